"""What a program puts into the state of the wrapped optimizer is taken in by value before the next step, save or load.

Each case is compared with an optimizer that has loaded a state dict of the values that the program has put there: at
once, as a save shows it, and after two more steps.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
)
from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import UsageError
from tests.training import Bag, bits_equal

SHAPES = [(4, 8), (4, 8), (33,), (), (0, 3)]
WRAPPERS = ("mixed", "distributed", "chained", "offloaded")
OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.6}
"""All but the first parameter."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOMENTS = ("exp_avg", "exp_avg_sq")
COMPACT = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8, "store_param_remainders": True}


class _Training:
    """Five parameters that have taken two steps of AdamW."""

    def __init__(self, dtype: torch.dtype, wrapper: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.bag = Bag(torch.randn(shape).to(dtype) for shape in SHAPES)
        self.params = list(self.bag.params)
        named = [(f"params.{index}", param) for index, param in enumerate(self.params)]
        options |= OFFLOADED if wrapper == "offloaded" else {}
        config = OptimizerConfig(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, **options)
        scaler = ConstantGradScaler(8.0)
        split = [named[:3], named[3:]] if wrapper == "chained" else [named]
        self.inners = [torch.optim.AdamW(part, lr=1e-2) for part in split]
        self.optimizer: MegascaleOptimizer
        if wrapper == "distributed":
            self.optimizer = DistributedOptimizer(self.inners[0], config, scaler, modules=self.bag)
        else:
            parts = [MixedPrecisionOptimizer(inner, config, scaler) for inner in self.inners]
            self.optimizer = ChainedOptimizer(parts) if wrapper == "chained" else parts[0]
        self.inner = self.inners[0]
        self.step(0)
        self.early = copy.deepcopy(self.inner.state_dict())
        self.early_values = self.optimizer.state_dict()["optimizer"]["state"]
        self.step(1)

    def step(self, seed: int) -> None:
        """Take a step with gradients of this seed."""
        generator = torch.Generator().manual_seed(seed)
        self.optimizer.zero_grad()
        loss = sum((param.float() * torch.randn(param.shape, generator=generator)).sum() for param in self.params)
        self.optimizer.scale_loss(torch.as_tensor(loss)).backward()
        self.optimizer.step()

    def entry(self, index: int) -> dict[str, Any]:
        """Return what the wrapped optimizer has of a parameter; one of the first three."""
        found: dict[str, Any] = self.inner.state[self.params[index]]
        return found


States = dict[str, dict[str, Any]]


def _cleared(states: States, *indices: int) -> None:
    for index in indices:
        entry = states[f"params.{index}"]
        entry.update({name: torch.zeros_like(value) for name, value in entry.items()})


def _clear(training: _Training) -> None:
    for inner in training.inners:
        inner.state.clear()


def _pop(training: _Training) -> None:
    training.inner.state.pop(training.params[1])


def _pop_by_the_view(training: _Training) -> None:
    entries = training.optimizer.state.pop(training.params[1])
    assert all(not value.untyped_storage().nbytes() > value.nbytes for value in entries.values() if value is not None)


def _zero_in_place(training: _Training) -> None:
    for name in MOMENTS:
        training.entry(0)[name].zero_()


def _zero_by_assignment(training: _Training) -> None:
    for name in MOMENTS:
        training.entry(0)[name] = torch.zeros_like(training.entry(0)[name])


def _zeroed(states: States) -> None:
    for name in MOMENTS:
        states["params.0"][name].zero_()


def _count_is_a_number(training: _Training) -> None:
    training.entry(0)["step"] = 7


def _count_is_an_int_tensor(training: _Training) -> None:
    training.optimizer.state[training.params[0]]["step"] = torch.tensor([7])


def _counted(states: States) -> None:
    states["params.0"]["step"] = torch.tensor(7.0)


def _load_inner(training: _Training) -> None:
    training.inner.load_state_dict(training.early)


def _set_empty_state(training: _Training) -> None:
    for inner in training.inners:
        inner.__setstate__({"state": {}, "param_groups": inner.param_groups})


def _deep_copy(training: _Training) -> None:
    copied = copy.deepcopy(training.inner)
    for mine, theirs in zip(training.inner.state.values(), copied.state.values(), strict=True):
        for name, value in mine.items():
            assert bits_equal(value, theirs[name])
            theirs[name].fill_(3.0)


def _other(training: _Training) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    """Return fp32 parameters of the same shapes and a plain torch optimizer that has taken three steps on them."""
    torch.manual_seed(9)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES[: len(list(training.inner.state))]]
    plain = torch.optim.AdamW(params, lr=1e-2)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        plain.step()
    return params, plain


