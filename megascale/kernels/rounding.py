"""From main params to model params and back: rounding, and main params held as remainders, decoded and encoded.

:mod:`megascale.kernels.remainders` has the format.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from megascale.kernels.blocks import RoundingWatch
from megascale.kernels.decision import Decision
from megascale.kernels.protocol import FP16_OVERFLOW, Operands, flags_at, runs_of
from megascale.kernels.remainders import decode, encode

DECODED_NUMEL = 1 << 20
"""Elements that are decoded at a time. A larger parameter is decoded alone, in slices along its first dimension."""


class TorchRounding:
    """Main params rounded into model params, and held as remainders, in plain tensor code. Base of all backends.

    Small parameters are decoded and encoded together, so that the number of kernels does not grow with them.
    """

    def write_back_(self, operands: Operands) -> Tensor:
        """Round main params (at least one) into their model params, also those without a gradient. Return the flags."""
        mains, models = operands.main, operands.model
        copies = [(main, model) for main, model in zip(mains, models, strict=True) if model is not main]
        if copies:
            torch._foreach_copy_([model for _, model in copies], [main for main, _ in copies])
        watch = RoundingWatch(len(mains))
        watch.observe(range(len(mains)), mains, models)
        return watch.flags(mains[0].device)

    def decode_(self, operands: Operands) -> None:
        """Write the main params, fp32, of ``operands`` that have remainders, at least one."""
        for _, (mains, models, remainders) in _slices(operands):
            decoded = decode(_joined(models), _joined(remainders))
            torch._foreach_copy_(mains, _parts(decoded, mains))

    def encode_(self, operands: Operands, found_inf: Tensor) -> Tensor:
        """Write model params and remainders for the main params of ``operands``, unless ``found_inf`` is set.

        A finite element that would round to inf in fp16 keeps its model param and remainder. Returns a bool tensor of
        shape [parameters]: whether the main param's rounding into fp16 is not finite.
        """
        skipped = (found_inf != 0).reshape(())
        watch = RoundingWatch(len(operands.model))
        for indices, (mains, models, remainders) in _slices(operands):
            watch.observe(indices, mains, models)
            main, model, remainder = map(_joined, (mains, models, remainders))
            rounded, left = encode(main, model.dtype)
            keeps = skipped
            if model.dtype == torch.float16:
                keeps = skipped | ((main.abs() >= FP16_OVERFLOW) & main.isfinite())
            torch._foreach_copy_(models, _parts(torch.where(keeps, model, rounded), models))
            torch._foreach_copy_(remainders, _parts(torch.where(keeps, remainder, left), remainders))
        return watch.flags(skipped.device) & ~skipped


Update = Callable[[Any, Operands, Any, Decision], Tensor]


def of_trained(update: Update) -> Update:
    """Decorate a backend's update of main params: it gets those that have a gradient, at least one.

    Those that are held as remainders are decoded for it, some at a time, and are their own model params then. Without
    a gradient they are not decoded: encoding could give them another remainder.
    """

    @wraps(update)
    def updating(backend: Any, operands: Operands, hyper: Any, decision: Decision) -> Tensor:
        there = [index for index, grad in enumerate(operands.grad) if grad is not None]
        if not there:
            return torch.zeros(len(operands.model), dtype=torch.bool, device=operands.model[0].device)
        trained = operands if len(there) == len(operands.model) else operands.pick(there)

        def flags_of(places: Sequence[int]) -> Any:  # when it returns, its main params' memory is free for the next
            part = trained.pick(places)
            part.main = [torch.empty_like(model, dtype=torch.float32) for model in part.model]
            backend.decode_(part)
            update(backend, replace(part, model=part.main, remainder=[]), hyper, decision)
            return backend.encode_(part, decision.found_inf)

        if operands.remainder:
            flags = torch.cat(list(map(flags_of, runs_of(trained.model, DECODED_NUMEL))))
        else:
            flags = update(backend, trained, hyper, decision)
        return flags_at(there, flags, len(operands.model))

    return updating


def _slices(operands: Operands) -> Iterator[tuple[list[int], Sequence[list[Tensor]]]]:
    """Yield the indices of some parameters, with their main params, their model params and their remainders.

    A large parameter comes in slices along its first dimension, which are views whatever its strides: tensor code takes
    up to 39 bytes for each element that it has at once, and fewer of them stay in cache.
    """
    for indices in runs_of(operands.model, DECODED_NUMEL):
        columns = [[column[at] for at in indices] for column in (operands.main, operands.model, operands.remainder)]
        first = columns[0][0]
        if first.numel() <= DECODED_NUMEL:
            yield indices, columns
            continue
        length = max(1, DECODED_NUMEL // first[0].numel())
        for pieces in zip(*(tensor.split(length) for [tensor] in columns), strict=True):
            yield indices, [[piece] for piece in pieces]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements, in row-major order: a view of a single contiguous tensor."""
    return torch.cat([one.reshape(-1) for one in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)


def _parts(flat: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of joined elements in the shapes of ``likes``."""
    parts = flat.split([like.numel() for like in likes])
    return [part.view(like.shape) for part, like in zip(parts, likes, strict=True)]
