"""Main params of which each rank owns some, whole: for optimizers that read whole parameters.

Their state has whatever form the optimizer gives it: tensors of any shape, lists of them, numbers. Only the owner has
it. So that all ranks can name it in a state dict, they tell each other its form before they pack one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from megascale.errors import StateDictError
from megascale.kernels.compact_moments import is_scale
from megascale.main_params.main_param import MainParam
from megascale.main_params.shard import ParamShard
from megascale.main_params.sharded import ShardedMainParams
from megascale.parallel import is_expert
from megascale.utils.nests import map_tensors


class OwnedMainParams(ShardedMainParams):
    """Every rank keeps the parameters that it owns, whole, and nothing of others. See :class:`ShardedMainParams`."""

    are_whole = True
    _forms: Mapping[str, Any] = {}
    """State of all parameters, by name, of tensors on the meta device: as of the last exchange."""

    @override
    def share_state_forms(self, states: Callable[[], Mapping[int, Any]]) -> None:
        mine: dict[bool, dict[str, Any]] = {False: {}, True: {}}
        error: Exception | None = None
        try:
            held = states()
            for param in self:
                if param.is_owned:
                    mine[is_expert(param.model)][param.name] = map_tensors(
                        lambda value: torch.empty(value.shape, dtype=value.dtype, device="meta"),
                        held.get(id(param.model), {}),
                    )
        except Exception as caught:  # whatever it is: other ranks wait
            error = caught
        self._forms = {
            name: form
            for every in self._gathered(mine, error).values()
            for theirs in every
            for name, form in (theirs or {}).items()
        }

    @override
    def export_state(self, param: MainParam, state: Mapping[str, Any], *, copy: bool) -> dict[str, Any]:
        def export(leaf: Any) -> Tensor:
            value = leaf.detach() if param.is_owned else torch.empty(0, dtype=leaf.dtype, device=param.main.device)
            if copy:
                return self._sum_of_pieces(param, value, leaf.shape, 0)
            return ParamShard(value.reshape(-1), leaf.shape, 0)

        nest = state if param.is_owned else self._forms.get(param.name, {})
        exported: dict[str, Any] = map_tensors(export, nest)
        return exported

    @override
    def own_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """See :class:`MainParams`. Of parameters that others own this rank keeps nothing."""
        main = self._by_id.get(id(param))
        if main is None:
            return None
        if not main.is_owned:
            return {}

        def take(value: Tensor) -> Tensor:
            if not isinstance(value, ParamShard):
                return value.detach().to(main.main.device, copy=True)
            if value.piece.numel() != value.numel():
                raise StateDictError(
                    f"a ParamShard holds elements from {value.start} of {main.name!r}, all of which this rank owns; "
                    "read the checkpoint with megascale.checkpoint, which reshards"
                )
            return value.piece.to(main.main.device).view(value.shape)

        taken: dict[str, Any] = map_tensors(take, state)
        # Of a DTensor scales were saved as rows.
        return {key: value.reshape(-1) if is_scale(key) else value for key, value in taken.items()}
