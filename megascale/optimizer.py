"""MixedPrecisionOptimizer: the recipe of a 16-bit step around any torch optimizer."""

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from megascale.base_optimizer import MegascaleOptimizer, require_scaler
from megascale.casting import warn_of_cast_buffers
from megascale.config import OptimizerConfig
from megascale.errors import ArgumentError, listed
from megascale.grad_scaler import MegatronGradScaler
from megascale.grad_sync.reduced_grads import ReducedGrads
from megascale.kernels import select_backend
from megascale.main_params.base import MainParams
from megascale.main_params.replica_check import require_same
from megascale.parallel import ParallelGroups
from megascale.state.extra_state import ExtraState
from megascale.state.live_state import LiveState
from megascale.state.state_view import StateView
from megascale.step import misuse
from megascale.step.arguments import (
    check_arguments,
    check_belongs,
    check_meta,
    check_policy,
    config_for,
    device_of,
)
from megascale.step.description import summary
from megascale.step.loaded_state import keep_loaded_state
from megascale.step.member import StepMember
from megascale.step.recipe import StepRecipe
from megascale.step.result import StepResult as StepResult
from megascale.step.update_selection import check_inner
from megascale.utils import announce, validate
from megascale.utils.calls import methods_outside_of_graphs


@methods_outside_of_graphs
class MixedPrecisionOptimizer(MegascaleOptimizer):
    """Wraps a torch optimizer for 16-bit training: fp32 main params, loss scaling, one skip decision on every rank.

    It is a ``torch.optim.Optimizer`` and shares the wrapped optimizer's ``param_groups`` (which hold the model params);
    its ``state`` shows the wrapped optimizer's, and beside it main params and scaler, keyed by model param. The recipe
    follows Megatron-Core's ``Float16OptimizerWithFloat16Params``; `found_inf`, scale, norm and clip coefficient live on
    the device.

    Args:
        optimizer: Adam, AdamW, SGD, Lion and Muon run without a host read; any other costs one, of `found_inf`, a step.
        config: None takes fp16 or bf16 from the parameters' dtypes.
        grad_scaler: required for fp16. Moved to the parameters' device.
        clip_grad: largest global L2 norm of the unscaled gradients; 0: they are not clipped. None: the config's,
            which is 0 unless it was set.
        groups: None, a ProcessGroup, a DeviceMesh or ParallelGroups; see :meth:`ParallelGroups.of`. None: the whole
            world is data parallel if torch.distributed is initialised.
        named_parameters: names for the state dict, as from ``model.named_parameters()``. Not given: the groups'
            ``param_names`` (torch sets them when the optimizer was built from named parameters), else positions.
        grad_sync: accumulates and reduces the gradients, in place of DistributedDataParallel. Its parameters are
            updated from their main grads; one that no rank has used is updated with a gradient of zeros.
        grads_are_scaled: True: you guarantee that gradients are multiplied by the scale, although none of
            :meth:`scale_loss`, :meth:`get_loss_scale` and ``grad_scaler.scale`` is used between two steps.
        replicas_may_differ: True lets ranks that hold the same parameters update them from different gradients.

    Raises:
        ArgumentError, ArgumentTypeError: for an argument that does not fit, naming it. With ``grad_sync``, which all
            ranks pass together, also where ranks hold different values of a parameter, or built different GradSyncs.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig | None = None,
        grad_scaler: MegatronGradScaler | None = None,
        *,
        clip_grad: float | None = None,
        groups: ParallelGroups | ProcessGroup | DeviceMesh | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        grad_sync: ReducedGrads | None = None,
        grads_are_scaled: bool = False,
        replicas_may_differ: bool = False,
    ) -> None:
        named = None if named_parameters is None else validate.named("named_parameters", named_parameters)
        main_params = self._make_main_params(named or ())
        check_arguments(optimizer, config, grad_scaler, sharded=main_params.is_sharded)
        if not main_params.is_sharded:  # sharded ones have checked modules, and a grad_sync without parameters yet
            check_belongs(optimizer, None if named is None else {id(param): name for name, param in named}, grad_sync)
        warn_of_cast_buffers(param for group in optimizer.param_groups for param in group["params"])
        check_inner(optimizer)
        ExtraState(optimizer, main_params).require_savable()
        misuse.check_unwrapped(optimizer)
        self._inner = optimizer
        self._config = config_for(optimizer, config, clip_grad)
        self._groups = ParallelGroups.of(groups)
        require_scaler(self._config, grad_scaler)
        check_policy(optimizer, grad_scaler)
        main_params.stores_remainders = self._config.store_param_remainders
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._constructed = True

        self._device = device_of(optimizer)
        main_params.live_in_host_memory(self._config, self._device)
        self._backend = select_backend(self._config.backend, self._device)
        self._member = StepMember(
            optimizer,
            self._config,
            self._groups,
            self._backend,
            self._device,
            main_params,
            grad_sync,
            replicas_may_differ=validate.flag("replicas_may_differ", replicas_may_differ),
        )
        self._recipe = StepRecipe(
            [self._member],
            self._groups,
            None,
            self._config.clip_grad,
            grads_are_scaled=validate.flag("grads_are_scaled", grads_are_scaled),
        )
        self._require_same(0)
        self._member.sync_from_model()
        misuse.record(self, optimizer)
        keep_loaded_state(self, optimizer)
        self.grad_scaler = grad_scaler
        if self._device.type != "meta":
            announce.on_first_rank(lambda: summary(type(self).__name__, self._recipe))

    def _require_same(self, first: int) -> None:
        """Raise ArgumentError on all ranks if parameters of the param groups from ``first`` on, or the GradSyncs that
        reduce their gradients, differ. Frozen parameters, too: nothing compares them when they are unfrozen.
        """
        grad_sync = self._member.grad_sync
        if grad_sync is None or not grad_sync.compares_replicas:
            return
        names = self._member.main_params.names(self._inner.param_groups)
        params: dict[str, nn.Parameter] = {}
        group_of: dict[str, int] = {}
        for index, group in enumerate(self._inner.param_groups[first:], first):
            own = {
                names[id(param)]: param
                for param in group["params"]
                # A frozen one that is sparse, a DTensor or quantized could not be trained here, nor be read bit by bit.
                if param.requires_grad or (type(param) is nn.Parameter and param.layout == torch.strided)
            }
            params |= own
            group_of |= dict.fromkeys(own, index)
        require_same(
            params.items(),
            self._groups,
            group_of,
            values_may_differ=self._member.replicas_may_differ,
            are_added=first > 0,
        )

    def _make_main_params(self, named: Iterable[tuple[str, Tensor]]) -> MainParams:
        """Return the MainParams; here every rank has all of them. ``named``: parameters that were given names."""
        return MainParams(named)

    def _parts(self) -> "list[MixedPrecisionOptimizer]":
        """Return the optimizer itself; see :meth:`MegascaleOptimizer._parts`."""
        return [self]

    @property
    def _reduces_in_backward(self) -> bool:
        """Whether gradients are reduced by a ``grad_sync``."""
        return self._member.grad_sync is not None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's param groups, shared: what is written here takes effect there."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if self._constructed:
            self._inner.param_groups = value

    @property
    def state(self) -> Any:
        """Each parameter's whole state, live: see :mod:`megascale.state.state_view`. A copy of it can be loaded."""
        if not self._constructed:
            return self._inner.state
        self._member.main_params.wait()
        return StateView([self._live_state()])

    @state.setter
    def state(self, value: Any) -> None:
        if self._constructed:
            self._inner.state = StateView([self._live_state()]).held_for(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group of model params (or of (name, param) pairs). Main params are made at once.

        With a GradSync, as in a DistributedOptimizer, all ranks call it together.

        Raises:
            ArgumentError: with nothing added, for a parameter that cannot be trained, that another optimizer of the
                chain has, or that is none of a DistributedOptimizer's ``modules``; or of which ranks that reduce
                gradients together hold different values.
            UsageError: on ranks that have waited for another one, which raised an error or did not call it. With
                nothing added.
        """
        if not self._constructed:
            return
        self._member.require_not_lent("add_param_group()")
        self._inner.add_param_group(param_group)
        chain = None if self._member.chain is None else self._member.chain()
        try:
            check_meta(self._inner)
            params = [
                id(param)
                for member in (chain or self._recipe).members
                for group in member.optimizer.param_groups
                for param in group["params"]
            ]
            if len(params) != len(set(params)):
                raise ArgumentError(
                    "another optimizer of the chain holds a parameter of this param group; leave it out"
                )
            self._member.update.check_options(self._inner.param_groups[-1])
            require_scaler(config_for(self._inner, None, None), self.grad_scaler)
            self._require_same(len(self._inner.param_groups) - 1)
            self._member.sync_from_model()
        except Exception:
            self._inner.param_groups.pop()
            raise

    def local_grad(self, name: str) -> Tensor | None:
        """Return this rank's gradient of the parameter ``name``, live and still scaled; None if it has none.

        Between a step's end and the next :meth:`zero_grad` it is the reduced one. With a GradSync it is the main grad,
        with a DistributedOptimizer this rank's piece of it: 1-D, empty where other ranks own all. Of a DTensor it is
        the local part. Divide by the scale of that step for the gradient of the loss.

        Raises ArgumentError for a name that no trainable parameter has.
        """
        for param in self._member.main_params:
            if param.name == name:
                return self._member.grads.grad_of(param)
        raise ArgumentError(
            f"name={name!r} is no trainable parameter of this optimizer; those are "
            f"{listed([param.name for param in self._member.main_params])}"
        )

    def _param_names(self) -> list[str]:
        """Return the names of all parameters, in the order of ``param_groups``."""
        return list(self._member.main_params.names(self.param_groups).values())

    @override
    def _packed(self, *, copy: bool, decode: bool, to_load: bool) -> dict[str, Any]:
        return self._live_state().pack(copy=copy, decode=decode)

    def _live_state(self) -> LiveState:
        """Return references to everything that a state dict covers."""
        return LiveState(
            self.param_groups,
            self._inner.state,
            self._member.main_params,
            self.grad_scaler,
            self._member.counter,
            ExtraState(self._inner, self._member.main_params),
            ref(self._member),
        )
