"""The reduction of one bucket over the ranks that hold its parameters.

Replicated main params keep the whole bucket; sharded ones keep this rank's shard, summed over the other copies of that
shard too where there are any. Gradients that are sent in 16 bits are divided by the number of ranks first, because
16-bit sums overflow. Others are summed and then divided, or averaged by the backend where that gives the same bits:
:func:`megascale.utils.collectives.can_average_exactly`. With one backend, replicated and sharded reductions divide
alike.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from typing_extensions import override

from megascale.errors import ArgumentError
from megascale.grad_sync.message_thread import MessageThread
from megascale.parallel import GradGroup
from megascale.utils.calls import span
from megascale.utils.collectives import (
    Pending,
    all_reduce_start,
    can_average_exactly,
    exchange_start,
    group_rank,
    group_size,
    is_message_passing,
    reduce_scatter_start,
)
from megascale.utils.streams import WriteOrder

CHUNK = 1 << 18
"""Elements that are summed and divided while they are in cache."""
MESSAGE = 1 << 21
"""Elements of a message. A rank holds two messages from every other rank at a time."""

Divisor = float | Tensor


class ReduceThread(MessageThread):
    """A thread that exchanges buckets with other ranks, one after the other, and the memory that receives them.

    The thread also sums on arrival, so that backward does not wait for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory: Tensor | None = None

    def close(self) -> None:
        """Let the thread end after its last task."""
        super().close()
        self._memory = None

    def memory(self, numel: int, like: Tensor) -> Tensor:
        """Return uninitialised memory of shape [numel], dtype and device of ``like``, valid until the next call.

        It is reused by all tasks: fresh pages cost more than a sum.
        """
        held = self._memory
        if held is None or held.numel() < numel or (held.dtype, held.device) != (like.dtype, like.device):
            held = self._memory = torch.empty(numel, dtype=like.dtype, device=like.device)
        return held[:numel]


class BucketReduction(ABC):
    """The reduction of one bucket. Calls come in this order, once a step: start, wait, finish.

    Where a rank keeps its shard, the rest of the bucket is undefined until the next step's gradients fill it. The
    payload is divided before the sum if it has 16 bits, otherwise after it.

    Args:
        flat: the bucket.
        order: orders the streams that write it.
        group: the ranks that hold its parameters.
        travel_dtype: of the messages.
        cuts: where the ranks' shards begin and end; None: every rank keeps the whole bucket.
        aside: the current stream of :meth:`start` is one of reductions alone, which may wait for them.

    Attributes:
        rank: the index of this rank's shard.
        own: where in the bucket lies what this rank keeps: its shard, or all of it.
        kept: 1-D: that part of the bucket.
    """

    def __init__(
        self,
        flat: Tensor,
        order: WriteOrder,
        group: GradGroup,
        travel_dtype: torch.dtype,
        cuts: Sequence[int] | None,
        *,
        aside: bool = False,
    ) -> None:
        self.flat = flat
        self.group = group
        self.travel_dtype = travel_dtype
        self.rank = group_rank(group.shard)
        self.cuts = list(pairwise(cuts or ()))
        self.own = slice(*self.cuts[self.rank]) if self.cuts else slice(None)
        self.kept = flat[self.own]
        self._num_holders = group_size(group.holders)
        self._pre_divisor = self._num_holders if travel_dtype.itemsize < 4 else 1
        self._can_average = travel_dtype.itemsize >= 4 and can_average_exactly(group.holders, flat.device)
        self._averages = False
        self._divisor: Divisor = 1
        self._order = order
        self._is_aside = aside
        self._over_replicas: Work | None = None

    def start(self, divisor: Divisor) -> None:
        """Start to sum and to divide by ``divisor``, without waiting. Do not write the bucket until :meth:`finish`.

        Aside all of it is put on the current stream, one message behind the other, so that the stream of backward waits
        for none, and the sum over the other copies of a shard begins in backward, too.
        """
        self._divisor = divisor
        self._averages = self._can_average and not isinstance(divisor, Tensor) and divisor == self._num_holders
        self._order.write()
        if self._num_holders == 1:
            divide_(self.kept, divisor)
        else:
            self.begin()
            if self._is_aside:
                self.wait()
                self.wait_for_replicas()

    def finish(self, divisor: Divisor) -> None:
        """Wait until ``kept`` is the sum divided by ``divisor``, which may have changed since :meth:`start`."""
        self.wait()
        self.wait_for_replicas()
        self._order.join()
        if divisor is not self._divisor:
            divide_(self.kept, divisor / self._divisor)

    @abstractmethod
    def begin(self) -> None:
        """Start to sum over several ranks."""

    @abstractmethod
    def wait(self) -> None:
        """Let the current stream wait for the sum, if it was begun, divide, and free scratch."""

    def packed(self) -> Tensor:
        """Return the payload: the bucket itself, or a copy in ``travel_dtype``."""
        if self.travel_dtype == self.flat.dtype:
            divide_(self.flat, self._pre_divisor)
            return self.flat
        payload = torch.empty_like(self.flat, dtype=self.travel_dtype)
        # Divided and cast in one pass. A CPU divides into scratch of the bucket's dtype first: of a chunk, in cache.
        chunk = CHUNK if self.flat.device.type == "cpu" else max(1, self.flat.numel())
        for part, packed in zip(self.flat.split(chunk), payload.split(chunk), strict=True):
            torch.div(part, self._pre_divisor, out=packed)
        return payload

    def sum_over_replicas(self) -> None:
        """Start to add the other copies of this shard, where it is not empty: the copies are as large."""
        if self.kept.numel():
            self._over_replicas = all_reduce_start(self.kept, self.group.replicate, average=self._averages)

    def wait_for_replicas(self) -> None:
        """Let the current stream wait for the sum over the other copies of this shard."""
        if self._over_replicas is not None:
            self._over_replicas.wait()
            self._over_replicas = None


