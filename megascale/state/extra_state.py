"""ExtraState: what a wrapped optimizer's ``state_dict()`` has beside ``state`` and ``param_groups``.

StableSPAM saves a step count and a schedule there, Ranger21 its learning rates. State of parameters is saved by their
names in any case. The rest is numbers, strings and tensors that belong to no parameter. The optimizer's
``state_dict()`` gives it, and its ``load_state_dict()`` takes it, while its param groups hold main params; what that
does to state and groups is put back.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch

from megascale.errors import ArgumentError, StateDictError
from megascale.main_params.base import MainParams
from megascale.step.lending import lent, put_back
from megascale.utils.nests import tensors_in
from megascale.utils.portable import portable

_TORCHS = ("state", "param_groups")
_HOOKS = ("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_post_hooks")


class ExtraState:
    """Reads and loads the extra entries of one wrapped optimizer's state dict.

    Args:
        optimizer: the wrapped torch optimizer, whose ``state_dict()`` and ``load_state_dict()`` are called.
        params: the main params of its parameters. While those two run, its param groups list them in place of the
            model params, as in its ``step()``: what it keys by parameter, it keys by these. Where they are divided
            among ranks, a tensor outside of ``state[param]`` is refused: each rank has another one, and nothing says
            how they belong together.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: MainParams) -> None:
        self._optimizer = optimizer
        self._params = params

    def read(self, *, copy: bool) -> dict[str, Any]:
        """Return the entries, of tensors and primitives.

        Raises StateDictError, naming it, for an entry that is neither, and for a tensor where main params are divided.
        """
        if not _overrides(self._optimizer, "state_dict", _HOOKS[0]):
            return {}
        with self._lent():
            return self._read(copy=copy)

    def require_savable(self) -> None:
        """Raise ArgumentError, naming it, for an entry that cannot be saved, or could not be loaded again.

        Called before there are main params: ``params`` has none yet.
        """
        name = type(self._optimizer).__name__
        if not _overrides(self._optimizer, "state_dict", _HOOKS[0]):
            return
        try:
            entries = self._read(copy=False)
        except Exception as error:  # whatever it calls
            raise ArgumentError(
                f"optimizer {name} cannot be saved: {error}; keep tensors, numbers and strings in its state_dict()"
            ) from error
        if entries and not _overrides(self._optimizer, "load_state_dict", _HOOKS[1]):
            raise ArgumentError(
                f"optimizer {name} cannot be loaded: its state_dict() has {sorted(entries)}, which torch's "
                "load_state_dict() drops; give it a load_state_dict() that takes them"
            )

    def check(self, entries: Mapping[str, Any]) -> None:
        """Raise StateDictError if the optimizer's ``load_state_dict()`` refuses ``entries``; nothing has changed."""
        if not entries:
            return
        before = self.read(copy=True)
        try:
            self.load(entries)
        except Exception as error:  # whatever it raises
            raise StateDictError(
                f"{type(self._optimizer).__name__}.load_state_dict() raised {type(error).__name__}: {error}; load what "
                "an optimizer of the same class has saved"
            ) from error
        finally:
            self.load(before)

    def load(self, entries: Mapping[str, Any]) -> None:
        """Let the optimizer take ``entries`` and nothing else."""
        if not entries:
            return
        with self._lent():
            optimizer = self._optimizer
            own = {name: value for name, value in vars(optimizer).items() if name in _TORCHS}
            state = {key: dict(one) if isinstance(one, dict) else one for key, one in optimizer.state.items()}
            groups = [(group, dict(group)) for group in optimizer.param_groups]
            try:
                optimizer.load_state_dict({**optimizer.state_dict(), **deepcopy(dict(entries))})
            finally:
                vars(optimizer).update(own)
                put_back(optimizer, state, groups)

    def _lent(self) -> AbstractContextManager[None]:
        params = [param for param in self._params if param.is_owned]
        return lent(self._optimizer, params, [None] * len(params))

    def _read(self, *, copy: bool) -> dict[str, Any]:
        where = f"{type(self._optimizer).__name__}.state_dict()"
        given = {name: value for name, value in self._optimizer.state_dict().items() if name not in _TORCHS}
        entries = {name: portable(value, f"{where}[{name!r}]", copy=copy) for name, value in given.items()}
        tensors = [name for name, value in entries.items() if any(True for _ in tensors_in(value))]
        if tensors and self._params.is_sharded:
            raise StateDictError(
                f"{where} has {tensors}, tensors that are not in state[param]: each rank of a DistributedOptimizer "
                "would save another one; use MixedPrecisionOptimizer"
            )
        return entries


def _overrides(optimizer: torch.optim.Optimizer, method: str, hooks: str) -> bool:
    """Return whether a method is not torch's, or has hooks."""
    function = getattr(getattr(optimizer, method), "__func__", None)
    return function is not getattr(torch.optim.Optimizer, method) or bool(getattr(optimizer, hooks, None))
