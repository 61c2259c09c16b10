"""Streams: which devices have them, without such a device."""

import pytest
import torch

from megascale.utils.streams import has_streams


@pytest.mark.parametrize(("accelerator", "expected"), [("cuda", True), ("xpu", False), (None, False)])
def test_a_device_that_is_this_process_accelerator_has_streams(
    monkeypatch: pytest.MonkeyPatch, accelerator: str | None, expected: bool
) -> None:
    """A CPU has none, nor has a device that this process lacks."""
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    assert has_streams(torch.device("cuda", 1)) is expected
    assert not has_streams(torch.device("cpu"))