class CollectiveReduction(BucketReduction):
    """By the backend's own all-reduce or reduce-scatter, in place where the dtype is the same."""

    def __init__(self, *bucket: Any, aside: bool) -> None:
        super().__init__(*bucket, aside=aside)
        self._are_equal = len({end - begin for begin, end in self.cuts}) == 1
        self._payload: Tensor | None = None
        self._work: Work | None = None

    @override
    def begin(self) -> None:
        payload = self._payload = self.packed()
        if not self.cuts:
            self._work = all_reduce_start(payload, self.group.holders, average=self._averages)
            return
        shards = None if self._are_equal else [payload[begin:end] for begin, end in self.cuts]
        self._work = reduce_scatter_start(
            payload[self.own], payload, self.group.shard, average=self._averages, shards=shards
        )

    @override
    def wait(self) -> None:
        if self._payload is None:
            return
        self._order.write()
        if self._work is not None:
            self._work.wait()
        if self._payload is not self.flat:
            self.kept.copy_(self._payload[self.own])
            if self._order.is_needed:  # it may be the memory of another stream
                self._payload.record_stream(torch.accelerator.current_stream(self._payload.device))
        divide_(self.kept, 1 if self._averages else self._divisor / self._pre_divisor)
        self._work = self._payload = None
        if self.cuts:
            self.sum_over_replicas()


class P2PReduceScatter(BucketReduction):
    """Sharded, by point-to-point messages, summed on arrival: in at least fp32, in the order of ranks."""

    def __init__(self, *bucket: Any, thread: ReduceThread, tag: int) -> None:
        super().__init__(*bucket)
        self._thread = thread
        self._tag = tag
        self._carried: Future[None] | None = None

    @override
    def begin(self) -> None:
        self._carried = self._thread.submit(self._carry)

    @override
    def wait(self) -> None:
        """See :class:`BucketReduction`. Raises the error of a failed exchange."""
        if self._carried is not None:
            carried, self._carried = self._carried, None
            self._thread.result(carried)
            self.sum_over_replicas()

    @torch.no_grad()
    def _carry(self) -> None:
        with span("megascale.reduce_bucket"):
            flat = self.packed()
            width = min(MESSAGE, self.kept.numel())
            others = len(self.cuts) - 1
            places = self._thread.memory(2 * others * width, flat).view(2, others, width)
            under_way: deque[tuple[Pending, Tensor, Tensor, Tensor]] = deque()
            longest = max(end - begin for begin, end in self.cuts)
            for index, start in enumerate(range(0, longest, MESSAGE)):
                # The next message is exchanged while this one is summed.
                sent = [flat[begin:end][start : start + MESSAGE] for begin, end in self.cuts]
                own, kept = sent[self.rank], self.kept[start : start + MESSAGE]
                arrived = places[index % 2, :, : own.numel()]
                under_way.append((exchange_start(arrived, sent, self.group.shard, self._tag), arrived, own, kept))
                if len(under_way) == 2:
                    self._sum(*under_way.popleft())
            for exchange in under_way:
                self._sum(*exchange)

    def _sum(self, exchange: Pending, arrived: Tensor, own: Tensor, kept: Tensor) -> None:
        """Wait for one message from every other rank, sum them and this rank's ``own`` into ``kept``, and divide."""
        exchange.wait()
        others = list(arrived.unbind())
        sources = [*others[: self.rank], own, *others[self.rank :]]
        left = self._divisor / self._pre_divisor
        for begin in range(0, kept.numel(), CHUNK):
            chunk = slice(begin, begin + CHUNK)
            sum_in_order([source[chunk] for source in sources], kept[chunk])
            divide_(kept[chunk], left)


def bucket_reduction(
    flat: Tensor,
    order: WriteOrder,
    group: GradGroup,
    travel_dtype: torch.dtype,
    thread: ReduceThread,
    tag: int,
    *,
    cuts: Sequence[int] | None,
    aside: bool,
) -> BucketReduction:
    """Return the reduction of the bucket ``flat``. Raises ArgumentError for shards that gloo would have to send.

    ``tag``: of its messages. The other arguments are those of :class:`BucketReduction`.
    """
    if cuts is not None and is_message_passing(group.shard, flat.device):
        if flat.device.type != "cpu":
            raise ArgumentError(
                f"gloo sends no shards of parameters on {flat.device}, as it reads host memory alone; name a backend "
                'for them: init_process_group("nccl"), or "cpu:gloo,cuda:nccl"'
            )
        return P2PReduceScatter(flat, order, group, travel_dtype, cuts, thread=thread, tag=tag)
    return CollectiveReduction(flat, order, group, travel_dtype, cuts, aside=aside)


def divide_(tensor: Tensor, divisor: Divisor) -> None:
    """Divide in place. Does nothing if ``divisor`` is the number 1."""
    if isinstance(divisor, Tensor):
        tensor.div_(divisor.to(tensor.device, torch.float32))
    elif divisor != 1:
        tensor.div_(divisor)


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of ``parts`` into ``out``: rank 0 first, in fp32 at least.

    A part may be ``out`` itself; the others are scratch.
    """
    total = parts[0].to(torch.promote_types(out.dtype, torch.float32))
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)
