"""SavedState: what :mod:`megascale.checkpoint` asks of an optimizer's state, beside the state dict."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megascale.main_params.shard import ParamShard
from megascale.state.hooks import pack_with_hooks
from megascale.state.live_state import LiveState


class SavedState(Protocol):
    """The state of one optimizer, or of a chain."""

    def pack(self) -> dict[str, Any]:
        """Return ``state_dict(copy=False)`` with remainders, int16, in place of the main params that are held so.

        A checkpoint saves the weights beside them; ``load_state_dict`` needs fp32.
        """

    def share_forms(self) -> None:
        """Prepare :meth:`pack` where a rank alone has all state of a parameter. All ranks call it together.

        With ``shard="parameters"`` ranks tell each other the names, shapes and dtypes of the state that they hold.
        Otherwise it does nothing.

        Raises StateDictError on every rank alike, naming it, for state that a state dict cannot hold.
        """

    def check(self, state_dict: dict[str, Any], *, strict: bool) -> None:
        """Raise StateDictError as ``load_state_dict`` would, as far as it can without reading tensor values.

        Changes and communicates nothing.
        """

    def names(self) -> list[str]:
        """Return the name of every parameter, in the order of ``param_groups``."""

    def model_shards(self) -> dict[int, ParamShard]:
        """Return, by id of the parameter, the part that this rank keeps of each sharded model param, live."""

    def rounded_params(self) -> set[int]:
        """Return the ids of 16-bit model params that are written as roundings of main params only.

        Those of a DistributedOptimizer, and those whose main params are remainders, which a later write resets.
        """


class OwnState:
    """The SavedState of one optimizer.

    Args:
        optimizer: whose hooks are called.
        live: returns its state.
        sync_from_model: see :meth:`megascale.step.member.StepMember.sync_from_model`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, live: Callable[[], LiveState], sync_from_model: Callable[[], object]
    ) -> None:
        self._optimizer = optimizer
        self._live = live
        self._sync_from_model = sync_from_model

    def pack(self) -> dict[str, Any]:
        """See :class:`SavedState`."""
        return pack_with_hooks(
            self._optimizer, self._sync_from_model, lambda: self._live().pack(copy=False, decode=False)
        )

    def share_forms(self) -> None:
        """See :class:`SavedState`."""
        self._live().share_forms()

    def check(self, state_dict: dict[str, Any], *, strict: bool) -> None:
        """See :class:`SavedState`."""
        self._sync_from_model()
        self._live().check(state_dict, strict=strict)

    def names(self) -> list[str]:
        """See :class:`SavedState`."""
        self._sync_from_model()
        live = self._live()
        return list(live.main_params.names(live.param_groups).values())

    def model_shards(self) -> dict[int, ParamShard]:
        """See :class:`SavedState`."""
        self._sync_from_model()
        return self._live().main_params.model_shards()

    def rounded_params(self) -> set[int]:
        """See :class:`SavedState`."""
        params = self._live().main_params
        held = [param for param in params if param.is_copy and (params.is_sharded or param.remainder is not None)]
        return {id(param.model) for param in held}


class ChainState:
    """The SavedState of a chain.

    Args:
        chain: whose hooks are called.
        parts: of its members.
        join: makes one state dict of the members'.
        split: makes each member's part of a state dict; takes ``strict``. Raises StateDictError.
    """

    def __init__(
        self,
        chain: torch.optim.Optimizer,
        parts: Sequence[SavedState],
        join: Callable[[list[dict[str, Any]]], dict[str, Any]],
        split: Callable[[dict[str, Any], bool], list[dict[str, Any]]],
    ) -> None:
        self._chain = chain
        self._parts = parts
        self._join = join
        self._split = split

    def pack(self) -> dict[str, Any]:
        """See :class:`SavedState`."""
        return pack_with_hooks(self._chain, lambda: None, lambda: self._join([part.pack() for part in self._parts]))

    def share_forms(self) -> None:
        """See :class:`SavedState`."""
        for part in self._parts:
            part.share_forms()

    def check(self, state_dict: dict[str, Any], *, strict: bool) -> None:
        """See :class:`SavedState`."""
        for part, own in zip(self._parts, self._split(state_dict, strict), strict=True):
            part.check(own, strict=strict)

    def names(self) -> list[str]:
        """See :class:`SavedState`."""
        return [name for part in self._parts for name in part.names()]

    def model_shards(self) -> dict[int, ParamShard]:
        """See :class:`SavedState`."""
        return {key: shard for part in self._parts for key, shard in part.model_shards().items()}

    def rounded_params(self) -> set[int]:
        """See :class:`SavedState`."""
        return {key for part in self._parts for key in part.rounded_params()}
