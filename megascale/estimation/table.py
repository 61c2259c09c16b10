"""An estimate as a table of lines."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale.estimation.estimates import Estimate

LABEL = 26


def lines(found: "Estimate") -> Iterator[str]:
    """Yield the lines of the table."""
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
