"""A LightningModule, its data, and the same training without Lightning: what the tests of the plugin share."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megascale import DynamicGradScaler, MegatronGradScaler, MixedPrecisionOptimizer
from tests.training import Tiny, bits_equal

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

import lightning.pytorch as pl

from megascale.integrations.lightning import MegascalePrecision

BATCHES = 8
Rows = list[tuple[bool, float]]
"""For each step, whether it landed, and the scale after it."""


def scaler(scale: float = 2.0**8) -> DynamicGradScaler:
    """Return a scaler that grows every third clean step."""
    return DynamicGradScaler(scale, 1.0, 2.0, 0.5, 3, 1)


def batches(rank: int = 0, count: int = BATCHES) -> list[Tensor]:
    """Return normal batches of shape [4, 4]."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 4, generator=generator) for _ in range(count)]


def loader(rank: int = 0, count: int = BATCHES) -> DataLoader[Any]:
    """Return the batches as Lightning takes them."""
    return DataLoader(TensorDataset(torch.cat(batches(rank, count))), batch_size=4)


class Regression(pl.LightningModule):
    """A Tiny network that learns to return zeros. The loss is inf at the batches named in ``overflows``."""

    def __init__(
        self,
        overflows: Collection[int] = (),
        inner: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = Tiny()
        self.overflows = overflows
        self.inner = inner or adamw
        self.rows: Rows = []
        self.grad_dtypes: set[torch.dtype] = set()
        self._noted: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean square."""
        return loss_of(self.net, batch[0], batch_idx in self.overflows)

    def configure_optimizers(self) -> Any:
        """Return what ``inner`` makes."""
        return self.inner(self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Note the gradients' dtypes."""
        self.grad_dtypes |= {p.grad.dtype for p in self.parameters() if p.grad is not None}

    def on_train_batch_end(self, *args: Any) -> None:
        """Note what the batch's steps did."""
        plugin, optimizers = self.trainer.precision_plugin, cast(list[Any], self.trainer.optimizers)
        if not isinstance(plugin, MegascalePrecision):
            return
        results = [plugin.last_result(optimizer) for optimizer in optimizers]
        for optimizer, result in zip(optimizers, results, strict=True):
            if result is not None and not any(result is noted for noted in self._noted):
                self.rows.append((bool(result.success), optimizer.get_loss_scale().item()))
        self._noted = results


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return the torch optimizer of most tests."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def loss_of(net: nn.Module, x: Tensor, overflow: bool) -> Tensor:
    """Return the mean square of the network's output, fp32, times inf where asked."""
    loss: Tensor = net(x).float().square().mean()
    return loss * math.inf if overflow else loss


def trainer(plugin: Any, **options: Any) -> Any:
    """Return a Trainer on the CPU that writes and prints nothing unless asked to."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
    }
    plugins = plugin if isinstance(plugin, list) else [plugin]
    return pl.Trainer(**(quiet | {"plugins": plugins} | options))


def fitted(module: Any, plugin: Any, data: Any = None, **options: Any) -> Any:
    """Train ``module`` and return the Trainer."""
    made = trainer(plugin, **options)
    made.fit(module, data or loader())
    return made


def plain_loop(
    precision: str,
    overflows: Collection[int] = (),
    *,
    grad_scaler: MegatronGradScaler | None = None,
    accumulate: int = 1,
    norm: float = 0.0,
    value: float = 0.0,
) -> tuple[Regression, MixedPrecisionOptimizer, Rows]:
    """Train as Lightning should, in a loop of our own."""
    module = Regression()
    weights = {"16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision)
    autocast = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(precision)
    if weights is not None:
        module.to(weights)
    optimizer = MixedPrecisionOptimizer(adamw(module), None, grad_scaler, named_parameters=module.named_parameters())
    optimizer.clip_grad = norm
    rows = []
    for index, batch in enumerate(batches()):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = loss_of(module.net, batch if weights is None else batch.to(weights), index in overflows)
        optimizer.scale_loss(loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.prepare_grads()
            if value:
                optimizer.clip_grad_value_(value)
            rows.append((bool(optimizer.step_with_ready_grads().success), optimizer.get_loss_scale().item()))
            optimizer.zero_grad()
    return module, optimizer, rows


def tensors(nested: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of nested dicts and lists."""
    if isinstance(nested, Mapping):
        for key, item in nested.items():
            yield from tensors(item, f"{where}.{key}")
    elif isinstance(nested, (list, tuple)):
        for index, item in enumerate(nested):
            yield from tensors(item, f"{where}.{index}")
    else:
        yield where, nested


def assert_same(left: Any, right: Any) -> None:
    """Fail unless two nested states agree in every bit, naming where they do not."""
    lefts, rights = dict(tensors(left)), dict(tensors(right))
    assert lefts.keys() == rights.keys()
    for where, value in lefts.items():
        other = rights[where]
        same = bits_equal(value, other) if isinstance(value, Tensor) else value == other
        assert same, f"{where}: {value} and {other}"
