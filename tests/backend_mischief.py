"""What users do to tensors whose addresses an optimizer has: changes, which may return how to undo them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Undo = Callable[[], Any]


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's storage is as large as it needs: that of one that was freed must not be read."""
    if tensor.numel() == 0:
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


def _param_within_another(at: Place) -> Undo:
    """Make the data a view of that of a larger parameter."""
    for other in at.params:
        if other is not at.param and other.dtype == at.param.dtype and other.numel() > at.param.numel() > 0:
            return _replace_data(at, other.data.reshape(-1)[: at.param.numel()].view(at.param.shape))
    raise LookupError("none is larger")


PARAMS: dict[str, Callable[[Place], Undo | None]] = {
    "parameter moved": _moved,
    "parameter replaced": _replaced,
    "parameter written": _written,
    "parameter written through data": _written_through_data,
    "parameter beyond fp16": _beyond_fp16,
    "parameter not finite": _not_finite,
    "parameter in shared memory": _param_shared,
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
    "parameter within another": _param_within_another,
}
