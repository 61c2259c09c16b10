"""The host memory that asynchronous saves copy into."""

import pytest
import torch
from torch import Tensor

from megascale.checkpoint import staging
from megascale.checkpoint.manifest import CHUNK_BYTES
from megascale.checkpoint.staging import Staging
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice


def test_copies_lie_in_the_same_memory() -> None:
    """A copy has the values of its call; a tensor of another shape or dtype gets other memory, and what is gone is."""
    staging = Staging()
    live = torch.arange(6.0).reshape(2, 3)
    before = staging.copied([live, live.t(), live])
    assert torch.equal(before[1], live.t())
    live += 1
    assert before[0][0, 0] == 0
    after = staging.copied([live, live.half()])
    assert after[0] is before[0]
    assert torch.equal(after[0], live)
    assert after[1].dtype == torch.float16
    assert len(staging._held) == 2


LARGE = CHUNK_BYTES // 2 + 3


def _kinds() -> dict[str, Tensor]:
    values = torch.randn(LARGE)
    return {
        "longer than a chunk": values,
        "parameter": torch.nn.Parameter(torch.randn(LARGE)),
        "half, not of whole words": values[1:].half(),
        "not contiguous": values[: LARGE // 2 * 2].view(2, -1).t(),
        "expanded": torch.randn(1).expand(LARGE),
        "negative bit": torch.complex(values, values).conj().imag,
        "conjugate": torch.complex(values, values).conj(),
        "zeros without memory": torch._efficientzerotensor(LARGE),
        "bool": values > 0,
        "few": values[:9],
        "one": torch.tensor(3.0),
        "none": torch.empty(0),
    }


def test_every_kind_of_tensor_is_copied_bit_for_bit() -> None:
    """Large and small, and those whose memory is not their values; all in one call."""
    kinds = _kinds()
    copies = Staging().copied(list(kinds.values()))
    for (kind, tensor), copy in zip(kinds.items(), copies, strict=True):
        assert torch.equal(copy, tensor), kind
        assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr(), kind


def test_large_tensors_are_not_torchs_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads would wait for one another at each tensor: only what one thread copies is left to it."""
    given: list[int] = []
    copy = torch._foreach_copy_

    def counted(targets: list[Tensor], sources: list[Tensor]) -> None:
        given.extend(tensor.numel() for tensor in sources)
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    Staging().copied([torch.randn(numel) for numel in (5, staging._FEW_ELEMENTS, 32769, LARGE)])
    assert given == [5, staging._FEW_ELEMENTS]


def test_what_is_known_is_not_looked_at_again() -> None:
    """With the same mark memory and order are as before, values are new; another mark begins anew."""
    memory = Staging()
    count = staging._BATCH_COUNT + 3
    live = [torch.full((place % 5,), float(place)) for place in range(count)] + [torch.randn(LARGE)]
    before = memory.copied(live, "plan")
    for tensor in live:
        tensor += 1
    after = memory.copied(live, "plan")
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(after, live, strict=True))
    fewer = memory.copied(live[-1:], "another plan")
    assert torch.equal(fewer[0], live[-1])


def _staged_on_a_stream(device: FakeDevice) -> tuple[int, set[tuple[int, int]]]:
    """Return the stream that a save was called on, and those that its copies were queued on."""
    live = [torch.ones(3, device="cuda") for _ in range(1500)] + [torch.ones(3)]
    with torch.Stream("cuda") as stream, device.watch() as seen:
        held = Staging().copied(live)
    assert all(torch.equal(there, torch.ones(3)) for there in held)
    return stream.stream_id, {call.stream for call in seen if call.kind == "copy"}


def test_tensors_of_a_device_are_copied_on_the_callers_stream(on_device: OnDevice) -> None:
    """However many there are: a thread of our own has another stream, which waits for no step."""
    stream, copied_on = on_device(_staged_on_a_stream)
    assert copied_on == {(0, stream)}
