"""What users may do to the state of an optimizer, which holds tensors that we hold addresses of."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.backend_mischief import PARAMS, Place, Undo


def _each_state(at: Place, change: Callable[[Tensor], Any]) -> None:
    for value in at.state.values():
        if isinstance(value, Tensor):
            change(value)


def _state_shared(at: Place) -> None:
    _each_state(at, Tensor.share_memory_)


def _state_set(at: Place) -> None:
    _each_state(at, lambda value: value.set_(value.clone()))  # type: ignore[call-overload]


def _data_moved(at: Place) -> None:
    def move(value: Tensor) -> None:
        value.data = value.data.clone()

    _each_state(at, move)


def _replace_entries(at: Place, change: Callable[[Tensor], Any], *, steps: bool = False) -> Undo:
    """Put other tensors into the dict."""
    state, before = at.state, dict(at.state)
    for key, value in before.items():
        if isinstance(value, Tensor) and (steps or key != "step"):
            state[key] = change(value)

    def undo() -> None:
        state.clear()
        state.update(before)

    return undo


def _change_data(at: Place, change: Callable[[Tensor], Tensor], *, steps: bool = False) -> Undo:
    """Give the same tensors other memory."""
    before = [(value, value.data) for key, value in at.state.items() if isinstance(value, Tensor)]
    for key, value in at.state.items():
        if isinstance(value, Tensor) and (steps or key != "step"):
            value.data = change(value.data)

    def undo() -> None:
        for value, data in before:
            value.data = data

    return undo


def _larger(value: Tensor) -> Tensor:
    return torch.ones(value.numel() + 8, dtype=value.dtype)


def _smaller(value: Tensor) -> Tensor:
    return torch.ones(value.numel() // 2, dtype=value.dtype)


def _empty_entries(at: Place) -> Undo:
    state, before = at.state, dict(at.state)
    state.clear()
    return lambda: state.update(before)


def _without_one(at: Place) -> Undo:
    state, before = at.state, dict(at.state)
    state.pop(list(state)[-1])
    return lambda: state.update(before)


def _clear(at: Place) -> None:
    at.inner.state.clear()


def _forget_param(at: Place) -> None:
    at.inner.state.pop(at.param)


def _new_mapping(at: Place) -> None:
    at.inner.state = defaultdict(dict)


def _copied_mapping(at: Place) -> None:
    at.inner.state = defaultdict(dict, {param: dict(state) for param, state in at.inner.state.items()})


def _reordered_mapping(at: Place) -> None:
    entries = list(at.inner.state.items())[::-1]
    at.inner.state.clear()
    at.inner.state.update(entries)


def _one_tensor(at: Place) -> Undo:
    """Make all moments of a parameter one tensor."""
    state, before = at.state, dict(at.state)
    moments = at.moments()
    state.update({name: moments[0][1] for name, _ in moments})

    def undo() -> None:
        state.update(before)

    return undo


def _overlapping_state(at: Place) -> Undo:
    """Let the moments of a parameter be views of one memory, one element apart."""
    numel = at.param.numel()
    memory = torch.rand(numel + len(at.moments()), generator=torch.Generator().manual_seed(at.seed))
    views = iter(memory[first:][:numel].view(at.param.shape) for first in range(len(at.moments())))
    return _replace_entries(at, lambda value: next(views))


def _state_freed(at: Place) -> Undo:
    return _change_data(at, lambda value: _resized(value.clone()))


def _resized(value: Tensor) -> Tensor:
    value.untyped_storage().resize_(0)
    return value


def _neighbours_moments(at: Place) -> Undo:
    """Let the moments be views of those of the next larger parameter, in its param group or in another."""
    moments, numel = dict(at.moments()), at.param.numel()
    for other in (*at.params[at.index + 1 :], *at.params[: at.index]):
        theirs = at.inner.state.get(other, {})
        if other.numel() > numel and all(
            isinstance(theirs.get(name), Tensor) and theirs[name].numel() > value.numel()
            for name, value in moments.items()
        ):
            views = {name: theirs[name].reshape(-1)[: v.numel()].view(v.shape) for name, v in moments.items()}
            before = dict(at.state)
            at.state.update(views)
            return lambda: at.state.update(before)
    raise LookupError("none is larger")


def _one_step_for_all(at: Place) -> None:
    """As a state dict of older torch may have it: one tensor counts the steps of all parameters."""
    steps = [state for state in at.inner.state.values() if isinstance(state.get("step"), Tensor)]
    if len({float(state["step"]) for state in steps}) == 1:
        for state in steps:
            state["step"] = steps[0]["step"]


def _for_inference(value: Tensor) -> Tensor:
    with torch.inference_mode():
        return value.clone()


def _replace_scales(at: Place, change: Callable[[Tensor], Any]) -> Undo:
    before = dict(at.state)
    scales = {name: change(value) for name, value in before.items() if name.endswith("_scale")}
    at.state.update(scales)
    return lambda: at.state.update(before)


STATE: dict[str, Callable[[Place], Undo | None]] = {
    "state in shared memory": _state_shared,
    "state set": _state_set,
    "state moved": _data_moved,
    "state replaced": lambda at: _replace_entries(at, Tensor.clone, steps=True),
    "state replaced by numbers": lambda at: _replace_entries(at, lambda value: 0.0),
    "step as a number": lambda at: _replace_entries(
        at, lambda value: value.item() if value.dim() == 0 else value, steps=True
    ),
    "state larger": lambda at: _replace_entries(at, _larger),
    "state smaller": lambda at: _replace_entries(at, _smaller),
    "state reshaped": lambda at: _replace_entries(at, lambda value: value.reshape(-1, 1)),
    "state strided": lambda at: _replace_entries(
        at, lambda value: torch.empty(*value.shape, 2, dtype=value.dtype)[..., 0].copy_(value)
    ),
    "state negative": lambda at: _replace_entries(at, lambda value: torch._neg_view(value.neg())),
    "state as fp16": lambda at: _replace_entries(at, Tensor.half),
    "state as fp64": lambda at: _replace_entries(at, Tensor.double),
    "state and step as fp64": lambda at: _replace_entries(at, Tensor.double, steps=True),
    "state and step as int64": lambda at: _replace_entries(at, Tensor.long, steps=True),
    "data of state larger": lambda at: _change_data(at, _larger),
    "data of state smaller": lambda at: _change_data(at, _smaller),
    "data of state as fp16": lambda at: _change_data(at, Tensor.half),
    "data of state as fp64": lambda at: _change_data(at, Tensor.double),
    "data of state and step as fp64": lambda at: _change_data(at, Tensor.double, steps=True),
    "data of state freed": _state_freed,
    "state all one tensor": _one_tensor,
    "state that overlaps": _overlapping_state,
    "state within a neighbour's": _neighbours_moments,
    "one step for all": _one_step_for_all,
    "state for inference": lambda at: _replace_entries(at, _for_inference, steps=True),
    "scales strided": lambda at: _replace_scales(at, lambda value: torch.stack([value, value + 1], -1)[..., 0]),
    "scales as fp64": lambda at: _replace_scales(at, Tensor.double),
    "scales longer": lambda at: _replace_scales(at, lambda value: torch.ones(len(value) + 1)),
    "scales as numbers": lambda at: _replace_scales(at, lambda value: 1.0),
    "state emptied": _empty_entries,
    "state without one": _without_one,
    "all state cleared": _clear,
    "state of a parameter forgotten": _forget_param,
    "all state another mapping": _new_mapping,
    "all state a copied mapping": _copied_mapping,
    "all state in another order": _reordered_mapping,
}


FOR_KERNELS = {
    kind for kind in STATE if kind not in ("state moved", "state set", "state in shared memory", "data of state freed")
}
"""What only our kernels look at: an optimizer that runs its own step takes its state for what it left there."""

MISCHIEF = PARAMS | STATE
