"""MixedPrecisionOptimizer: the recipe of a 16-bit step around any torch optimizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megascale.config import OptimizerConfig, offload_fraction
from megascale.errors import ArgumentError, UsageError, listed
from megascale.grad_scaler import MegatronGradScaler
from megascale.grad_sync.reduced_grads import ReducedGrads
from megascale.kernels import Decision, select_backend
from megascale.main_params.base import MainParams
from megascale.main_params.replica_check import require_same
from megascale.main_params.replicated import ReplicatedMainParams
from megascale.parallel import ParallelGroups
from megascale.state.hooks import load_with_hooks, pack_with_hooks, raise_own
from megascale.state.live_state import LiveState
from megascale.state.state_view import Source, StateView
from megascale.step import ownership
from megascale.step.arguments import check_arguments, check_grad_scaler, config_for, device_of, require_values
from megascale.step.description import described, summary
from megascale.step.member import StepMember
from megascale.step.overflow_report import OverflowReport
from megascale.step.recipe import StepRecipe
from megascale.step.result import StepResult as StepResult
from megascale.step.update_selection import check_inner
from megascale.utils import announce, validate
from megascale.utils.spelling import names_arguments
from megascale.utils.step_hooks import with_step_hooks


@names_arguments
class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer for 16-bit training: fp32 main params, loss scaling, one skip decision on every rank.

    It is a ``torch.optim.Optimizer`` and shares the wrapped optimizer's ``param_groups`` (which hold the model params);
    its ``state`` shows the wrapped optimizer's, and beside it main params and scaler, keyed by model param. The recipe
    follows Megatron-Core's ``Float16OptimizerWithFloat16Params``; `found_inf`, scale, norm and clip coefficient never
    leave the device.

    Args:
        optimizer: Adam, AdamW, SGD, Lion and Muon run without a host read; any other costs one, of `found_inf`, a step.
        config: None takes fp16 or bf16 from the parameters' dtypes.
        grad_scaler: required for fp16. Moved to the parameters' device.
        clip_grad: largest global L2 norm of the unscaled gradients; 0: they are not clipped. None: the config's;
            without a config they are not clipped.
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

    _constructed = False

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
        main_params = self._make_main_params({id(param): name for name, param in named_parameters or ()})
        check_arguments(optimizer, config, grad_scaler, sharded=main_params.is_sharded)
        if clip_grad is not None:
            validate.non_negative("clip_grad", clip_grad)
        check_inner(optimizer)
        ownership.check_unwrapped(optimizer)
        self.optimizer = optimizer
        self.config = config_for(optimizer, config, clip_grad)
        self.groups = ParallelGroups.of(groups)
        _check_scaler(self.config, grad_scaler)
        main_params.stores_remainders = self.config.store_param_remainders
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._constructed = True

        self.device = device_of(optimizer)
        main_params.live_in_host_memory(self.config, self.device)
        self.backend = select_backend(self.config.backend, self.device)
        self._member = StepMember(
            optimizer,
            self.config,
            self.groups,
            self.backend,
            self.device,
            main_params,
            grad_sync,
            replicas_may_differ=validate.flag("replicas_may_differ", replicas_may_differ),
        )
        are_scaled = validate.flag("grads_are_scaled", grads_are_scaled)
        self.recipe = StepRecipe([self._member], self.groups, None, self.config.clip_grad, grads_are_scaled=are_scaled)
        has_values = self.device.type != "meta"  # a move to meta would erase the scaler's state
        self.grad_scaler = grad_scaler.to(self.device) if grad_scaler is not None and has_values else grad_scaler
        if self.grad_scaler is not None:
            self.grad_scaler.backend = self.backend
        self._replicas_may_differ = replicas_may_differ
        self._require_same(0)
        self._member.sync_from_model()
        self._member.unverified_params.clear()
        ownership.record(self, optimizer, self.grad_scaler)
        if has_values:
            announce.on_first_rank(self._summary)

    def _summary(self) -> str:
        return summary(type(self).__name__, self._member, self.groups, self.grad_scaler, self.clip_grad)

    def _require_same(self, first: int) -> None:
        """Raise ArgumentError on all ranks if trainable parameters of the param groups from ``first`` on, or the
        GradSyncs that reduce their gradients, differ.
        """
        grad_sync = self._member.grad_sync
        if grad_sync is None or not grad_sync.compares_replicas:
            return
        names = self._member.main_params.names(self.optimizer.param_groups)
        trained: dict[str, nn.Parameter] = {}
        group_of: dict[str, int] = {}
        for index, group in enumerate(self.optimizer.param_groups[first:], first):
            own = {names[id(param)]: param for param in group["params"] if param.requires_grad}
            trained |= own
            group_of |= dict.fromkeys(own, index)
        may_differ, remedy = self._replicas_may_differ, "pass replicas_may_differ=True"
        require_same(trained.items(), self.groups, remedy, group_of, values_may_differ=may_differ)

    def _make_main_params(self, names: Mapping[int, str]) -> MainParams:
        """Return the MainParams; here every rank has all of them. ``names``: parameter names by ``id(param)``."""
        return ReplicatedMainParams(names)

    # The step

    @with_step_hooks
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> StepResult:  # type: ignore[override]
        """Take one step with the gradients that backward left, or skip it on every rank alike.

        After :meth:`prepare_grads` it takes the step that was decided there, if its gradients are there unchanged, or
        were dropped.

        Raises:
            UsageError: for a closure; for gradients of a loss that was not scaled, or that differ between ranks which
                hold the same parameters; for gradients that have changed since :meth:`prepare_grads`.
            GradientError: for a sparse gradient, naming the parameter.
            MainParamOverflowError: for a main param that rounds to inf in fp16, naming the parameter.

        All ranks raise at the same step: at once, or one step late where the host would have to wait for the device.
        """
        if closure is not None:
            raise UsageError("step() takes no closure: run forward and backward first, with the loss from scale_loss()")
        return self.recipe.step(self._scaler_error())

    @torch.no_grad()
    def prepare_grads(self) -> Tensor:
        """First half of a step: finish, measure, agree, decide, rescale. Returns `found_inf`, fp32 0-d, without a sync.

        The scaler is updated here, as Megatron-Core does it, so that a caller may leave out the second half of a
        skipped step. The decision keeps the reciprocal of the scale that scaled this step's loss.

        :meth:`step_with_ready_grads` or :meth:`step` then takes the step, once. Gradients are measured once: a second
        call without :meth:`zero_grad` before it raises UsageError.
        """
        decision = self.recipe.prepare(self._scaler_error())
        self.recipe.hold_grads()
        return decision.found_inf

    def _scaler_error(self) -> UsageError | None:
        return ownership.scaler_conflict(self.grad_scaler, (self,))

    @property
    def decision(self) -> Decision | None:
        """What :meth:`prepare_grads` decided, until :meth:`step_with_ready_grads` carries it out; else None."""
        return self.recipe.decision

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Begin the step as :meth:`prepare_grads` does, and let it clip to ``max_norm`` instead of :attr:`clip_grad`.

        For a loop that clips by itself; :meth:`step` then takes the step. ``clip_grad=`` needs no call. The gradients
        in ``param.grad`` stay scaled and unclipped: the update multiplies them by one coefficient. No host wait.

        Args:
            max_norm: above 0; inf only measures. The same on all ranks.
            norm_type: 2.

        Returns:
            The global norm of the unscaled gradients before clipping, over all ranks: fp32, 0-d, on the device.
            Non-finite if the step will be skipped.

        Raises:
            ArgumentError, ArgumentTypeError: for parameters in the place of ``max_norm``, or another norm.
            UsageError: as :meth:`prepare_grads`; also if called twice a step.
        """
        return self.recipe.prepare_clipped(max_norm, norm_type, self._scaler_error())

    @torch.no_grad()
    def clip_grad_value_(self, max_value: float) -> None:
        """Clamp every element of the unscaled, norm-clipped gradients to [-max_value, max_value]. In place, no sync.

        Call it between :meth:`prepare_grads` and :meth:`step_with_ready_grads`; the gradients stay scaled. Elementwise,
        as ``torch.nn.utils.clip_grad_value_``; a step with non-finite gradients is skipped as without it.
        """
        max_value = validate.positive("max_value", max_value)
        self.recipe.clip_values_(max_value)

    @torch.no_grad()
    def step_with_ready_grads(self) -> StepResult:
        """Second half of a step: update main params, optimizer state and model params, where the step lands."""
        return self.recipe.apply()

    @property
    def reduces_in_backward(self) -> bool:
        """Whether our hooks reduce gradients during backward."""
        return self._member.grad_sync is not None

    @property
    def num_skipped_steps(self) -> Tensor:
        """Skipped steps, those before a load too: int64, 0-d, on the device."""
        return self._member.counter.skipped

    @property
    def num_landed_steps(self) -> Tensor:
        """Steps that landed, those before a load too: int64, 0-d, on the device."""
        return self._member.counter.landed

    @property
    def grad_scaler(self) -> MegatronGradScaler | None:
        """The scaler of the loss. May be set between steps, on all ranks alike."""
        return self.recipe.grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, value: MegatronGradScaler | None) -> None:
        check_grad_scaler(value)
        _check_scaler(self.config, value)
        self.recipe.grad_scaler = value

    @property
    def clip_grad(self) -> float:
        """Largest global L2 norm of the unscaled gradients; 0: no clipping. Starts as the constructor's ``clip_grad``.

        May be set between steps, to the same number on all ranks. A captured graph keeps the number it was captured
        with.
        """
        return self.recipe.clip_grad

    @clip_grad.setter
    def clip_grad(self, value: float) -> None:
        self.recipe.clip_grad = validate.non_negative("clip_grad", value)

    @property
    def optimizer_offload_fraction(self) -> float:
        """The share of the 16-bit parameters' elements in host memory, at least; starts as the config's.

        May be set between steps, to the same number on all ranks together: main params and state move with every bit,
        and the host waits for the copies. "auto": all go to host memory, and the next steps are measured anew.
        UsageError without ``optimizer_cpu_offload``, or in the middle of a step.
        """
        return self._member.main_params.offload_fraction

    @optimizer_offload_fraction.setter
    def optimizer_offload_fraction(self, value: float | str) -> None:
        overlaps = self.config.overlap_cpu_optimizer_d2h_h2d
        self._member.set_offload_fraction(offload_fraction(value, overlaps=overlaps))

    def last_overflow(self, *, gather: bool = False) -> OverflowReport | None:
        """Return which gradients held inf or NaN in the last step that was skipped; None if none was.

        Ask between that step and the next backward: inf and NaN are told apart, and the largest finite value is known,
        while the gradients are there, or under :func:`megascale.debug.report_overflows`. Waits for the device.

        Args:
            gather: report the gradients of all ranks. All of ``groups.grad_stats`` call it together. False: this
                rank's; those of all ranks where they are known already.
        """
        return self.recipe.overflows.last(gather=validate.flag("gather", gather))

    # The loss

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss * scale`` in at least fp32, as fp16 could overflow. Without a scaler: the loss itself.

        Raises ArgumentTypeError for a loss that is no tensor: it has no gradients.
        """
        return self.recipe.scale_loss(loss)

    def get_loss_scale(self) -> Tensor:
        """Return the current scale: fp32, shape [1], on the device; ones without a scaler."""
        return self.recipe.get_loss_scale()

    # Parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's param groups, shared: what is written here takes effect there."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if self._constructed:
            self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """Each parameter's whole state, live: see :mod:`megascale.state.state_view`. A copy of it can be loaded."""
        if not self._constructed:
            return self.optimizer.state
        self._member.main_params.wait_for_arrivals()
        return StateView([self.state_source()])

    @state.setter
    def state(self, value: Any) -> None:
        if self._constructed:
            self.optimizer.state = StateView([self.state_source()]).held_for(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) all gradients, those of ``grad_sync`` too."""
        super().zero_grad(set_to_none)
        if self._member.held is not None:
            self._member.held.are_zeroed = True
        if self._member.grad_sync is not None:
            self._member.grad_sync.zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group of model params (or of (name, param) pairs). Main params are made at once.

        With a GradSync, as in a DistributedOptimizer, all ranks call it together. One that calls it alone waits for the
        others; :class:`megascale.rank_watch.RankWatch` names them.

        Raises ArgumentError, with nothing added, for a parameter that cannot be trained, or of which ranks that reduce
        gradients together hold different values.
        """
        if not self._constructed:
            return
        self.optimizer.add_param_group(param_group)
        try:
            self._require_same(len(self.optimizer.param_groups) - 1)
            self._member.sync_from_model()
        except Exception:
            self.optimizer.param_groups.pop()
            raise
        for param in self.optimizer.param_groups[-1]["params"]:
            main = self._member.main_params.get(param)
            if main is not None:
                self._member.unverified_params.pop(main.name, None)

    def main_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, main param) of every trainable parameter, live. An fp32 model param is its own main param.

        With ``store_param_remainders`` those of 16-bit parameters are decoded copies, which nobody reads back.
        """
        self._member.sync_from_model()
        return ((param.name, param.value()) for param in self._member.main_params)

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

    def param_names(self) -> list[str]:
        """Return the names of all parameters, in the order of ``param_groups``."""
        return list(self._member.main_params.names(self.param_groups).values())

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Set every main param to its model param's value exactly, as after loading weights into the model.

        Weights written in place through torch (``load_state_dict``, ``copy_``) are detected at the next step without
        this call; writes through ``param.data`` or raw memory are not.
        """
        require_values(self.device)
        self._member.sync_from_model()
        for param in self._member.main_params:
            if param.is_copy:
                param.reload()
        self.recipe.reset_errors()

    def finish_param_gather(self) -> None:
        """Wait until parameters are gathered, or back from host memory. Modules wait for their own by themselves."""
        self._member.main_params.wait()

    def offload(self, *, pin: bool = True) -> None:
        """Move main params, optimizer state and main grads to host memory until :meth:`reload`, with every bit.

        Waits for the device, communicates nothing. Tensors stay the same objects; main grads have no memory meanwhile.
        Until then only reads work, such as ``state_dict()``. ``pin=False``: pageable memory, slower copies.
        Raises UsageError, with nothing moved, for too little host memory, or a step that is under way.
        """
        self._member.offload(pin=validate.flag("pin", pin))

    def reload(self) -> None:
        """Bring back what :meth:`offload` moved, if it did. Weights loaded into the model meanwhile count as always."""
        self._member.reload()

    # State

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return all state, by parameter name: tensors and primitives only, the same keys on every rank.

        The functions of ``torch.distributed.checkpoint.state_dict`` take it too: :mod:`megascale.state.torch_layout`.
        ``copy=False`` returns live tensors instead of copies: for a caller that writes them out before the next step.

        Raises:
            InnerStepError: the last update failed in host memory, so that main params may be updated in part. It is
                raised once; with ``copy=True`` on every rank, with ``copy=False`` on this one.
        """
        return self.pack(copy=copy)

    def pack(self, *, copy: bool, decode: bool = True, to_load: bool = False) -> dict[str, Any]:
        """Return the state dict. ``decode``: False leaves remainders, int16, in place of the main params held so.

        Such a state dict is for a checkpoint, which saves the weights beside it: ``load_state_dict`` needs fp32.
        ``to_load``: its values are about to be replaced, and may be those that an update has left which failed.
        """
        require_values(self.device)
        agree = self._member.main_params.agree if copy else raise_own
        sync = partial(self._member.sync_to_pack, to_load=to_load)
        return pack_with_hooks(self, sync, lambda: self.live_state().pack(copy=copy, decode=decode), agree)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Load what :meth:`state_dict` returned, at any number of ranks; all of ``groups.grad_stats`` call it together.

        Everything is checked first, all ranks agree, then main params, state, options and scaler change, and model
        params are rounded anew from their main params. ``strict=False`` skips names that only one side has.
        What ``torch.distributed.checkpoint.state_dict`` makes of such a state dict loads too.

        Raises:
            StateDictError, MainParamOverflowError: on every rank alike; nothing has changed.
        """
        require_values(self.device)
        done = partial(self.recipe.start_anew, is_whole=strict)
        load_with_hooks(self, state_dict, strict, self.live_parts, done, self.groups.grad_stats)

    def live_state(self) -> LiveState:
        """Return references to everything that a state dict covers."""
        require_values(self.device)
        return self._live()

    def _live(self) -> LiveState:
        member, norms = self._member, self.recipe.norm_statistics
        held, mains = self.optimizer.state, member.main_params
        return LiveState(self.param_groups, held, mains, member.update, self.grad_scaler, member.counter, norms)

    def state_source(self) -> Source:
        """Return what :attr:`state` shows."""
        return Source.of(self._live(), self._member.sync_from_model)

    def live_states(self) -> list[LiveState]:
        """Return the live state of each optimizer that steps here, this one, with the model's changes taken over."""
        self._member.sync_from_model()
        return [self.live_state()]

    def live_parts(self, state_dict: dict[str, Any], strict: bool) -> list[tuple[LiveState, dict[str, Any]]]:
        """Return each of :meth:`live_states` and its part of a state dict."""
        return [(live, state_dict) for live in self.live_states()]

    def __repr__(self) -> str:
        if not self._constructed:
            return object.__repr__(self)
        return described(type(self).__name__, [self._member], self.groups, self.grad_scaler, self.clip_grad)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "a MixedPrecisionOptimizer cannot be pickled or deep-copied (it holds process groups); use state_dict()"
        )


def _check_scaler(config: OptimizerConfig, grad_scaler: MegatronGradScaler | None) -> None:
    if config.fp16 and grad_scaler is None:
        raise ArgumentError(
            "grad_scaler is None, but fp16 gradients need one; pass a DynamicGradScaler (or "
            "ConstantGradScaler), or train in bf16"
        )
