"""amp keeps forms of tensors from call to call: what others do to tensors between calls is followed all the same."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megascale.amp import GradScaler, fused_adam, local_grads, optimizer_step
from megascale.kernels import ListReader, TorchBackend, select_backend
from tests.training import bits_equal

HAS_KERNELS = type(select_backend()) is not TorchBackend
WARM = 3


def _grad_for(param: Tensor, index: int) -> Tensor:
    return torch.linspace(-1, 1 + index, param.numel()).reshape(param.shape).to(param.dtype)


def _built(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Return parameters with gradients, and a fused AdamW of two groups."""
    params = [nn.Parameter(torch.linspace(-2, 2, 12).reshape(3, 4).to(dtype) + index) for index in range(6)]
    groups: list[dict[str, Any]] = [{"params": params[:4]}, {"params": params[4:], "lr": 0.01}]
    return params, torch.optim.AdamW(groups, lr=0.1, fused=True)


def _by_optimizer_step(optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    optimizer_step(torch.zeros((), requires_grad=True), optimizer, scaler, 0.5, zero_grad=False)


def _by_step(optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()


def _by_unscale(optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


CALLS: dict[str, Callable[[torch.optim.Optimizer, GradScaler], None]] = {
    "optimizer_step": _by_optimizer_step,
    "step": _by_step,
    "unscale_": _by_unscale,
}
NO_SCALER = "optimizer_step without a scaler"
"""It makes one in each call: what is kept belongs to the optimizer."""


def _set_grad(change: Callable[[Tensor], Tensor | None]) -> "Change":
    def changed(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        param.grad = change(param.grad)  # type: ignore[arg-type]

    return changed


def _set_data(change: Callable[[Tensor], Tensor]) -> "Change":
    def changed(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        param.data = change(param.data)

    return changed


def _set_state(name: str, change: Callable[[Tensor], object]) -> "Change":
    def changed(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[param][name] = change(optimizer.state[param][name])

    return changed


def _cut(nbytes: int) -> Callable[[Tensor], Tensor]:
    def cut(tensor: Tensor) -> Tensor:
        tensor.untyped_storage().resize_(nbytes)
        return tensor

    return cut


def _frozen(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    param.requires_grad_(False).grad = None


def _another_param(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    params = optimizer.param_groups[0]["params"]
    place = next(index for index, one in enumerate(params) if one is param)
    params[place] = nn.Parameter(torch.full((3, 4), 7.0))
    params[place].grad = torch.full((3, 4), 2.0)


def _another_group(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    added = nn.Parameter(torch.ones(2, 2))
    added.grad = torch.ones(2, 2)
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    optimizer.param_groups.insert(0, optimizer.param_groups.pop())


def _loaded(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"] = entry["exp_avg"] * 2
    optimizer.load_state_dict(state)


def _shuffled(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()
    optimizer.param_groups.reverse()


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


Change = Callable[[nn.Parameter, torch.optim.Optimizer], None]
CHANGES: dict[str, Change] = {
    "no change": lambda param, optimizer: None,
    "gradient: another tensor": _set_grad(lambda grad: grad * 3),
    "gradient: none": _set_grad(lambda grad: None),
    "gradient: frozen": _frozen,
    "gradient: transposed": _set_grad(_transposed),
    "gradient: a Parameter": _set_grad(lambda grad: nn.Parameter(grad * 2, requires_grad=False)),
    "gradient: in a larger storage": _set_grad(lambda grad: torch.full((5, 4), 3.0)[1:4]),
    "gradient: sparse": _set_grad(lambda grad: grad.to_sparse()),
    "gradient: of another shape": lambda param, optimizer: setattr(param.grad, "data", torch.ones(2, 4)),
    "gradient: freed": _set_grad(_cut(0)),
    "gradient: cut short": _set_grad(_cut(16)),
    "gradient: inf": _set_grad(lambda grad: grad / 0),
    "parameter: other memory": _set_data(lambda data: data * 2),
    "parameter: transposed": _set_data(_transposed),
    "parameter: of another shape": _set_data(lambda data: torch.ones(4, 3)),
    "parameter: another one": _another_param,
    "parameter: in a new group": _another_group,
    "parameter: in another order": _shuffled,
    "state: loaded": _loaded,
    "state: cleared": lambda param, optimizer: optimizer.state.clear(),
    "state: of one cleared": lambda param, optimizer: optimizer.state[param].clear(),
    "state: another tensor": _set_state("exp_avg", lambda held: held * 3),
    "state: moved": _set_state("exp_avg_sq", lambda held: held.share_memory_()),
    "state: transposed": _set_state("exp_avg", _transposed),
    "state: of another shape": _set_state("exp_avg", lambda held: held.reshape(4, 3).clone()),
    "state: of another dtype": _set_state("exp_avg", lambda held: held.double()),
    "state: another count": _set_state("step", lambda held: held + 5),
    "state: a count of shape [1]": _set_state("step", lambda held: held.reshape(1)),
    "state: a count of another dtype": _set_state("step", lambda held: held.double()),
}


BY_TORCH = {
    "gradient: a Parameter": 1,
    "state: of another shape": 2,
    "state: a count of shape [1]": 2,
    "state: a count of another dtype": 2,
}
"""In how many of the two calls after the change torch's own step runs, where nothing is refused."""

REFUSED = (
    "gradient: of another shape",
    "gradient: freed",
    "gradient: cut short",
    "parameter: of another shape",
)
"""Changes after which the gradient no longer fits, though the same one, or one of the same form, was fit before."""


class _Outcome(NamedTuple):
    """What training left, and how: its error, how many calls ran on our kernels, and all tensors."""

    error: str
    on_kernels: int
    tensors: list[Tensor]


def _trained(change: Change, call: str, monkeypatch: pytest.MonkeyPatch, *, forgets: bool) -> _Outcome:
    """Train for some steps, with a change of the third parameter after :data:`WARM` steps.

    ``forgets``: before each call all that amp has kept is dropped.
    """
    params, optimizer = _built()
    changed, on_kernels, error = params[2], 0, ""
    step = fused_adam.step_

    def counted(*given: Any) -> None:
        nonlocal on_kernels
        on_kernels += 1
        step(*given)

    scaler = GradScaler("cpu", 4.0)
    with monkeypatch.context() as patched:
        patched.setattr(fused_adam, "step_", counted)
        for index in range(WARM + 2):
            for at, param in enumerate(params):
                param.grad = _grad_for(param, at + index) if param.requires_grad else None
            if index == WARM:
                change(changed, optimizer)
            if forgets:
                local_grads._readers.clear()
            try:
                CALLS[call](optimizer, scaler)
            except (RuntimeError, ValueError, KeyError) as caught:
                error = f"{type(caught).__name__}: {caught}"
                break
    every = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in every if param.grad is not None and param.grad.layout is torch.strided]
    state = [value for param in every for value in optimizer.state.get(param, {}).values()]
    return _Outcome(error, on_kernels, [*(param.detach() for param in every), *grads, *state])


@pytest.mark.default(
    "gradient: cut short-optimizer_step",
    "gradient: none-step",
    "gradient: freed-unscale_",
    "state: cleared-optimizer_step",
)
@pytest.mark.parametrize(
    ("change", "call"),
    [
        *((change, "optimizer_step") for change in CHANGES),  # which alone reads parameters and state
        *((change, call) for change in CHANGES if change.startswith("gradient") for call in ("step", "unscale_")),
    ],
)
def test_what_changes_between_calls_is_followed(change: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, the same errors and the same kernels as where nothing is kept from call to call.

    Where our kernels cannot read parameters or state, torch's own step runs, or refuses them.
    """
    kept = _trained(CHANGES[change], call, monkeypatch, forgets=False)
    anew = _trained(CHANGES[change], call, monkeypatch, forgets=True)
    assert kept[:2] == anew[:2]
    if change in REFUSED:
        assert kept.error.startswith("GradientError: the gradient of parameter 2 with a gradient")
    assert len(kept.tensors) == len(anew.tensors)
    for mine, theirs in zip(kept.tensors, anew.tensors, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.stride() == theirs.stride()
        assert mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
        if mine.untyped_storage().nbytes() >= mine.nbytes:
            assert bits_equal(mine, theirs)
    if HAS_KERNELS and call == "optimizer_step":
        assert kept.on_kernels == WARM + (0 if kept.error else 2 - BY_TORCH.get(change, 0))


@pytest.mark.skipif(not HAS_KERNELS, reason="no kernels here but torch's")
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_tensors", [6, 60])
@pytest.mark.parametrize("call", [*CALLS, NO_SCALER])
def test_each_list_is_read_once_in_a_call(
    call: str, num_tensors: int, num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients and parameters, and where amp updates them, of each group two moments and the step counts.

    In later calls no form is compared, where torch can tell in one call that all are the same.
    """
    params = [nn.Parameter(torch.ones(3)) for _ in range(num_tensors)]
    groups = [{"params": params[index::num_groups]} for index in range(num_groups)]
    optimizer, scaler = torch.optim.AdamW(groups, fused=True), GradScaler("cpu", 4.0)
    lists = 2 + (3 * num_groups if call in ("optimizer_step", NO_SCALER) else 0)
    counts, found = dict.fromkeys(("_read_forms", "_has_forms", "addresses"), 0), []

    def counting(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            counts[name] += 1
            return read(*given)

        return counted

    for name in counts:
        monkeypatch.setattr(ListReader, name, counting(name, getattr(ListReader, name)))
    for _ in range(4):
        counts.update(dict.fromkeys(counts, 0))
        for param in params:
            param.grad = torch.ones(3)
        if call == NO_SCALER:
            optimizer_step(torch.zeros((), requires_grad=True), optimizer, None, 0.5, zero_grad=False)
        else:
            CALLS[call](optimizer, scaler)
        found.append(tuple(counts.values()))
    later = (0, 0, lists)
    assert found == [(lists, lists, lists), later, later, later]


@pytest.mark.parametrize("call", CALLS)
def test_what_is_kept_holds_no_tensor(call: str) -> None:
    """State, gradients and parameters that are dropped or replaced between calls are gone, and the optimizer, too."""
    params, optimizer = _built()
    scaler = GradScaler("cpu", 4.0)
    for _ in range(WARM):
        for at, param in enumerate(params):
            param.grad = _grad_for(param, at)
        CALLS[call](optimizer, scaler)
    gone = [weakref.ref(value) for entry in optimizer.state.values() for value in entry.values()]
    gone += [weakref.ref(param.grad) for param in params if param.grad is not None]
    assert len(gone) == 6 * 4
    optimizer.state.clear()
    optimizer.zero_grad()
    assert all(reference() is None for reference in gone)
    gone = [weakref.ref(param) for param in params]
    optimizer.param_groups.clear()
    params.clear()
    del param
    assert all(reference() is None for reference in gone)
    assert optimizer in local_grads._readers
    held = weakref.ref(optimizer)
    del optimizer
    gc.collect()  # torch's optimizers are in cycles of their own
    assert held() is None


@pytest.mark.parametrize("turned", [(0, 1, 2, 3, 5), (1,)], ids=["all lists", "gradients"])
@pytest.mark.skipif(not HAS_KERNELS, reason="torch's own step is taken anyway")
def test_tensors_in_another_order_are_left_to_torch(turned: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever collects tensors in an order of his own, in place of the optimizer's method, gets torch's own step()."""
    params, optimizer = _built()
    collect: Any = optimizer._init_group  # type: ignore[attr-defined]
    taken = []
    monkeypatch.setattr(fused_adam, "step_", lambda *_: taken.append(True))

    def in_another_order(group: dict[str, Any], *lists: list[Tensor]) -> Any:
        found = collect(group, *lists)
        for at in turned:
            lists[at].reverse()
        return found

    for change in (None, in_another_order):
        if change is not None:
            monkeypatch.setattr(optimizer, "_init_group", change)
        for at, param in enumerate(params):
            param.grad = _grad_for(param, at)
        _by_optimizer_step(optimizer, GradScaler("cpu", 4.0))
    assert taken == [True]
