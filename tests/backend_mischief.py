"""What users do to tensors whose addresses an optimizer has: changes, which may return how to undo them."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Undo = Callable[[], Any]


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's storage is as large as it needs: that of one that was freed must not be read."""
    if tensor.numel() == 0 or torch._is_zerotensor(tensor):
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + last + 1) * tensor.itemsize


@dataclass
class Place:
    """Where something is to change.

    Attributes:
        params: all parameters, each with a gradient.
        inner: the wrapped optimizer.
        index: of the parameter that it is about.
        seed: of what is random about it.
    """

    params: list[nn.Parameter]
    inner: torch.optim.Optimizer
    index: int
    seed: int

    @property
    def param(self) -> nn.Parameter:
        """The parameter."""
        return self.params[self.index]

    @property
    def grad(self) -> Tensor:
        """Its gradient."""
        if self.param.grad is None:
            raise LookupError("frozen")
        return self.param.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.param.grad = value

    @property
    def state(self) -> dict[str, Any]:
        """Its state; a mapping of none where it has none yet."""
        state: dict[str, Any] = self.inner.state.get(self.param, {})
        if not all(has_memory(value) for value in state.values() if isinstance(value, Tensor)):
            raise LookupError("it lies nowhere")
        return state

    def moments(self) -> list[tuple[str, Tensor]]:
        """The tensors of its state that have its shape."""
        return [(key, value) for key, value in self.state.items() if isinstance(value, Tensor) and key != "step"]

    def random(self, like: Tensor) -> Tensor:
        """Return a new tensor."""
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(self.seed)).to(like.dtype)


class _Named(Tensor):
    """A subclass that changes nothing."""


# ---- gradients ----


def _negative(at: Place) -> None:
    at.grad = torch._neg_view(at.grad.clone())


def _negative_of_complex(at: Place) -> None:
    value = at.param.detach().float().requires_grad_()
    torch.complex(value, value * 2).conj().abs().sum().backward()
    if at.param.dtype == torch.float32:
        at.grad = value.grad
    else:
        at.grad.data = torch._neg_view(at.grad.clone())


def _zero_tensor(at: Place) -> None:
    at.grad = torch._efficientzerotensor(at.param.shape, dtype=at.param.dtype)


def _expanded(at: Place) -> None:
    at.grad = torch.full((), 0.5, dtype=at.param.dtype).expand(at.param.shape)


def _strided(at: Place) -> None:
    wide = torch.empty(*at.grad.shape, 2, dtype=at.grad.dtype)
    wide[..., 1] = at.grad
    at.grad = wide[..., 1]


def _transposed(at: Place) -> None:
    at.grad = at.grad.clone().t().contiguous().t()


def _misaligned(at: Place) -> None:
    at.grad = torch.cat([at.grad.new_zeros(1), at.grad.reshape(-1)])[1:].view(at.grad.shape)


def _missing(at: Place) -> None:
    at.grad = None


def _all_missing(at: Place) -> None:
    for param in at.params:
        param.grad = None


def _sparse(at: Place) -> None:
    at.grad = at.grad.to_sparse()


def _freed(at: Place) -> None:
    at.grad.untyped_storage().resize_(0)


