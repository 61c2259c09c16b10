"""Sizes of a model's tensors, from a module, from shapes, or from a number of parameters. Nothing is allocated."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from megascale.builder import is_hidden_matrix
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.utils import validate

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
AS_IS = "as_is"
"""A precision: the dtypes that the module has."""
FEWEST_TENSORS = 200
LARGEST_TENSOR = 1 << 28
"""Elements. A number of parameters is split into at least so many tensors, none larger: a matrix of 16,384 squared."""

Shapes = Mapping[str, Sequence[int]] | Sequence[Sequence[int]]


class ParamSpec(NamedTuple):
    """A trainable parameter: name, shape, dtype, and whether it is a hidden matrix, which Muon would update."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_hidden: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class ModelSizes:
    """What an estimate knows of a model.

    Attributes:
        params: the trainable parameters, in the order of the forward pass.
        frozen: bytes of each parameter that is not trained.
        buffers: bytes of each buffer that ``state_dict()`` holds.
        other_buffers: bytes of each buffer that it does not hold.
    """

    params: tuple[ParamSpec, ...]
    frozen: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()
    other_buffers: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Trainable parameters, in elements."""
        return sum(param.numel for param in self.params)


def sizes_of(model: nn.Module | Shapes | int, precision: str) -> ModelSizes:
    """Return the sizes of ``model`` with floating point tensors in ``precision``.

    Args:
        model: a module, best on the meta device; shapes, by name or in order; or a number of parameters, which is split
            into equal tensors.
        precision: "fp16", "bf16" or "fp32"; for a module also "as_is".

    Raises:
        ArgumentError, ArgumentTypeError: naming what is wrong.
    """
    validate.one_of("precision", precision, (*PRECISIONS, AS_IS))
    if isinstance(model, nn.Module):
        return _sizes_of_module(model, PRECISIONS.get(precision))
    if precision == AS_IS:
        raise ArgumentError(f"precision={AS_IS!r} needs a module, which has dtypes; choose {', '.join(PRECISIONS)}")
    if isinstance(model, int):
        shapes = _split(validate.integer("number of parameters", model, minimum=1))
    elif isinstance(model, (Mapping, Sequence)) and not isinstance(model, (str, bytes)):
        named = model.items() if isinstance(model, Mapping) else enumerate(model)
        shapes = ((str(name), _checked(name, shape)) for name, shape in named)
    else:
        raise ArgumentTypeError(
            f"model must be a torch.nn.Module, shapes, or a number of parameters, got {type(model).__name__}"
        )
    dtype = PRECISIONS[precision]
    params = tuple(ParamSpec(name, shape, dtype, is_hidden_matrix(name, shape)) for name, shape in shapes)
    return ModelSizes(_not_empty(params))


def _sizes_of_module(module: nn.Module, dtype: torch.dtype | None) -> ModelSizes:
    def nbytes(tensor: torch.Tensor) -> int:
        kept = tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype
        return tensor.numel() * kept.itemsize

    params = list(module.named_parameters())
    kinds = {name: type(module.get_submodule(name.rpartition(".")[0])).__name__ for name, _ in params}
    trained = tuple(
        ParamSpec(name, tuple(p.shape), dtype or p.dtype, is_hidden_matrix(name, p.shape, kinds[name]))
        for name, p in params
        if p.requires_grad
    )
    frozen = tuple(nbytes(param) for _, param in params if not param.requires_grad)
    saved = module.state_dict().keys()
    buffers: dict[bool, list[int]] = {True: [], False: []}
    for name, buffer in module.named_buffers():
        buffers[name in saved].append(nbytes(buffer))
    return ModelSizes(_not_empty(trained), frozen, tuple(buffers[True]), tuple(buffers[False]))


def _split(numel: int) -> Iterable[tuple[str, tuple[int, ...]]]:
    tensors = min(numel, max(FEWEST_TENSORS, -(-numel // LARGEST_TENSOR)))
    small, more = divmod(numel, tensors)
    return ((str(index), (small + (index < more),)) for index in range(tensors))


def _checked(name: Any, shape: Any) -> tuple[int, ...]:
    valid = isinstance(shape, Sequence) and not isinstance(shape, (str, bytes))
    if not valid or any(isinstance(side, bool) or not isinstance(side, int) or side < 0 for side in shape):
        raise ArgumentError(f"shape of {name!r} must be a list of integers, 0 or more, got {shape!r}")
    return tuple(shape)


def _not_empty(params: tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
    if not params:
        raise ArgumentError("model has no parameter that is trained; an estimate needs at least one")
    return params
