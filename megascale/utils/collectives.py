"""The only module that calls torch.distributed collectives.

A group of None means "this rank alone": every function then returns without communication.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work, distributed_c10d

from megascale.errors import MegascaleError, RankError, UsageError
from megascale.utils import call_site
from megascale.utils.dtensors import is_dtensor, to_local
from megascale.utils.supported_torch import explained

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

PATIENCE_S = 10.0
"""After how many seconds a rank warns that others do not make a call which all make together."""

_GROUPS_OF_OURS = 1 << 40
"""From where groups are counted that a part of the world makes: beyond any number of groups of all ranks."""
_groups_made: Counter[tuple[int, ...]] = Counter()
"""How many groups each set of ranks has made: its ranks agree about it, as they make them together."""

_host_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup | None] = WeakKeyDictionary()
"""See :func:`host_group`."""

_meetings: Counter[tuple[tuple[int, ...], str]] = Counter()
"""How often the ranks of a group have met for a call."""

# torch 2.13's names; there the older names, which torch 2.11 has, warn.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def is_initialized() -> bool:
    """Return whether this torch has torch.distributed, and a program has initialised it."""
    return dist.is_available() and dist.is_initialized()


def is_alone_in_world() -> bool:
    """Return whether there is no other process to send anything to."""
    return not is_initialized() or dist.get_world_size() == 1


def group_size(group: ProcessGroup | None) -> int:
    """Return how many ranks ``group`` has."""
    return 1 if group is None else group.size()


def group_ranks(group: ProcessGroup | None) -> tuple[int, ...]:
    """Return the ranks of ``group`` as numbers of the world; none for this rank alone."""
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def group_rank(group: ProcessGroup | None) -> int:
    """Return this rank's index in ``group``."""
    return 0 if group is None else group.rank()


