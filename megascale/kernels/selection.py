"""Which backend runs: by name, or the fastest one that works here."""

import functools
import os
from collections.abc import Callable
from importlib import import_module

import torch

from megascale.config import BACKENDS
from megascale.errors import UsageError
from megascale.kernels.decision import NUM_STATISTICS
from megascale.kernels.native.backend import NativeBackend
from megascale.kernels.reference import Backend, ReferenceBackend
from megascale.kernels.torch_backend import TorchBackend
from megascale.utils import call_site, validate
from megascale.utils.streams import has_streams

ENVIRONMENT_VARIABLE = "MEGASCALE_BACKEND"


def select_backend(name: str = "auto", device: torch.device | None = None) -> Backend:
    """Return the backend called ``name``.

    "auto" is what the environment variable MEGASCALE_BACKEND says, else the fastest one for ``device`` (None: the CPU):
    native on a CPU, triton on an accelerator. If that one does not work, a warning says why and torch is used. To find
    out, this loads native.c's library, or launches a Triton kernel on the accelerator.

    Raises:
        ArgumentError: for an unknown name, from either source.
        UsageError: for a named backend that does not work here, with the reason.
    """
    validate.one_of("backend", name, BACKENDS)
    if name == "auto":
        name = validate.one_of(ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE, "auto"), BACKENDS)
    if name != "auto":
        return _MAKERS[name](device)
    fastest = "native"
    if device is not None and device.type != "cpu":
        fastest = "triton" if has_streams(device) else "torch"
    return _or_torch(lambda: _MAKERS[fastest](device))


def host_backend() -> Backend:
    """Return the backend for updates in host memory while a device computes: native, else torch, with a warning.

    It has this process's share of the cores: those that the launcher may run on, by the number of ranks of this
    machine, which torchrun tells; at most those that this process is bound to. torchrun also sets OMP_NUM_THREADS=1,
    for programs whose ranks compute on the host alone.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    num_ranks = int(ranks) if ranks.isdigit() and int(ranks) > 0 else 1
    cores = _cores()
    # The launcher may have divided its cores already (torchrun --numa-binding, numactl): not a second time.
    divided = max(cores, _cores(os.getppid())) // num_ranks
    return _or_torch(lambda: NativeBackend(max(1, min(cores, divided))))


def _or_torch(make: Callable[[], Backend]) -> Backend:
    """Return what ``make`` returns; torch, with a warning, if that does not work here."""
    try:
        return make()
    except UsageError as error:
        _warn_once(f"{error}\nUsing the torch backend")
        return TorchBackend()


def _cores(process: int = 0) -> int:
    """Return how many cores a process may run on. 0: this one; where another's are not told, none."""
    try:
        return len(os.sched_getaffinity(process))
    except OSError:
        return 0


def why_not(name: str, device: torch.device) -> str | None:
    """Return why the backend called ``name`` cannot run on ``device``; None where it can: it has decided a step there.

    Raises ArgumentError for an unknown name.
    """
    maker = _MAKERS[validate.one_of("backend", name, tuple(_MAKERS))]
    try:
        maker(device).decide(torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=device), None, 0.0)
    except UsageError as error:
        return str(error)
    return None


@functools.cache
def _warn_once(message: str) -> None:
    call_site.warn(message)


def _triton(device: torch.device | None) -> Backend:
    from megascale.kernels.triton.backend import TritonBackend, require_launch

    backend = TritonBackend()
    if device is not None and has_streams(device):
        require_launch(device)
    return backend


_MAKERS: dict[str, Callable[[torch.device | None], Backend]] = {
    "reference": lambda _: ReferenceBackend(),
    "torch": lambda _: TorchBackend(),
    "native": lambda _: NativeBackend(),
    "triton": _triton,
    # A leaf: the core imports none.
    "apex": lambda _: import_module("megascale.kernels.apex_backend").ApexBackend(),
}
