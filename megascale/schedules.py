"""LR schedules that follow landed steps only, without a host sync.

A skipped step must not advance a schedule, and the host learns of a skip one step late. So the host advances the
schedule as if the step had landed, the device chooses between the rate before and the rate after, and the host takes
the advance back when it learns of a skip, before it advances again. The rate of every step is that of the number of
steps landed before it, exactly.
"""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from megascale.errors import ArgumentError, ArgumentTypeError, StateDictError
from megascale.host_view import HostView
from megascale.landed.learning_rates import GroupRates, number_of, takes_rates_on_device
from megascale.landed.steps import StepOutcomes
from megascale.utils.calls import methods_outside_of_graphs
from megascale.utils.portable import LEAVES, plain

_OWN = frozenset(("scheduler", "optimizer", "_outcomes", "_rates", "_view", "_pending"))
"""The attributes of a LandedLRScheduler; all others are those of the schedule in it."""


class _Advance(NamedTuple):
    """What is restored if an advance turns out to have been made for a skipped step: the state and rates before it."""

    state: dict[str, Any]
    rates: list[float]


@methods_outside_of_graphs
class LandedLRScheduler(LRScheduler):
    """A torch LR scheduler that counts landed steps only. Call :meth:`step` after every ``optimizer.step()``.

        schedule = LandedLRScheduler(OneCycleLR(optimizer, 1e-3, total_steps=1000, cycle_momentum=False))
        ...
        result = optimizer.step()
        schedule.step(result.success)

    ``group["lr"]`` becomes a 0-d tensor on the device: fp64, so that the update reads the very number that the schedule
    computed (fp32 for a torch optimizer). The host waits for the device only where it must
    know at once whether the step landed:

    - the optimizer's update needs the decision on the host (any but Adam, AdamW, SGD, Lion and Muon; see
      ``MixedPrecisionOptimizer``), or it is a torch optimizer neither fused nor capturable: rates stay numbers;
    - the schedule changes momentum or betas, as OneCycleLR and CyclicLR do unless ``cycle_momentum=False``;
    - the schedule raises, for example at its end: the error is passed on only if the step landed;
    - other code has written the rate's tensor, as ``load_state_dict`` does: it is read once. A number put into
      ``group["lr"]`` needs no wait. The schedule goes on from the new rate, as torch's own do.

    Add all param groups before the scheduler is built: with a later one :meth:`step` raises UsageError.

    All other attributes (``last_epoch``, ``base_lrs``, ...) are the wrapped scheduler's; reading or setting one here
    waits too. After a skipped step the wrapped scheduler's state is what it was before.

    Args:
        scheduler: any of torch's but ReduceLROnPlateau, which follows a metric and not steps. Step it through the
            wrapper only. Wrap a SequentialLR or ChainedScheduler as a whole.
        optimizer: the wrapper whose landed steps count, where the scheduler was built on the optimizer inside it. None:
            the scheduler's own.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument.
    """

    def __init__(self, scheduler: LRScheduler, optimizer: torch.optim.Optimizer | None = None) -> None:
        # Not super().__init__(), which would start a schedule of its own.
        optimizer = _check(scheduler, optimizer)
        # Tensors that a scheduler keeps, here and in its groups, become numbers: those of an lr given as a tensor.
        scheduler.load_state_dict(_plain(scheduler.state_dict()))
        for group in optimizer.param_groups:
            kept = group.keys() - scheduler.optimizer.defaults.keys() - {"params", "lr"}
            group.update({key: number_of(group[key]) for key in kept if _is_scalar(group[key])})
        self.scheduler = scheduler
        self.optimizer = optimizer
        self._outcomes = StepOutcomes(optimizer)
        self._rates = GroupRates(optimizer)
        self._view = HostView()
        self._pending: _Advance | None = None

    def __repr__(self) -> str:
        epoch = vars(self.scheduler).get("last_epoch")
        return f"LandedLRScheduler({type(self.scheduler).__name__}, last_epoch={epoch!r})"

    def step(self, success: Tensor | bool | None = None) -> None:  # type: ignore[override]
        """Advance by one if the optimizer's step landed.

        Args:
            success: bool, or a tensor of one bool, such as ``result.success``, the same on all ranks. None: whether any
                step since the last call landed, by the optimizer's own count.

        Raises:
            ArgumentTypeError, UsageError: see :meth:`megascale.landed.steps.StepOutcomes.landed`.
        """
        self._rates.require_same_groups()  # before the outcome is taken, which is told once
        landed = self._outcomes.landed(success)
        self._undo_if_skipped(self._view.push({"landed": landed}))
        self._rates.pull()
        state, rates, options = _copied(self.scheduler.state_dict()), list(self._rates.numbers), self._other_options()
        on_device = landed if takes_rates_on_device(self.optimizer) and isinstance(landed, Tensor) else None
        must_wait = on_device is None
        if must_wait and not self._has_landed():
            return
        try:
            # Tells torch that the optimizer has stepped: not every way to step passes the scheduler's counter.
            self.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
            with self._rates.as_numbers():
                self.scheduler.step()
        except Exception:
            has_landed = must_wait or self._has_landed()
            self._return_to(state, rates, options)
            if has_landed:
                raise
            return
        if on_device is not None and self._other_options() == options:
            self._pending = _Advance(state, rates)
            self._rates.select(on_device, rates)
        elif must_wait or self._has_landed():
            self._rates.push()
        else:
            self._return_to(state, rates, options)

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rate of each param group for the next step: exact, copies, on the device where the rates are."""
        return [_copied(group["lr"]) for group in self.optimizer.param_groups]

    def known_lr(self) -> list[float]:
        """Return the rate of each param group as the host knows it without waiting: at most one step old."""
        return list(self._rates.numbers if self._pending is None else self._pending.rates)

    def get_lr(self) -> list[float | Tensor]:
        """See :meth:`torch.optim.lr_scheduler.LRScheduler.get_lr`."""
        self._catch_up()
        return self.scheduler.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the wrapped scheduler's state, exact: the host waits for the last step.

        It is torch's own format: it loads into the bare scheduler too, and that one's loads here.
        """
        self._catch_up()
        return _plain(_copied(self.scheduler.state_dict()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned. The rates themselves are in the optimizer's state: load that too.

        Raises:
            StateDictError: it is not the state of such a scheduler; nothing has changed.
        """
        self._catch_up()
        own = self.scheduler.state_dict()
        if not isinstance(state_dict, dict):
            raise StateDictError(f"state dict of a scheduler must be a dict, got {type(state_dict).__name__}")
        missing = sorted(own.keys() - state_dict.keys())
        if missing:
            raise StateDictError(
                f"state dict lacks {missing}, which {type(self.scheduler).__name__} has; load the state of the same "
                "scheduler"
            )
        before = _copied(own)
        try:
            self.scheduler.load_state_dict(_plain(_copied(state_dict)))
            self._rates.set_expected(self.scheduler.get_last_lr())
        except Exception as error:
            self.scheduler.load_state_dict(before)
            raise StateDictError(f"state dict does not fit {type(self.scheduler).__name__}: {error}") from error

    def __getattr__(self, name: str) -> Any:
        # Not while copying or unpickling, when there is no scheduler yet.
        if name.startswith("__") or "scheduler" not in self.__dict__:
            raise AttributeError(name)
        getattr(self.scheduler, name)
        self._catch_up()
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Methods that are replaced are the wrapper's: the schedule in it is stepped through them.
        if name in _OWN or "scheduler" not in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
            return
        self._catch_up()  # an advance that is taken back later would meet the new value
        setattr(self.scheduler, name, value)

    def _has_landed(self) -> bool:
        """Wait, and return whether the step that was pushed last has landed."""
        heard = self._view.flush()
        return heard is not None and heard["landed"] != 0

    def _catch_up(self) -> None:
        self._undo_if_skipped(self._view.flush())

    def _undo_if_skipped(self, heard: dict[str, float] | None) -> None:
        """Undo an advance that was made for a skipped step: of rates and the schedule's state, it changed nothing else.

        The device's rates have not followed it.
        """
        pending, self._pending = self._pending, None
        if pending is not None and heard is not None and heard["landed"] == 0:
            self.scheduler.load_state_dict(pending.state)
            self._rates.numbers = pending.rates

    def _return_to(self, state: dict[str, Any], rates: list[float], options: list[dict[str, Any]]) -> None:
        """Undo an advance that was made just now."""
        self.scheduler.load_state_dict(state)
        self._rates.numbers = rates
        for group, own in zip(self.optimizer.param_groups, options, strict=True):
            group.update(own)

    def _other_options(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key not in ("params", "lr") and _is_plain(value)}
            for group in self.optimizer.param_groups
        ]


def _check(scheduler: Any, optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer whose landed steps count. Raises ArgumentError or ArgumentTypeError."""
    if isinstance(scheduler, LandedLRScheduler):
        raise ArgumentTypeError("scheduler is a LandedLRScheduler already; wrap the torch scheduler once")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ArgumentTypeError(
            "scheduler is a ReduceLROnPlateau, which follows a metric and not steps; call its step(metric) bare, "
            "beside a LandedLRScheduler if need be"
        )
    if not isinstance(scheduler, LRScheduler):
        raise ArgumentTypeError(
            f"scheduler must be a torch.optim.lr_scheduler.LRScheduler, got {type(scheduler).__name__}"
        )
    own = scheduler.optimizer
    if optimizer is None:
        return own
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
    if list(map(id, optimizer.param_groups)) != list(map(id, own.param_groups)):
        raise ArgumentError(
            f"optimizer has other param groups than the {type(own).__name__} that the scheduler was built on; pass the "
            "optimizer that wraps it"
        )
    return optimizer


def _plain(value: Any) -> Any:
    """Return ``value`` with Python's numbers for numpy's and for tensors of one element, as ``torch.load`` reads them.

    Containers are copies.
    """
    return _mapped(lambda one: number_of(one) if _is_scalar(one) else plain(one), value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_plain(value: Any) -> bool:
    """Whether comparing ``value`` reads no tensor."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(plain(value), LEAVES)


def _copied(value: Any) -> Any:
    """Return a copy of a scheduler's state: containers and tensors are copied, other objects in them are shared.

    A schedule's callable may hold a model or an optimizer, which cannot be deep-copied.
    """

    def copy_of(one: Any) -> Any:
        if isinstance(one, Tensor):
            return one.detach().clone()
        is_container = isinstance(one, (list, set, deque)) or hasattr(one, "__array__")
        return copy.copy(one) if is_container else one

    return _mapped(copy_of, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` of all that is no dict, list or tuple in its place; those are of their types.

    Keys of dicts are Python's own.
    """
    if isinstance(value, dict):
        made = copy.copy(value)
        made.clear()
        for key, item in value.items():
            made[plain(key)] = _mapped(function, item)
        return made
    if type(value) in (list, tuple):
        return type(value)(_mapped(function, item) for item in value)
    return function(value)
