"""GradSync on one rank, and the sum of what arrives from several."""

import pytest
import torch
from torch import Tensor, nn

from megascale.errors import GradientError, UsageError
from megascale.grad_sync import GradSync
from megascale.grad_sync.reduction import sum_in_order


@pytest.mark.parametrize("own", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_add_up_in_fp32(own: int, dtype: torch.dtype) -> None:
    """In place of this rank's own part, or elsewhere; in bf16 256 + 1 + 1 would be 256."""
    for in_place in (True, False):
        parts = [torch.full((3,), value, dtype=dtype) for value in (256.0, 1.0, 1.0, 2.0)]
        out = parts[own] if in_place else torch.zeros(3, dtype=dtype)
        sum_in_order(parts, out)
        assert out.tolist() == [260.0] * 3


def _grad(sync: GradSync, param: nn.Parameter) -> list[float]:
    grad = sync.main_grad(param)
    assert grad is not None
    found: list[float] = grad.tolist()
    return found


@pytest.mark.parametrize("divisor", [8.0, torch.tensor(8.0)])
def test_a_divisor_may_come_after_backward(divisor: float | Tensor) -> None:
    """The reduction has begun with another one by then. After finish() it comes too late."""
    param = nn.Parameter(torch.ones(2))
    sync = GradSync([("w", param)])
    sync.set_divisor(2.0)
    (param * 16.0).sum().backward()
    sync.set_divisor(divisor)
    sync.finish()
    assert _grad(sync, param) == [2.0] * 2
    sync.set_divisor(4.0)
    sync.finish()
    assert _grad(sync, param) == [2.0] * 2


def test_a_parameter_that_is_added_after_finish_waits_for_the_next_step() -> None:
    """Its gradient would be lost at zero_()."""
    first, late = (nn.Parameter(torch.ones(2)) for _ in range(2))
    sync = GradSync([("first", first)])
    first.sum().backward()
    sync.finish()
    sync.add([("late", late)])
    with pytest.raises(UsageError, match="a gradient of 'late' came after its bucket's reduction had begun"):
        late.sum().backward()
    sync.zero_()
    late.grad = None
    (3.0 * late).sum().backward()
    sync.finish()
    assert _grad(sync, late) == [3.0] * 2


def test_a_gradient_of_another_shape_is_told_of_once() -> None:
    """The first one of a step, at finish(). zero_() forgets it."""
    one, two = (nn.Parameter(torch.ones(3)) for _ in range(2))
    sync = GradSync([("one", one), ("two", two)])
    for is_finished in (True, False):
        for param in (two, one):
            param.data = torch.ones(5)
            param.sum().backward()
        if is_finished:
            with pytest.raises(GradientError, match=r"the gradient of 'two' is \(5,\) on cpu, the parameter \(3,\) on"):
                sync.finish()
        sync.zero_()
        for param in (one, two):
            param.data = torch.ones(3)
    (one + two).sum().backward()
    sync.finish()
    assert _grad(sync, two) == [1.0] * 3


def test_a_gradient_after_finish_is_refused_though_backward_left_none() -> None:
    """The zeros of an unused parameter are reduced already."""
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    sync = GradSync([("used", used), ("unused", unused)])
    used.sum().backward()
    sync.finish()
    unused.grad = torch.ones(2)
    with pytest.raises(GradientError, match=r"'unused' has a gradient in param.grad .* put there after backward"):
        sync.finish()


def test_buckets_of_all_dtypes_have_one_order() -> None:
    """The order in which backward fills them: the last parameter first. Whole buckets need no padding for shards."""
    kinds = [torch.float16, torch.float32, torch.float16]
    named = [(str(index), nn.Parameter(torch.ones(64, dtype=dtype))) for index, dtype in enumerate(kinds)]
    sync = GradSync(named, bucket_numel=1)
    assert [list(bucket.params) for bucket in sync.buckets] == [["2"], ["1"], ["0"]]
    assert [bucket.memory.flat.numel() for bucket in sync.buckets] == [64] * 3
