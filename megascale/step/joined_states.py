"""The state of a wrapped optimizer and of those that it holds, as one mapping that is read and written like ``state``.

Lookahead keeps slow weights of a parameter, and its base optimizer keeps the moments. Joined, an entry of the base is
called ``optimizer.exp_avg``: after the attribute that holds it. So it is saved, sharded and loaded as any other.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from megascale.step.lending import holders_of


def states_of(optimizer: torch.optim.Optimizer) -> MutableMapping[Any, Any]:
    """Return ``optimizer.state``; where it holds optimizers with state of their own, theirs joined to it."""
    found: dict[str, torch.optim.Optimizer] = {}
    for path, holder in holders_of(optimizer).items():
        if all(holder.state is not other.state for other in found.values()):  # SAM shares its base's
            found[path] = holder
    return optimizer.state if len(found) == 1 else JoinedStates(found)


class JoinedStates(MutableMapping[Any, Any]):
    """By parameter the entries of all, in a dict that is to be assigned once it has changed.

    Those of an optimizer that another holds have its path before their names. So have other keys, which are strings.

    Args:
        holders: by path; the wrapped optimizer under "".
    """

    def __init__(self, holders: Mapping[str, torch.optim.Optimizer]) -> None:
        self.holders = holders

    def _place(self, key: Any) -> tuple[torch.optim.Optimizer, Any]:
        """Return who holds what is called ``key`` here, and its name there."""
        paths = (path for path in self.holders if path and isinstance(key, str) and key.startswith(f"{path}."))
        path = max(paths, key=len, default="")
        return self.holders[path], key[len(path) + 1 :] if path else key

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, Tensor):
            holder, name = self._place(key)
            return holder.state[name]
        if key not in self:
            raise KeyError(key)
        return {
            f"{path}.{name}" if path else name: value
            for path, holder in self.holders.items()
            for name, value in holder.state.get(key, {}).items()
        }

    def __contains__(self, key: object) -> bool:
        if isinstance(key, Tensor):
            return any(key in holder.state for holder in self.holders.values())
        holder, name = self._place(key)
        return name in holder.state

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, Tensor) or not isinstance(value, Mapping):
            holder, name = self._place(key)
            holder.state[name] = value
            return
        parts: dict[int, dict[str, Any]] = {id(holder): {} for holder in self.holders.values()}
        for name, entry in value.items():
            holder, own = self._place(name)
            parts[id(holder)][own] = entry
        for holder in self.holders.values():
            if parts[id(holder)] or key in holder.state:
                holder.state[key] = parts[id(holder)]

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        if not isinstance(key, Tensor):
            holder, name = self._place(key)
            del holder.state[name]
            return
        for holder in self.holders.values():
            holder.state.pop(key, None)

    def __iter__(self) -> Iterator[Any]:
        keys = ((path, key) for path, holder in self.holders.items() for key in holder.state)
        named = (f"{path}.{key}" if path and not isinstance(key, Tensor) else key for path, key in keys)
        return iter(list(dict.fromkeys(named)))

    def __len__(self) -> int:
        return sum(1 for _ in self)
