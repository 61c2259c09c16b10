"""Running averages (EMA, SWA) of main params: in fp32, over landed steps only, without a host sync."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import ArgumentError, ArgumentTypeError, StateDictError, UsageError, listed
from megascale.host_view import HostView
from megascale.landed.running_averages import AvgFn, MultiAvgFn, RunningAverages, copy_, rule_of
from megascale.landed.steps import StepOutcomes
from megascale.main_params.base import MainParams
from megascale.main_params.main_param import MainParam
from megascale.step.arguments import device_of
from megascale.utils import validate
from megascale.utils.calls import methods_outside_of_graphs
from megascale.utils.collectives import raising_together
from megascale.utils.dtensors import dtensor_like, to_local
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.param_names import renames
from megascale.utils.transfer import to_device_async


@dataclass(frozen=True, eq=False)
class _Averaged:
    """A main param and its average: local, of the main param's shape."""

    name: str
    owner: MainParams
    source: MainParam
    average: Tensor

    @property
    def like_main(self) -> Tensor:
        """The average, as a DTensor where the main param is one. Shares memory."""
        return dtensor_like(self.average, self.source.main)


TOGETHER = "state_dict(), model_state_dict() or applied() of AveragedMainParams"
"""What all ranks call together where they hold pieces, for the error of a rank that waits alone."""


