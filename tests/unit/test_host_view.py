"""HostView: what was pushed is read later as it was then, in the order of its names."""

import torch

from megascale.host_view import HostView


def test_a_pushed_vector_is_a_copy() -> None:
    """Statistics are written again by the next step: the host reads those of the step that pushed them."""
    view, vector = HostView(), torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert view.push_vector(["a", "b"], vector) is None
    vector.fill_(9.0)
    assert view.push_vector(["b", "a"], vector) == {"a": 1.0, "b": 2.0}
    vector.zero_()
    assert view.flush() == {"b": 9.0, "a": 9.0}
    assert view.flush() is None


def test_pushed_tensors_are_copies() -> None:
    """Tensors of any shape of one element and dtype, among numbers: each comes back under its name, in order."""
    view = HostView()
    scale, skips, found = torch.tensor([2.0**16]), torch.tensor(2**40 + 1, dtype=torch.int64), torch.tensor([[True]])
    assert view.push({"skips": skips, "lr": 0.1, "scale": scale, "found": found}) is None
    for tensor in (scale, skips, found):
        tensor.zero_()
    pushed = view.push({"lr": 0.2})
    assert pushed == {"skips": 2.0**40 + 1, "lr": 0.1, "scale": 2.0**16, "found": 1.0}
    assert list(pushed) == ["skips", "lr", "scale", "found"]
    assert view.flush() == {"lr": 0.2}
