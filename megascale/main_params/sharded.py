"""Main params sharded over data-parallel ranks (ZeRO stage 1, arXiv 1910.02054).

Each rank keeps one contiguous 1-D piece of every parameter, often empty, in the main params and in the optimizer's
state; or whole parameters, each of one owner: :mod:`megascale.main_params.owned`. It updates them from its shard of the
reduced gradients, writes them into flat buckets that the model's parameters are views of, and gathers those buckets.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from megascale.errors import ArgumentError, StateDictError, listed
from megascale.grad_sync.construction import Construction, param_forms
from megascale.grad_sync.grad_hook import check_syncable
from megascale.grad_sync.layout import Piece
from megascale.grad_sync.sync import GradSync
from megascale.kernels.compact_moments import GROUP, is_scale, num_groups
from megascale.main_params.base import MainParams
from megascale.main_params.gather import ParamGather
from megascale.main_params.main_param import MainParam, main_memory, main_param_of
from megascale.main_params.replica_check import broadcast_parameters, digests, exchanges, require_same_values
from megascale.main_params.shard import ParamShard
from megascale.main_params.update_unit import UpdateUnit
from megascale.parallel import ParallelGroups, is_expert
from megascale.utils.collectives import all_reduce_sum_, gather_or_raise, meet
from megascale.utils.consensus import explained

T = TypeVar("T")


class ShardedMainParams(MainParams):
    """Every rank keeps its own pieces only.

    Args:
        named: the parameters, with their names, in the order of the forward pass.
        groups: which ranks share what.
        grad_sync: buckets the parameters and shards their gradients.
        gather: gets the same buckets, for the model params.
        broadcast: where ranks differ, take the first rank's parameters. False: raise.
    """

    is_sharded = True
    are_whole = False

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        groups: ParallelGroups,
        grad_sync: GradSync,
        gather: ParamGather,
        *,
        broadcast: bool,
    ) -> None:
        super().__init__(named)
        self._groups = groups
        self._grad_sync = grad_sync
        self._gather = gather
        self.written_too_early = gather.written_too_early
        self._broadcast = broadcast

    @override
    def make(self, params: Mapping[str, nn.Parameter], group_of: Mapping[str, int]) -> list[MainParam]:
        """See :class:`MainParams`. All ranks call it together.

        Raises ArgumentError on every rank alike, before anything has changed, for a parameter that cannot be taken in,
        if ranks have built different optimizers, or if they hold different values and may not be overwritten.
        """
        in_forward = {name: params[name] for name, _ in self._explicit_names.values() if name in params}
        self._compare(params, in_forward, group_of)
        if self._broadcast:
            broadcast_parameters(params.items(), self._groups)
        # Gradients first: their buckets say where model params lie, so that one range is a rank's shard of both.
        added = self._grad_sync.add(in_forward.items(), group_of)
        shards: dict[str, Tensor] = {}
        pieces: dict[str, Piece] = {}
        for synced in added:
            self.everywhere = {**self.everywhere, **synced.params}
            memory = self._gather.add(synced).memory
            shards |= memory.parts(synced.reduction.rank)
            pieces |= {piece.name: piece for piece in memory.bucket.pieces(synced.reduction.rank)}
        # A bucket's parameters are updated in one unit, and gathered after it: they live in one place, on all ranks.
        on_host = self.host_buffers(shards, [(list(one.params), one.memory.flat.numel()) for one in reversed(added)])
        copies = main_memory(shards, on_host, as_remainders=self.stores_remainders)
        return [
            main_param_of(name, model, shards[name], copies.get(name), piece=pieces[name], on_host=on_host.get(name))
            for name, model in params.items()
        ]

    def _compare(
        self, params: Mapping[str, nn.Parameter], in_forward: Collection[str], group_of: Mapping[str, int]
    ) -> None:
        """Raise ArgumentError on every rank alike for what :meth:`make` cannot take in. ``in_forward``: their names."""
        error: Exception | None = None
        try:
            check_syncable(params)
            if unowned := [name for name, param in params.items() if id(param) not in self._explicit_names]:
                raise ArgumentError(
                    f"modules do not own parameter {listed(unowned)}: no module would wait for its gather, or give it "
                    "a name; build the optimizer anew, with every module whose parameters it updates"
                )
        except Exception as caught:  # whatever it is: other ranks wait
            error = caught

        def built(experts: bool, own: Mapping[str, nn.Parameter]) -> Construction:
            by_sync = self._grad_sync.construction(experts=experts)
            facts = {
                **by_sync.facts,
                "overlap_param_gather": self._gather.overlap,
                "broadcast_params": self._broadcast,
                **param_forms("modules", [(name, own[name]) for name in in_forward if name in own], group_of),
                **param_forms("the optimizer", own.items(), group_of),
            }
            readable = {name: param for name, param in own.items() if not (self._broadcast or param.is_meta)}
            return Construction(facts, by_sync.groups, digests(readable))

        for every in exchanges(params, self._groups, built, error, are_added=bool(self._known)):
            require_same_values(every)

    @override
    def agree(self, error: Exception | None, call: str = "state_dict()") -> None:
        for group in dict.fromkeys(self._groups.of_param(param).shard for param in self.everywhere.values()):
            meet(group, call)
        self._gathered({}, error)

    @override
    def share_state_forms(self, states: Callable[[], Mapping[int, Any]]) -> None:
        """See :class:`MainParams`. Raises StateDictError if ranks hold pieces of different tensors."""
        facts: dict[bool, dict[str, str]] = {}
        error: Exception | None = None
        try:
            held = states()
            for param in self:
                own = facts.setdefault(is_expert(param.model), {})
                own[f"the state of parameter {len(own)}"] = f"{list(held[id(param.model)])} of {param.name!r}"
        except Exception as caught:  # whatever it is: other ranks wait
            error = caught
        for every in self._gathered(facts, error).values():
            if found := explained({rank: own or {} for rank, own in enumerate(every)}):
                raise StateDictError(f"{found}: change param_groups and state on every rank alike")

    def _gathered(self, values: Mapping[bool, T], error: Exception | None) -> dict[bool, list[T | None]]:
        """Return what the ranks that hold other shards give, for experts and for other parameters, in their order.

        Raises on all of them if one has an ``error``. Not all ranks need have both kinds of parameters.
        """
        groups = {is_expert(param): self._groups.of_param(param).shard for param in self.everywhere.values()}
        return {kind: gather_or_raise(values.get(kind), error, groups[kind]) for kind in sorted(groups)}

    @override
    def make_units(self) -> list[UpdateUnit]:
        """Return one unit per bucket and param group: a bucket's gather starts while the next is updated.

        All ranks have the same units, also one of which this rank owns nothing: they gather in one order.
        """
        group_of = {id(param): index for index, group in enumerate(self.ordered) for param in group}
        found: list[UpdateUnit] = []
        for bucket in reversed(self._gather.buckets):
            by_group: dict[int, tuple[list[MainParam], list[MainParam]]] = {}
            for param in filter(None, map(self.get, bucket.synced.params.values())):
                if id(param) in group_of:
                    params, elsewhere = by_group.setdefault(group_of[id(param)], ([], []))
                    (params if param.main.numel() else elsewhere).append(param)
            found += [UpdateUnit({group: here}, elsewhere) for group, (here, elsewhere) in by_group.items()]
        return found

    @override
    def restore(self) -> None:
        """See :class:`MainParams`. A parameter with storage of its own moves back into its bucket, values and all.

        No gather may be under way.
        """
        for param in self:
            bucket = self._gather.bucket_of[id(param.model)]
            view = bucket.memory.views[param.name]
            if param.model.data_ptr() != view.data_ptr() or param.model.stride() != view.stride():
                bucket.point(param.name, param.model)
                if param.is_copy:
                    param.sync_from_model()

    @override
    def mark_written(self, unit: UpdateUnit) -> None:
        """See :class:`MainParams`. Starts the gather of the bucket that the unit is in."""
        super().mark_written(unit)
        self._gather.bucket_of[id((unit.params or unit.elsewhere)[0].model)].start()

    @override
    def wait(self) -> None:
        super().wait()
        self._gather.wait()

    @override
    def end_step(self) -> None:
        """See :class:`MainParams`. With overlap the gather continues during the next forward."""
        self._gather.start_all()

    @override
    def why_not_capturable(self) -> str | None:
        if self._gather.overlap:
            return "overlap_param_gather=True lets a gather run out of the graph: build the optimizer without it"
        return None

    @override
    def to_local(self, param: nn.Parameter, value: Tensor, dtype: torch.dtype, *, group: int = 1) -> Tensor:
        """See :class:`MainParams`. Returns the live piece itself for its own ParamShard in the same dtype."""
        known = self._by_id[id(param)]
        main = known.main
        start, numel = known.start // group, -(-main.numel() // group)
        shape = main.shape if group == 1 else torch.Size([numel])
        if not isinstance(value, ParamShard):
            piece = value.detach().reshape(-1)[start : start + numel]
            return piece.to(main.device, dtype, copy=True).view(shape)
        if value.piece.numel() != numel or (value.start != start and numel):
            raise StateDictError(
                f"a ParamShard holds elements from {value.start} of {known.name!r}, this rank owns "
                f"those from {start}; read the checkpoint with megascale.checkpoint, which reshards"
            )
        return value.piece.to(main.device, dtype).view(shape)

    @override
    def export(self, param: MainParam, values: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
        """See :class:`MainParams`. Whole tensors are in host memory."""
        exported: dict[str, Tensor] = {}
        for key, value in values.items():
            shape, start = param.model.shape, param.start
            if is_scale(key):
                shape, start = torch.Size([num_groups(shape.numel())]), start // GROUP
            elif value.shape != param.main.shape:
                exported[key] = value.detach().clone() if copy else value.detach()
                continue
            if copy:
                exported[key] = self._sum_of_pieces(param, value, shape, start)
            else:
                exported[key] = ParamShard(value.detach().reshape(-1), shape, start)
        return exported

    def _sum_of_pieces(self, param: MainParam, piece: Tensor, shape: torch.Size, start: int) -> Tensor:
        """Return the whole of a tensor of ``param`` on the host: an all-reduce of bytes, to which each rank adds its
        own piece.

        On the model param's device: the piece may lie in host memory meanwhile, see :mod:`.residence`.
        """
        whole = piece.new_zeros(shape.numel(), device=param.model.device)
        whole[start : start + piece.numel()] = piece.reshape(-1)
        all_reduce_sum_(whole.view(torch.uint8), self._gather.bucket_of[id(param.model)].synced.group.shard)
        return whole.view(shape).cpu()
