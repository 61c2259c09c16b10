"""``optimizer.state`` of our optimizers: each parameter's whole state, for whoever reads it.

Programs save, move and measure a torch optimizer by what ``optimizer.state[param]`` holds, and loaders such as those of
``torch.distributed.checkpoint.state_dict`` and torchtitan take from there the names that they look up in a file. All of
them find the same entries here:

- those of the wrapped optimizer, live. What is written reaches them, and state that our kernels update is taken in by
  value: see :mod:`megascale.step.kernel_state`. Copied, pickled and popped, entries are clones.
- those that :mod:`megascale.state.torch_layout` adds to a state dict: main param, scale, trackers, counts. The main
  param is live; the others are copies in host memory. Where this optimizer has no such value, as a bf16 run has no
  scale, the entry is None: a loader still asks the file for it, and the value that it finds there is not lost.

``load_state_dict()`` takes a copy of these entries, with those of ``param_groups``, as it takes what ``state_dict()``
returns: see :func:`megascale.state.torch_layout.from_torch_layout`.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.state import torch_layout as layout
from megascale.state.live_state import LiveState
from megascale.utils.autograd import detached
from megascale.utils.dtensors import to_local
from megascale.utils.nests import map_tensors

K = TypeVar("K")


class _View(MutableMapping[K, Any]):
    """What ``dict`` has and ``MutableMapping`` lacks. Pickled and deep-copied it is a plain dict."""

    def copy(self) -> dict[K, Any]:
        """Return a dict of the live values."""
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())

    def __repr__(self) -> str:
        return repr(dict(self))


class ParamEntries(_View[str]):
    """The entries of one parameter; see this module.

    Raises:
        StateDictError: while it is read, for a wrapped optimizer that has entries of the added names itself.
        UsageError: for another value written to an added entry.
    """

    def __init__(self, source: LiveState, param: Tensor) -> None:
        self._source = source
        self._param = param

    @property
    def _own(self) -> MutableMapping[str, Any]:
        """The wrapped optimizer's entries; a new dict where it has none."""
        own: MutableMapping[str, Any] | None = self._source.state.get(self._param)
        return {} if own is None else own

    def __iter__(self) -> Iterator[str]:
        own = self._own
        if not layout.TAKEN.isdisjoint(own):
            layout.require_free_names(self._name(), own)
        return iter((*own, *layout.ADDED))

    def __len__(self) -> int:
        return len(self._own) + len(layout.ADDED)

    def __contains__(self, name: object) -> bool:
        return name in layout.TAKEN or name in self._own

    def __getitem__(self, name: str) -> Any:
        return self._added(name) if name in layout.TAKEN else self._own[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in layout.TAKEN:
            if not _are_equal(self._added(name), value):
                raise UsageError(
                    f"optimizer.state of {self._name()!r} was assigned another {name!r} than it has: that entry shows "
                    "what the optimizer holds elsewhere; use load_state_dict() to change it"
                )
        else:
            self._source.state.setdefault(self._param, {})[name] = value

    def __delitem__(self, name: str) -> None:
        if name in layout.TAKEN:
            raise UsageError(
                f"optimizer.state of {self._name()!r} always has {name!r}, which cannot be deleted: it shows what the "
                "optimizer holds elsewhere"
            )
        del self._own[name]

    def clear(self) -> None:
        """Drop the wrapped optimizer's entries."""
        self._own.clear()

    def pop(self, name: str, *default: Any) -> Any:
        """Take an entry out, as a copy: what its place shows is then the next one."""
        return map_tensors(torch.clone, super().pop(name, *default))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies: a tensor that is pickled or deep-copied takes all that shares its memory along.
        return OrderedDict, (), None, None, ((name, map_tensors(torch.clone, value)) for name, value in self.items())

    def _name(self) -> str:
        names = self._source.main_params.names(self._source.param_groups)
        return names.get(id(self._param), "a parameter of no param group")

    def _added(self, name: str) -> Tensor | None:
        """Return an entry that is added; None where there is no such value. A scale and counts wait for the device."""
        source = self._source
        main = source.main_params.get(self._param)
        if name == layout.NUM_STATES:
            return torch.tensor(len(self._own), device="cpu")
        if name == layout.MAIN_PARAM:
            if main is None or not main.is_copy:
                return None
            member = source.member()
            if member is not None and main.tracker is not None and main.tracker.is_written(main.slot):
                member.sync_from_model()
            return detached(main.value())
        return None if source.counter.landings.is_meta else layout.shared_entries(source.shared_values()).get(name)


class StateView(_View[Any]):
    """The state of one optimizer, or of several that step as one: :class:`ParamEntries` by parameter.

    Keys that are no parameters, as some optimizers use them, have the wrapped optimizer's values.

    Args:
        sources: of each optimizer.
    """

    def __init__(self, sources: Sequence[LiveState]) -> None:
        self._sources = list(sources)

    def __bool__(self) -> bool:
        return True  # whoever finds no state takes a step with gradients of zeros, which would count

    def __iter__(self) -> Iterator[Any]:
        seen: set[int] = set()
        for source in self._sources:
            params = [param for group in source.param_groups for param in group["params"]]
            seen.update(map(id, params))
            yield from params
            yield from [key for key in source.state if id(key) not in seen]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return self._find(key) is not None

    def __getitem__(self, key: Any) -> Any:
        source = self._find(key)
        if source is None:
            if isinstance(key, Tensor) or len(self._sources) > 1:
                raise KeyError(key)
            return self._sources[0].state[key]  # a defaultdict makes it
        held = source.state.get(key)
        if isinstance(key, Tensor) and (held is None or isinstance(held, MutableMapping)):
            return ParamEntries(source, key)
        return held

    def __setitem__(self, key: Any, value: Any) -> None:
        source = self._find(key)
        if source is None:
            if len(self._sources) > 1:
                raise UsageError("state of several optimizers takes no new keys: write it into that of one of them")
            [source] = self._sources
        if isinstance(key, Tensor):
            if not isinstance(value, Mapping):
                raise UsageError(
                    f"optimizer.state of {ParamEntries(source, key)._name()!r} was assigned a {type(value).__name__}; "
                    "assign a dict of its entries, by name"
                )
            added = {name: value[name] for name in layout.ADDED if name in value}
            for name, entry in added.items():
                if name != layout.NUM_STATES:  # which follows from what is assigned
                    ParamEntries(source, key)[name] = entry
            if isinstance(value, ParamEntries) or added:
                value = {name: entry for name, entry in value.items() if name not in added}
        source.state[key] = value

    def __delitem__(self, key: Any) -> None:
        source = self._find(key)
        if source is None:
            raise KeyError(key)
        del source.state[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Take a parameter's entries out, as a dict of copies: what is left shows main param, scaler and counts."""
        if key not in self or not isinstance(self[key], ParamEntries):
            return super().pop(key, *default)
        entries = map_tensors(torch.clone, self[key])
        del self[key]
        return entries

    def clear(self) -> None:
        """Drop all entries of the wrapped optimizers."""
        for source in self._sources:
            source.state.clear()

    def held_for(self, value: Any) -> Any:
        """Return what the wrapped optimizer, there is one, holds where ``value`` is assigned to ``optimizer.state``."""
        if isinstance(value, StateView):
            return value._sources[0].state
        own: defaultdict[Any, Any] = defaultdict(dict)
        StateView([replace(self._sources[0], state=own)]).update(value)
        return own

    def _find(self, key: object) -> LiveState | None:
        """Return the source that has a parameter, or another key."""
        for source in self._sources:
            is_param = isinstance(key, Tensor) and key not in source.state
            listed = (param for group in source.param_groups for param in group["params"]) if is_param else ()
            if key in source.state or any(key is param for param in listed):
                return source
        return None


def _are_equal(one: Tensor | None, other: Any) -> bool:
    """Return whether both have the same values; NaN has that of NaN. Waits for the device."""
    if one is None or not isinstance(other, Tensor):
        return one is other
    mine, theirs = to_local(one).cpu(), to_local(other)
    if mine.shape != theirs.shape or theirs.is_meta:
        return False
    return torch.allclose(mine, theirs.to("cpu", mine.dtype), rtol=0.0, atol=0.0, equal_nan=True)
