"""How gradients lie in a bounded number of bytes of host memory."""

import random
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from megascale.errors import UsageError
from megascale.kernels import TensorList
from megascale.main_params.grad_memory import SLOTS, GradMemory, Layout, copies_in, layout_of
from megascale.main_params.host_twin import HostTwin
from megascale.main_params.main_param import MainParam
from megascale.main_params.update_unit import UpdateUnit
from megascale.utils.host_memory import aligned, allocate, allocated_bytes

MIB = 1 << 20


def _storages(tensors: list[Tensor]) -> int:
    """Return the bytes of all storages that tensors lie in."""
    sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(sizes.values())


def test_allocated_bytes_are_those_that_are_allocated() -> None:
    """Large tensors alone, others in slabs, whatever the order: each prefix of sizes."""
    draw, slab = random.Random(0), 1 << 14
    for _ in range(50):
        sizes = [draw.choice([0, 1, 512, 700, 5000, 9000, 16384, 20000]) for _ in range(draw.randint(1, 12))]
        expected = [_storages(allocate(sizes[:end], pin=False, slab=slab)) for end in range(1, len(sizes) + 1)]
        assert allocated_bytes(sizes, pin=False, slab=slab) == expected


def test_pinned_memory_is_rounded_up_as_torch_does() -> None:
    """Each allocation to a power of two."""
    assert allocated_bytes([96 * MIB, 33 * MIB, 40 * MIB], pin=True) == [128 * MIB, 192 * MIB, 256 * MIB]


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_layouts(seed: int, pin: bool) -> None:
    """Within the limit; no unit in a slot that is too small; of those that fit into one the last have their own; the
    more bytes there are, the fewer share them; and the error names the bytes that just do.
    """
    draw = random.Random(seed)
    units = [
        [draw.choice([0, 4, 512, MIB, 3 * MIB, 30 * MIB, 70 * MIB]) for _ in range(draw.randint(1, 4))]
        for _ in range(draw.randint(1, 9))
    ]
    nbytes = [sum(map(aligned, unit)) for unit in units]
    everything = allocated_bytes(chain.from_iterable(units), pin=pin)[-1]
    assert not layout_of(units, everything, pin=pin).shared
    with pytest.raises(UsageError, match="optimizer_offload_grad_bytes=1 is too little") as caught:
        layout_of([*units, [4096]], 1, pin=pin)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    units.append([4096])
    nbytes.append(4096)
    with pytest.raises(UsageError, match=f"give {least} or more, or None"):
        layout_of(units, least - 1, pin=pin)
    shares = []
    for limit in sorted({least, *(draw.randint(least, max(least, everything)) for _ in range(5))}):
        found = layout_of(units, limit, pin=pin)
        assert sorted([*found.own, *found.shared]) == list(range(len(units)))
        own = [size for at in found.own for size in units[at]]
        taken = [
            *allocated_bytes(own, pin=pin, slab=found.slab)[-1:],
            *allocated_bytes([found.slot] * SLOTS, pin=pin)[-1:],
        ]
        assert sum(taken) <= limit
        assert all(nbytes[at] <= found.slot for at in found.shared)
        assert found.shared == sorted(found.shared)
        slotted = [at for at, size in enumerate(nbytes) if 0 < size <= found.slot]
        assert found.shared == slotted[: len(found.shared)]
        shares.append(sum(nbytes[at] for at in found.shared))
    assert shares == sorted(shares, reverse=True)


def test_a_large_embedding_makes_no_slot_large() -> None:
    """It has memory of its own, and all others share slots of their size."""
    layers = [[32 * MIB] for _ in range(8)]
    assert layout_of([[1024 * MIB], *layers], (1024 + 3 * 32) * MIB, pin=True) == Layout(
        [0, 8], list(range(1, 8)), 32 * MIB
    )