def _take_plain_state(training: _Training) -> None:
    params, plain = _other(training)
    for param, mine in zip(params, training.params, strict=False):
        live = training.inner.state[mine]
        training.inner.state[mine] = {
            name: value.reshape(live[name].shape) for name, value in plain.state[param].items()
        }


def _plain(states: States) -> None:
    torch.manual_seed(9)


def _clone_all_by_the_view(training: _Training) -> None:
    for param in training.params:
        entries = training.optimizer.state[param]
        for name, value in entries.items():
            if isinstance(value, Tensor):
                entries[name] = value.clone()


def _swap_entries(training: _Training) -> None:
    one, other = training.params[:2]
    state = training.inner.state
    state[one], state[other] = state[other], state[one]


def _swap_tensors(training: _Training) -> None:
    one, other = training.entry(0), training.entry(1)
    for name in one:
        one[name], other[name] = other[name], one[name]


def _swapped(states: States) -> None:
    states["params.0"], states["params.1"] = states["params.1"], states["params.0"]


def _give_away(training: _Training) -> None:
    one, other = training.params[:2]
    training.inner.state[other] = training.inner.state.pop(one)


def _given_away(states: States) -> None:
    _swapped(states)
    _cleared(states, 0)


def _share_a_tensor(training: _Training) -> None:
    training.entry(1)["exp_avg"] = training.entry(0)["exp_avg"]


def _shared(states: States) -> None:
    states["params.1"]["exp_avg"] = states["params.0"]["exp_avg"].clone()


def _share_an_entry(training: _Training) -> None:
    training.inner.state[training.params[1]] = training.entry(0)


def _shared_entry(states: States) -> None:
    states["params.1"] = copy.deepcopy(states["params.0"])


def _one_count_for_all(training: _Training) -> None:
    count = torch.tensor(2.0)
    for inner in training.inners:
        for entry in inner.state.values():
            entry["step"] = count


def _a_view_of_its_own_place(training: _Training) -> None:
    for name in MOMENTS:
        training.entry(0)[name] = training.entry(0)[name].view_as(training.entry(0)[name])


def _other_forms(training: _Training) -> None:
    first, second = training.entry(0), training.entry(1)
    first["exp_avg"] = first["exp_avg"].double()
    first["exp_avg_sq"] = torch.stack([first["exp_avg_sq"]] * 2, -1)[..., 0]
    with torch.inference_mode():
        second["exp_avg"] = second["exp_avg"].clone()
    second["exp_avg_sq"] = torch.ones(()).expand_as(second["exp_avg_sq"])


def _of_other_forms(states: States) -> None:
    states["params.1"]["exp_avg_sq"].fill_(1.0)


def _the_weights(training: _Training) -> None:
    weight = training.params[0].data.float()
    training.entry(0)["exp_avg"] = weight.reshape(training.entry(0)["exp_avg"].shape)


def _nothing(states: States) -> None:
    return


Case = tuple[Callable[[_Training], None], Callable[[States], None]]

CASES: dict[str, Case] = {
    "clear": (_clear, lambda states: _cleared(states, *range(len(SHAPES)))),
    "pop": (_pop, lambda states: _cleared(states, 1)),
    "pop by the view": (_pop_by_the_view, lambda states: _cleared(states, 1)),
    "zeros in place": (_zero_in_place, _zeroed),
    "zeros assigned": (_zero_by_assignment, _zeroed),
    "count, a number": (_count_is_a_number, _counted),
    "count, a tensor": (_count_is_an_int_tensor, _counted),
    "__setstate__": (_set_empty_state, lambda states: _cleared(states, *range(len(SHAPES)))),
    "deepcopy": (_deep_copy, _nothing),
    "clones": (_clone_all_by_the_view, _nothing),
    "entries exchanged": (_swap_entries, _swapped),
    "tensors exchanged": (_swap_tensors, _swapped),
    "entry given away": (_give_away, _given_away),
    "tensor shared": (_share_a_tensor, _shared),
    "entry shared": (_share_an_entry, _shared_entry),
    "one count for all": (_one_count_for_all, _nothing),
    "view of its place": (_a_view_of_its_own_place, _nothing),
    "other forms": (_other_forms, _of_other_forms),
}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {key: one for name, inner in value.items() for key, one in _flat(inner, f"{path}.{name}").items()}
    return {path: value}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    mine, theirs = _flat(one), _flat(other)
    return mine.keys() == theirs.keys() and all(
        bits_equal(value, theirs[key]) if isinstance(value, Tensor) else value == theirs[key]
        for key, value in mine.items()
    )


