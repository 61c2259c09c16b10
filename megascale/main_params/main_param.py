"""MainParam: the fp32 copy of a 16-bit model param. An fp32 or fp64 model param is its own, never copied."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megascale.errors import ArgumentTypeError, UsageError
from megascale.kernels import memory_fault, shares_elements
from megascale.main_params.write_tracker import WriteTracker
from megascale.utils.dtensors import is_dtensor, local

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
        part = local(model)
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
        tracker, slot: the tracker, and the model param's index in it; None until it is admitted.
        form: of the model param; must not change.
    """

    name: str
    model: nn.Parameter
    main: Tensor
    shard: Tensor | None
    is_copy: bool
    is_owned: bool = True
    start: int = 0
    tracker: WriteTracker | None = None
    slot: int = 0
    form: ParamForm = field(init=False)

    def __post_init__(self) -> None:
        self.form = ParamForm.of(self.model)

    def check(self) -> None:
        """Raise UsageError, naming the parameter, if the form of its model param has changed."""
        model = self.model
        fault = memory_fault(model._local_tensor if is_dtensor(model) else model)
        if fault is not None:
            raise UsageError(
                f"parameter {self.name!r} {fault}; restore its data before the step, or build the optimizer anew"
            )
        now = ParamForm.of(model)
        if now != self.form:
            raise UsageError(
                f"parameter {self.name!r} became {now} after the optimizer was built for {self.form}; resize, move or "
                "cast the model first"
            )
        _check_elements(self.name, model)

    @property
    def part(self) -> Tensor:
        """The local part of the model param that rounds this rank's main param."""
        return local(self.model) if self.shard is None else self.shard

    def record_version(self) -> None:
        """Record that the present model param is the rounding of the main param."""
        if self.tracker is not None:
            self.tracker.take(self.slot)

    def sync_from_model(self) -> None:
        """Take over a model param that others wrote. Elements that still are the main param's rounding stay."""
        if not self.is_copy:
            self.record_version()
            return
        part, main = self.part, local(self.main)
        same = main.to(part.dtype).view(torch.int16) == part.view(torch.int16)
        main.copy_(torch.where(same, main, part.to(main.dtype)))
        self.record_version()

    def reload(self) -> None:
        """Set the main param to the model param's value exactly."""
        local(self.main).copy_(self.part)
        self.record_version()


def check_trainable(name: str, model: Tensor) -> None:
    """Raise ArgumentTypeError, naming it, for a parameter of a dtype or layout that no step can update; UsageError for
    one whose elements share memory, or that was created in inference mode.
    """
    if model.is_inference():
        raise UsageError(
            f"parameter {name!r} is an inference tensor, which torch lets nobody update; create it outside "
            "torch.inference_mode()"
        )
    if model.dtype not in MODEL_DTYPES:
        raise ArgumentTypeError(
            f"parameter {name!r} has dtype {model.dtype}; train fp16, bf16, fp32 or fp64 parameters"
        )
    if model.layout != torch.strided:
        raise ArgumentTypeError(f"parameter {name!r} has layout {model.layout}; make it dense")
    _check_elements(name, model)


def _check_elements(name: str, model: Tensor) -> None:
    if shares_elements(local(model)):
        raise UsageError(
            f"several elements of parameter {name!r}, {ParamForm.of(model)} with strides {local(model).stride()}, "
            "share memory, which an update would write several times; give it a clone() of its data"
        )
