"""Kernels: the passes over memory, behind one Protocol and one selection function."""

import os

from megascale import validate
from megascale.config import BACKENDS
from megascale.kernels.operands import AdamHyper, Backend, Decision, Operands, SgdHyper, TensorStats
from megascale.kernels.reference import ReferenceBackend, stats_dtype
from megascale.kernels.torch_backend import TorchBackend

__all__ = [
    "AdamHyper",
    "Backend",
    "Decision",
    "Operands",
    "ReferenceBackend",
    "SgdHyper",
    "TensorStats",
    "TorchBackend",
    "select_backend",
    "stats_dtype",
]

ENVIRONMENT_VARIABLE = "MEGASCALE_BACKEND"


def select_backend(name: str = "auto") -> Backend:
    """Return the backend called ``name``; "auto" asks the environment variable MEGASCALE_BACKEND, then takes torch.

    Raises ArgumentError for an unknown name, from either source.
    """
    validate.one_of("backend", name, BACKENDS)
    if name == "auto":
        name = validate.one_of(ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE, "torch"), BACKENDS)
    return ReferenceBackend() if name == "reference" else TorchBackend()
