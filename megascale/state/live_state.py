"""An optimizer's live state, packed into a state dict and loaded from one.

A load checks everything, all ranks agree, and only then is one parameter after the other copied into its place. So a
refusal leaves everything as it was, and a load needs memory for one parameter's state more.
"""

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from megascale.errors import StateDictError, UsageError, listed
from megascale.grad_scaler import ConstantGradScaler, MegatronGradScaler
from megascale.kernels.compact_moments import GROUP, is_scale
from megascale.main_params.base import MainParams
from megascale.main_params.group_scales import decoded_where_cut
from megascale.main_params.shard import ParamShard
from megascale.state import schema as portable_state
from megascale.state.extra_state import ExtraState
from megascale.state.torch_layout import StateDict
from megascale.step.member import StepMember
from megascale.step.result import StepCounter, parse_counts
from megascale.step.torch_states import is_per_element
from megascale.step.torch_step import GeneralUpdate
from megascale.utils.dtensors import held, to_local
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.nests import map_tensors
from megascale.utils.portable import portable

Loaded = tuple[nn.Parameter, str, Tensor | None, dict[str, Any] | None]
"""What is loaded of one model param, as it was given: the param, its name, its main param and its state, each of these
two None where there is none."""


@dataclass
class Plan:
    """All changes of a load, checked, so that applying them cannot fail half way.

    Attributes:
        params: in the order in which they are loaded, one after the other: no second copy of them is made.
        options: of each param group, and what they become.
        shared: state that belongs to no parameter.
        extra_state: what the wrapped optimizer's ``load_state_dict()`` takes.
        loaded: objects of which an optimizer has one, such as its scaler, and the state that each loads.
        from_weights: whether all main params are set from the model's weights, as the state dict has none.
        remarks: what the state dict of a run in another precision lacks, or has in excess, and what comes of it.
    """

    params: list[Loaded]
    options: list[tuple[dict[str, Any], dict[str, Any]]]
    shared: dict[Any, Any]
    extra_state: dict[str, Any]
    loaded: list[tuple[Any, Mapping[str, Any]]]
    from_weights: bool
    remarks: list[str]