def _compare(training: _Training, expected: _Training, states: States) -> None:
    """Require that ``training`` has these states at once, and goes on as ``expected`` does once it has loaded them."""
    whole = expected.optimizer.state_dict()
    whole["optimizer"]["state"] = states
    expected.optimizer.load_state_dict(whole)
    assert _same(training.optimizer.state_dict()["optimizer"]["state"], states)
    shown = [value for entry in training.inner.state.values() for value in entry.values()]
    for seed in (2, 3):
        training.step(seed)
        expected.step(seed)
        assert _same(training.optimizer.state_dict(), expected.optimizer.state_dict())
        assert all(map(bits_equal, training.params, expected.params))
    now = [value for entry in training.inner.state.values() for value in entry.values()]
    assert len(shown) == len(now)
    assert all(one is other for one, other in zip(shown, now, strict=True))


@pytest.mark.default(
    "mixed-dtype0-clear",
    "distributed-dtype0-entries exchanged",
    "chained-dtype2-tensor shared",
    "mixed-dtype2-other forms",
    "distributed-dtype2-pop",
    "mixed-dtype1-entry shared",
    "offloaded-dtype0-entries exchanged",
    "offloaded-dtype1-entry given away",
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_put_into_the_state_is_taken_in(wrapper: str, dtype: torch.dtype, case: str) -> None:
    """Invariant 9: by value, before the next save or step; the entries then show the library's tensors, for good."""
    training, expected = _Training(dtype, wrapper), _Training(dtype, wrapper)
    act, edit = CASES[case]
    states = training.optimizer.state_dict()["optimizer"]["state"]
    edit(states)
    act(training)
    _compare(training, expected, states)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_inner_load_state_dict(wrapper: str) -> None:
    """State of an earlier step, with fp32 moments whose second ones fp16 would make 0."""
    training, expected = _Training(torch.float16, wrapper), _Training(torch.float16, wrapper)
    states = training.optimizer.state_dict()["optimizer"]["state"]
    states |= {f"params.{i}": training.early_values[f"params.{i}"] for i in range(3 if wrapper == "chained" else 5)}
    training.inner.load_state_dict(training.early)
    _compare(training, expected, states)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_state_of_plain_torch_adamw(wrapper: str, dtype: torch.dtype) -> None:
    """Three steps of another optimizer, on fp32 parameters; assigned entry by entry."""
    training, expected = _Training(dtype, wrapper), _Training(dtype, wrapper)
    states = training.optimizer.state_dict()["optimizer"]["state"]
    params, plain = _other(training)
    states |= {f"params.{i}": copy.deepcopy(dict(plain.state[param])) for i, param in enumerate(params)}
    _take_plain_state(training)
    _compare(training, expected, states)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_is_given_to_the_parameter_that_replaces_another(dtype: torch.dtype) -> None:
    """As densification does: kept over ``del``, it is that parameter's, whose main param begins with its weights."""
    training, expected = _Training(dtype, "mixed"), _Training(dtype, "mixed")
    expected.optimizer.reload_model_params()
    states = training.optimizer.state_dict()["optimizer"]["state"]
    old, group = training.params[0], training.inner.param_groups[0]
    entry = training.inner.state[old]
    del training.inner.state[old]
    training.params[0] = group["params"][0] = nn.Parameter(old.detach().clone())
    training.inner.state[training.params[0]] = entry
    training.optimizer.reload_model_params()
    _compare(training, expected, states)
    assert old not in training.inner.state
    assert training.inner.state[training.params[0]] is entry


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another device": (lambda t: t.to("meta"), r"meta.*|meta device"),
    "another shape": (lambda t: t.reshape(-1)[:5], r"is \(5,\) on cpu"),
    "integers": (lambda t: t.int(), "has dtype torch.int32; it must be floating point"),
    "no tensor": (lambda t: t.tolist(), "is a list; it must be a tensor"),
}


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_does_not_fit_is_refused_by_name(wrapper: str, refused: str) -> None:
    """Before a bit changes, by a step and by a save; mended, the next step is as if nothing had been."""
    training, left = _Training(torch.float16, wrapper), _Training(torch.float16, wrapper)
    change, message = REFUSED[refused]
    right = training.entry(1)["exp_avg"]
    training.entry(0)["exp_avg_sq"] = training.entry(0)["exp_avg_sq"].clone()  # one that fits is not copied either
    training.entry(1)["exp_avg"] = change(right)
    weights = [param.detach().clone() for param in training.params]
    for call in (lambda: training.step(2), training.optimizer.state_dict):
        with pytest.raises(UsageError, match=rf"state\['params.1'\]\['exp_avg'\] .*({message})"):
            call()
    assert all(bits_equal(param.detach(), old) for param, old in zip(training.params, weights, strict=True))
    training.entry(1)["exp_avg"] = right
    training.step(2)
    left.step(2)
    assert _same(training.optimizer.state_dict(), left.optimizer.state_dict())


