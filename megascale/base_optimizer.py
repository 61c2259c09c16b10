"""MegascaleOptimizer: what an optimizer offers that steps by a recipe, be it one optimizer or a chain of several."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.config import OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.grad_scaler import MegatronGradScaler
from megascale.kernels import Decision
from megascale.parallel import ParallelGroups
from megascale.state.live_state import LiveState, Plan
from megascale.state.schema import check_layout, under_live_names
from megascale.state.torch_layout import from_torch_layout, require_one_layout
from megascale.step import misuse
from megascale.step.arguments import check_grad_scaler
from megascale.step.description import described
from megascale.step.main_grads import lent_main_params
from megascale.step.misuse import require_values
from megascale.step.overflow_report import OverflowReport
from megascale.step.recipe import StepRecipe
from megascale.step.result import StepResult
from megascale.utils import announce, call_site, validate
from megascale.utils.calls import methods_outside_of_graphs, with_step_hooks
from megascale.utils.collectives import raise_together, raising_together
from megascale.utils.transfer import to_device_async

if TYPE_CHECKING:
    from megascale.optimizer import MixedPrecisionOptimizer


@methods_outside_of_graphs
class MegascaleOptimizer(torch.optim.Optimizer):
    """The step, the loss scale and the state dict of every optimizer here; of a chain, those of all its members.

    Attributes:
        _config: of the first member; what a decision depends on is the same in all.
        _recipe: orders the parts of a step, for one member or several.
        _groups, _device: of the first member.
    """

    _constructed = False
    _config: OptimizerConfig
    _groups: ParallelGroups
    _device: torch.device
    _recipe: StepRecipe

    def _parts(self) -> "list[MixedPrecisionOptimizer]":
        """Return the optimizers that hold the parameters: a chain's members, or the optimizer itself."""
        raise NotImplementedError

    def _settings_error(self) -> UsageError | None:
        """Return an error if what was set since the last step does not fit together."""
        return misuse.scaler_conflict(self._recipe.grad_scaler, (self,))

    # The step

    @with_step_hooks
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> StepResult:  # type: ignore[override]
        """Take one step with the gradients that backward left, or skip it on every rank alike.

        After :meth:`prepare_grads` it takes the step that was decided there.

        Raises:
            UsageError: for a closure; for gradients of a loss that was not scaled, or that differ between ranks which
                hold the same parameters.
            GradientError: for a sparse gradient, naming the parameter.
            StateDictError: in the first step, for an option of a param group that a state dict cannot hold.
            MainParamOverflowError: for a main param that rounds to inf in fp16, naming the parameter.
            InnerStepError: for what the update itself raised, as for want of memory: some main params may be updated
                and others not. On several ranks the next step raises it.

        All ranks raise at the same step: at once, or one step late where the host would have to wait for the device.
        """
        error = self._settings_error()
        if closure is not None:
            error = UsageError(
                "step() takes no closure: run forward and backward first, with the loss from scale_loss()"
            )
            if self._decision is not None:  # no rank waits for this one's statistics
                raise error
        return self._recipe.step(error)

    @torch.no_grad()
    def prepare_grads(self) -> Tensor:
        """First half of a step: finish, measure, agree, decide, rescale. Returns `found_inf`, fp32 0-d, without a sync.

        The scaler is updated here, as Megatron-Core does it, so that a caller may leave out the second half of a
        skipped step. The decision keeps the reciprocal of the scale that scaled this step's loss.

        :meth:`step_with_ready_grads` or :meth:`step` then takes the step, once; :meth:`zero_grad` drops it. Leave
        gradients alone in between, but for :meth:`clip_grad_value_`: the update reads those that are there, and norm
        and `found_inf` stay those that were measured here. A second call raises UsageError if neither the step was
        taken nor :meth:`zero_grad` called.
        """
        return self._recipe.prepare(self._settings_error()).found_inf

    @property
    def _decision(self) -> Decision | None:
        """What :meth:`prepare_grads` decided, until :meth:`step_with_ready_grads` carries it out; else None."""
        return self._recipe.decision

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
        error: Exception | None = self._settings_error()
        limit = 0.0
        try:
            if not isinstance(max_norm, (int, float)):
                raise ArgumentTypeError(
                    f"max_norm must be a number, got {type(max_norm).__name__}: the optimizer clips all of its own "
                    "parameters by one norm, so call optimizer.clip_grad_norm_(1.0), without them"
                )
            if norm_type != 2:
                raise ArgumentError(f"norm_type must be 2, the norm that the optimizer clips by, got {norm_type!r}")
            if max_norm != math.inf:
                limit = validate.positive("max_norm", max_norm)
        except ArgumentError as caught:  # other ranks wait for this one's statistics
            error = caught
        return self._recipe.prepare(error, limit).grad_norm

    @torch.no_grad()
    def clip_grad_value_(self, max_value: float) -> None:
        """Clamp every element of the unscaled, norm-clipped gradients to [-max_value, max_value]. In place, no sync.

        Call it between :meth:`prepare_grads` and :meth:`step_with_ready_grads`; the gradients stay scaled. Elementwise,
        as ``torch.nn.utils.clip_grad_value_``; a step with non-finite gradients is skipped as without it.
        """
        self._recipe.clip_values_(validate.positive("max_value", max_value))

    @torch.no_grad()
    def step_with_ready_grads(self) -> StepResult:
        """Second half of a step: update main params, optimizer state and model params, where the step lands."""
        return self._recipe.apply()

    @property
    def num_skipped_steps(self) -> Tensor:
        """Skipped steps, those before a load too: int64, 0-d, on the device."""
        return self._recipe.members[0].counter.skipped

    @property
    def num_landed_steps(self) -> Tensor:
        """Steps that landed, those before a load too: int64, 0-d, on the device."""
        return self._recipe.members[0].counter.landed

    @property
    def grad_scaler(self) -> MegatronGradScaler | None:
        """The scaler of the loss. May be set between steps, on all ranks alike; it moves to the parameters' device."""
        return self._recipe.grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, value: MegatronGradScaler | None) -> None:
        check_grad_scaler(value)
        for part in self._parts():
            require_scaler(part._config, value)
        if value is not None:
            if self._device.type != "meta":  # a move to meta would erase its state
                value.to(self._device)
            value.backend = self._parts()[0]._backend
            for part in self._parts():
                misuse.record_user(part, value)
        for one in (self, *self._parts()):
            one._recipe.set_grad_scaler(value)

    @property
    def clip_grad(self) -> float:
        """Largest global L2 norm of the unscaled gradients; 0: no clipping. Starts as the constructor's ``clip_grad``.

        May be set between steps, to the same number on all ranks. A captured graph keeps the number it was captured
        with.
        """
        return self._recipe.clip_grad

    @clip_grad.setter
    def clip_grad(self, value: float) -> None:
        limit = validate.non_negative("clip_grad", value)
        for one in (self, *self._parts()):
            one._recipe.clip_grad = limit

    def last_overflow(self, *, gather: bool = False) -> OverflowReport | None:
        """Return which gradients held inf or NaN in the last step that was skipped; None if none was.

        Ask between that step and the next backward: inf and NaN are told apart, and the largest finite value is known,
        while the gradients are there, or under :func:`megascale.debug.report_overflows`. Waits for the device.

        Args:
            gather: report the gradients of all ranks. All of ``groups.grad_stats`` call it together. False: this
                rank's; those of all ranks where they are known already.
        """
        return self._recipe.overflows.last(gather=validate.flag("gather", gather))

    # The loss

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss * scale`` in at least fp32, as fp16 could overflow. Without a scaler: the loss itself.

        Raises ArgumentTypeError for a loss that is no tensor: it has no gradients.
        """
        if not isinstance(loss, Tensor):
            raise ArgumentTypeError(
                f"loss must be a tensor with its graph, got {loss!r} of type {type(loss).__name__}; scale what the "
                "loss function returned, not loss.item()"
            )
        self._recipe.overflows.losses.add(loss)
        if self.grad_scaler is None:
            return loss
        scale = to_device_async(self.grad_scaler.scale.reshape(()), loss.device)
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale

    def get_loss_scale(self) -> Tensor:
        """Return the current scale: fp32, 0-d, on the device; 1 without a scaler.

        Who reads it may scale the loss by it: the next step does not find a loss that nobody has scaled. For a log read
        ``grad_scaler.live_scale``, which does not count.
        """
        if self.grad_scaler is None:
            return torch.ones((), dtype=torch.float32, device=self._device)
        return self.grad_scaler.scale.reshape(()).clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) all gradients, those of ``grad_sync`` too, and a step that was prepared and not taken."""
        for member in self._recipe.members:
            member.require_not_lent("zero_grad()")
        super().zero_grad(set_to_none)
        self._recipe.discard_prepared()
        for member in self._recipe.members:
            if member.grad_sync is not None:
                member.grad_sync.zero_()

    @contextmanager
    def main_grads(self) -> "Iterator[Any]":
        """Show the wrapped optimizer its main params and unscaled fp32 gradients, for its methods besides ``step()``.

            with optimizer.main_grads() as inner:
                inner.update_hessian()

        After the backward whose gradients it shall see; all of ``groups.grad_stats`` enter and leave it together. No
        forward and backward inside, and no call of this optimizer. It yields the wrapped optimizer; of a chain, a tuple
        of them. Gradients are not clipped; those of the model stay, scaled, unless the method has dropped all that it
        was shown, as ``inner.zero_grad()`` does. Model params are rounded at the end. The loss scale does not move: the
        next :meth:`step` judges its own gradients.

        If gradients overflowed, on any rank, the body runs, and all that it has written is taken back at the end: main
        params, the state, options and plain attributes of the wrapped optimizer. So it is if the body raises, on any
        rank. The host reads `found_inf`; main params and state are copied for as long as it lasts.

        Raises:
            UsageError: with pieces of parameters or main params in host memory; inside itself; between
                :meth:`prepare_grads` and the step. As :meth:`step` for gradients that it would refuse.
            MainParamOverflowError: as :meth:`step`.
            RankError: on every rank, if the body has raised on one of several.
        """
        members, parts = self._recipe.members, self._parts()
        with lent_main_params(self._recipe, members, self._settings_error(), with_grads=True) as dropped:
            inner = [part._inner for part in parts]
            yield inner[0] if parts == [self] else tuple(inner)
        for member, part in zip(members, parts, strict=True):
            if any(member is one for one in dropped):
                part.zero_grad()

    def train(self) -> None:
        """Call the wrapped optimizer's ``train()``, of schedule-free optimizers, on main params, if it has one.

        As in :meth:`main_grads`, without gradients. All ranks call it together.
        """
        self._call_wrapped("train")

    def eval(self) -> None:
        """Call the wrapped optimizer's ``eval()``; see :meth:`train`."""
        self._call_wrapped("eval")

    def _call_wrapped(self, name: str) -> None:
        having = [member for member in self._recipe.members if callable(getattr(member.optimizer, name, None))]
        if having:
            with lent_main_params(self._recipe, having, None, with_grads=False):
                for member in having:
                    getattr(member.optimizer, name)()

    def main_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, main param) of every trainable parameter, live. An fp32 model param is its own main param.

        What is written into them reaches the model with the next step.
        With ``store_param_remainders`` those of 16-bit parameters are decoded copies, which nobody reads back.
        """
        for member in self._recipe.members:
            member.sync_from_model()
        return ((param.name, param.value()) for member in self._recipe.members for param in member.main_params)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Set every main param to its model param's value exactly, as after loading weights into the model.

        Weights written in place through torch (``load_state_dict``, ``copy_``) are detected at the next step without
        this call; writes through ``param.data`` or raw memory are not.
        """
        for member in self._recipe.members:
            member.sync_from_model()
            for param in member.main_params:
                if param.is_copy:
                    param.reload()
        self._recipe.reset_errors()

    def finish_param_gather(self) -> None:
        """Wait until parameters are gathered, or back from host memory. Modules wait in forward and for state dicts.

        With ``overlap_param_gather`` and ``overlap_cpu_optimizer_d2h_h2d`` call it after a step and before anything
        else that reads weights, as a copy of the model does, or writes them: weights that arrive later replace what was
        written, and the next step refuses such a write.
        """
        for member in self._recipe.members:
            member.main_params.wait()

    def offload(self, *, pin: bool = True) -> None:
        """Move main params, optimizer state and main grads to host memory until :meth:`reload`, with every bit.

        Waits for the device, communicates nothing. Tensors stay the same objects; main grads have no memory meanwhile.
        Until then only reads work, such as ``state_dict()``. ``pin=False``: pageable memory, slower copies.
        Raises UsageError, with nothing moved, for too little host memory, or a step that is under way.
        """
        validate.flag("pin", pin)
        for member in self._recipe.members:
            member.offload(pin=pin)

    def reload(self) -> None:
        """Bring back what :meth:`offload` moved, if it did. Weights loaded into the model meanwhile count as always."""
        for member in self._recipe.members:
            member.reload()

    # State

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return all state, by parameter name: tensors, numbers, strings, dtypes and devices only.

        It has the same keys on every rank, and the same types however long the program has run.

        The functions of ``torch.distributed.checkpoint.state_dict`` take it too: :mod:`megascale.state.torch_layout`.
        ``copy=False`` returns live tensors instead of copies: for a caller that writes them out before the next step.
        Clone those that :meth:`load_state_dict` is to give to another parameter: it copies one after the other.

        Raises:
            InnerStepError: the last update failed in host memory, so that main params may be updated in part. It is
                raised once; with ``copy=True`` on every rank, with ``copy=False`` on this one.
        """
        return self._pack(copy=copy)

    def _pack(self, *, copy: bool, decode: bool = True, to_load: bool = False) -> dict[str, Any]:
        """Return the state dict. ``decode``: False leaves remainders, int16, in place of the main params held so.

        Such a state dict is for a checkpoint, which saves the weights beside it: ``load_state_dict`` needs fp32.
        ``to_load``: its values are about to be replaced, and may be those that an update has left which failed.
        """
        error: Exception | None = None
        try:
            for pre_hook in self._optimizer_state_dict_pre_hooks.values():
                pre_hook(self)
            for member in self._recipe.members:
                member.sync_to_pack(to_load=to_load)
        except Exception as caught:  # whatever it is: other ranks wait
            error = caught
        if copy:
            for member in self._recipe.members:
                member.main_params.agree(error)
        elif error is not None:
            raise error
        packed = self._packed(copy=copy, decode=decode, to_load=to_load)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            packed = post_hook(self, packed) or packed
        return packed

    def _packed(self, *, copy: bool, decode: bool, to_load: bool) -> dict[str, Any]:
        """Return the state dict as :meth:`_pack` does, without hooks; what the model's owner wrote is taken over."""
        raise NotImplementedError

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Load what :meth:`state_dict` returned, at any number of ranks; all of ``groups.grad_stats`` call it together.

        Everything is checked first, all ranks agree, then main params, state, options and scaler change, and model
        params are rounded anew from their main params. ``strict=False`` skips names that only one side has.
        What ``torch.distributed.checkpoint.state_dict`` makes of such a state dict loads too. So do the state dict of a
        plain torch optimizer and that of a run in another precision, once the model's weights are loaded: see
        :mod:`megascale.state.schema`. A warning tells what they lack.

        Raises:
            StateDictError, MainParamOverflowError: on every rank alike; nothing has changed.
            RankError, or another: of a hook; all ranks raise it. After that of a post hook all is loaded. After one
                while values are copied, as of memory, a part is: load again.
        """
        require_values(self._device)
        planned: list[tuple[LiveState, Plan]] = []
        # Nothing changes in here. To load may communicate, and no rank must be missing in it.
        with raising_together(self._groups.grad_stats):
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = pre_hook(self, state_dict) or state_dict
            parts = self._live_parts(state_dict, strict)
            planned = [(live, live.plan(part, strict=strict)) for live, part in parts]
        error: Exception | None = None
        for live, plan in planned:
            try:
                live.apply(plan)
            except Exception as caught:  # the optimizers of a chain that follow gather weights, for which others wait
                error = error or caught
        raise_together(error, self._groups.grad_stats)
        self._recipe.start_anew(is_whole=strict)
        # Of a chain, and of every rank, they are the same.
        if (
            remarks := dict.fromkeys(remark for _, plan in planned for remark in plan.remarks)
        ) and announce.is_first_rank():
            call_site.warn(f"load_state_dict() takes moments and options as they were saved; {'; '.join(remarks)}")
        with raising_together(self._groups.grad_stats):
            for post_hook in self._optimizer_load_state_dict_post_hooks.values():
                post_hook(self)

    def _live_states(self) -> list[LiveState]:
        """Return the live state of each optimizer that steps here, with the model's changes taken over."""
        for member in self._recipe.members:
            member.sync_from_model()
        return [part._live_state() for part in self._parts()]

    def _live_parts(self, state_dict: Any, strict: bool) -> list[tuple[LiveState, Mapping[str, Any]]]:
        """Return each of :meth:`_live_states` and its part of a state dict of any layout: in ours, under live names.

        Raises StateDictError.
        """
        lives = self._live_states()
        require_one_layout(state_dict)
        # Torch's own keys at the top, and not ours: of a torch optimizer, or of torch.distributed.checkpoint.
        if isinstance(state_dict, Mapping) and "param_groups" in state_dict and "optimizer" not in state_dict:
            live = self._packed(copy=False, decode=True, to_load=True)
            state_dict = from_torch_layout(state_dict, live, strict=strict)
        check_layout(state_dict, strict=strict)
        named = under_live_names(state_dict, [names for live in lives for names in live.names()])
        return list(zip(lives, self._split(named, strict), strict=True))

    def _split(self, state_dict: Mapping[str, Any], strict: bool) -> list[Mapping[str, Any]]:
        """Return each optimizer's part of a state dict. Raises StateDictError for a part that belongs to none."""
        return [state_dict]

    def __repr__(self) -> str:
        if not self._constructed:
            return object.__repr__(self)
        return described(type(self).__name__, self._recipe)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            f"a {type(self).__name__} cannot be pickled or deep-copied (it holds process groups); use state_dict()"
        )


def require_scaler(config: OptimizerConfig, grad_scaler: MegatronGradScaler | None) -> None:
    """Raise ArgumentError where fp16 gradients have no scaler."""
    if config.fp16 and grad_scaler is None:
        raise ArgumentError(
            "grad_scaler is None, but fp16 gradients need one; pass a DynamicGradScaler (or "
            "ConstantGradScaler), or train in bf16"
        )
