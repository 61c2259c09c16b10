"""Main params and state in host memory, on a GPU: the bodies of the simulated device's tests, with late streams."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fake_device import lives
from tests.training import bits_equal
from tests.unit.fake_device.test_host_update import CASES, life_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("held", "stored", "overlap"), [case for case in CASES if case[0] == "replicated"])
def test_the_host_computes(held: str, stored: dict[str, Any], overlap: bool, backend: str) -> None:
    """Bits are those without offload, also after a load."""
    way = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": overlap}
    values, places = life_of(held, stored | way | {"backend": backend})
    expected, _ = life_of(held, stored | {"backend": backend})
    assert places == {"cpu"}
    assert all(map(torch.equal, values, expected))


def _busy_model() -> nn.Sequential:
    """Return the model of a life whose every layer keeps the device busy before its forward and its backward."""
    model = _quick_model()
    for layer in model:
        layer.register_forward_pre_hook(_keep_busy)
        layer.register_full_backward_pre_hook(_keep_busy)
    return model


_quick_model = lives.model_of_life


def _keep_busy(*_: object) -> None:
    """Occupy the current stream for a tenth of a millisecond or so."""
    torch.cuda._sleep(200_000)


def _awaited(action: Callable[[lives.Trained], list[Tensor]]) -> Callable[[lives.Trained], list[Tensor]]:
    """Return an action that begins when the device is idle: nothing in it reads what is not there yet."""

    def awaited(trained: lives.Trained) -> list[Tensor]:
        torch.cuda.synchronize()
        return action(trained)

    return awaited


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA's streams")
@pytest.mark.parametrize("name", lives.LIVES)
def test_no_bit_differs(name: str, request: pytest.FixtureRequest) -> None:
    """The lives of the simulated device, while this one is behind: the bits of a life without offload that waits."""
    for life in lives.LIVES[name]:
        if life.held == "fsdp2":
            request.getfixturevalue("one_rank")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(lives, "model_of_life", _busy_model)
            values = lives.lived(life, life.way)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(lives, "ACTIONS", {key: _awaited(action) for key, action in lives.ACTIONS.items()})
            expected = lives.lived(life, {})
        assert len(values) == len(expected)
        assert all(map(bits_equal, values, expected))
