"""MainParam: the fp32 copy of a 16-bit model param. An fp32 or fp64 model param is its own, never copied.

A copy may be held as a remainder: an int16 beside the model param, see :mod:`megascale.kernels.remainders`. Its fp32
tensor then has memory only while it is decoded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.grad_sync.layout import Piece
from megascale.kernels import memory_fault, sharing, tensor_fault
from megascale.kernels.remainders import REMAINDER_DTYPE, decode, encode
from megascale.main_params.host_buffers import HostBuffers
from megascale.main_params.segments import Form, in_segments
from megascale.main_params.write_tracker import WriteTracker
from megascale.utils.dtensors import dtensor_like, held, to_local
from megascale.utils.dtypes import HALF_DTYPES

MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ParamForm(NamedTuple):
    """What must not change of a model param once its main param is made. Its address may."""

    shape: torch.Size
    local_shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: Tensor) -> "ParamForm":
        """Return the form of a model param."""
        part = to_local(model)
        return cls(model.shape, part.shape, part.dtype, part.device)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} on {self.device}"


@dataclass(eq=False, slots=True)
class MainParam:
    """A model param, its main param, and the tracker that detects writes to the model param by others.

    Attributes:
        name: of the model param.
        model: the whole model param, key of the optimizer's state.
        main: replicated: shape, strides and placements of ``model``. Sharded by elements: 1-D, the part that this rank
            owns. Sharded by parameters: the owner's has the shape of ``model``, others' are 1-D and empty.
        shard: sharded: the same part of ``model``, a live view; None if replicated.
        is_copy: whether the main param has memory of its own.
        is_owned: False where sharded by parameters and another rank owns it.
        start: where the main param begins in the flattened parameter, in elements.
        remainder: int16, in the form of ``main``, which then has memory between :meth:`decode` and :meth:`release`
            only; None: ``main`` holds the values.
        tracker, slot: the tracker, and the model param's index in it; None until it is admitted.
        on_host: what the model param has in host memory, where main param and state live there; else None.
        narrow_state: names of the wrapped optimizer's state that has the model param's 16-bit dtype on purpose; None
            until that state is first looked at.
        form: of the model param; must not change.
    """

    name: str
    model: nn.Parameter
    main: Tensor = field(repr=False)  # torch reads memory that is not there, to print it
    shard: Tensor | None
    is_copy: bool
    is_owned: bool = True
    start: int = 0
    remainder: Tensor | None = None
    tracker: WriteTracker | None = None
    slot: int = 0
    on_host: HostBuffers | None = None
    narrow_state: frozenset[str] | None = None
    form: ParamForm = field(init=False)

    def __post_init__(self) -> None:
        self.form = ParamForm.of(self.model)
        if self.remainder is not None:
            self.release()
            self._take_weights()

    @property
    def memory(self) -> Tensor:
        """What this rank holds of the main param between steps: fp32, or the remainder."""
        return self.main if self.remainder is None else self.remainder

    def value(self) -> Tensor:
        """Return the main param; a new tensor where it is held as a remainder."""
        if self.remainder is None:
            return self.main
        rounded = self.rounded
        return dtensor_like(decode(rounded, to_local(self.remainder).to(rounded.device)), self.main)

    def store(self, value: Tensor) -> None:
        """Set the local main param to ``value``, and the model param to its rounding."""
        if self.remainder is not None:
            rounded, remainder = encode(value.to(torch.float32), self.part.dtype)
            self.part.copy_(rounded)
            to_local(self.remainder).copy_(remainder)
            self._take_weights()
        else:
            to_local(self.main).copy_(value)
            if self.is_copy:
                self.part.copy_(to_local(self.main))

    def decode(self) -> None:
        """Give ``main`` memory and its values, until :meth:`release`."""
        if self.remainder is not None:
            main = to_local(self.main)
            main.untyped_storage().resize_(main.numel() * main.element_size())
            main.copy_(decode(self.rounded, to_local(self.remainder)))

    def release(self) -> None:
        """Free the memory of ``main`` where a remainder stands for it."""
        if self.remainder is not None:
            to_local(self.main).untyped_storage().resize_(0)

    def move(self) -> None:
        """Move the main param to the device of its model param. Raises UsageError for one that lives in host memory."""
        if self.on_host is not None:
            raise UsageError(
                f"parameter {self.name!r} was moved after its optimizer was built with optimizer_cpu_offload=True; "
                "move the model first"
            )
        if self.remainder is None:
            self.main = self.main.to(self.model.device)
        else:
            self.remainder = self.remainder.to(self.model.device)
            self.main = torch.empty_like(self.remainder, dtype=torch.float32)
            self.release()

    def check(self) -> None:
        """Raise UsageError, naming the parameter, if the form of its model param has changed."""
        fault = tensor_fault(held(self.model).data)
        if fault is not None:
            raise UsageError(
                f"parameter {self.name!r} {fault}; restore its data before the step, or build the optimizer anew"
            )
        now = ParamForm.of(self.model)
        if now != self.form:
            raise UsageError(
                f"parameter {self.name!r} became {now} after the optimizer was built for {self.form}; resize, move or "
                "cast the model first"
            )

    @property
    def part(self) -> Tensor:
        """The local part of the model param that rounds this rank's main param."""
        return to_local(self.model) if self.shard is None else self.shard

    @property
    def rounded(self) -> Tensor:
        """Where an update writes the main param's rounding: :attr:`part`, or in host memory."""
        return self.part if self.on_host is None else self.on_host.weights

    def record_version(self) -> None:
        """Record that the present model param is the rounding of the main param."""
        if self.tracker is not None:
            self.tracker.take(self.slot)

    def sync_from_model(self) -> None:
        """Take over a model param that others wrote. Elements that still are the main param's rounding stay.

        Held as a remainder all take the model param's values. All stay if it has only moved, as an offload does: with
        any weights a remainder makes a main param that rounds to them.
        """
        if self.remainder is not None:
            if self.tracker is not None and self.tracker.has_new_version(self.slot):
                to_local(self.remainder).zero_()
            self._take_weights()
        elif self.is_copy:
            main = to_local(self.main)
            part = self.part.to(main.device)
            same = main.to(part.dtype).view(torch.int16) == part.view(torch.int16)
            main.copy_(torch.where(same, main, part.to(main.dtype)))
        self.record_version()

    def reload(self) -> None:
        """Set the main param to the model param's value exactly."""
        if self.remainder is not None:
            to_local(self.remainder).zero_()
            self._take_weights()
        else:
            to_local(self.main).copy_(self.part)
        self.record_version()

    def _take_weights(self) -> None:
        """Copy the model param to its weights in host memory, beside which the remainder counts."""
        if self.on_host is not None:
            self.on_host.weights.copy_(self.part)