def _shrunk(at: Place) -> None:
    at.grad.data = at.grad.data.reshape(-1)[: at.grad.numel() // 2].clone()


def _grown(at: Place) -> None:
    at.grad.data = torch.ones(at.grad.numel() + 100, dtype=at.grad.dtype)


def _reshaped(at: Place) -> None:
    at.grad.data = at.grad.data.reshape(-1)


def _in_fp32(at: Place) -> None:
    at.grad.data = at.grad.data.float()


def _in_fp32_as_told(at: Place) -> None:
    grad, param = at.grad.float(), at.param
    param.grad = None
    param.grad_dtype = torch.float32
    param.grad = grad


def _in_fp16(at: Place) -> None:
    at.grad.data = at.grad.data.half()


def _of_integers(at: Place) -> None:
    at.grad.data = at.grad.data.int()


def _shared(at: Place) -> None:
    for param in at.params:
        if param.grad is not None and param.shape == at.param.shape and param.dtype == at.param.dtype:
            param.grad = at.grad


def _of_a_subclass(at: Place) -> None:
    at.grad = at.grad.as_subclass(_Named)


def _with_a_graph(at: Place) -> None:
    at.grad = at.grad.requires_grad_() * 2


def _for_inference(at: Place) -> None:
    with torch.inference_mode():
        at.grad = torch.full(at.param.shape, 0.25, dtype=at.param.dtype)


def _the_param_itself(at: Place) -> None:
    at.grad = at.param.detach().clone()
    at.grad.set_(at.param.data)  # type: ignore[call-overload]


GRADIENTS: dict[str, Callable[[Place], Undo | None]] = {
    "negative bit": _negative,
    "negative bit of a complex product": _negative_of_complex,
    "zero tensor": _zero_tensor,
    "expanded": _expanded,
    "strided": _strided,
    "transposed": _transposed,
    "misaligned": _misaligned,
    "missing": _missing,
    "all missing": _all_missing,
    "sparse": _sparse,
    "freed": _freed,
    "shrunk": _shrunk,
    "grown": _grown,
    "reshaped": _reshaped,
    "in fp32": _in_fp32,
    "in fp32, as torch was told": _in_fp32_as_told,
    "in fp16": _in_fp16,
    "of integers": _of_integers,
    "shared": _shared,
    "of a subclass": _of_a_subclass,
    "with a graph": _with_a_graph,
    "for inference": _for_inference,
    "the parameter itself": _the_param_itself,
}


# ---- parameters ----


def _replace_data(at: Place, data: Tensor) -> Undo:
    before, param = at.param.data, at.param
    param.grad = None  # of another shape, it would be refused
    param.data = data
    if param.requires_grad and param.grad_dtype == data.dtype:
        param.grad = torch.ones_like(data)

    def undo() -> None:
        param.grad = None
        param.data = before

    return undo


def _moved(at: Place) -> None:
    at.param.data = at.param.data.clone()


def _replaced(at: Place) -> None:
    at.param.data = at.random(at.param)


def _written(at: Place) -> None:
    with torch.no_grad():
        at.param.mul_(2)


def _written_through_data(at: Place) -> None:
    at.param.data.mul_(2)


def _beyond_fp16(at: Place) -> None:
    with torch.no_grad():
        at.param.fill_(65504.0)


def _not_finite(at: Place) -> None:
    with torch.no_grad():
        at.param.fill_(float("nan"))


def _param_shared(at: Place) -> None:
    at.param.share_memory_()


def _param_for_inference(at: Place) -> None:
    with torch.inference_mode():
        data = at.param.detach().clone()
    at.param.data = data


def _param_strided(at: Place) -> Undo:
    return _replace_data(at, torch.empty(*at.param.shape, 2, dtype=at.param.dtype)[..., 0].copy_(at.param.data))


def _param_grown(at: Place) -> Undo:
    return _replace_data(at, torch.ones(at.param.numel() + 8, dtype=at.param.dtype))


def _param_much_grown(at: Place) -> Undo:
    return _replace_data(at, torch.ones(at.param.numel() + 200_000, dtype=at.param.dtype))


def _param_shrunk(at: Place) -> Undo:
    return _replace_data(at, torch.ones(at.param.numel() // 2, dtype=at.param.dtype))


def _param_reshaped(at: Place) -> Undo:
    return _replace_data(at, at.param.data.reshape(-1, 1))


def _param_as(dtype: torch.dtype) -> Callable[[Place], Undo]:
    return lambda at: _replace_data(at, at.param.data.to(dtype))


def _model_as(dtype: torch.dtype) -> Callable[[Place], Undo]:
    def change(at: Place) -> Undo:
        undos = [_replace_data(Place(at.params, at.inner, i, 0), p.data.to(dtype)) for i, p in enumerate(at.params)]
        return lambda: [undo() for undo in undos]

    return change


def _param_freed(at: Place) -> Undo:
    storage, before = at.param.untyped_storage(), at.param.data.clone()
    size = storage.size()
    storage.resize_(0)

    def undo() -> None:
        storage.resize_(size)
        at.param.data.copy_(before)

    return undo


PARAMS: dict[str, Callable[[Place], Undo | None]] = {
    "parameter moved": _moved,
    "parameter replaced": _replaced,
    "parameter written": _written,
    "parameter written through data": _written_through_data,
    "parameter beyond fp16": _beyond_fp16,
    "parameter not finite": _not_finite,
    "parameter in shared memory": _param_shared,
    "parameter for inference": _param_for_inference,
    "parameter strided": _param_strided,
    "parameter grown": _param_grown,
    "parameter much grown": _param_much_grown,
    "parameter shrunk": _param_shrunk,
    "parameter reshaped": _param_reshaped,
    "parameter as fp16": _param_as(torch.float16),
    "parameter as bf16": _param_as(torch.bfloat16),
    "parameter as fp32": _param_as(torch.float32),
    "parameter as fp64": _param_as(torch.float64),
    "model as fp16": _model_as(torch.float16),
    "model as bf16": _model_as(torch.bfloat16),
    "model as fp32": _model_as(torch.float32),
    "model as fp64": _model_as(torch.float64),
    "parameter freed": _param_freed,
}


# ---- state ----


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
    "state emptied": _empty_entries,
    "state without one": _without_one,
    "all state cleared": _clear,
    "state of a parameter forgotten": _forget_param,
    "all state another mapping": _new_mapping,
    "all state a copied mapping": _copied_mapping,
    "all state in another order": _reordered_mapping,
}

MISCHIEF = PARAMS | STATE

FOR_KERNELS = {
    kind for kind in STATE if kind not in ("state moved", "state set", "state in shared memory", "data of state freed")
}
"""What only our kernels look at: an optimizer that runs its own step takes its state for what it left there."""