def test_tensors_that_rounding_would_enlarge_lie_side_by_side() -> None:
    """Torch rounds each of 80 MB up to 128 MiB, and a slab of 1 GiB, which holds 13 of them, not at all."""
    units = [[80 * 10**6]] * 26
    assert allocated_bytes([80 * 10**6] * 26, pin=True)[-1] == 26 * 128 * MIB
    assert layout_of(units, 2048 * MIB, pin=True) == Layout(list(range(26)), [], slab=1024 * MIB)


class _Owner:
    """What has units."""

    def __init__(self, count: int) -> None:
        models = [nn.Parameter(torch.zeros(64, dtype=torch.float16)) for _ in range(count)]
        twins = [HostTwin(torch.zeros(64, dtype=torch.float16)) for _ in range(count)]
        self.params = [
            MainParam(str(at), model, torch.zeros(64), None, True, twin=twin)
            for at, (model, twin) in enumerate(zip(models, twins, strict=True))
        ]
        self.now = [UpdateUnit(0, [param]) for param in self.params]

    def units(self) -> list[UpdateUnit]:
        return self.now

    def twins(self) -> list[HostTwin]:
        return [param.twin for param in self.params if param.twin is not None]


def _gradients(twins: list[HostTwin], dtype: torch.dtype = torch.float16) -> list[tuple[list[HostTwin], TensorList]]:
    return [([twin], TensorList([torch.zeros(64, dtype=dtype)])) for twin in twins]


def test_memory_is_assigned_once_to_all() -> None:
    """Also to gradients that are not there in the first step; anew where one has another dtype, or units are others."""
    owner = _Owner(4)
    twins = owner.twins()
    memory = GradMemory(pin=True, limit=3 * 512, units=owner.units)
    assert memory.make(_gradients(twins[:1]))
    assert [twin.slot for twin in twins] == [0, 1, 0, None]
    grads = list(copies_in(twins))
    assert grads[0].data_ptr() == grads[2].data_ptr() != grads[1].data_ptr()
    assert _storages(grads) <= 3 * 512
    assert not memory.make(_gradients(twins[1:]))
    assert not memory.make(_gradients(twins))
    assert memory.make(_gradients(twins[3:], torch.float32))
    assert not memory.make([*_gradients(twins[:3]), *_gradients(twins[3:], torch.float32)])
    owner.now = [UpdateUnit(0, owner.params[:2]), UpdateUnit(0, owner.params[2:3])]
    assert memory.make([(twins[:2], TensorList([torch.zeros(64, dtype=torch.float16)] * 2)), *_gradients(twins[2:3])])
    assert [twin.slot for twin in twins] == [None] * 4
    assert twins[3].grad is None


def test_gradients_that_are_not_there_are_expected_like_others() -> None:
    """Main grads of one dtype: in the first step memory fits those, too, that come later."""
    owner = _Owner(4)
    twins = owner.twins()
    memory = GradMemory(pin=True, limit=3 * 512, units=owner.units)
    assert memory.make(_gradients(twins[:1], torch.float32))
    assert not memory.make(_gradients(twins, torch.float32))


def test_a_limit_that_is_too_small_leaves_memory_as_it_was() -> None:
    """The error comes before anything is given up."""
    owner = _Owner(4)
    twins = owner.twins()
    memory = GradMemory(pin=True, limit=2 * 512, units=owner.units)
    memory.make(_gradients(twins))
    before = list(copies_in(twins))
    owner.now = [UpdateUnit(0, owner.params)]
    with pytest.raises(UsageError, match="=1024 is too little"):
        memory.make([(twins, TensorList([torch.zeros(64, dtype=torch.float16)] * 4))])
    assert [one.data_ptr() for one in copies_in(twins)] == [one.data_ptr() for one in before]


def test_memory_keeps_no_optimizer_alive() -> None:
    """Invariant 11: units are asked for through a weak reference."""
    owner = _Owner(1)
    memory = GradMemory(pin=True, limit=512, units=owner.units)
    [twin] = owner.twins()
    assert memory.make(_gradients([twin]))
    del owner
    assert not memory.make(_gradients([twin]))
