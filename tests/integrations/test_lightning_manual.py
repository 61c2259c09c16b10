"""Manual optimization with MegascalePrecision: several optimizers, one loss scale.

Losses are fp32 here, so that a loss scale that is a power of two cannot change a bit: whatever the scale does, training
must equal training without one. A gradient that is unscaled with another scale than scaled it shows at once.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import UsageError

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

import lightning.pytorch as pl

from megascale.integrations.lightning import LossScaleMonitor, MegascalePrecision
from tests.integrations.lightning_cases import (
    BATCHES,
    assert_same,
    batches,
    fitted,
    loader,
    scaler,
    trainer,
)
from tests.training import Tiny

Configure = Callable[["Gan"], Any]


class Gan(pl.LightningModule):
    """Two networks that play against each other, in the order that ``pattern`` names. D's loss overflows at batch 3."""

    automatic_optimization = False

    def __init__(self, pattern: str = "one after the other", configure: Configure | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.g, self.d = nn.Linear(4, 4), Tiny()
        self.pattern = pattern
        self.configure = configure
        self.scales: list[float] = []

    def loss_g(self, x: Tensor) -> Tensor:
        """G's loss: D's verdict on what G makes."""
        loss: Tensor = -self.d(self.g(x)).float().tanh().mean()
        return loss

    def loss_d(self, x: Tensor, batch_idx: int) -> Tensor:
        """D's loss: its verdict on what G makes, and on the data."""
        loss: Tensor = (self.d(self.g(x).detach()) - self.d(x)).float().tanh().mean()
        return loss * math.inf if batch_idx == 3 else loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Play one round."""
        play(self, batch[0], batch_idx, self.optimizers(), self.manual_backward)

    def on_train_batch_end(self, *args: Any) -> None:
        """Note the scale."""
        plugin: Any = self.trainer.precision_plugin
        if plugin.grad_scaler is not None:
            self.scales.append(plugin.grad_scaler.scale.item())

    def configure_optimizers(self) -> Any:
        """Return G's and D's optimizer."""
        return self.configure(self) if self.configure else inners(self)


def inners(gan: Gan) -> list[torch.optim.Optimizer]:
    """Return a torch optimizer for each network."""
    return [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (gan.g, gan.d)]


def play(gan: Gan, x: Tensor, batch_idx: int, optimizers: Any, backward: Callable[..., Any]) -> None:
    """Play one round."""
    opt_g, opt_d = optimizers
    if gan.pattern == "one after the other":
        opt_g.zero_grad()
        backward(gan.loss_g(x))
        opt_g.step()
        opt_d.zero_grad()
        backward(gan.loss_d(x, batch_idx))
        opt_d.step()
    elif gan.pattern == "both backwards first":
        opt_g.zero_grad()
        opt_d.zero_grad()
        backward(gan.loss_g(x), inputs=list(gan.g.parameters()))
        backward(gan.loss_d(x, batch_idx), inputs=list(gan.d.parameters()))
        opt_g.step()
        opt_d.step()
    else:  # G accumulates two batches, D steps at each
        backward(gan.loss_g(x), inputs=list(gan.g.parameters()))
        opt_d.zero_grad()
        backward(gan.loss_d(x, batch_idx), inputs=list(gan.d.parameters()))
        opt_d.step()
        if batch_idx % 2:
            opt_g.step()
            opt_g.zero_grad()


PATTERNS = ["one after the other", "both backwards first", "one accumulates"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_several_optimizers_train_as_without_a_scale(pattern: str) -> None:
    """Backwards and steps in any order: each gradient is unscaled by what scaled it, and the overflow skips D alone."""
    gan, expected = Gan(pattern), Gan(pattern)
    fast = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 1, 1)  # the scale changes at every batch
    run = fitted(gan, MegascalePrecision("32-true", grad_scaler=fast))
    optimizers = [MixedPrecisionOptimizer(inner) for inner in inners(expected)]
    for index, batch in enumerate(batches()):
        play(expected, batch, index, optimizers, Tensor.backward)
    assert gan.scales == [2.0**exponent for exponent in (9, 10, 11, 10, 11, 12, 13, 14)]
    assert_same(gan.state_dict(), expected.state_dict())
    for ours, plain in zip(run.optimizers, optimizers, strict=True):
        states = [list(one.state_dict()["optimizer"]["state"].values()) for one in (ours, plain)]
        assert_same(*states)
    assert [optimizer.num_skipped_steps.item() for optimizer in run.optimizers] == [0, 1]


def test_manual_step_returns_its_result_and_clips() -> None:
    """opt.step() returns a StepResult; self.clip_gradients(opt, ...) clips that optimizer's coming step alone."""
    norms: list[list[float]] = []

    class Clipped(Gan):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizers: Any = self.optimizers()
            opt_g, opt_d = optimizers
            opt_g.zero_grad()
            self.manual_backward(self.loss_g(batch[0]))
            self.clip_gradients(opt_g, 1e-3, "norm")
            first = opt_g.step()
            opt_d.zero_grad()
            self.manual_backward(self.loss_d(batch[0], 0))
            second = opt_d.step()
            norms.append([first.grad_norm.item(), second.grad_norm.item()])

    gan, plain = Clipped(configure=sgd), Gan(configure=sgd)
    fitted(gan, MegascalePrecision("32-true", grad_scaler=scaler()), max_steps=2)
    fitted(plain, MegascalePrecision("32-true", grad_scaler=scaler()), max_steps=2)
    start = Gan()
    moved = [
        torch.cat([(p - q).flatten() for p, q in zip(one.parameters(), other.parameters(), strict=True)]).norm().item()
        for one, other in ((gan.g, start.g), (gan.d, start.d), (plain.g, start.g))
    ]
    [[norm_g, norm_d]] = norms
    assert moved[0] == pytest.approx(1e-3, rel=1e-2)  # clipped to 1e-3, times lr 1
    assert moved[1] == pytest.approx(norm_d, rel=1e-4)
    assert moved[2] == pytest.approx(norm_g, rel=1e-4)
    assert norm_g > 2e-3


def sgd(gan: Gan) -> list[torch.optim.Optimizer]:
    """Return an optimizer for each network whose step is the gradient."""
    return [torch.optim.SGD(net.parameters(), lr=1.0) for net in (gan.g, gan.d)]


class Noting(torch.optim.SGD):
    """Notes in what context its step runs."""

    seen: ClassVar[set[tuple[torch.dtype, bool]]] = set()

    def step(self, closure: Any = None) -> Any:
        """Note, then step."""
        self.seen.add((torch.get_default_dtype(), torch.is_autocast_enabled("cpu")))
        return super().step(closure)


@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
def test_the_step_keeps_its_precision_inside_the_training_step(precision: str) -> None:
    """Under manual optimization the step runs inside training_step, but not in its 16-bit default or its autocast."""
    Noting.seen.clear()
    inside: set[tuple[torch.dtype, bool]] = set()

    class Watched(Gan):
        def loss_g(self, x: Tensor) -> Tensor:
            inside.add((torch.get_default_dtype(), torch.is_autocast_enabled("cpu")))
            return super().loss_g(x)

    gan = Watched(configure=lambda gan: [Noting(net.parameters(), lr=1e-2) for net in (gan.g, gan.d)])
    fitted(gan, MegascalePrecision(precision, grad_scaler=scaler()))
    assert inside == {(torch.float16, False) if precision == "16-true" else (torch.float32, True)}
    assert Noting.seen == {(torch.float32, False)}


def test_wrapped_optimizers_share_their_scaler() -> None:
    """Optimizers that are wrapped already must have one scaler: then they train as those that the plugin wraps."""

    def with_scalers(*scalers: DynamicGradScaler) -> Configure:
        def configure(gan: Gan) -> Any:
            return [
                MixedPrecisionOptimizer(inner, None, one, named_parameters=gan.named_parameters())
                for inner, one in zip(inners(gan), scalers, strict=True)
            ]

        return configure

    one = scaler()
    gan, plain = Gan(configure=with_scalers(one, one)), Gan()
    ours = fitted(gan, MegascalePrecision("16-true"))
    theirs = fitted(plain, MegascalePrecision("16-true", grad_scaler=scaler()))
    assert gan.scales == plain.scales
    for left, right in zip(ours.optimizers, theirs.optimizers, strict=True):
        assert_same(left.state_dict(), right.state_dict())
    with pytest.raises(UsageError, match="different grad scalers"):
        fitted(Gan(configure=with_scalers(scaler(), scaler())), MegascalePrecision("16-true"))


def test_resumes_with_several_optimizers(tmp_path: Any) -> None:
    """Each optimizer's state, and the one scale, come back from a Lightning checkpoint: two epochs are one and one."""
    whole, first, second = Gan(), Gan(), Gan()
    expected = fitted(whole, MegascalePrecision("16-true", grad_scaler=scaler()), max_epochs=2)
    fitted(first, MegascalePrecision("16-true", grad_scaler=scaler())).save_checkpoint(tmp_path / "half")
    run = trainer(MegascalePrecision("16-true", grad_scaler=scaler(2.0)), max_epochs=2)
    run.fit(second, loader(), ckpt_path=tmp_path / "half")
    assert second.scales == whole.scales[BATCHES:]
    for left, right in zip(run.optimizers, expected.optimizers, strict=True):
        assert_same(left.state_dict(), right.state_dict())


def test_the_monitor_names_each_optimizer() -> None:
    """With several optimizers there is one loss_scale, and skips and norms of each."""
    run = fitted(Gan(), MegascalePrecision("16-true", grad_scaler=scaler()), callbacks=[LossScaleMonitor()])
    assert {"loss_scale", "num_skipped_steps/0", "num_skipped_steps/1", "grad_norm/0", "grad_norm/1"} <= set(
        run.callback_metrics
    )
    assert run.callback_metrics["num_skipped_steps/1"].item() == 1
