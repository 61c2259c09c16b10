"""ChainedOptimizer: several optimizers that step as one, with one scaler, one decision and one norm."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain, islice
from operator import attrgetter
from typing import Any
from weakref import ref

from torch import Tensor
from typing_extensions import override

from megascale.base_optimizer import MegascaleOptimizer
from megascale.config import DecisionConfig
from megascale.errors import ArgumentError, ArgumentTypeError, StateDictError, UsageError, listed
from megascale.optimizer import MixedPrecisionOptimizer
from megascale.state.schema import SHARED_STATE, shared_by_optimizer
from megascale.state.state_view import StateView
from megascale.state.torch_layout import StateDict
from megascale.step.misuse import scaler_conflict
from megascale.step.recipe import StepRecipe
from megascale.utils import validate
from megascale.utils.calls import methods_outside_of_graphs

SHARED_KEYS = ("grad_scaler", "step_counts", "version")
"""Keys of a state dict that have the same value for every optimizer of a chain."""


@methods_outside_of_graphs
class ChainedOptimizer(MegascaleOptimizer):
    """Several MixedPrecisionOptimizers or DistributedOptimizers over one model: dense and expert parameters, say.

    An overflow anywhere skips all of them; the norm that clips is that of all gradients; one scaler serves all. In
    Megatron-Core's ``ChainedOptimizer`` each has its own scaler, and the loss is scaled by the first.

    Args:
        optimizers: one or more, that share one grad scaler object (or have none), ``groups.grad_stats``, device,
            ``clip_grad`` and the fields of their configs that say how a step is decided. Parameter names must differ,
            so pass named parameters. Any order, the same on all ranks. Where optimizers have a GradSync each and the
            backend is not gloo, backward must reach their parameters in the same order on all ranks; else switch
            overlap off.
        clip_grad: largest L2 norm of all gradients together, in place of the optimizers' own; 0: not clipped. None:
            theirs, which must be the same.

    Raises:
        ArgumentError, ArgumentTypeError: for optimizers that cannot step as one, saying in what they differ.
    """

    def __init__(self, optimizers: Sequence[MixedPrecisionOptimizer], *, clip_grad: float | None = None) -> None:
        self._optimizers = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        limit = None if clip_grad is None else validate.non_negative("clip_grad", clip_grad)
        _check(self._optimizers, clip_alike=limit is None)
        first = self._optimizers[0]
        self._config = first._config
        self._groups = first._groups
        self._device = first._device
        members = [member for optimizer in self._optimizers for member in optimizer._recipe.members]
        are_scaled = all(optimizer._recipe.grads_are_scaled for optimizer in self._optimizers)
        self._recipe = StepRecipe(
            members, self._groups, first.grad_scaler, first.clip_grad, grads_are_scaled=are_scaled
        )
        for optimizer in self._optimizers:
            # Loading into one member clears the errors of the whole chain.
            optimizer._recipe.errors = self._recipe.errors
            optimizer._recipe.overflows, optimizer._recipe.observers = self._recipe.overflows, self._recipe.observers
        for member in members:
            member.chain = ref(self._recipe)
        super().__init__(self.param_groups, {})
        self._constructed = True
        self._names()
        if limit is not None:
            self.clip_grad = limit

    def _parts(self) -> list[MixedPrecisionOptimizer]:
        """Return its members; see :meth:`MegascaleOptimizer._parts`."""
        return self._optimizers

    @override
    def _settings_error(self) -> UsageError | None:
        for index, optimizer in enumerate(self._optimizers):
            if optimizer.clip_grad != self.clip_grad:
                return UsageError(
                    f"optimizers[{index}].clip_grad was set to {optimizer.clip_grad}, the ChainedOptimizer clips all "
                    f"gradients by one norm, to {self.clip_grad}; set ChainedOptimizer.clip_grad"
                )
        return scaler_conflict(self._recipe.grad_scaler, self._optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All param groups, in the order of the optimizers. The list is new, its dicts are live."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if self._constructed:
            raise UsageError("param_groups of a ChainedOptimizer cannot be replaced; change those of its optimizers")

    @property
    def state(self) -> Any:
        """The state of all optimizers, by model param; see :attr:`MixedPrecisionOptimizer.state`."""
        for member in self._recipe.members if self._constructed else ():
            member.main_params.wait()
        return StateView([optimizer._live_state() for optimizer in self._optimizers])

    @state.setter
    def state(self, value: Any) -> None:
        if self._constructed:
            raise UsageError("state of a ChainedOptimizer cannot be replaced; use load_state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError: add the group to one of the chained optimizers instead."""
        if self._constructed:
            raise UsageError(
                "a ChainedOptimizer cannot choose: add the param group to one of the optimizers that you have chained, "
                "or build them anew with it"
            )

    def local_grad(self, name: str) -> Tensor | None:
        """See :meth:`MixedPrecisionOptimizer.local_grad`; of the optimizer that has the parameter ``name``."""
        for optimizer, names in zip(self._optimizers, self._names(), strict=True):
            if name in names:
                return optimizer.local_grad(name)
        raise ArgumentError(
            f"name={name!r} is no parameter of these optimizers; they have "
            f"{listed([*chain.from_iterable(self._names())])}"
        )

    @override
    def _packed(self, *, copy: bool, decode: bool, to_load: bool) -> dict[str, Any]:
        self._names()  # a group may have been added to one of them
        parts = [one._pack(copy=copy, decode=decode, to_load=to_load) for one in self._optimizers]
        shared: list[Any] = [next(iter(part["optimizer"].get(SHARED_STATE, [])), {}) for part in parts]
        return StateDict(
            optimizer={
                "state": {name: state for part in parts for name, state in part["optimizer"]["state"].items()},
                "param_groups": [group for part in parts for group in part["optimizer"]["param_groups"]],
            }
            | ({SHARED_STATE: shared} if any(shared) else {}),
            main_params={name: main for part in parts for name, main in part["main_params"].items()},
            **{key: parts[0][key] for key in SHARED_KEYS if key in parts[0]},
        )

    def _names(self) -> list[list[str]]:
        """Return each optimizer's parameter names. Raises ArgumentError if two share one."""
        names = [optimizer._param_names() for optimizer in self._optimizers]
        twice = [name for name, count in Counter(chain.from_iterable(names)).items() if count > 1]
        if twice:
            raise ArgumentError(
                f"two of the optimizers have a parameter called {twice[0]!r}; build them from named parameters (a "
                "DistributedOptimizer takes names from modules: give each the whole model)"
            )
        return names

    @override
    def _split(self, state_dict: Mapping[str, Any], strict: bool) -> list[Mapping[str, Any]]:
        names = self._names()
        known = [*chain.from_iterable(names)]
        states, mains = state_dict["optimizer"]["state"], state_dict["main_params"]
        groups = state_dict["optimizer"]["param_groups"]
        unexpected = sorted((states.keys() | mains.keys()).difference(known))
        if unexpected and strict:
            raise StateDictError(
                f"state dict has parameters that no optimizer has: {listed(unexpected)}; build the same "
                "optimizers over the same parameters; strict=False takes those that both sides have"
            )
        fits = len(groups) == len(self.param_groups)
        if not fits and strict:
            raise StateDictError(
                f"state dict has {len(groups)} param groups, the optimizers have {len(self.param_groups)}; build the "
                "same groups, or load with strict=False to keep the live options"
            )
        shared = shared_by_optimizer(state_dict["optimizer"], len(names), strict=strict)
        rest = iter(groups if fits else ())
        return [
            {
                "optimizer": {
                    "state": _picked(states, own),
                    "param_groups": list(islice(rest, len(optimizer.param_groups))),
                    SHARED_STATE: [own_shared],
                },
                "main_params": _picked(mains, own),
                **{key: state_dict[key] for key in SHARED_KEYS if key in state_dict},
            }
            for optimizer, own, own_shared in zip(self._optimizers, names, shared, strict=True)
        ]