def test_an_entry_that_lacks_a_moment_is_refused() -> None:
    """It would begin anew beside a count that goes on."""
    training = _Training(torch.float16, "mixed")
    del training.entry(1)["exp_avg"]
    with pytest.raises(UsageError, match=r"'params.1' has \['exp_avg_sq', 'step'\] and lacks \['exp_avg'\]"):
        training.step(2)
    training.entry(1).clear()
    training.step(2)
    assert float(training.entry(1)["step"]) == 1.0


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_state_that_does_not_fit_is_mended_by_a_load(wrapper: str) -> None:
    """What is to be replaced is not looked at."""
    training, left = _Training(torch.float16, wrapper), _Training(torch.float16, wrapper)
    saved = training.optimizer.state_dict()
    training.entry(0)["exp_avg"] = torch.zeros(3)
    del training.entry(1)["exp_avg"]
    training.optimizer.load_state_dict(saved)
    training.step(2)
    left.step(2)
    assert _same(training.optimizer.state_dict(), left.optimizer.state_dict())


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_a_copy_of_an_entry_is_no_larger_than_the_entry(copied: str) -> None:
    """Torch saves and copies whole storages; an entry of our view brings its own values alone."""
    import pickle

    training = _Training(torch.float16, "mixed")
    entries = training.optimizer.state[training.params[0]]
    made = copy.deepcopy(entries) if copied == "deepcopy" else pickle.loads(pickle.dumps(entries))
    for name in MOMENTS:
        assert made[name].untyped_storage().nbytes() == made[name].nbytes
        assert bits_equal(made[name], training.entry(0)[name])
        made[name].zero_()
    assert training.entry(0)["exp_avg"].any()


@pytest.mark.parametrize("options", [{}, COMPACT, {"exp_avg_dtype": torch.bfloat16}])
def test_state_lies_side_by_side(options: dict[str, Any]) -> None:
    """Invariant 9: one storage for each name, at multiples of 32 elements, also after a load; counts are one vector."""
    training = _Training(torch.bfloat16, "mixed", **options)
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    for name in training.entry(0):
        tensors = [training.inner.state[param][name] for param in training.params[:4]]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        offsets = [tensor.storage_offset() for tensor in tensors]
        if name.endswith("scale"):
            assert offsets == [0, 32, 64, 96]
        else:
            assert offsets == ([0, 1, 2, 3] if name == "step" else [0, 32, 64, 128])
        with pytest.raises(RuntimeError, match="not resizable"):
            tensors[0].untyped_storage().resize_(0)


def test_what_is_assigned_while_the_state_is_away_is_taken_in_after_its_return() -> None:
    """In place of what offload() has moved; the assigned tensor itself is not kept."""
    training, expected = _Training(torch.float16, "mixed"), _Training(torch.float16, "mixed")
    states = training.optimizer.state_dict()["optimizer"]["state"]
    _zeroed(states)
    training.optimizer.offload()
    for name in MOMENTS:
        training.entry(0)[name] = torch.zeros_like(training.entry(0)[name])
    gone = ref(training.entry(0)["exp_avg"])
    training.optimizer.reload()
    _compare(training, expected, states)
    assert gone() is None
