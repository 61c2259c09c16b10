"""MainParams: which parameters of an optimizer have a main param, and how both are kept in step.

Here every rank keeps all of them. :mod:`megascale.main_params.sharded` lets each keep its own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from megascale.config import StepConfig
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError, listed
from megascale.main_params.group_scales import place_scales
from megascale.main_params.host_buffers import HostBuffers, host_memory
from megascale.main_params.main_param import MainParam, check_apart, check_trainable, main_memory, main_param_of
from megascale.main_params.residence import Residence
from megascale.main_params.shard import ParamShard
from megascale.main_params.update_unit import UpdateUnit, units_of
from megascale.main_params.weight_arrivals import WeightArrivals
from megascale.main_params.write_tracker import WriteTracker
from megascale.utils.autograd import detached
from megascale.utils.collectives import full_tensor
from megascale.utils.dtensors import distribute_like, is_dtensor, to_local
from megascale.utils.dtypes import HALF_DTYPES

# An attrgetter, as map() then runs in C: at every step, over every parameter without a main param.
_REQUIRES_GRAD = attrgetter("requires_grad")


class MainParams:
    """The main params of all trainable parameters of ``param_groups``, in their order; every rank keeps all of them.

    A parameter gets its main param when it is first seen with ``requires_grad``: at construction, or at the first step
    after it was unfrozen or added. It keeps it when it is frozen again.
    """

    is_sharded = False
    """Whether each rank keeps only its pieces."""

    everywhere: Mapping[str, nn.Parameter] = {}
    """By name, the model params of which other ranks hold other shards."""

    are_whole = True
    """Whether a main param has the shape of its parameter on every rank that owns it."""

    stores_remainders = False
    """Whether main params that are copies are held as remainders, see :class:`MainParam`."""

    arrivals: WeightArrivals | None = None
    """Where copies live in host memory: what sends weights from there. None: beside the model params."""
    pins_params = True
    """Whether those weights are in pinned memory."""
    offload_fraction = 1.0
    """The share of the copies' elements that lives there, at least."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        # With the parameter, whose id no other one can have then. Not weakly: torch.utils.swap_tensors(), by which a
        # module of FSDP2 is moved, refuses tensors that have weak references.
        self._explicit_names = {id(param): (name, param) for name, param in named}
        self._by_id: dict[int, MainParam] = {}
        self._known: list[list[nn.Parameter]] = []
        self.tracker = WriteTracker([])
        self._frozen: list[nn.Parameter] = []
        self._trained: list[bool] = []
        self._units: list[UpdateUnit] = []
        self._has_units = False
        self.times_arranged = 0
        self.ordered: list[list[MainParam]] = []
        self.residence = Residence()
        # Names of params that were written while their weights were on their way. Whoever waits for weights adds to it.
        self.written_too_early: list[str] = []

    def sync_from_model(self, param_groups: Sequence[dict[str, Any]]) -> list[MainParam]:
        """Take over changes of ``param_groups`` and outside writes to model params. Returns the new main params.

        Raises ArgumentError or ArgumentTypeError for a parameter that cannot be trained, UsageError for one whose
        shape, dtype or layout has changed or that shares memory with another, before anything has changed.
        """
        self.wait()  # values are read below
        made: list[MainParam] = []
        written = self.tracker.written()  # before groups are compared, for which it reads requires_grad anew
        if not self._is_unchanged(param_groups):
            for group in param_groups:  # a tuple or an iterator, of which torch's add_param_group makes a list, too
                params = group.get("params")
                if isinstance(params, Tensor) or not isinstance(params, Iterable):
                    raise ArgumentTypeError(
                        f"params of a param group must be a list of parameters, got a {type(params).__name__}"
                    )
                group["params"] = params if isinstance(params, list) else list(params)
            made = self._add_new(param_groups)
            written = self.tracker.written()  # slots are those of another tracker
        if written:
            self._take_written(written)
        return made

    @torch.no_grad()
    def _take_written(self, written: Sequence[int]) -> None:
        """Take over model params that others wrote or moved. ``written``: their slots."""
        params = list(self)
        # All are checked before the first value is taken over: a refusal leaves main params as they were.
        for index in written:
            params[index].check()
        # Tables hold addresses, and two params may share memory now.
        if self.tracker.moved():
            check_apart([(param.name, param.model) for param in params])
            self.restore()
            self._has_units = False
            written = self.tracker.written()
        for index in written:
            params[index].sync_from_model()

    def _is_unchanged(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the groups hold the same parameters as before, and the same of them are frozen."""
        if len(param_groups) != len(self._known):
            return False
        for group, known in zip(param_groups, self._known, strict=True):
            params = group["params"]
            if type(params) is not list or len(params) != len(known) or not all(map(is_, params, known)):
                return False
        return self.tracker.requires_grad == self._trained and not any(map(_REQUIRES_GRAD, self._frozen))

    @torch.no_grad()
    def _add_new(self, param_groups: Sequence[dict[str, Any]]) -> list[MainParam]:
        """Create main params for parameters that have none, and order all of them."""
        names: dict[int, str] = {}
        seen: set[int] = set()
        unseen: dict[str, nn.Parameter] = {}
        group_of: dict[str, int] = {}
        for index, group in enumerate(param_groups):
            for param in group["params"]:
                if not issubclass(kind := type(param), Tensor):
                    raise ArgumentTypeError(f"params of a param group holds a {kind.__name__}; give parameters")
                if id(param) in seen:  # several updates of one step would write it
                    known = self._by_id.get(id(param))  # None at construction
                    raise ArgumentError(
                        f"param_groups[{index}] holds {known.name if known else self.names(param_groups)[id(param)]!r} "
                        "that param_groups held before; list each parameter once"
                    )
                seen.add(id(param))
                if param.requires_grad and id(param) not in self._by_id:
                    names = names or self.names(param_groups)
                    check_trainable(names[id(param)], param)
                    unseen[names[id(param)]] = param
                    group_of[names[id(param)]] = index
        if unseen:  # to freeze parameters for a rollout needs no memory
            self.residence.require_here("a new parameter")
        before = [self._by_id[id(p)] for group in param_groups for p in group["params"] if id(p) in self._by_id]
        check_apart([*((param.name, param.model) for param in before), *unseen.items()])
        if not self.is_sharded:
            # Parameters may be replaced, as by Accelerate under FSDP2: the old ones must not stay in memory.
            self._by_id = {key: param for key, param in self._by_id.items() if key in seen}
        made = self.make(unseen, group_of) if unseen else []
        self._by_id.update({id(param.model): param for param in made})
        self.ordered = [[self._by_id[id(p)] for p in group["params"] if id(p) in self._by_id] for group in param_groups]
        self._known = [list(group["params"]) for group in param_groups]
        self._frozen = [param for group in self._known for param in group if id(param) not in self._by_id]
        # The new tracker goes on with what was recorded of each model param.
        self.tracker = WriteTracker(param.model for param in self)
        for index, main in enumerate(self):
            if main.tracker is not None:
                self.tracker.remember(index, main.tracker, main.slot)
            main.tracker, main.slot = self.tracker, index
        self._trained = self.tracker.requires_grad
        self._has_units = False
        return made

    def names(self, param_groups: Sequence[dict[str, Any]]) -> dict[int, str]:
        """Return the name of every parameter by id: as given, else its group's ``param_names``, else its position.

        Raises ArgumentError if two parameters share a name, or if a group has more or fewer names than parameters.
        """
        names: dict[int, str] = {}
        position = 0
        for group in param_groups:
            given = group.get("param_names") or [None] * len(group["params"])
            if len(given) != len(group["params"]):
                raise ArgumentError(
                    f"a param group has {len(group['params'])} params and {len(given)} param_names; give one to each"
                )
            for param, name in zip(group["params"], given, strict=True):
                names[id(param)] = self._explicit_names.get(id(param), (name,))[0] or str(position)
                position += 1
        for name, count in Counter(names.values()).items():
            if count > 1:
                raise ArgumentError(
                    f"two parameters are called {name!r}; give each a name of its own in named_parameters"
                )
        return names

    def __iter__(self) -> Iterator[MainParam]:
        return (param for group in self.ordered for param in group)

    def get(self, param: Tensor) -> MainParam | None:
        """Return the main param of a model param, or None."""
        return self._by_id.get(id(param))

    def keeps(self, param: nn.Parameter) -> bool:
        """Whether this optimizer can hold state of ``param``: not of one that is frozen, where ranks hold shards."""
        return not self.is_sharded or id(param) in self._by_id

    def units(self) -> list[UpdateUnit]:
        """Return the units, in the order of the update."""
        if not self._has_units:
            for unit in self._units:
                unit.calls = None  # who holds the unit still must hold no memory through it
            self._units, self._has_units = self.make_units(), True
            self.times_arranged += 1
        return self._units

    def make_units(self) -> list[UpdateUnit]:
        """Return the units of :attr:`ordered`: here as few as there can be."""
        return units_of(self.ordered)

    def live_in_host_memory(self, config: StepConfig, device: torch.device) -> None:
        """Make main params that are copies in host memory, if ``config`` says so. ``device``: of the model params."""
        if config.optimizer_cpu_offload:
            self.arrivals = WeightArrivals(device, self.written_too_early, are_gathered=self.is_sharded)
            self.pins_params = config.pin_cpu_params
            self.offload_fraction = config.optimizer_offload_fraction

    def host_buffers(
        self, parts: Mapping[str, Tensor], runs: Sequence[tuple[Iterable[str], int]]
    ) -> Mapping[str, HostBuffers]:
        """Return new host memory of 16-bit model params, by name, where copies live there; none elsewhere.

        Args:
            parts: of the model params, by name.
            runs: names that leave or stay together, with their number of elements, which is the same on all ranks; in
                the order of forward. Those that it needs first stay where they are, as far as the fraction lets.

        Raises UsageError if there is too little host memory.
        """
        if self.arrivals is None:
            return {}
        halves = [(names, numel) for names, numel in runs if all(parts[name].dtype in HALF_DTYPES for name in names)]
        staying = (1 - self.offload_fraction) * sum(numel for _, numel in halves)
        there: list[str] = []
        for names, numel in halves:
            staying -= numel
            if staying < 0 or self.offload_fraction == 1.0:
                there += names
        memory = host_memory([to_local(parts[name]) for name in there], pin=self.pins_params)
        return dict(zip(there, map(HostBuffers, memory), strict=True))

    def make(self, params: Mapping[str, nn.Parameter], group_of: Mapping[str, int]) -> list[MainParam]:
        """Return new main params for ``params`` (by name), with the model's values. ``group_of``: their groups."""
        on_host = self.host_buffers(params, [([name], param.numel()) for name, param in params.items()])
        copies = main_memory(params, on_host, as_remainders=self.stores_remainders)
        return [
            main_param_of(name, param, None, copies.get(name), on_host=on_host.get(name))
            for name, param in params.items()
        ]

    def get_or_create(self, param: nn.Parameter, name: str) -> MainParam | None:
        """Return the main param of ``param``, made if ``param`` is frozen and has none; None if it can have none."""
        if not self.is_sharded and id(param) not in self._by_id:
            [made] = self.make({name: param}, {})
            self._by_id[id(param)] = made
            made.tracker = WriteTracker([param])
        return self._by_id.get(id(param))

    def restore(self) -> None:
        """Bring model params whose storage was replaced back to where this optimizer keeps them.

        Here it does nothing: replaced storage counts as a write.
        """

    def mark_written(self, unit: UpdateUnit) -> None:
        """Record that the model params of one unit have just been written, as the roundings of their main params."""
        self.tracker.take_written(unit.slots)

    def wait(self) -> None:
        """Wait until every model param is whole on every rank, and back from host memory."""
        if self.arrivals is not None:
            self.arrivals.wait()

    def require_no_early_write(self) -> None:
        """Wait for weights. Raises UsageError, once, for params that were written while theirs were on their way."""
        self.wait()
        if names := self.written_too_early[:]:
            self.written_too_early.clear()
            raise UsageError(
                f"parameter {listed(names)} was written after step() while its weights were still on their way; when "
                "they arrived they replaced some or all of what was written. Call optimizer.finish_param_gather() "
                "between step() and code that writes parameters (a mask, a clamp), or leave the overlap off. This step "
                "has changed nothing, but the written values are lost: load the model again, as from a checkpoint"
            )

    def end_step(self) -> None:
        """End a step: model params are whole on every rank, or will be when a module needs them. Here they are."""

    def why_not_capturable(self) -> str | None:
        """Return why :meth:`end_step` cannot be part of a device's graph; None where it can."""
        return None

    @torch.no_grad()
    def to_local(self, param: nn.Parameter, value: Tensor, dtype: torch.dtype, *, group: int = 1) -> Tensor:
        """Return this rank's part of ``value``, a saved tensor of the parameter's shape, as ``dtype``.

        ``group``: group size of a per-group tensor (1-D, such as the scales of codes); 1 for a per-element tensor.
        """
        known = self._by_id.get(id(param))
        like = param if known is None or known.on_host is None else known.main  # which is in host memory
        if group > 1:
            return place_scales(value, like, dtype)
        if is_dtensor(like) and not is_dtensor(value):
            value = distribute_like(value, like)
        elif is_dtensor(value) and not is_dtensor(like):
            value = full_tensor(value)
        placed = torch.empty_like(like, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
        return placed.copy_(value)

    def export(self, param: MainParam, values: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
        """Return tensors of ``param`` as a state dict holds them: whole, or as ParamShards of the live ones.

        With ``copy`` all ranks call it together.
        """
        return {key: detached(value).clone() if copy else detached(value) for key, value in values.items()}

    def model_shards(self) -> dict[int, ParamShard]:
        """Return, by id of the parameter, this rank's piece of every sharded model param, live."""
        self.wait()
        return {
            id(param.model): ParamShard(param.shard.view(-1), param.model.shape, param.start)
            for param in self
            if param.shard is not None
        }

    def agree(self, error: Exception | None, call: str = "state_dict()") -> None:
        """Raise ``error``, if there is one; also on the ranks that hold other shards, which call this together.

        ``call``: the user's, for the error of a rank that waits alone.
        """
        if error is not None:
            raise error

    def share_state_forms(self, states: Callable[[], Mapping[int, Any]]) -> None:
        """Tell other ranks what state this rank alone holds, before :meth:`export_state`. All ranks call it together.

        Here no rank holds any. ``states``: returns portable state, by id of the parameter. Where ranks hold shards, an
        error that it raises on one rank is raised by all.
        """

    def export_state(self, param: MainParam, state: Mapping[str, Any], *, copy: bool) -> dict[str, Any]:
        """Return the optimizer's state of ``param`` with its tensors as :meth:`export` returns them."""
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        return {**state, **self.export(param, tensors, copy=copy)}

    def own_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what this rank keeps of a saved state; None where each tensor's shape tells: :meth:`to_local`."""
        return None