def _picked(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _check(optimizers: Sequence[Any], *, clip_alike: bool) -> None:
    """Raise ArgumentError or ArgumentTypeError unless ``optimizers`` can step as one. ``clip_alike``: by one norm."""
    if not optimizers:
        raise ArgumentError("optimizers is empty; pass one or more")
    first = optimizers[0]
    deciding = [".".join(("_config", one.name)) for one in fields(DecisionConfig)]
    alike = ["_device", *(["clip_grad"] if clip_alike else []), *deciding]
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, MixedPrecisionOptimizer):
            raise ArgumentTypeError(
                f"optimizers[{index}] must be a MixedPrecisionOptimizer or DistributedOptimizer, got "
                f"{type(optimizer).__name__}"
            )
        for what in alike:
            mine, theirs = map(attrgetter(what), (optimizer, first))
            if mine != theirs:
                raise ArgumentError(
                    f"optimizers[{index}] has {what.lstrip('_')}={mine}, optimizers[0] has {theirs}; make them equal"
                )
        if optimizer.grad_scaler is not first.grad_scaler:
            raise ArgumentError(
                f"optimizers[{index}] has another grad scaler than optimizers[0]; pass the same object to each, as "
                "there is one scale"
            )
        if optimizer._groups.grad_stats != first._groups.grad_stats:
            raise ArgumentError(
                f"optimizers[{index}] has another groups.grad_stats than optimizers[0]; all must take one decision"
            )
    if any(one._recipe.overflows.listener is not None for one in optimizers):
        raise ArgumentError(
            "report_overflows() reports on one of the optimizers: call remove() of what it returned, and "
            "report_overflows() on the chain, which tells of all"
        )
    ids = [id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    if len(ids) != len(set(ids)):
        raise ArgumentError("two of the optimizers hold the same parameter; give each parameter to one optimizer")