@dataclass(frozen=True)
class LiveState:
    """References to everything that a state dict covers, of one optimizer.

    Attributes:
        member: updates all that. A weak reference: whoever keeps entries of a dropped optimizer keeps their tensors,
            and not the wrapper of the torch optimizer.
    """

    param_groups: list[dict[str, Any]]
    state: MutableMapping[Any, Any]
    main_params: MainParams
    grad_scaler: MegatronGradScaler | None
    counter: StepCounter
    extra_state: ExtraState
    member: "ref[StepMember]"

    @property
    def update(self) -> GeneralUpdate:
        """What updates all that."""
        member = self.member()
        if member is None:
            raise UsageError("the optimizer whose state this is was dropped; keep it for as long as its state is used")
        return member.update

    def shared_values(self) -> dict[str, Any]:
        """Return what a state dict holds once, for all parameters. Waits for the device."""
        return {
            "grad_scaler": {} if self.grad_scaler is None else self.grad_scaler.state_dict(),
            "step_counts": self.counter.state_dict(),
        }

    def pack(self, *, copy: bool, decode: bool = True) -> dict[str, Any]:
        """Return the state dict; see :mod:`megascale.state.schema`.

        ``decode``: False leaves main params that are held as remainders so; only a checkpoint can load them again.
        """
        # A copy is whole on every rank, also of parameters of which this rank owns nothing and has no state.
        if copy:
            self.share_forms()
        states: dict[str, Any] = {}
        mains: dict[str, Tensor] = {}
        for name, param in self.named_params().items():
            main = self.main_params.get(param)
            state = dict(self.state.get(param, {}))
            if main is not None:
                # Tensors are left to main params, which know this rank's pieces of them.
                if others := {key: value for key, value in state.items() if not isinstance(value, Tensor)}:
                    state |= portable(others, f"state[{name!r}]", copy=copy)
                if main.is_copy:
                    held = main.value() if decode else main.memory
                    mains[name] = self.main_params.export(main, {"": held}, copy=copy)[""]
                states[name] = self.main_params.export_state(main, state, copy=copy)
            else:
                states[name] = portable(state, f"state[{name!r}]", copy=copy)
        return StateDict(
            optimizer={"state": states} | self._pack_options(copy=copy),
            main_params=mains,
            **self.shared_values(),
            version=portable_state.VERSION,
        )

    def share_forms(self) -> None:
        """Tell other ranks the form of the state that only this rank holds. All ranks call it together.

        Raises StateDictError on every rank alike, naming it, for state that a state dict cannot hold.
        """
        self.main_params.share_state_forms(self._portable_states)

    def _pack_options(self, *, copy: bool) -> dict[str, Any]:
        """Return the param groups and the state that belongs to no parameter."""
        groups = [
            portable_state.pack_group(group, names, index, copy=copy)
            for index, (group, names) in enumerate(zip(self.param_groups, self.names(), strict=True))
        ]
        return {"param_groups": groups} | portable_state.pack_shared(self._shared(copy=copy), copy=copy)

    def _shared(self, *, copy: bool) -> dict[Any, Any]:
        """Return the wrapped optimizer's state that belongs to no parameter, as it keeps it and as it saves it."""
        extra = self.extra_state.read(copy=copy)
        of_no_param = {key: value for key, value in self.state.items() if not isinstance(key, Tensor)}
        return of_no_param | ({portable_state.EXTRA_STATE: extra} if extra else {})

    def _portable_states(self) -> dict[int, Any]:
        """Return the state of each parameter, by id. Raises StateDictError for what a state dict cannot hold."""
        self._pack_options(copy=False)
        return {
            id(param): portable(self.state.get(param, {}), f"state[{name!r}]", copy=False)
            for name, param in self.named_params().items()
        }

    def rounded_params(self) -> set[int]:
        """Return the ids of 16-bit model params that are written as roundings of main params only.

        Those of a DistributedOptimizer, and those whose main params are remainders, which a later write resets.
        """
        return {
            id(param.model)
            for param in self.main_params
            if param.is_copy and (self.main_params.is_sharded or param.remainder is not None)
        }

    def check(self, state_dict: Mapping[str, Any], *, strict: bool) -> None:
        """Check all of a state dict, in our layout under live names, but its values: first names, then the rest.

        Raises StateDictError; UsageError while main params are away in host memory.
        """
        self.main_params.residence.require_here("load_state_dict()")
        params = self.named_params()
        states, groups = state_dict["optimizer"]["state"], state_dict["optimizer"]["param_groups"]
        mains = state_dict["main_params"]
        if strict:
            portable_state.check_names(states, params, params, "optimizer state")
            halves = [name for name, param in params.items() if param.dtype in HALF_DTYPES and param.requires_grad]
            # A run of fp32 weights, or a plain torch optimizer's, has none at all.
            portable_state.check_names(mains, params, halves if mains else (), "main params")
            portable_state.check_groups(groups, self.names())
            # Other state of parameters that are frozen here is accepted, and kept whole until they are trained.
            homeless = [name for name, param in params.items() if name in mains and not self.main_params.keeps(param)]
            if homeless:
                raise StateDictError(
                    f"state dict holds main params of {listed(homeless)}, frozen here; set requires_grad first, "
                    "or load with strict=False to leave it out"
                )
        options = self._options()
        for name in (name for name in params if name in mains):
            portable_state.check_main_param(name, mains[name], params[name])
        for name in (name for name in params if name in states):
            # A parameter that was never updated has no state, and needs none.
            is_empty = isinstance(states[name], Mapping) and not states[name]
            required = () if is_empty else self.update.required_state(options[id(params[name])])
            portable_state.check_state(name, _counted(states[name], required), params[name], required)
        portable_state.check_shared(state_dict["optimizer"], self._shared(copy=False), strict=strict)
        for index, group in enumerate(groups):
            portable_state.loadable_options(group, index)
        self._loaded(state_dict, strict)

    def _options(self) -> dict[int, dict[str, Any]]:
        """Return the param group of each parameter, by id."""
        return {id(param): group for group in self.param_groups for param in group["params"]}

    def names(self) -> list[list[str]]:
        """Return the names of the parameters of each param group."""
        names = self.main_params.names(self.param_groups)
        return [[names[id(param)] for param in group["params"]] for group in self.param_groups]

    def named_params(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name."""
        names = self.main_params.names(self.param_groups)
        return {names[id(param)]: param for group in self.param_groups for param in group["params"]}

    def plan(self, state_dict: Mapping[str, Any], *, strict: bool) -> Plan:
        """Check a state dict, as :meth:`check` does, and its values. Raises as that, and MainParamOverflowError.

        All that can raise is done here: other ranks may find an error, and then nothing has changed. No rank
        communicates. Nothing is copied: a live tensor is for the place that it lies in; a main param's for another is
        refused.
        """
        self.check(state_dict, strict=strict)
        states, groups = state_dict["optimizer"]["state"], state_dict["optimizer"]["param_groups"]
        mains, options, params = state_dict["main_params"], self._options(), list[Loaded]()
        places = {held(main.main).data_ptr(): main for main in self.main_params}
        for name, param in self.named_params().items():
            keeps = self.main_params.keeps(param)
            main, state = mains.get(name) if keeps else None, None
            if main is not None:
                # A piece that is not this rank's is refused where it is placed; here, as below, to no effect.
                if isinstance(main, ParamShard):
                    self.main_params.to_local(param, main, main.dtype)
                memory = main.piece if isinstance(main, ParamShard) else held(main)
                place = places.get(memory.data_ptr()) if memory.numel() else None
                if place is not None and place.model is not param:
                    raise StateDictError(
                        f"state dict gives {name!r} the live main param of {place.name!r}, which the load may change "
                        "first: clone it"
                    )
                portable_state.check_fits_model(name, memory.float(), param)
            if name in states and (name not in mains or keeps):
                given = _counted(states[name], self.update.required_state(options[id(param)]))
                state = portable(given, f"state[{name!r}]", copy=False)
                pieces = map_tensors(lambda value: value if isinstance(value, ParamShard) else None, state)
                self._placed_state(name, param, {key: piece for key, piece in pieces.items() if piece is not None})
            params.append((param, name, main, state))
        pairs = zip(self.param_groups, groups, strict=True) if len(groups) == len(self.param_groups) else ()
        planned = [(group, self._planned_options(group, given, index)) for index, (group, given) in enumerate(pairs)]
        own = self._shared(copy=False)
        shared = portable_state.check_shared(state_dict["optimizer"], own, strict=strict)
        shared = portable_state.placed_like(shared, own)
        extra_state = shared.pop(portable_state.EXTRA_STATE, {})
        self.extra_state.check(extra_state)
        remarks = self._remarks(state_dict) if strict else []
        loaded = self._loaded(state_dict, strict)
        return Plan(params, planned, shared, extra_state, loaded, from_weights=strict and not mains, remarks=remarks)

    def _planned_options(self, live: Mapping[str, Any], given: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the options that ``live`` takes over. Raises StateDictError for those that no step could use."""
        options = portable_state.loadable_options(given, index)
        try:
            self.update.check_options({**live, **options})
            for key, value in options.items():
                held = live.get(key)
                if isinstance(held, Tensor) and isinstance(value, (float, int)):
                    options[key] = torch.full_like(held, value)  # a tensor of the default dtype would round it
                elif isinstance(held, Tensor) and isinstance(value, Tensor):
                    options[key] = value.to(held.device).reshape(held.shape)
                elif isinstance(held, tuple) and hasattr(held, "_make"):
                    options[key] = held._make(value)
        except Exception as error:  # whatever reads them
            raise StateDictError(
                f"param_groups[{index}] of the state dict has options that no step could use: {error}; leave such an "
                "option out to keep the live one"
            ) from error
        return options

    def _placed_state(self, name: str, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return one parameter's state: of per-element tensors this rank's part, others copied to its device."""
        main = self.main_params.get(param)
        device = to_local(param if main is None else main.memory).device
        placed = portable(state, f"state[{name!r}]", copy=False)
        own = self.main_params.own_state(param, placed)
        if own is not None:
            return own
        is_cut = self.main_params.keeps(param)
        placed = decoded_where_cut(placed, param if main is None else main.main)
        for key, value in placed.items():
            if is_scale(key) and is_cut:
                placed[key] = self.main_params.to_local(param, value, value.dtype, group=GROUP)
            elif isinstance(value, Tensor):
                live = self.state.get(param, {}).get(key)
                # Whether a 0-d one is an element of a 0-d parameter or a number beside it, live state tells.
                is_number = (
                    value.dim() == 0 and isinstance(live, Tensor) and main is not None and live.shape != main.main.shape
                )
                placed[key] = (
                    self.main_params.to_local(param, value, value.dtype)
                    if is_cut and not is_number and is_per_element(key, value, param)
                    else value.to(device, copy=True)
                )
            else:
                placed[key] = map_tensors(lambda inner: inner.to(device, copy=True), value)
        return placed

    def _loaded(self, state_dict: Mapping[str, Any], strict: bool) -> list[tuple[Any, Mapping[str, Any]]]:
        """Return :attr:`Plan.loaded`. Raises StateDictError. State dicts of other systems lack step counts."""
        loaded: list[tuple[Any, Mapping[str, Any]]] = []
        given: Any = state_dict.get("grad_scaler")
        if self.grad_scaler is not None and not self._keeps_scaler(given, strict):
            self.grad_scaler.parse_state_dict(given)
            loaded.append((self.grad_scaler, dict(given)))
        if "step_counts" in state_dict:
            loaded.append((self.counter, parse_counts(state_dict["step_counts"])))
        return loaded

    def _keeps_scaler(self, given: Any, strict: bool) -> bool:
        """Return whether the scaler keeps its state, as no other was saved. A constant one needs none."""
        return (given is None and not strict) or (given == {} and not isinstance(self.grad_scaler, ConstantGradScaler))

    def _remarks(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Return :attr:`Plan.remarks`: what differs because of the precision is no reason to lose moments."""
        remarks = []
        mains, given = state_dict["main_params"], state_dict["grad_scaler"]
        if not mains and any(
            param.dtype in HALF_DTYPES and param.requires_grad for param in self.named_params().values()
        ):
            remarks.append(
                "the state dict has no main params (fp32 weights, or a plain torch optimizer's): they are taken from "
                "the model's weights, which must be loaded first"
            )
        if self.grad_scaler is None and given:
            remarks.append("the saved loss scale is left out, as the optimizer has no grad scaler")
        elif self.grad_scaler is not None and self._keeps_scaler(given, strict=True):
            remarks.append("the state dict has no loss scale, and the optimizer's grad scaler stays as it is")
        return remarks

    @torch.no_grad()
    def apply(self, plan: Plan) -> None:
        """Carry out the plan. All ranks call it together."""
        # Options before states, which are created as the options ask; main params before units are marked as written.
        for live, options in plan.options:
            for key, value in options.items():
                if isinstance(live.get(key), Tensor) and isinstance(value, Tensor):
                    live[key].copy_(value)
                else:
                    live[key] = value
        for copied in (param for param in self.main_params if plan.from_weights and param.is_copy):
            copied.reload()
        # One by one into their places: what is copied on the way is freed before the next one. Ranks of a DTensor
        # communicate where it, or its scales, lie otherwise here.
        for param, name, value, state in plan.params:
            main = self.main_params.get(param) if value is None else self.main_params.get_or_create(param, name)
            if value is not None and main is not None:
                dtype = torch.float32 if param.dtype in HALF_DTYPES else param.dtype
                main.store(to_local(self.main_params.to_local(param, value, dtype)))
                main.record_version()
            if state is not None:
                placed = self._placed_state(name, param, state)
                self.state[param] = placed if main is None else self.update.load_state(main, placed)
        self.state.update(plan.shared)
        # store() has rounded each main param into its model param. Marked, that is no write of the caller's, and shards
        # are gathered on all ranks, also of parameters that the state dict left out.
        for unit in self.main_params.units():
            self.main_params.mark_written(unit)
        self.main_params.wait()
        self.main_params.sync_from_model(self.param_groups)
        for group, params in zip(self.param_groups, self.main_params.ordered, strict=True):
            self.update.create_states(group, params)
        self.extra_state.load(plan.extra_state)
        for one, given in plan.loaded:
            one.load_state_dict(given)


def _counted(state: Any, required: Collection[str]) -> Any:
    """Return one parameter's saved state, with the ``step`` added that SGD keeps with dampening only.

    It tells whether dampening applies, from the second step on; an existing momentum has seen one step.
    """
    if not {"momentum_buffer", "step"} <= set(required) or not isinstance(state, Mapping):
        return state
    return {"step": torch.tensor(1.0, device="cpu"), **state} if "momentum_buffer" in state else state
