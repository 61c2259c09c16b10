"""Main params that are held as remainders: what trains, what is held, and what others may do to them."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.errors import MainParamOverflowError
from megascale.kernels import Operands, rounding
from megascale.kernels.rounding import TorchRounding
from megascale.utils.dtensors import to_local
from tests.cells import CELLS, Cell, integers
from tests.fsdp2_cases import whole
from tests.pool import RankPool
from tests.training import INNER, Bag, Inner, bits_equal, constant, grad_of, same_bits, set_grads, snapshot

HELD: dict[str, Any] = {"store_param_remainders": True}
TRITON = ["triton"] if find_spec("triton") and not torch.accelerator.is_available() else []
"""In its interpreter."""
RULES: dict[str, Inner] = {
    **{name: INNER[name] for name in ("adamw_fused", "adam_amsgrad", "lion", "sgd", "sgd_dampening", "sgd_nesterov")},
    "own step": lambda m: torch.optim.RMSprop(m.named_parameters(), lr=1e-2),
    "host rate": lambda m: torch.optim.AdamW(
        m.named_parameters(), lr=1e-2, betas=(torch.tensor(0.9), torch.tensor(0.99))
    ),
}


def odd(dtype: torch.dtype, seed: int = 0) -> Bag:
    """Return tensors of 0 to 2,112 elements, some of them strided, with numbers from 1e-9 to 10."""
    torch.manual_seed(seed)
    tensors = [torch.randn(shape) for shape in [(3, 5), (33, 64), (), (0,), (1,), (64,)]]
    tensors += [torch.randn(8, 40).t(), torch.randn(6, 12)[:, ::2], torch.randn(64) * torch.logspace(-9, 1, 64)]
    return Bag([tensor.to(dtype) for tensor in tensors])


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The main params that plain tensor code has decoded together, one list for each call."""
    found, decode_ = list[list[Tensor]](), TorchRounding.decode_

    def noted(backend: TorchRounding, operands: Operands) -> None:
        found.append(operands.main)
        decode_(backend, operands)

    monkeypatch.setattr(TorchRounding, "decode_", noted)
    return found


@pytest.mark.parametrize(
    ("lengths", "together"),
    [((16, 15, 14, 13), [3, 1]), ((16, 15, 17, 13), [3, 1]), ((32, 17, 50, 1, 2), [1, 1, 1, 2])],
)
def test_little_is_decoded_at_a_time(
    lengths: tuple[int, ...], together: list[int], monkeypatch: pytest.MonkeyPatch, decoded: list[list[Tensor]]
) -> None:
    """Where kernels do not decode by themselves: parameters up to the bound together, and a larger one alone."""
    monkeypatch.setattr(rounding, "DECODED_NUMEL", 48)
    module = Bag([torch.ones(length).half() for length in lengths])
    optimizer = constant(module, RULES["adamw_fused"], 1.0, backend="reference", **HELD)
    set_grads(module, seed=0)
    optimizer.step()
    assert list(map(len, decoded)) == together


def test_overflow_keeps_the_element() -> None:
    """A main param that would round to inf in fp16 stays what it was, others move, and the next step names it."""
    module = Bag([torch.tensor([65440.0, -65440.0, 1.0]).half(), torch.ones(2).half()])
    optimizer = constant(module, INNER["sgd"], 1.0, **HELD)
    set_grads(module, seed=0)
    grad_of(module[0]).copy_(torch.tensor([-20000.0, 20000.0, 1.0]))
    try:
        optimizer.step()
    except MainParamOverflowError as error:
        found: MainParamOverflowError = error
    else:
        set_grads(module, seed=1)
        with pytest.raises(MainParamOverflowError) as caught:
            optimizer.step()
        found = caught.value
    assert "main param of 'params.0' is 65520 or more" in str(found)
    main = dict(optimizer.main_params())["params.0"]
    assert main[:2].tolist() == [65440.0, -65440.0]
    assert module[0].isfinite().all()
    assert main[2] < 1


