"""Kernels: the passes over memory, behind one Protocol and one selection function."""

from megascale.kernels.native_backend import NativeBackend
from megascale.kernels.operands import AdamHyper, Backend, Decision, LionHyper, Operands, SgdHyper, TensorStats
from megascale.kernels.reference import ReferenceBackend, stats_dtype
from megascale.kernels.selection import select_backend
from megascale.kernels.tensor_list import GradList, ParamList, TensorList
from megascale.kernels.tensor_reader import hold_objects, read_versions, same_objects, same_values
from megascale.kernels.torch_backend import TorchBackend

__all__ = [
    "AdamHyper",
    "Backend",
    "Decision",
    "GradList",
    "LionHyper",
    "NativeBackend",
    "Operands",
    "ParamList",
    "ReferenceBackend",
    "SgdHyper",
    "TensorList",
    "TensorStats",
    "TorchBackend",
    "hold_objects",
    "read_versions",
    "same_objects",
    "same_values",
    "select_backend",
    "stats_dtype",
]
