"""Kernels: the passes over memory, behind one class and one selection function."""

from megascale.kernels.decision import (
    CLIP_EPSILON,
    LARGEST_SUM_SQUARES,
    NUM_STATISTICS,
    REPLICA_TOLERANCE,
    WITH_GRADS,
    Decision,
    GradWeights,
    ScaleRule,
    Statistic,
    TensorStats,
    TorchDecisions,
    clip_coefficient,
    inverse,
)
from megascale.kernels.native.backend import NativeBackend
from megascale.kernels.protocol import Operands
from megascale.kernels.reference import Backend, ReferenceBackend
from megascale.kernels.selection import host_backend, select_backend, why_not
from megascale.kernels.tensors.faults import memory_fault, sharing, tensor_fault
from megascale.kernels.tensors.forms import LOOKS, Forms
from megascale.kernels.tensors.list_reader import UNREADABLE, ListReader
from megascale.kernels.tensors.tensor_list import TensorList
from megascale.kernels.torch_backend import TorchBackend
from megascale.rules import AdamHyper, LionHyper, SgdHyper

__all__ = [
    "CLIP_EPSILON",
    "LARGEST_SUM_SQUARES",
    "LOOKS",
    "NUM_STATISTICS",
    "REPLICA_TOLERANCE",
    "UNREADABLE",
    "WITH_GRADS",
    "AdamHyper",
    "Backend",
    "Decision",
    "Forms",
    "GradWeights",
    "LionHyper",
    "ListReader",
    "NativeBackend",
    "Operands",
    "ReferenceBackend",
    "ScaleRule",
    "SgdHyper",
    "Statistic",
    "TensorList",
    "TensorStats",
    "TorchBackend",
    "TorchDecisions",
    "clip_coefficient",
    "host_backend",
    "inverse",
    "memory_fault",
    "select_backend",
    "sharing",
    "tensor_fault",
    "why_not",
]