@pytest.mark.default("native", "reference")
@pytest.mark.parametrize("backend", ["native", "reference", *TRITON])
def test_weights_that_only_move_keep_remainders(backend: str) -> None:
    """To other memory, as offloading moves them, or written with their own values in a way that nobody counts. A write
    that torch counts takes all of a parameter, also one of the same values.
    """
    module = odd(torch.float16)
    optimizer = constant(module, INNER["adamw_fused"], 256.0, backend=backend, **HELD)

    def move() -> None:
        for param in module.params:
            param.data = param.data.clone()

    def write_the_same() -> None:
        for param in module.params:
            param.data.copy_(param.data.clone())

    def load() -> None:
        module.load_state_dict({key: value.clone() for key, value in module.state_dict().items()})

    for step, write in enumerate((move, write_the_same, load)):
        set_grads(module, step, 256.0)
        optimizer.step()
        before = {name: main.clone() for name, main in optimizer.main_params()}
        if write is load:
            assert any(not bits_equal(before[name], param.float()) for name, param in module.named_parameters())
            before = {name: param.detach().float() for name, param in module.named_parameters()}
        write()
        for param in module.params:
            param.grad = None
        optimizer.step()
        assert all(bits_equal(before[name], main) for name, main in optimizer.main_params())


WRITTEN = (0.0, -0.0, 3 * 2.0**-24, 2.0**-15, 0.5, -65504.0)
"""What weights are written with; bf16 rounds the last."""
COMPACT = [cell for cell in CELLS if cell.state == "compact"]


@pytest.mark.default("float16-zero1-compact")
@pytest.mark.parametrize("cell", COMPACT, ids=str)
def test_writes_that_nobody_counts_make_no_other_weight(cell: Cell, ranks: RankPool) -> None:
    """Invariant 6: weights that were written through ``.data`` are those after a step of rate 0, with remainders of
    other weights beside them; reload_model_params() makes them the main params. With fp32 main params 16-bit weights
    would be those of before, and parameters in fp32 are their own main params: there are no cells of fp32 state.
    """
    for found in ranks.run(cell.world_size, _written_by_nobody, cell):
        assert found == [(True, True, True)] * len(WRITTEN)


def _written_by_nobody(cell: Cell) -> list[tuple[bool, bool, bool]]:
    model = cell.model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.0**-12)  # fp16's remainders below 2**-16 are larger than above
    optimizer = cell.optimizer(model)
    found = []
    for seed, value in enumerate(WRITTEN):
        for group in optimizer.param_groups:
            group["lr"] = 2.0**-16
        for more in range(3):
            cell.backward(optimizer, model, integers(cell.shapes, 3 * seed + more))
            optimizer.step()
            optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for weight in model.parameters():
            to_local(weight.detach()).data.fill_(value)
        expected = [weight.detach().clone() for weight in model.parameters()]
        cell.backward(optimizer, model, integers(cell.shapes, seed))
        success = bool(optimizer.step().success)
        optimizer.zero_grad()
        kept = all(map(torch.equal, map(whole, model.parameters()), map(whole, expected)))
        optimizer.reload_model_params()
        written = torch.tensor(value).to(cell.dtype)
        taken = all(bool((whole(main) == written).all()) for _, main in optimizer.main_params())
        found.append((success, kept, taken))
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_state_dicts_travel(dtype: torch.dtype) -> None:
    """A state dict holds fp32 main params: it loads with and without remainders, and training goes on alike."""
    modules = [odd(dtype, seed) for seed in range(3)]
    first, again, whole = (
        constant(module, INNER["adamw_fused"], 256.0, **options)
        for module, options in zip(modules, (HELD, HELD, {}), strict=True)
    )
    for step in range(3):
        set_grads(modules[0], step, 256.0)
        first.step()
    saved = first.state_dict()
    assert {main.dtype for main in saved["main_params"].values()} == {torch.float32}
    again.load_state_dict(saved)
    whole.load_state_dict(saved)
    assert same_bits(snapshot(first, modules[0]), snapshot(whole, modules[2]))
    again.load_state_dict(whole.state_dict())
    for module, optimizer in zip(modules, (first, again, whole), strict=True):
        set_grads(module, 5, 256.0)
        optimizer.step()
    assert same_bits(snapshot(first, modules[0]), snapshot(again, modules[1]))


def test_decoded_main_params_are_aligned(decoded: list[list[Tensor]]) -> None:
    """Muon's begin at a multiple of 64 bytes of the memory that they share, as kernels that read vectors need, behind
    the one before it.
    """
    module = Bag([torch.ones(1, numel).half() for numel in (3, 16, 33, 1, 64)])
    optimizer = constant(module, lambda bag: torch.optim.Muon(bag.parameters()), 256.0, backend="torch", **HELD)
    set_grads(module, seed=0)
    optimizer.step()
    assert [main.storage_offset() for main in decoded[0]] == [0, 16, 32, 80, 96]