@methods_outside_of_graphs
class AveragedMainParams:
    """``torch.optim.swa_utils.AveragedModel`` for 16-bit training: an average of the main params of ``model``.

        averages = AveragedMainParams(model, optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        ...
        result = optimizer.step()
        averages.update_parameters(success=result.success)
        ...
        with averages.applied():
            evaluate(model)

    Averages are in the main params' dtype and where they are: 16-bit weights are rounded from them, never averaged. A
    skipped step changes no bit of them, nor ``n_averaged``; the choice is made on the device. The first landed update
    copies, the next ones average, as in torch. Under a DistributedOptimizer each rank keeps the averages of its own
    pieces; of DTensors, of its local part. There is no second model: :meth:`applied` lends the averages to this one.

    Args:
        model: its trainable parameters must be the optimizer's. Frozen ones are not averaged.
        optimizer: MixedPrecisionOptimizer, DistributedOptimizer or ChainedOptimizer; or a torch optimizer of fp32 or
            fp64 parameters, whose landed steps :meth:`update_parameters` must be told.
        avg_fn: as in torch: ``avg_fn(average, current, n_averaged)`` returns the new average.
        multi_avg_fn: as in torch: writes averages in place, from lists of tensors of one device and dtype. Both must be
            elementwise: they get pieces of parameters, and lists may be split to save memory. If both are None: the
            equally weighted average (SWA). torch's ``get_swa_multi_avg_fn`` reads ``n_averaged`` on the host.
        use_buffers: average buffers too, in their own dtype. False: keep the buffers of the last landed update.

    Attributes:
        n_averaged: updates that landed: int64, 0-d, on the optimizer's device.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
        use_buffers: bool = False,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ArgumentError("avg_fn and multi_avg_fn are both given; give one")
        for name, rule in (("avg_fn", avg_fn), ("multi_avg_fn", multi_avg_fn)):
            if rule is not None and not callable(rule):
                raise ArgumentTypeError(
                    f"{name} must be a function, got {rule!r}; torch.optim.swa_utils.get_ema_{name}(decay) makes one"
                )
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.model = model
        self.use_buffers = validate.flag("use_buffers", use_buffers)
        self._average = rule_of(avg_fn, multi_avg_fn)
        self._owners = _owners(optimizer)
        self._num_main_params = _count(self._owners)
        self._outcomes = StepOutcomes(optimizer)
        self._group = optimizer._groups.grad_stats if isinstance(optimizer, MegascaleOptimizer) else None
        sources = _sources(model, self._owners)
        self._params = RunningAverages([to_local(source.value()) for _, _, source in sources])
        self._entries = [
            _Averaged(*source, average) for source, average in zip(sources, self._params.averages, strict=True)
        ]
        self._buffers = dict(model.named_buffers())
        self._averaged_buffers = RunningAverages([to_local(buffer) for buffer in self._buffers.values()])
        self.n_averaged = torch.zeros((), dtype=torch.int64, device=device_of(optimizer))
        self._view = HostView()
        self._has_started = False

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "AveragedMainParams cannot be pickled or deep-copied: a copy has no optimizer; use state_dict()"
        )

    @torch.no_grad()
    def update_parameters(self, model: nn.Module | None = None, *, success: Tensor | bool | None = None) -> None:
        """Add the main params of this moment to the averages, if a step has landed.

        Args:
            model: for torch's signature; None or the constructor's model.
            success: bool, or a tensor of one bool, such as ``result.success``. None: whether any step since the last
                call landed, by the optimizer's own count.

        Raises:
            ArgumentError, ArgumentTypeError: for an argument that does not fit.
            UsageError: success is None and cannot be known; or parameters were unfrozen or added since construction.
        """
        if model is not None and model is not self.model:
            raise ArgumentError("model is not the one that the averages were built for; build others for it")
        if _count(self._owners) != self._num_main_params:
            raise UsageError(
                "main params have been added since AveragedMainParams was built (parameters unfrozen, or a param group "
                "added); build it anew then"
            )
        buffers = [self.model.get_buffer(name) for name in self._buffers]  # as they are now: modules may replace them
        for (name, first), buffer in zip(self._buffers.items(), buffers, strict=True):
            if buffer is None or buffer.shape != first.shape:
                raise UsageError(
                    f"buffer {name!r} has changed its shape since AveragedMainParams was built; build it anew"
                )
        landed = self._outcomes.landed(success)
        if not isinstance(landed, Tensor):
            landed = torch.full((), landed, dtype=torch.bool, device=self.n_averaged.device)
        rule = self._average if self.use_buffers else copy_
        self._averaged_buffers.update(list(map(to_local, buffers)), landed, self.n_averaged, rule, self._has_started)
        for owner in {id(entry.owner): entry.owner for entry in self._entries}.values():
            if owner.arrivals is not None:  # not for gathers: this rank's main params need none
                owner.arrivals.wait()
        mains = [to_local(entry.source.value()) for entry in self._entries]
        self._params.update(mains, landed, self.n_averaged, self._average, self._has_started)
        self.n_averaged.add_(to_device_async(landed, self.n_averaged.device))
        if not self._has_started:
            heard = self._view.push({"n_averaged": self.n_averaged})
            self._has_started = heard is not None and heard["n_averaged"] > 0

    def averages(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the model, average), live: fp32 or fp64, a DTensor or a 1-D piece where the main param is."""
        return ((entry.name, entry.like_main) for entry in self._entries)

    # The averaged model

    @torch.no_grad()
    def model_state_dict(self) -> dict[str, Tensor]:
        """Return averaged parameters and buffers, in the model's dtypes: copies, by the model's names.

        Loads into a model like this one with ``strict=False``: frozen parameters and tied names are not in it. With a
        DistributedOptimizer all ranks call it together.
        """
        return self._like_model() | {name: buffer.clone() for name, buffer in self._buffers_like_model()}

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Return a context in which the model computes with the averages and has them in its ``state_dict()``.

        The model's parameters are set aside, not written, and restored at the end, also after an error. Buffers written
        in the context are the averages': ``torch.optim.swa_utils.update_bn(loader, model)`` refreshes the BatchNorm
        statistics of the averages, not those of the model. Costs memory for a copy of the parameters. With a
        DistributedOptimizer all ranks enter it together.

        Raises:
            UsageError: the model is under FSDP2, which keeps its own references to parameters.
        """
        # Unless FSDP2 is imported, no module is under it.
        sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        if any(isinstance(module, sharded) for module in self.model.modules()):
            raise UsageError(
                "averages cannot be lent to a model under fully_shard; load model_state_dict() into another model, "
                "sharded alike, with strict=False"
            )
        whole = self._like_model()
        lent: dict[int, Tensor] = {
            id(entry.source.model): nn.Parameter(whole[entry.name], requires_grad=False) for entry in self._entries
        }
        lent |= {id(self.model.get_buffer(name)): buffer for name, buffer in self._buffers_like_model()}
        aside: list[tuple[dict[str, Any], str, Any]] = []
        for module in self.model.modules():
            registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            aside += [(kept, key, value) for kept in registries for key, value in kept.items() if id(value) in lent]
        try:
            for kept, key, value in aside:
                kept[key] = lent[id(value)]
            yield self.model
        finally:
            for kept, key, value in aside:
                kept[key] = value

    # State

    @torch.no_grad()
    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return ``{"averages": {name: tensor}, "buffers": {name: tensor}, "n_averaged": int64 tensor}``.

        Averages are whole and in full precision; with a DistributedOptimizer they are gathered into host memory, and
        all ranks call it together. ``copy=False`` returns live tensors, and ParamShards of pieces: for
        torch.distributed.checkpoint.
        """
        for owner in self._owners if copy else ():
            owner.agree(None, TOGETHER)
        averages = {
            entry.name: entry.owner.export(entry.source, {"": entry.like_main}, copy=copy)[""]
            for entry in self._entries
        }
        buffers = {name: buffer.clone() if copy else buffer for name, buffer in self._buffers_like_model()}
        return {
            "averages": averages,
            "buffers": buffers,
            "n_averaged": self.n_averaged.clone() if copy else self.n_averaged,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, at any number of ranks; all ranks call it together.

        Raises:
            StateDictError: on every rank alike; nothing has changed.
        """
        planned: list[tuple[Tensor, Tensor]] = []
        with raising_together(self._group):
            planned = self._plan(state_dict)
        for live, value in planned:
            live.copy_(value)
        self.n_averaged.copy_(state_dict["n_averaged"])
        self._view.flush()
        self._has_started = False

    def _plan(self, state_dict: Any) -> list[tuple[Tensor, Tensor]]:
        """Return (live tensor, its new value). Raises StateDictError."""
        if not isinstance(state_dict, Mapping) or not {"averages", "buffers", "n_averaged"} <= state_dict.keys():
            raise StateDictError("state dict must hold 'averages', 'buffers' and 'n_averaged'")
        averages, buffers, count = (state_dict[key] for key in ("averages", "buffers", "n_averaged"))
        if not isinstance(count, Tensor) or count.shape != () or count.dtype != torch.int64:
            raise StateDictError(f"state dict's n_averaged must be an int64 tensor of one element, got {count!r}")
        own = dict(self._buffers_like_model())
        live = {entry.name: entry.source.model for entry in self._entries}
        averages, buffers = _named_tensors("averages", averages, live), _named_tensors("buffers", buffers, own)
        planned = [
            (
                entry.average,
                to_local(entry.owner.to_local(entry.source.model, averages[entry.name], entry.average.dtype)),
            )
            for entry in self._entries
        ]
        return planned + [(to_local(buffer), to_local(buffers[name])) for name, buffer in own.items()]

    def _like_model(self) -> dict[str, Tensor]:
        """Return copies of the averages by name, whole, in the model params' dtypes; DTensors where those are."""
        for owner in self._owners:
            owner.agree(None, TOGETHER)
        return {
            entry.name: entry.owner.export(entry.source, {"": entry.average}, copy=True)[""].to(entry.source.model)
            if entry.owner.is_sharded
            else dtensor_like(entry.average.to(entry.source.model.dtype, copy=True), entry.source.model)
            for entry in self._entries
        }

    def _buffers_like_model(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the averages' buffers, live, under the model's names."""
        for (name, buffer), average in zip(self._buffers.items(), self._averaged_buffers.averages, strict=True):
            yield name, dtensor_like(average, buffer)


def _owners(optimizer: torch.optim.Optimizer) -> list[MainParams]:
    """Return the MainParams of an optimizer. A torch optimizer's parameters are their own main params."""
    if isinstance(optimizer, MegascaleOptimizer):  # with main params of newly unfrozen parameters
        return [live.main_params for live in optimizer._live_states()]
    halves = [p.dtype for group in optimizer.param_groups for p in group["params"] if p.dtype in HALF_DTYPES]
    if halves:
        raise ArgumentError(
            f"optimizer {type(optimizer).__name__} has {halves[0]} parameters and no main params to average; wrap it "
            "in a MixedPrecisionOptimizer"
        )
    params = MainParams(())
    params.sync_from_model(optimizer.param_groups)
    return [params]


def _count(owners: Iterable[MainParams]) -> int:
    return sum(len(params) for owner in owners for params in owner.ordered)


def _sources(model: nn.Module, owners: Sequence[MainParams]) -> list[tuple[str, MainParams, MainParam]]:
    """Return, for each parameter that has a main param, the model's name, its owner and the main param."""
    sources = []
    for name, param in model.named_parameters():
        found = [(owner, source) for owner in owners if (source := owner.get(param)) is not None]
        if not found and param.requires_grad:
            raise ArgumentError(
                f"optimizer does not train parameter {name!r} of model; give it to the optimizer, or freeze it"
            )
        sources += [(name, owner, source) for owner, source in found]
    return sources


def _named_tensors(what: str, given: Any, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return saved tensors by the names that they have here; see :func:`megascale.utils.param_names.renames`.

    Raises StateDictError unless they have the names and shapes of ``live``.
    """
    is_named = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    new = renames(given, live, f"state dict's {what!r}") if is_named else {}
    named = {new.get(name, name): value for name, value in given.items()} if is_named else {}
    if not is_named or named.keys() != live.keys():
        got = (listed(sorted(named)) or "nothing") if is_named else type(given).__name__
        raise StateDictError(f"state dict's {what!r} must be of {listed(sorted(live))}, got {got}")
    for name, tensor in live.items():
        value = named[name]
        if not isinstance(value, Tensor) or value.shape != tensor.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise StateDictError(f"state dict's {what}[{name!r}] must have shape {tuple(tensor.shape)}, got {shape}")
    return named
