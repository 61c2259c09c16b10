"""Main params: the fp32 masters of 16-bit model params.

A model param in fp32 or fp64 is its own main param and is never copied. What is kept, and where, is a strategy:
replicated (here), or sharded over data-parallel ranks (:mod:`megascale.main_params.sharded`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.kernels import GradList, ParamList, TensorList, memory_fault, plain, same_objects, shares_elements
from megascale.main_params.slab import Arena
from megascale.main_params.write_tracker import Watch, Watched
from megascale.utils.collectives import full_tensor
from megascale.utils.dtensors import distribute_like, is_dtensor, local

MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALF_DTYPES = (torch.float16, torch.bfloat16)

# Called for every parameter without a main param at every step, in a loop that runs in C.
_REQUIRES_GRAD = attrgetter("requires_grad")


class ParamForm(NamedTuple):
    """What of a model param stays as it was when its main param was made. Its memory may lie elsewhere."""

    shape: torch.Size
    local_shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: Tensor) -> "ParamForm":
        """Return that of a model param."""
        part = local(model)
        return cls(model.shape, part.shape, part.dtype, part.device)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} on {self.device}"


@dataclass(eq=False, slots=True)
class MainParam:
    """A model param, its main param, and who tells whether someone else wrote the model param since the last step.

    Attributes:
        name: of the model param.
        model: the whole model param, key of the optimizer's state.
        main: replicated: shape, strides and placements of ``model``. Sharded: 1-D, the part that this rank owns.
        shard: sharded: the same part of ``model``, a live view; None where this rank owns the whole.
        is_copy: whether the main param has memory of its own.
        watch, place: where the model param is watched, since the last :meth:`seal`; None until it is admitted.
        form: of the model param, as long as this is its main param.
    """

    name: str
    model: nn.Parameter
    main: Tensor
    shard: Tensor | None
    is_copy: bool
    watch: Watch | None = None
    place: int = 0
    form: ParamForm = field(init=False)

    def __post_init__(self) -> None:
        self.form = ParamForm.of(self.model)

    def check(self) -> None:
        """Raise UsageError, naming the parameter, if its model param is no longer what the main param was made for."""
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
        if shares_elements(local(model)):
            raise UsageError(
                f"several elements of parameter {self.name!r}, {now} with strides {local(model).stride()}, share "
                "memory, which an update would write several times; give it a clone() of its data"
            )

    @property
    def part(self) -> Tensor:
        """The local part of the model param that rounds this rank's main param."""
        return local(self.model) if self.shard is None else self.shard

    def seal(self) -> None:
        """Take the model param as it is now for the rounding of the main param."""
        if self.watch is not None:
            self.watch.take(self.place)

    def follow(self) -> None:
        """Take over a model param written outside. Where it still is the main param's rounding, all bits stay."""
        if not self.is_copy:
            self.seal()
            return
        part, main = self.part, local(self.main)
        same = main.to(part.dtype).view(torch.int16) == part.view(torch.int16)
        main.copy_(torch.where(same, main, part.to(main.dtype)))
        self.seal()

    def reload(self) -> None:
        """Set the main param to the model param's value exactly."""
        local(self.main).copy_(self.part)
        self.seal()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Batch:
    """Main params that are updated in one go. The same object from step to step, as long as it holds the same params
    in the same memory: what is worked out for a batch may be kept for it.

    Attributes:
        group: the index of their param group.
        params: in the order of the update.
        models: their model params.
    """

    group: int
    params: list[MainParam]
    models: Watched = field(init=False)
    _places: slice | NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.models = Watched(param.model for param in self.params)
        places = np.array([param.place for param in self.params], dtype=np.int64)
        in_a_row = len(places) > 0 and np.array_equal(places, np.arange(places[0], places[0] + len(places)))
        self._places = slice(places[0], places[-1] + 1) if in_a_row else places

    def grads(self, look: TensorList | None) -> GradList:
        """Return ``param.grad`` of all model params.

        ``look``: what :meth:`MainParams.follow` has just seen; None: look again.
        """
        params = self.models.params
        if look is None:
            return ParamList(params).grads(params, slice(None))
        return look.grads(params, self._places) if isinstance(look, ParamList) else GradList(params)

    def seal(self, versions: NDArray[np.int64] | None = None) -> None:
        """Take all model params, just written where they lie, for the roundings of their main params.

        ``versions``: theirs, where they are known.
        """
        watch = self.params[0].watch if self.params else None
        if watch is not None:
            watch.take_written(self._places, self.models.versions() if versions is None else versions)


