"""An optimizer's live state, packed into a state dict and loaded from one: plan, agree, apply."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megascale import state_dict as portable_state
from megascale.collectives import raise_together
from megascale.errors import StateDictError
from megascale.grad_scaler import MegatronGradScaler
from megascale.inner_update import InnerUpdate
from megascale.main_params import HALF_DTYPES, ReplicatedMainParams, local


@dataclass
class _Plan:
    """What a load will change, all of it checked and copied: applying it cannot fail half way."""

    options: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    main_params: list[tuple[nn.Parameter, str, Tensor]] = field(default_factory=list)
    states: list[tuple[nn.Parameter, dict[str, Any]]] = field(default_factory=list)
    scaler: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class LiveState:
    """References to everything that a state dict covers."""

    param_groups: list[dict[str, Any]]
    state: MutableMapping[Tensor, dict[str, Any]]
    main_params: ReplicatedMainParams
    update: InnerUpdate
    grad_scaler: MegatronGradScaler | None

    def pack(self, *, copy: bool) -> dict[str, Any]:
        """Return the state dict; see :mod:`megascale.state_dict`."""
        names = self.main_params.names(self.param_groups)
        states: dict[str, Any] = {}
        mains: dict[str, Tensor] = {}
        for param in self._params():
            name = names[id(param)]
            states[name] = portable_state.portable(dict(self.state.get(param, {})), f"state[{name!r}]", copy=copy)
            main = self.main_params.get(param)
            if main is not None and main.is_copy:
                mains[name] = portable_state.portable(main.main, name, copy=copy)
        groups = [
            portable_state.pack_group(group, [names[id(p)] for p in group["params"]], index, copy=copy)
            for index, group in enumerate(self.param_groups)
        ]
        return {
            "optimizer": {"state": states, "param_groups": groups},
            "main_params": mains,
            "grad_scaler": {} if self.grad_scaler is None else self.grad_scaler.state_dict(),
            "version": portable_state.VERSION,
        }

    def load(self, state_dict: Mapping[str, Any], *, strict: bool, group: ProcessGroup | None) -> None:
        """Plan on every rank, agree that every plan is sound, then apply. Raises on all ranks alike."""
        error: Exception | None = None
        try:
            plan = self._plan(state_dict, strict)
        except Exception as caught:  # any failure of one rank must reach the others
            error = caught
        raise_together(error, group)
        self._apply(plan)

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    def _plan(self, state_dict: Mapping[str, Any], strict: bool) -> _Plan:
        portable_state.check_layout(state_dict)
        names = self.main_params.names(self.param_groups)
        params = {names[id(param)]: param for param in self._params()}
        states, groups = state_dict["optimizer"]["state"], state_dict["optimizer"]["param_groups"]
        mains = state_dict["main_params"]
        if strict:
            portable_state.check_names(states, params, params, "optimizer state")
            halves = [name for name, param in params.items() if param.dtype in HALF_DTYPES and param.requires_grad]
            portable_state.check_names(mains, params, halves, "main params")
            portable_state.check_groups(
                groups, [[names[id(p)] for p in group["params"]] for group in self.param_groups]
            )
        plan = _Plan(scaler=self._plan_scaler(state_dict["grad_scaler"], strict))
        if len(groups) == len(self.param_groups):
            plan.options = [
                (live, portable_state.loadable_options(given, index))
                for index, (live, given) in enumerate(zip(self.param_groups, groups, strict=True))
            ]
        for name in (name for name in params if name in mains):
            portable_state.check_main_param(name, mains[name], params[name])
            dtype = torch.float32 if params[name].dtype in HALF_DTYPES else params[name].dtype
            plan.main_params.append((params[name], name, portable_state.place_like(mains[name], params[name], dtype)))
        options = {id(p): group for group in self.param_groups for p in group["params"]}
        for name in (name for name in params if name in states):
            param = params[name]
            required = self.update.required_state(options[id(param)]) if states[name] else ()
            plan.states.append((param, portable_state.loadable_state(name, states[name], param, required)))
        return plan

    def _plan_scaler(self, given: Any, strict: bool) -> Mapping[str, Any] | None:
        """Return the scaler's state if it is to be loaded. ``strict``: a scaler on one side only is an error."""
        if self.grad_scaler is None:
            if given and strict:
                raise StateDictError(
                    "state dict holds a grad scaler's state, the optimizer has no grad scaler; pass one, or "
                    "load with strict=False"
                )
            return None
        if given == {} and not strict:
            return None
        self.grad_scaler.parse_state_dict(given)
        return dict(given)

    @torch.no_grad()
    def _apply(self, plan: _Plan) -> None:
        for live, options in plan.options:
            for key, value in options.items():
                if isinstance(live.get(key), Tensor) and isinstance(value, (Tensor, float, int)):
                    live[key].copy_(torch.as_tensor(value))
                else:
                    live[key] = value
        for param, name, value in plan.main_params:
            main = self.main_params.adopt(param, name)
            local(main.main).copy_(local(value))
            if main.is_copy:
                local(main.model).copy_(local(main.main))
            main.seal()
        for param, state in plan.states:
            self.state[param] = state
        for group, params in zip(self.param_groups, self._trained(), strict=True):
            for main in params:
                self.update.create_state(group, main)
        if plan.scaler is not None and self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(plan.scaler)

    def _trained(self) -> Sequence[Sequence[Any]]:
        self.main_params.follow(self.param_groups)
        return self.main_params.ordered
