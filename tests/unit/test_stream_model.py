"""The model of streams finds what it should find, and nothing else."""

import pytest
import torch

from tests.stream_model import StreamError, StreamModel


def test_work_of_one_stream_is_in_order() -> None:
    """Whatever it does."""
    with StreamModel() as model, model.on(model.stream("side")):
        tensor = torch.zeros(4)
        tensor[:2].add_(1)
        tensor.sum()


@pytest.mark.parametrize("first", ["read", "write"])
@pytest.mark.parametrize("second", ["read", "write"])
@pytest.mark.parametrize("waits", ["not", "for the stream", "for an event", "for an early event", "through a third"])
def test_two_streams_need_an_order(first: str, second: str, waits: str) -> None:
    """But for two reads."""
    model = StreamModel()
    a, b, c = map(model.stream, "abc")
    with model:
        tensor = torch.zeros(4)
        for stream in (a, b, c):
            stream.wait_stream(model.main)
        early = a.record_event()
        with model.on(a):
            tensor.add_(1) if first == "write" else tensor.sum()
        if waits == "for the stream":
            b.wait_stream(a)
        elif waits == "for an event":
            b.wait_event(a.record_event())
        elif waits == "for an early event":
            b.wait_event(early)
        elif waits == "through a third":
            c.wait_stream(a)
            b.wait_stream(c)
        with model.on(b):
            tensor.add_(1) if second == "write" else tensor.sum()
        model.main.wait_stream(a)
        model.main.wait_stream(b)
        found, model.errors = model.errors, []
    is_race = waits in ("not", "for an early event") and "write" in (first, second)
    assert bool(found) == is_race, found


def test_parts_of_a_tensor_are_apart() -> None:
    """Bytes are compared, not tensors."""
    model = StreamModel()
    side = model.stream("side")
    with model:
        tensor = torch.zeros(8)
        side.wait_stream(model.main)
        with model.on(side):
            tensor[:4].add_(1)
        tensor[4:].add_(1)
        assert not model.errors
        tensor[3:].sum()
        [error] = model.errors
        model.errors.clear()
        model.main.wait_stream(side)
    assert error.startswith("read of bytes 12 to 32 by aten.sum.default on main, not behind write of bytes 0 to 16")


@pytest.mark.parametrize("saved_by", ["nothing", "waiting", "keeping"])
def test_freed_memory_is_used_no_more(saved_by: str) -> None:
    """The allocator gives it to the next one on the stream that it came from."""
    model = StreamModel()
    side = model.stream("side")
    with model:
        tensor = torch.zeros(8)
        side.wait_stream(model.main)
        with model.on(side):
            tensor.sum()
        if saved_by == "waiting":
            model.main.wait_stream(side)
        if saved_by == "keeping":
            model.keep(tensor, side)
        del tensor
        found, model.errors = model.errors, []
    assert [error.split(",")[0] for error in found] == ["memory of main is freed"] * (saved_by == "nothing")


def test_errors_are_raised_at_the_end() -> None:
    """All of them."""
    model = StreamModel()

    def race() -> None:
        with model:
            tensor = torch.zeros(8)
            for name in "ab":
                with model.on(model.stream(name)):
                    tensor.sum()

    with pytest.raises(StreamError, match=r"(?s)on a, not behind.*on b, not behind"):
        race()