def all_reduce_sum_(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum ``tensor`` over ``group`` in place. SUM only: gloo's MAX and MIN can lose a NaN."""
    if group_size(group) > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


def all_to_all(message: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Send ``sent[rank]`` elements of ``message``, 1-D, to each rank in turn.

    Returns what arrives, ``received[rank]`` elements of each, in a new tensor of the message's dtype and device.
    """
    arrived = message.new_empty(sum(received))
    dist.all_to_all_single(arrived, message, received, sent, group=group)
    return arrived


@lru_cache
def _backends(config: str) -> dict[str, str]:
    """Return the backends of a group by the types of their devices. ``config``: as torch writes it."""
    return {kind: name for kind, _, name in (pair.partition(":") for pair in config.split(","))}


def _is_carried_by(names: Collection[str], group: ProcessGroup | None, device: torch.device) -> bool:
    """Return whether one of these backends carries tensors of ``device`` over ``group``, of more than one rank."""
    return group_size(group) > 1 and _backends(dist.get_backend_config(group)).get(device.type) in names


def can_average_exactly(group: ProcessGroup | None, device: torch.device) -> bool:
    """Return whether the backend's average over ``group`` has the same bits as a sum that is divided.

    NCCL multiplies each addend by the reciprocal of the number of ranks. For a power of two that is exact, except for
    addends that become subnormal, and overflows less easily. For other numbers of ranks bits would differ. gloo's
    average is a separate pass, no faster than ours.
    """
    size = group_size(group)
    return size & (size - 1) == 0 and _is_carried_by(("nccl",), group, device)


def all_reduce_start(tensor: Tensor, group: ProcessGroup | None, *, average: bool = False) -> Work | None:
    """Start to sum, or to average, ``tensor`` over ``group`` in place; call ``wait()`` on the result.

    Returns None if there is nothing to do.
    """
    if group_size(group) == 1:
        return None
    return dist.all_reduce(tensor, op=_reduction(average), group=group, async_op=True)


def _reduction(average: bool) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


class Pending:
    """Messages in progress that are waited for together. Keeps their tensors alive until then.

    Args:
        works: None for what needed no message.
        tensors: what the messages read and write.
    """

    def __init__(self, works: Iterable[Work | None], tensors: Sequence[Tensor] = ()) -> None:
        self._works = [work for work in works if work is not None]
        self._tensors = tensors
        self._waiting = Lock()

    def wait(self) -> None:
        """Wait for all messages. Any thread may call it, any number of times.

        Raises:
            RuntimeError: of the backend, where a rank is lost: at once, or when the process group's timeout is over.
        """
        with self._waiting:  # gloo tells of a message's end once: a second thread would wait for ever
            while self._works:
                self._works[0].wait()
                del self._works[0]  # a message that has failed stays: it never counts as arrived
            self._tensors = ()


def is_message_passing(group: ProcessGroup | None, device: torch.device) -> bool:
    """Return whether point-to-point messages are the fastest way to move shards on ``device`` over ``group``.

    gloo's own reduce-scatter reduces the whole tensor on every rank, and its all-gather makes one more copy: messages
    move half as much data, in a third of the time.
    """
    return _is_carried_by(("gloo",), group, device)


def runs_on_streams(group: ProcessGroup | None, device: torch.device) -> bool:
    """Return whether a stream can wait for collectives over ``group``, and a device's graph capture them.

    Not if the host carries them out.
    """
    return not _is_carried_by(("gloo", "mpi"), group, device)


def reduce_scatter_start(
    output: Tensor,
    tensor: Tensor,
    group: ProcessGroup | None,
    *,
    average: bool = False,
    shards: Sequence[Tensor] | None = None,
) -> Work | None:
    """Start to sum, or to average, ``tensor`` over ``group`` into ``output``: this rank's shard, shape [numel / ranks].

    ``output`` may be this rank's own shard of ``tensor``; the rest of ``tensor`` is then undefined.

    ``shards``: the shards of ``tensor``, one per rank, where they are not equal. NCCL then groups one reduction to each
    rank into one call. Together they carry the bytes of a reduce-scatter of ``tensor``; nothing is padded.
    """
    if group_size(group) == 1:
        return None
    if shards is not None:
        return dist.reduce_scatter(output, list(shards), op=_reduction(average), group=group, async_op=True)
    return _reduce_scatter(output, tensor, op=_reduction(average), group=group, async_op=True)


def exchange_start(
    received: Tensor, shards: Tensor | Sequence[Tensor], group: ProcessGroup | None, tag: int
) -> Pending:
    """Start to send every other rank its one of ``shards``, 1-D or a row; nothing is sent for an empty one.

    ``received``, shape [ranks - 1, numel], gets the others' shards for this rank, in the order of ranks. ``tag``
    distinguishes concurrent exchanges; those with the same tag keep their order.
    """
    return _messages(received.unbind(), [shards[other] for other in _others(group)], group, tag, [*shards, received])


def all_gather_start(
    tensor: Tensor, shard: Tensor, group: ProcessGroup | None, tag: int, shards: Sequence[Tensor] | None = None
) -> Pending:
    """Start to fill ``tensor`` with every rank's ``shard``, which is this rank's own part of ``tensor``.

    ``tag`` distinguishes concurrent gathers. ``shards``: the parts of ``tensor``, one per rank, where they are not
    equal. Nothing is sent for an empty one; NCCL groups one broadcast from each rank into one call.
    """
    if group_size(group) == 1:
        return Pending([])
    if not is_message_passing(group, tensor.device):
        if shards is not None:
            return Pending([dist.all_gather(list(shards), shard, group=group, async_op=True)], [tensor])
        return Pending([_all_gather(tensor, shard, group=group, async_op=True)], [tensor])
    places = shards or tensor.view(group_size(group), -1).unbind()
    others = _others(group)
    return _messages([places[other] for other in others], [shard] * len(others), group, tag, [tensor])


def _messages(
    received: Sequence[Tensor],
    sent: Sequence[Tensor],
    group: ProcessGroup | None,
    tag: int,
    tensors: Sequence[Tensor],
) -> Pending:
    """Start all receives, then all sends: one of each with every other rank, in the order of ranks.

    What is empty does not travel: both sides know its size.
    """
    receive = zip(_others(group), received, strict=True)
    send = zip(_others(group), sent, strict=True)
    works = [dist.irecv(to, group=group, group_src=peer, tag=tag) for peer, to in receive if to.numel()]
    works += [dist.isend(part, group=group, group_dst=peer, tag=tag) for peer, part in send if part.numel()]
    return Pending(works, tensors)


def _others(group: ProcessGroup | None) -> list[int]:
    return [rank for rank in range(group_size(group)) if rank != group_rank(group)]


def broadcast_(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Overwrite ``tensor`` with that of the group's first rank."""
    if group is not None and group_size(group) > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)
    return tensor


def all_gather_object(value: T, group: ProcessGroup | None) -> list[T]:
    """Return every rank's ``value``, in the order of ranks."""
    if group_size(group) == 1:
        return [value]
    gathered: list[Any] = [None] * group_size(group)
    dist.all_gather_object(gathered, value, group=host_group(group))
    return gathered


def host_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group over which objects travel between the ranks of ``group``, in host memory.

    It is ``group`` if one of its backends carries tensors of the host. Beside NCCL alone it is a gloo group, made by
    the first call, which every rank makes together: a constructor's comparison of the ranks. NCCL would send objects
    through the current device, which is one and the same on all ranks of a program that never calls set_device; and
    where a rank's disk is slow, NCCL's watchdog would end the ranks that wait for it.
    """
    if group is None or "cpu" in _backends(dist.get_backend_config(group)):
        return group
    if group not in _host_groups:
        _host_groups[group] = twin_group(group)
    return _host_groups[group]


def twin_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return a new gloo group of the same ranks and timeout, for collectives on the host in another thread.

    Two threads that used one group would mix the order of their messages, which has to be the same on all ranks.

    Every rank of ``group`` calls it together. The new group lives until torch.distributed is destroyed.

    Raises:
        RankError: gloo cannot connect the ranks.
    """
    if group is None or group.size() == 1:
        return None
    ranks = list(group_ranks(group))
    is_part = len(ranks) != dist.get_world_size()
    try:
        with _numbers_of_their_own(ranks) if is_part else nullcontext():
            return dist.new_group(ranks, timeout_of(group), backend="gloo", use_local_synchronization=is_part)
    except RuntimeError as error:
        raise RankError(
            f"no gloo group of ranks {ranks}, over which objects and checkpoints travel: {error}. Where hosts have "
            "several network interfaces, set GLOO_SOCKET_IFNAME to the name of the one that connects them"
        ) from error


@contextmanager
def _numbers_of_their_own(ranks: Sequence[int]) -> Iterator[None]:
    """Let the group that these ranks alone make be none of those that all ranks count.

    Torch names a group by how many there were before it. From 2.15 on it counts groups of some ranks, too: on these the
    next group of all ranks would have another name than on those outside, and all would wait for one another.
    """
    world, made = distributed_c10d._world, tuple(ranks)
    counted = world.group_count
    world.group_count = _GROUPS_OF_OURS + _groups_made[made]
    _groups_made[made] += 1
    try:
        yield
    finally:
        world.group_count = counted


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return how long a rank of ``group`` waits for another one; None where the backend does not say."""
    devices = group._device_types  # none of a group that is a Python class of its own
    options = getattr(group._get_backend(devices[0]), "options", None) if devices else None
    return getattr(options, "_timeout", None)


def meet(group: ProcessGroup | None, call: str) -> None:
    """Wait until every rank of ``group`` is here, before collectives which one rank alone must not begin.

    Where some ranks go on to another collective instead, gloo ends the processes, and others wait or mix up messages.
    A rank warns after PATIENCE_S seconds. It waits for half as long as it would in a collective, so that its error
    comes before that of the others.

    Args:
        group: of all ranks that make this call together.
        call: its name, for the error.

    Raises:
        UsageError: the others have not come. It names them.
    """
    if group is None or group.size() == 1:
        return
    ranks, store, me = group_ranks(group), distributed_c10d._get_default_store(), dist.get_rank()
    key = f"megascale/{call}/{','.join(map(str, ranks))}/{_meetings[ranks, call]}"
    limit = (timeout_of(group) or dist.default_pg_timeout).total_seconds() / 2
    store.set(f"{key}/{me}", "here")
    if store.add(key, 1) == len(ranks):
        store.set(f"{key}/all", "here")
    begun, pause, has_warned = time.monotonic(), 1e-4, False
    while not store.check([f"{key}/all"]):  # wait() would keep other threads from the store
        waited = time.monotonic() - begun
        if waited > limit or (waited > PATIENCE_S and not has_warned):
            missing = [rank for rank in ranks if rank != me and not store.check([f"{key}/{rank}"])]
            story = (
                f"{call} on rank {me} waits for ranks {missing}: all of {list(ranks)} call it together. Call it on "
                "every rank, also where one alone uses the result"
            )
            if waited > limit:
                store.add(key, -1)  # a later call on all ranks is the same meeting
                store.delete_key(f"{key}/{me}")
                raise UsageError(f"{story} (waited {waited:.1f} s)")
            call_site.warn(story, RuntimeWarning)
            has_warned = True
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    _meetings[ranks, call] += 1


def redistribute_like(tensor: "DTensor", like: "DTensor") -> "DTensor":
    """Return ``tensor`` with the placements of ``like``. This reduces a Partial gradient."""
    return tensor.redistribute(like.device_mesh, like.placements)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor: a DTensor gathered, any other tensor itself. Of state in host memory: there."""
    if not is_dtensor(tensor):
        return tensor
    # Over the mesh's devices, wherever the parts lie: NCCL carries no host memory.
    placed: Any = tensor.to(tensor.device_mesh.device_type)
    whole: Tensor = placed.full_tensor()
    return whole.to(to_local(tensor).device)


def raise_together(error: Exception | None, group: ProcessGroup | None) -> None:
    """Raise on every rank if any rank has an error; every rank must call this.

    Each rank raises the class of the first failing rank's error; the message names that rank. Errors outside
    megascale's own come back as RankError on the ranks that did not fail.
    """
    gather_or_raise(None, error, group)


@contextmanager
def raising_together(group: ProcessGroup | None) -> Iterator[None]:
    """Run a block, and raise as :func:`raise_together` whatever it raised on any rank. Every rank must run it."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # whatever it is: other ranks wait
        error = caught
    raise_together(error, group)


def gather_or_raise(value: T, error: Exception | None, group: ProcessGroup | None) -> list[T]:
    """Return every rank's ``value``, in the order of ranks; raise as :func:`raise_together` if any has an error."""
    if error is not None:
        error = explained(error)
    if group_size(group) == 1:
        if error is not None:
            raise error
        return [value]
    mine: tuple[type[MegascaleError], str] | None = None
    if isinstance(error, MegascaleError):
        mine = type(error), str(error)
    elif error is not None:
        mine = RankError, f"{type(error).__name__}: {error}"
    answers: list[Any] = all_gather_object((mine, value if error is None else None), group)
    failed = [(rank, story) for rank, (story, _) in enumerate(answers) if story is not None]
    if not failed:
        return [given for _, given in answers]
    rank, (kind, message) = failed[0]
    others = f" (ranks {', '.join(str(r) for r, _ in failed)} failed)" if len(failed) > 1 else ""
    raise kind(f"rank {rank}: {message}{others}") from error
