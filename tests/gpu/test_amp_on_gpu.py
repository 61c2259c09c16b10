"""megascale.amp on an accelerator, beside torch's scaler: the bodies of the CPU's tests."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu import device
from tests.unit.amp import test_grad_scaler_bits as bodies

pytestmark = pytest.mark.gpu

NAMES = sorted(set(bodies.SCENARIOS) - {"new_scales", "autocast"})
"""Without those that name the CPU."""


@pytest.fixture
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    make, batches = bodies._model, bodies._batches

    def model(seed: int = 0) -> nn.Sequential:
        return make(seed).to(device())

    def moved() -> Iterator[tuple[int, Tensor, Tensor]]:
        for step, x, y in batches():
            yield step, x.to(device()), y.to(device())

    monkeypatch.setattr(bodies, "_model", model)
    monkeypatch.setattr(bodies, "_batches", moved)


def _alike(ours: Any, theirs: Any, *, exact: bool) -> None:
    """Compare what two lives have shown: decisions and scales have the same bits, weights those or nearly so."""
    if isinstance(ours, Tensor):
        tolerance = 0.0 if exact else None
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=tolerance, atol=tolerance)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            _alike(ours[key], theirs[key], exact=exact)
    elif isinstance(ours, list):
        for one, other in zip(ours, theirs, strict=True):
            _alike(one, other, exact=exact)
    else:
        assert ours == theirs


@pytest.mark.usefixtures("_on_device")
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("optimizer", ["adam_loop", "adamw_foreach", "adamw_fused", "sgd", "sgd_fused", "rmsprop"])
@pytest.mark.parametrize("name", NAMES)
def test_what_torchs_scaler_does(name: str, optimizer: str) -> None:
    """The same scales and skips; the same bits where torch updates, nearly the same where our fused kernels do."""
    settings: dict[str, Any] = {"init_scale": 128.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 2}
    ours, theirs = (
        list(bodies.SCENARIOS[name](kind(device().type, **settings), bodies.OPTIMIZERS[optimizer]))
        for kind in bodies.BOTH
    )
    _alike(ours, theirs, exact=not optimizer.endswith("fused"))
