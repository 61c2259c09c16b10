"""torchtitan's own functions that save and load optimizers, from its wheel: nothing is lost, and nothing is stepped."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megascale import MixedPrecisionOptimizer
from tests.fsdp2_cases import Case, gathered_weights, train, unlike, whole_state
from tests.pool import RankPool
from tests.training import INNER, bits_equal, model, same_bits, set_grads, snapshot, wrap

MODULE = "torchtitan.components.optimizer.utils"
if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("needs torchtitan: pip install --no-deps torchtitan", allow_module_level=True)


@cache
def _titan() -> Any:
    """Return the module of these functions, which needs torch alone; the package around it needs a GPU's libraries."""
    package = importlib.util.find_spec("torchtitan")
    assert package is not None
    assert package.submodule_search_locations is not None
    [folder] = package.submodule_search_locations
    spec = importlib.util.spec_from_file_location(MODULE, Path(folder, "components/optimizer/utils.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Container:
    """What torchtitan's OptimizersContainer does with its optimizers in a checkpoint, in the same calls."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all, keyed by qualified names."""
        titan, result = _titan(), {}
        for each in self.optimizers:
            titan.init_optim_state(each)
            result.update(titan.get_flat_optim_state_dict(each))
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned, on any number of ranks."""
        for each in self.optimizers:
            _titan().init_optim_state(each)
            _titan().load_flat_optim_state_dict(each, state_dict)


def _counts(optimizer: MixedPrecisionOptimizer) -> tuple[float, float]:
    return optimizer.num_landed_steps.item(), optimizer.num_skipped_steps.item()


def _trained(inner: str, dtype: torch.dtype) -> tuple[Any, MixedPrecisionOptimizer]:
    module = model(dtype)
    optimizer = wrap(module, INNER[inner])
    for step in range(4):
        set_grads(module, step, 1e6 if step == 1 else 1.0)
        optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


@pytest.mark.parametrize(
    ("inner", "dtype"),
    [
        ("adamw_fused", torch.float16),
        ("sgd", torch.float16),
        ("adam_amsgrad", torch.float32),
        ("sgd_momentum_fused", torch.float32),
    ],
)
def test_saved_state_loads(inner: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Main params, moments, scale, trackers and counts come back through torchtitan's functions and DCP."""
    module, optimizer = _trained(inner, dtype)
    dcp_save({"optimizer": Container(optimizer)}, checkpoint_id=tmp_path)
    other = model(dtype, seed=1)
    other.load_state_dict(module.state_dict())
    resumed = wrap(other, INNER[inner], scale=2.0**3)
    dcp_load({"optimizer": Container(resumed)}, checkpoint_id=tmp_path)
    assert same_bits(snapshot(resumed, other), snapshot(optimizer, module))
    assert bits_equal(resumed.get_loss_scale(), optimizer.get_loss_scale())
    assert _counts(resumed) == _counts(optimizer)
    for step in (7, 8):
        for each, of in ((module, optimizer), (other, resumed)):
            set_grads(each, step)
            of.step()
    assert same_bits(snapshot(resumed, other), snapshot(optimizer, module))


@pytest.mark.parametrize("inner", ["adamw_fused", "sgd_dampening"])
def test_a_new_optimizer_is_not_stepped(inner: str) -> None:
    """Torchtitan steps an optimizer without state with gradients of zeros: ours counts no step, and keeps its scale."""
    module = model()
    optimizer = wrap(module, INNER[inner])
    before, counts = snapshot(optimizer, module), _counts(optimizer)
    _titan().init_optim_state(optimizer)
    assert same_bits(snapshot(optimizer, module), before)
    assert _counts(optimizer) == counts
    assert all(param.grad is None for param in module.parameters())


def _on_rank(folder: str, is_saved: bool) -> dict[str, Any]:
    case = Case()
    module, optimizer = case.build(seed=0 if is_saved else 1)
    parts = {"model": module, "optimizer": Container(optimizer)}
    if is_saved:
        train(module, optimizer, case, range(6), {1: 0, 4: 3})
        dcp_save(parts, checkpoint_id=folder)
    else:
        dcp_load(parts, checkpoint_id=folder)
    return whole_state(optimizer) | gathered_weights(module)


def test_fsdp2_goes_on_at_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """What two ranks save, one, two and four load: state and weights, bit for bit."""
    saved, _ = ranks.run(2, _on_rank, str(tmp_path), True)
    for size in (1, 2, 4):
        for found in ranks.run(size, _on_rank, str(tmp_path), False):
            assert unlike(found, saved) == []