def main_memory(
    parts: Mapping[str, Tensor], on_host: Mapping[str, HostBuffers], *, as_remainders: bool
) -> dict[str, Tensor]:
    """Return, by name, zeros for the main params of those parts of model params that have a copy; local tensors.

    Args:
        on_host: of those whose copies are in host memory.
        as_remainders: zeros are int16, in place of fp32.
    """
    likes = {
        name: on_host[name].weights if name in on_host else held(part)
        for name, part in parts.items()
        if part.dtype in HALF_DTYPES
    }
    dtype = REMAINDER_DTYPE if as_remainders else torch.float32
    return dict(zip(likes, in_segments([Form.like(like, dtype) for like in likes.values()]), strict=True))


def main_param_of(
    name: str,
    model: nn.Parameter,
    shard: Tensor | None,
    memory: Tensor | None,
    *,
    piece: Piece | None = None,
    on_host: HostBuffers | None = None,
) -> MainParam:
    """Return a main param with the model's values.

    Args:
        shard: of ``model``, which the main param is to be like; None: all of it.
        memory: zeros, of fp32 or of a remainder, see :func:`main_memory`. None: the main param is no copy.
        piece: what ``shard`` is of ``model``.
        on_host: what the model param has in host memory, where ``memory`` is there.
    """
    main: Tensor = model if shard is None else shard
    remainder = None
    if memory is not None and memory.dtype == REMAINDER_DTYPE:
        remainder = dtensor_like(memory, main)
        main = torch.empty_like(
            main, dtype=torch.float32, device=memory.device, requires_grad=False, memory_format=torch.preserve_format
        )
    elif memory is not None:
        memory.copy_(to_local(main))
        main = dtensor_like(memory, main)
    is_owned, start = (True, 0) if piece is None else (piece.is_owned, piece.param_start)
    return MainParam(name, model, main, shard, memory is not None, is_owned, start, remainder, on_host=on_host)


def check_trainable(name: str, model: Tensor) -> None:
    """Raise ArgumentTypeError, naming it, for a parameter of a dtype or layout that no step can update, and
    ArgumentError for one that no kernel can read or write.
    """
    if model.dtype not in MODEL_DTYPES:
        raise ArgumentTypeError(
            f"parameter {name!r} has dtype {model.dtype}; train fp16, bf16, fp32 or fp64 parameters"
        )
    if model.layout != torch.strided:
        raise ArgumentTypeError(f"parameter {name!r} has layout {model.layout}; make it dense")
    local = held(model)
    # Memory may be missing yet, as on the meta device. Data tells what the Parameter around it does not.
    fault = None if memory_fault(local) else tensor_fault(local) or tensor_fault(local.data)
    if fault is not None:
        raise ArgumentError(f"parameter {name!r} {fault}")


def check_apart(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise UsageError, naming them, for two parameters that share elements, as after ``b.data = a.data``.

    Each has a main param and moments of its own, and the update of one would undo that of the other. Looks at the
    address of every parameter.
    """
    parts = [(name, to_local(param)) for name, param in named]
    here = [(name, part) for name, part in parts if memory_fault(part) is None]
    pair = sharing([part for _, part in here])
    if pair:
        first, second = (here[index][0] for index in pair)
        raise UsageError(
            f"parameters {first!r} and {second!r} share memory, which two updates would write; use one Parameter in "
            "both places of the model, or give one of them a clone() of its data"
        )