class MainParams(ABC):
    """The main params of all trainable parameters of ``param_groups``, in their order.

    A parameter gets its main param when it is first seen with ``requires_grad``: at construction, or at the first step
    after it was unfrozen or added. It keeps it when it is frozen again.
    """

    is_sharded = False
    """Whether a rank keeps pieces only."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._explicit_names = dict(names)
        self._by_id: dict[int, MainParam] = {}
        self._known: list[list[nn.Parameter]] = []
        self._watch = Watch([])
        self._frozen: list[nn.Parameter] = []
        self._trained = np.empty(0, dtype=np.int64)
        self._batches: list[Batch] | None = None
        self.ordered: list[list[MainParam]] = []

    @torch.no_grad()
    def follow(self, param_groups: Sequence[dict[str, Any]]) -> tuple[list[MainParam], TensorList]:
        """Catch up with ``param_groups`` and with outside writes to model params.

        Returns the main params that it made, and what it has seen, for :meth:`Batch.grads`.

        Raises ArgumentError or ArgumentTypeError for a parameter that cannot be trained, UsageError for one that is no
        longer what its main param was made for, before anything has changed.
        """
        self.settle()
        made: list[MainParam] = []
        look = self._watch.look()
        if not self._has_seen(param_groups, look):
            made = self._admit(param_groups)
            look = self._watch.look()
        written = self._watch.written(look)
        if not written:
            return made, look
        params = list(self)
        for place in written:
            params[place].check()
        if self._watch.moved(look):
            self._make_plain([params[place] for place in written])
            self.restore()
            self._batches = None
            look = self._watch.look()
            written = self._watch.written(look)
        for place in written:
            params[place].follow()
        return made, look

    def _make_plain(self, params: Sequence[MainParam]) -> None:
        """Give parameters whose bytes are not their values, as after ``param.data = x.conj().imag``, bytes that are."""
        for param in params:
            if not is_dtensor(param.model):
                param.model.data = plain(param.model.data)

    def _has_seen(self, param_groups: Sequence[dict[str, Any]], look: TensorList) -> bool:
        """Whether the groups have the very parameters that they had, and the same of them are frozen."""
        groups = [group["params"] for group in param_groups]
        if len(groups) != len(self._known) or not all(map(same_objects, groups, self._known)):
            return False
        thawed = any(map(_REQUIRES_GRAD, self._frozen))
        return not thawed and np.array_equal(self._watch.requires_grad(look), self._trained)

    def _admit(self, param_groups: Sequence[dict[str, Any]]) -> list[MainParam]:
        """Make main params for parameters that have none, and order all of them."""
        names: dict[int, str] = {}
        unseen: dict[str, nn.Parameter] = {}
        group_of: dict[str, int] = {}
        for index, group in enumerate(param_groups):
            for param in group["params"]:
                if param.requires_grad and id(param) not in self._by_id:
                    names = names or self.names(param_groups)
                    name = names[id(param)]
                    check_trainable(name, param)
                    unseen[name] = param
                    group_of[name] = index
        if not self.is_sharded:
            # Others replace parameters, as Accelerate does under FSDP2: those that were must not stay in memory.
            here = {id(param) for group in param_groups for param in group["params"]}
            self._by_id = {key: param for key, param in self._by_id.items() if key in here}
        made = self.make(unseen, group_of) if unseen else []
        self._by_id.update({id(param.model): param for param in made})
        self.ordered = [[self._by_id[id(p)] for p in group["params"] if id(p) in self._by_id] for group in param_groups]
        self._watch_again(param_groups)
        self._batches = None
        return made

    def _watch_again(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Watch all main params' model params, each as it was remembered so far, and note what groups were seen."""
        self._known = [list(group["params"]) for group in param_groups]
        self._frozen = [param for group in self._known for param in group if id(param) not in self._by_id]
        self._watch = Watch(param.model for param in self)
        for place, param in enumerate(self):
            if param.watch is not None:
                self._watch.remember(place, param.watch, param.place)
            param.watch, param.place = self._watch, place
        self._trained = self._watch.requires_grad(self._watch.look())

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

    def __iter__(self) -> Iterator[MainParam]:
        return (param for group in self.ordered for param in group)

    def get(self, param: Tensor) -> MainParam | None:
        """Return the main param of a model param, or None."""
        return self._by_id.get(id(param))

    def keeps(self, param: nn.Parameter) -> bool:
        """Whether this optimizer can hold state of ``param``."""
        return True

    def grad(self, param: MainParam) -> Tensor | None:
        """Return this rank's piece of the reduced gradient, live; None where gradients are whole."""
        return None

    def batches(self) -> list[Batch]:
        """Return what is updated in one go, in order."""
        if self._batches is None:
            self._batches = self.make_batches()
        return self._batches

    def make_batches(self) -> list[Batch]:
        """Return the batches of :attr:`ordered`: here one for each param group."""
        return [Batch(group, params) for group, params in enumerate(self.ordered)]

    @abstractmethod
    def make(self, params: Mapping[str, nn.Parameter], group_of: Mapping[str, int]) -> list[MainParam]:
        """Return main params for ``params`` (by name; ``group_of``: their param groups), with the model's values."""

    @abstractmethod
    def adopt(self, param: nn.Parameter, name: str) -> MainParam | None:
        """Return the main param of ``param``; of a frozen one whose state is loaded, a new one. None: it has none."""

    @abstractmethod
    def restore(self) -> None:
        """Mend the storage of model params that others have replaced."""

    @abstractmethod
    def publish(self, batch: Batch, versions: NDArray[np.int64] | None = None) -> None:
        """Take note that the model params of one batch have been written.

        ``versions``: those of their local parts (:attr:`MainParam.part`) by now, where they are known.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until every model param is whole on every rank."""

    def end_step(self) -> None:
        """End a step with model params that are whole on every rank, or will be when a module needs them."""
        self.settle()

    def why_not_capturable(self) -> str | None:
        """Return why what follows the update cannot be part of a device's graph; None where it can."""
        return None

    @abstractmethod
    def place(self, param: nn.Parameter, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what this rank keeps of ``value``, a saved tensor of the parameter's shape, as ``dtype``."""

    @abstractmethod
    def cut(self, param: MainParam, value: Tensor) -> Tensor:
        """Return what this rank keeps of ``value``, a live tensor of the model param's shape."""

    @abstractmethod
    def export(self, param: MainParam, values: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
        """Return tensors of ``param`` as a state dict holds them: whole, or as ParamShards of the live ones.

        With ``copy`` all ranks call it together.
        """


class ReplicatedMainParams(MainParams):
    """Every rank keeps all main params."""

    def make(self, params: Mapping[str, nn.Parameter], group_of: Mapping[str, int]) -> list[MainParam]:
        """See :class:`MainParams`."""
        arena = Arena(params.values())
        return [_make(name, param, arena) for name, param in params.items()]

    def adopt(self, param: nn.Parameter, name: str) -> MainParam:
        """See :class:`MainParams`."""
        if id(param) not in self._by_id:
            made = self._by_id[id(param)] = _make(name, param, Arena(()))
            made.watch = Watch([param])
        return self._by_id[id(param)]

    def restore(self) -> None:
        """See :class:`MainParams`. Other storage counts as a write."""

    def publish(self, batch: Batch, versions: NDArray[np.int64] | None = None) -> None:
        """See :class:`MainParams`."""
        batch.seal(versions)

    def settle(self) -> None:
        """See :class:`MainParams`. They always are."""

    def place(self, param: nn.Parameter, value: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`MainParams`."""
        return place_like(value, param, dtype)

    def cut(self, param: MainParam, value: Tensor) -> Tensor:
        """See :class:`MainParams`."""
        return value

    def export(self, param: MainParam, values: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
        """See :class:`MainParams`."""
        return {key: value.detach().clone() if copy else value.detach() for key, value in values.items()}


def check_trainable(name: str, model: Tensor) -> None:
    """Raise ArgumentTypeError, naming it, for a parameter of a dtype or layout that no step can update."""
    if model.dtype not in MODEL_DTYPES:
        raise ArgumentTypeError(
            f"parameter {name!r} has dtype {model.dtype}; train fp16, bf16, fp32 or fp64 parameters"
        )
    if model.layout != torch.strided:
        raise ArgumentTypeError(f"parameter {name!r} has layout {model.layout}; make it dense")


def _make(name: str, model: nn.Parameter, arena: Arena) -> MainParam:
    if model.dtype not in HALF_DTYPES:
        return MainParam(name, model, model, None, is_copy=False)
    main = arena.zeros(model, torch.float32, "main").copy_(model.detach())
    return MainParam(name, model, main, None, is_copy=True)


def place_like(value: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a new tensor with the values of ``value`` and the device, strides and placements of ``like``."""
    with torch.no_grad():
        if is_dtensor(like) and not is_dtensor(value):
            value = distribute_like(value, like)
        elif is_dtensor(value) and not is_dtensor(like):
            value = full_tensor(value)
        placed = torch.empty_like(like, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
        return placed.copy_(value)
