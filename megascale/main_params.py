"""Main params: the fp32 master of each 16-bit model param, replicated on every data-parallel rank.

A model param in fp32 or fp64 is its own main param and is never copied. Every main param has the shape, strides and
(for DTensors) placements of its model param.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megascale.errors import ArgumentError, ArgumentTypeError, UsageError

MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALF_DTYPES = (torch.float16, torch.bfloat16)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, any other tensor itself. Call it without grad mode: the part aliases."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(eq=False, slots=True)
class MainParam:
    """A model param, its main param, and what tells whether someone else wrote the model param since the last step."""

    name: str
    model: nn.Parameter
    main: Tensor
    _seen: tuple[int, int]

    @property
    def is_copy(self) -> bool:
        """Whether the main param is a tensor of its own."""
        return self.main is not self.model

    @property
    def changed_outside(self) -> bool:
        """Whether the model param was written, or got other storage, since the last :meth:`seal`."""
        return self.is_copy and _fingerprint(self.model) != self._seen

    def seal(self) -> None:
        """Take the model param as it is now for the rounding of the main param."""
        self._seen = _fingerprint(self.model)

    def follow(self) -> None:
        """Take over a model param written outside. Where it still is the main param's rounding, all bits stay."""
        model, main = local(self.model), local(self.main)
        if model.device != main.device or model.shape != main.shape or model.dtype not in HALF_DTYPES:
            raise UsageError(
                f"parameter {self.name!r} became {tuple(model.shape)} {model.dtype} on {model.device} after the "
                f"optimizer was built, its main param is {tuple(main.shape)} on {main.device}; move or cast the "
                "model first"
            )
        same = main.to(model.dtype).view(torch.int16) == model.view(torch.int16)
        main.copy_(torch.where(same, main, model.to(main.dtype)))
        self.seal()

    def reload(self) -> None:
        """Set the main param to the model param's value exactly."""
        local(self.main).copy_(local(self.model))
        self.seal()


class ReplicatedMainParams:
    """The main params of all trainable parameters of ``param_groups``, in their order.

    A parameter gets its main param when it is first seen with ``requires_grad``: at construction, or at the first step
    after it was unfrozen or added. It keeps it when it is frozen again.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._explicit_names = dict(names)
        self._by_id: dict[int, MainParam] = {}
        self.ordered: list[list[MainParam]] = []

    @torch.no_grad()
    def follow(self, param_groups: Sequence[dict[str, Any]]) -> list[MainParam]:
        """Catch up with ``param_groups`` and with outside writes to model params. Returns the main params it made.

        Raises ArgumentError or ArgumentTypeError for a parameter that cannot be trained, before anything has changed.
        """
        unseen = [p for p in self._trainable(param_groups) if id(p) not in self._by_id]
        names = self.names(param_groups) if unseen else {}
        made = {id(p): _make(names[id(p)], p) for p in unseen}
        self._by_id.update(made)
        self.ordered = [[self._by_id[id(p)] for p in group["params"] if id(p) in self._by_id] for group in param_groups]
        for param in self:
            if param.changed_outside:
                param.follow()
        return list(made.values())

    def names(self, param_groups: Sequence[dict[str, Any]]) -> dict[int, str]:
        """Return the name of every parameter by id: as given, else its group's ``param_names``, else its position.

        Raises ArgumentError if two parameters share a name.
        """
        names: dict[int, str] = {}
        position = 0
        for group in param_groups:
            given = group.get("param_names") or [None] * len(group["params"])
            for param, name in zip(group["params"], given, strict=True):
                names[id(param)] = self._explicit_names.get(id(param)) or name or str(position)
                position += 1
        seen: set[str] = set()
        for name in names.values():
            if name in seen:
                raise ArgumentError(
                    f"two parameters are called {name!r}; give each a name of its own in named_parameters"
                )
            seen.add(name)
        return names

    def adopt(self, param: nn.Parameter, name: str) -> MainParam:
        """Return the main param of ``param``, made now if it has none (a frozen parameter whose state is loaded)."""
        if id(param) not in self._by_id:
            self._by_id[id(param)] = _make(name, param)
        return self._by_id[id(param)]

    def __iter__(self) -> Iterator[MainParam]:
        return (param for group in self.ordered for param in group)

    def get(self, param: Tensor) -> MainParam | None:
        """Return the main param of a model param, or None."""
        return self._by_id.get(id(param))

    @staticmethod
    def _trainable(param_groups: Iterable[dict[str, Any]]) -> Iterator[nn.Parameter]:
        return (param for group in param_groups for param in group["params"] if param.requires_grad)


def _make(name: str, model: nn.Parameter) -> MainParam:
    if model.dtype not in MODEL_DTYPES:
        raise ArgumentTypeError(
            f"parameter {name!r} has dtype {model.dtype}; train fp16, bf16, fp32 or fp64 parameters"
        )
    if model.layout != torch.strided:
        raise ArgumentTypeError(f"parameter {name!r} has layout {model.layout}; make it dense")
    main: Tensor = model
    if model.dtype in HALF_DTYPES:
        main = model.detach().to(torch.float32, memory_format=torch.preserve_format)
    return MainParam(name, model, main, _fingerprint(model))


def _fingerprint(model: Tensor) -> tuple[int, int]:
    """Return what changes when torch writes the tensor in place, or it gets other storage. Reads no element."""
    part = model._local_tensor if isinstance(model, DTensor) else model
    return part._version, part.data_ptr()
