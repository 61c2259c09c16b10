"""``megascale.estimate``: memory, checkpoint, messages and time of a run, from sizes alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megascale.estimation.collectives import Collective, collectives
from megascale.estimation.memory import UPDATE_OF_A_MATRIX, checkpoint_bytes, held_bytes, host_bytes, transient_bytes
from megascale.estimation.partition import Partition
from megascale.estimation.setup import Setup
from megascale.estimation.sizes import ModelSizes, Shapes, sizes_of
from megascale.estimation.traffic import moved_bytes, offload_traffic
from megascale.utils import validate

LABEL = 26
"""Letters of a row's name in the table."""


@dataclass(frozen=True, repr=False)
class Estimate:
    """What one rank of a run needs. Sizes in bytes, times in seconds.

    Attributes:
        sizes, setup: what was estimated.
        held: between backward and the step, by kind, without activations; on the device.
        transient: on top of that for a time, by purpose.
        checkpoint: model and optimizer on disk, of all ranks together.
        moved: read and written in memory in a step, by pass.
        collectives: what the rank calls in a step.
        seconds: of a step, by pass and purpose, as if nothing overlapped; without those whose bandwidth is unknown.
        host: bytes held in host memory, by kind; empty without ``optimizer_cpu_offload``.
        offload: bytes that cross the bus in a step, each way, and that the update moves in host memory; as ``host``.
    """

    sizes: ModelSizes
    setup: Setup
    held: dict[str, int]
    transient: dict[str, int]
    checkpoint: int
    moved: dict[str, int]
    collectives: list[Collective]
    seconds: dict[str, float]
    host: dict[str, int] = field(default_factory=dict)
    offload: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "\n".join(_lines(self))

    @property
    def total(self) -> int:
        """Bytes held between backward and the step, without activations."""
        return sum(self.held.values())

    @property
    def peak(self) -> int:
        """The most bytes that are held at once, without activations: in backward, or in the update."""
        update = self.transient.get(UPDATE_OF_A_MATRIX, 0)
        return self.total + max(sum(self.transient.values()) - update, update)


def estimate(
    model: nn.Module | Shapes | int,
    *,
    precision: str = "fp16",
    memory_bandwidth: float | None = None,
    link_bandwidth: float | None = None,
    **setup: Any,
) -> Estimate:
    """Estimate memory by kind, checkpoint, messages and time of a step, for one rank. Allocates no tensor.

    Args:
        model: a module, best built under ``torch.device("meta")``; shapes, by name or in the order of the forward pass;
            or a number of parameters, which is split into equal tensors.
        precision: of the model, "fp16", "bf16" or "fp32"; for a module also "as_is".
        memory_bandwidth: bytes a second that a kernel reads and writes; ``python -m megascale bench`` measures it.
        link_bandwidth: bytes a second that leave a rank.
        setup: fields of :class:`Setup`, such as ``ranks=8, sharding="distributed", optimizer="lion"``.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument, its value and what it may be.
    """
    for name in setup:
        validate.one_of("argument of estimate()", name, tuple(Setup.__dataclass_fields__))
    partition = Partition(sizes_of(model, precision), Setup(**setup))
    moved, calls = moved_bytes(partition), collectives(partition)
    seconds: dict[str, float] = {}
    if memory_bandwidth is not None:
        rate = validate.positive("memory_bandwidth", memory_bandwidth)
        seconds |= {name: nbytes / rate for name, nbytes in moved.items() if nbytes}
    if link_bandwidth is not None:
        rate = validate.positive("link_bandwidth", link_bandwidth)
        seconds |= {call.purpose: call.sent / rate for call in calls}
    return Estimate(
        partition.sizes,
        partition.setup,
        held_bytes(partition),
        transient_bytes(partition),
        checkpoint_bytes(partition),
        moved,
        calls,
        seconds,
        host_bytes(partition),
        offload_traffic(partition),
    )


def _lines(found: Estimate) -> Iterator[str]:
    """Yield the lines of the table that an estimate prints."""
    setup = found.setup
    ranks = f"{setup.ranks:,} rank{'s' * (setup.ranks > 1)}"
    yield f"{found.sizes.numel:,} parameters in {len(found.sizes.params):,} tensors"
    yield f"{setup.sharding}, {setup.optimizer}, {ranks}, {setup.communication}"
    yield ""
    yield "Bytes a rank, without activations"
    yield from (_row(kind, nbytes) for kind, nbytes in found.held.items() if nbytes)
    yield _row("total", found.total)
    yield from (_row(f"for a time: {purpose}", nbytes) for purpose, nbytes in found.transient.items() if nbytes)
    yield _row("peak", found.peak)
    yield ""
    if found.host:
        yield "Bytes a rank in host memory"
        yield from (_row(kind, nbytes) for kind, nbytes in found.host.items())
        yield _row("total", sum(found.host.values()))
        yield ""
        yield "Over the bus, and moved in host memory, a step"
        yield from (_row(name, nbytes) for name, nbytes in found.offload.items())
        yield ""
    yield _row("Checkpoint, all ranks", found.checkpoint)
    yield ""
    yield "Memory read and written a step"
    yield from (_row(name, nbytes) for name, nbytes in found.moved.items() if nbytes)
    if found.collectives:
        yield ""
        yield "Sent by a rank a step"
        yield from (_row(f"{c.purpose}: {c.count:,} {c.operation}", c.sent) for c in found.collectives)
    if found.seconds:
        yield ""
        yield "Time of a step, as if nothing overlapped"
        yield from (f"  {name:<{LABEL}}{seconds * 1e3:>22,.2f} ms" for name, seconds in found.seconds.items())
        yield f"  {'sum':<{LABEL}}{sum(found.seconds.values()) * 1e3:>22,.2f} ms"


def _row(label: str, nbytes: int) -> str:
    text = f"{label:<{LABEL}}"
    return f"  {text:<40}{nbytes:>22,}{nbytes / 1e9:>12,.3f} GB"
