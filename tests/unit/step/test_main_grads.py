"""main_grads(): a wrapped optimizer's methods besides step() see what its step() sees, whole or not at all.

The cells: fp16 x {replicated, sharded by parameters, FSDP2} x {fp32 state, remainders}, and some of bf16 and fp32. An
optimizer that runs its own step() has no 8-bit moments. Shards cut at elements are refused.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import ChainedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import MainParamOverflowError, RankError, UsageError
from megascale.grad_sync import GradSync
from tests.cells import SHAPES, Cell, Given, Named, integers
from tests.fsdp2_cases import whole
from tests.own_methods import Bf16Momentum, Sam, ScheduleFree, Sophia, values_in
from tests.pool import RankPool
from tests.training import bits_equal, same_values

WHOLE_CELLS = [
    *(
        (Cell(torch.float16, layout), remainders)
        for layout, remainders in product(("replicated", "zero1-parameters", "fsdp2"), (False, True))
    ),
    (Cell(torch.bfloat16, "zero1-parameters"), True),
    (Cell(torch.bfloat16, "replicated"), False),
    (Cell(torch.float32, "fsdp2"), False),
]
IDS = [f"{cell}{'-remainders' if remainders else ''}" for cell, remainders in WHOLE_CELLS]
in_whole_cells = pytest.mark.parametrize(("cell", "remainders"), WHOLE_CELLS, ids=IDS)

Life = Callable[[Any, Callable[[int], None], Callable[[str], Any]], None]
"""Takes the optimizer, what makes the gradients of a seed, and what calls a method of the wrapped optimizer."""


def _sophia(optimizer: Any, backward: Callable[[int], None], call: Callable[..., Any]) -> None:
    for step in range(3):
        backward(step)
        call("update_hessian")
        optimizer.zero_grad()
        backward(step + 10)
        optimizer.step()
        optimizer.zero_grad()


def _sam(optimizer: Any, backward: Callable[[int], None], call: Callable[..., Any]) -> None:
    for step in range(3):
        backward(step)
        call("first_step", zero_grad=True)
        backward(step + 10)
        optimizer.step()
        optimizer.zero_grad()


def _schedule_free(optimizer: Any, backward: Callable[[int], None], call: Callable[..., Any]) -> None:
    optimizer.eval()
    optimizer.train()
    for step in range(3):
        backward(step)
        optimizer.step()
        optimizer.eval()
        optimizer.train()
        optimizer.zero_grad()
    optimizer.eval()


LIVES: dict[str, tuple[Callable[[Named], torch.optim.Optimizer], Life]] = {
    "sophia": (Sophia, _sophia),
    "sam": (Sam, _sam),
    "schedule-free": (ScheduleFree, _schedule_free),
}


def _plain(shapes: Any, kind: str) -> list[Tensor]:
    """Return the parameters of a life in fp32, without megascale."""
    model = Given(shapes)
    inner, life = LIVES[kind][0](list(model.named_parameters())), LIVES[kind][1]
    life(inner, lambda seed: model(integers(shapes, seed)).backward(), lambda name, **o: getattr(inner, name)(**o))
    return [param.detach() for param in model.parameters()]


def _life(cell: Cell, remainders: bool, kind: str) -> dict[str, Any]:
    """Return the main params and weights, whole, after a life; dtypes of all state."""
    model = cell.model()
    optimizer = cell.optimizer(model, LIVES[kind][0], {"store_param_remainders": remainders})

    def call(name: str, **options: Any) -> None:
        with optimizer.main_grads() as inner:
            assert inner is optimizer._inner
            getattr(inner, name)(**options)

    LIVES[kind][1](optimizer, lambda seed: cell.backward(optimizer, model, integers(cell.shapes, seed)), call)
    states = optimizer.state_dict()["optimizer"]["state"]
    dtypes = {str(leaf.dtype) for leaf in values_in(states).values() if isinstance(leaf, Tensor)}
    mains = {name: whole(main) for name, main in optimizer.main_params() if main.numel()}
    return {"mains": mains, "weights": [whole(weight) for weight in model.parameters()], "dtypes": dtypes}


@pytest.mark.default(
    "schedule-free-float16-zero1-parameters-fp32-remainders",
    "sam-bfloat16-replicated-fp32",
    "sophia-float32-fsdp2-fp32",
)
@in_whole_cells
@pytest.mark.parametrize("kind", LIVES)
def test_methods_see_main_params_and_unscaled_gradients(
    cell: Cell, remainders: bool, kind: str, ranks: RankPool
) -> None:
    """Sophia's hessian, SAM's climb and the swaps of schedule-free optimizers have the bits of a run in fp32."""
    expected = _plain(cell.shapes, kind)
    found = ranks.run(cell.world_size, _life, cell, remainders, kind)
    mains = {name: main for own in found for name, main in own["mains"].items()}
    assert len(mains) == len(expected)
    for name, main in mains.items():
        right = expected[int(name.rpartition(".")[2])]
        # A remainder does not hold all fp32 numbers: see megascale/kernels/remainders.py.
        assert torch.allclose(main, right, rtol=2.0**-20, atol=2.0**-30) if remainders else bits_equal(main, right)
    for own in found:
        assert own["dtypes"] <= {"torch.float32"}
        for index, weight in enumerate(own["weights"]):
            assert bits_equal(weight, mains[f"weights.{index}"].to(cell.dtype)), "weights are roundings of main params"


def _everything(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """Return copies of all that a loan may change."""
    inner = optimizer._inner
    return (
        values_in(optimizer.state_dict())
        | values_in([whole(weight) for weight in model.parameters()], "weights")
        | values_in([{**group, "params": list(map(id, group["params"]))} for group in inner.param_groups], "groups")
        | {"num_updates": getattr(inner, "num_updates", None), "keys": sorted(map(id, inner.state))}
    )


def _spoil(inner: Any) -> None:
    """Change everything that a method can reach, and make new state."""
    inner.update_hessian()
    inner.num_updates += 5
    for group in inner.param_groups:
        group["lr"] = 3.0
        group["new"] = 1
        for p in group["params"]:
            inner.state[p]["made"] = torch.zeros_like(p)
            inner.state[p].pop("momentum", None)
            if "hessian" in inner.state[p]:
                inner.state[p]["hessian"].data = torch.ones_like(inner.state[p]["hessian"])
            p.data = torch.full_like(p, 7.0)


def _overflow(cell: Cell, remainders: bool, at: int) -> list[bool]:
    """Return whether a loan whose gradients overflow leaves all as it was, before and after the first step."""
    model = cell.model()
    optimizer = cell.optimizer(model, Sophia, {"store_param_remainders": remainders})
    kept = []
    for step in range(2):
        before = _everything(optimizer, model)
        grads = integers(cell.shapes, step)
        grads[at].view(-1)[-1] = float("inf")
        cell.backward(optimizer, model, grads)
        ran = False
        with torch.no_grad(), optimizer.main_grads() as inner:
            _spoil(inner)
            ran = True
        kept.append(ran and same_values(before, _everything(optimizer, model)))
        optimizer.zero_grad()
        cell.backward(optimizer, model, integers(cell.shapes, step))
        with optimizer.main_grads() as inner:
            inner.update_hessian()
        kept.append(bool(optimizer.step().success))
        optimizer.zero_grad()
    return kept


@pytest.mark.default("first-bfloat16-zero1-parameters-fp32-remainders", "last-float16-fsdp2-fp32")
@in_whole_cells
@pytest.mark.parametrize("at", [0, 2], ids=["first", "last"])
def test_an_overflow_leaves_everything_as_it_was(cell: Cell, remainders: bool, at: int, ranks: RankPool) -> None:
    """The body runs, and main params, model, state (new, replaced and dropped), options and attributes are put back,
    on every rank alike: where ranks own whole parameters, one of them alone has the overflow.
    """
    for kept in ranks.run(cell.world_size, _overflow, cell, remainders, at):
        assert kept == [True] * 4


def _exception(cell: Cell, remainders: bool, culprits: tuple[int, ...]) -> tuple[type[Exception], str, bool, bool]:
    model = cell.model()
    optimizer = cell.optimizer(model, Sophia, {"store_param_remainders": remainders})
    cell.backward(optimizer, model, integers(cell.shapes, 0))
    optimizer.step()
    before = _everything(optimizer, model)
    optimizer.zero_grad()
    cell.backward(optimizer, model, integers(cell.shapes, 1))
    rank = dist.get_rank() if dist.is_initialized() else 0
    with pytest.raises(Exception) as caught, torch.no_grad(), optimizer.main_grads() as inner:  # noqa: PT011, PT012
        _spoil(inner)
        if rank in culprits:
            raise ValueError("out of paper")
    kept = same_values(before, _everything(optimizer, model))
    return type(caught.value), str(caught.value), kept, bool(optimizer.step().success)


@pytest.mark.default("float16-zero1-parameters-fp32-remainders", "bfloat16-replicated-fp32", "float32-fsdp2-fp32")
@in_whole_cells
def test_an_exception_leaves_everything_as_it_was(cell: Cell, remainders: bool, ranks: RankPool) -> None:
    """An exception of one rank's body: all ranks put back what they held, and raise; the next step works."""
    for culprits in [(0,)] if cell.world_size == 1 else [(1,), (0, 1)]:
        told = ranks.run(cell.world_size, _exception, cell, remainders, culprits)
        for kind, message, kept, success in told:
            assert kept
            assert success
            assert "out of paper" in message
            assert kind is (ValueError if cell.world_size == 1 else RankError)


def _wrapped(inner: Callable[[Named], torch.optim.Optimizer], dtype: torch.dtype = torch.float16) -> tuple[Any, Any]:
    cell = Cell(dtype, "replicated")
    model = cell.model()
    optimizer = cell.optimizer(model, inner)
    cell.backward(optimizer, model, integers(cell.shapes, 0))
    return model, optimizer


INSIDE: dict[str, Callable[[Any], Any]] = {
    "main_grads()": lambda o: o.main_grads().__enter__(),
    "train()": lambda o: o.train(),
    "step()": lambda o: o.step(),
    "prepare_grads()": lambda o: o.prepare_grads(),
    "zero_grad()": lambda o: o.zero_grad(),
    "state_dict()": lambda o: o.state_dict(),
    "load_state_dict()": lambda o: o.load_state_dict({}),
    "main_params()": lambda o: list(o.main_params()),
    "reload_model_params()": lambda o: o.reload_model_params(),
    "offload()": lambda o: o.offload(),
    "add_param_group()": lambda o: o.add_param_group({"params": [("new", nn.Parameter(torch.zeros(3)))]}),
}


@pytest.mark.parametrize("call", INSIDE)
def test_calls_of_the_wrapper_inside_are_refused(call: str) -> None:
    """The wrapped optimizer holds main params: what reads or replaces them has to wait; all is as before then."""
    model, optimizer = _wrapped(ScheduleFree)
    optimizer.train()
    before = _everything(optimizer, model)
    with pytest.raises(UsageError, match="leave the context first"), optimizer.main_grads():
        INSIDE[call](optimizer)
    assert same_values(before, _everything(optimizer, model))
    assert optimizer.step().success


@pytest.mark.parametrize("call", ["main_grads", "train", "eval"])
def test_a_step_that_is_decided_comes_first(call: str) -> None:
    """Between prepare_grads() and its update a loan would change what was decided on."""
    _, optimizer = _wrapped(ScheduleFree)
    optimizer.train()
    optimizer.prepare_grads()
    borrow = optimizer.main_grads().__enter__ if call == "main_grads" else getattr(optimizer, call)
    with pytest.raises(UsageError, match=r"take the step with step_with_ready_grads\(\) first"):
        borrow()
    assert optimizer.step_with_ready_grads().success
    optimizer.eval()


def _cut() -> None:
    cell = Cell(torch.float16, "zero1")
    model = cell.model()
    optimizer = cell.optimizer(model, ScheduleFree, shard="elements", elementwise=True)
    cell.backward(optimizer, model, integers(cell.shapes, 0))
    with pytest.raises(UsageError, match="build it with shard='parameters'"):
        optimizer.main_grads().__enter__()


def test_pieces_of_parameters_are_refused(ranks: RankPool) -> None:
    """A method may read whole parameters, of which a rank has a piece."""
    ranks.run(2, _cut)


def test_main_params_in_host_memory_are_refused() -> None:
    """They are not beside the gradients."""
    cell = Cell(torch.float16, "replicated")
    model = cell.model()
    optimizer = cell.optimizer(model, fields={"optimizer_cpu_offload": True})
    cell.backward(optimizer, model, integers(SHAPES, 0))
    with pytest.raises(UsageError, match="build the optimizer without it"):
        optimizer.main_grads().__enter__()
    assert optimizer.step().success


def _one_steps_alone() -> None:
    cell = Cell(torch.float16, "replicated")
    model = cell.model()
    optimizer = cell.optimizer(model, Sophia)
    cell.backward(optimizer, model, integers(cell.shapes, 0))
    with pytest.raises(UsageError, match="the call"):
        (optimizer.step if dist.get_rank() == 0 else optimizer.main_grads().__enter__)()


def test_a_loan_on_one_rank_alone_is_named(ranks: RankPool) -> None:
    """A rank that takes a step while another lends: an error on both, not a message taken for another."""
    ranks.run(2, _one_steps_alone)


def test_gradients_that_a_method_drops_are_dropped() -> None:
    """`first_step(zero_grad=True)` means the model's gradients, and those of a GradSync; unless it is undone."""
    for grad_sync in (False, True):
        model = Given(SHAPES).half()
        named = list(model.named_parameters())
        scaler = DynamicGradScaler(2.0**4, 1.0, 2.0, 0.5, 1000, 1)
        sync = GradSync(named) if grad_sync else None
        optimizer = MixedPrecisionOptimizer(Sam(named), None, scaler, grad_sync=sync)
        _sam(optimizer, partial(_backward, optimizer, model), _caller(optimizer))
        for weight, right in zip(model.parameters(), _plain(SHAPES, "sam"), strict=True):
            assert bits_equal(weight, right.half())


def _backward(optimizer: Any, model: nn.Module, seed: int) -> None:
    optimizer.scale_loss(model(integers(SHAPES, seed))).backward()


def _caller(optimizer: Any) -> Callable[..., None]:
    def call(name: str, **options: Any) -> None:
        with optimizer.main_grads() as inner:
            getattr(inner, name)(**options)

    return call


@pytest.mark.parametrize("method", [lambda i: None, lambda i: [p.grad.zero_() for p in i.param_groups[0]["params"]]])
def test_gradients_stay_for_the_step(method: Callable[[Any], Any]) -> None:
    """What a method does to the gradients that it was shown is its own affair: the model's are those of backward."""
    model, optimizer = _wrapped(Sophia)
    before = [weight.grad.clone() for weight in model.parameters()]
    with optimizer.main_grads() as inner:
        method(inner)
    assert all(bits_equal(weight.grad, old) for weight, old in zip(model.parameters(), before, strict=True))
    assert optimizer.step().success


def test_a_chain_lends_all_of_its_optimizers() -> None:
    """It yields a tuple; train() and eval() are for those that have them."""
    cell = Cell(torch.float16, "replicated")
    first, second = cell.model(), Cell(torch.float16, "replicated").model()
    scaler = DynamicGradScaler(2.0**4, 1.0, 2.0, 0.5, 1000, 1)
    parts = [
        MixedPrecisionOptimizer(
            kind([(f"{index}.{name}", param) for name, param in model.named_parameters()]), None, scaler
        )
        for index, (kind, model) in enumerate([(ScheduleFree, first), (Sophia, second)])
    ]
    chain = ChainedOptimizer(parts)
    chain.train()
    for step in range(2):
        for model in (first, second):
            chain.scale_loss(model(integers(SHAPES, step))).backward()
        with chain.main_grads() as (schedule_free, sophia):
            assert type(schedule_free) is ScheduleFree
            sophia.update_hessian()
        assert chain.step().success
        chain.zero_grad()
    chain.eval()
    assert not parts[0].param_groups[0]["train_mode"]
    hessian = values_in(chain.state_dict()["optimizer"]["state"]["1.weights.0"])[".hessian"]
    grads = [integers(SHAPES, step)[0].square() for step in range(2)]
    assert bits_equal(hessian, (grads[0] / 2).lerp(grads[1], 0.5))


def test_a_main_param_that_outgrows_its_weight_is_told() -> None:
    """As after a step: the main param is intact, and the error names it."""
    _, optimizer = _wrapped(Sophia)
    with (
        pytest.raises(MainParamOverflowError, match=r"weights\.0"),
        torch.no_grad(),
        optimizer.main_grads() as inner,
    ):
        inner.param_groups[0]["params"][0].fill_(1e5)
    assert next(main for _, main in optimizer.main_params()).min() == 1e5


def test_param_groups_that_are_added_inside_are_refused() -> None:
    """The wrapped optimizer's add_param_group() takes model params, and it holds main params."""
    model, optimizer = _wrapped(Sophia)
    before = _everything(optimizer, model)
    with (
        pytest.raises(UsageError, match=r"add them by the wrapper's add_param_group\(\)"),
        optimizer.main_grads() as inner,
    ):
        inner.add_param_group({"params": [("new", nn.Parameter(torch.zeros(3)))]})
    assert same_values(before, _everything(optimizer, model))


@pytest.mark.parametrize(
    "cell",
    [
        Cell(torch.float32, "fsdp2"),
        Cell(torch.bfloat16, "replicated", "compact"),
        Cell(torch.bfloat16, "fsdp2", "compact"),
    ],
    ids=str,
)
def test_kernels_optimizers_lend_too(cell: Cell, ranks: RankPool) -> None:
    """AdamW, whose state is that of kernels: what a program writes into main params is rounded into the model."""
    for right in ranks.run(cell.world_size, _write, cell):
        assert right


def _write(cell: Cell) -> bool:
    model = cell.model()
    optimizer = cell.optimizer(model)
    for step in range(2):
        cell.backward(optimizer, model, integers(cell.shapes, step))
        before = {name: whole(main).clone() for name, main in optimizer.main_params()}
        with torch.no_grad(), optimizer.main_grads() as inner:
            for group in inner.param_groups:
                for p in group["params"]:
                    assert p.dtype == torch.float32
                    p.add_(p.grad, alpha=2.0**-8)
        grads = integers(cell.shapes, step)
        for (name, main), weight, grad in zip(optimizer.main_params(), model.parameters(), grads, strict=True):
            expected = before[name] + grad * 2.0**-8
            near = torch.allclose(whole(main), expected, rtol=2.0**-20, atol=2.0**-30)
            is_right = near if cell.state == "compact" else bits_equal(whole(main), expected)
            if not is_right or not bits_equal(whole(weight), expected.to(cell.dtype)):
                return False
        if not optimizer.step().success:
            return False
        optimizer.zero_grad()
    return True


# State that is 16-bit because a method was called without it, or on purpose


def _careless(cell: Cell, culprits: tuple[int, ...]) -> tuple[type[Exception], str, bool]:
    model = cell.model()
    optimizer = cell.optimizer(model, Sophia)
    cell.backward(optimizer, model, integers(cell.shapes, 0))
    before = [whole(weight) for weight in model.parameters()]
    if (dist.get_rank() if dist.is_initialized() else 0) in culprits:
        for group in optimizer.param_groups:  # as it is with param.grad: ZeRO-1 and FSDP2 have gradients elsewhere
            for p in group["params"]:
                optimizer._inner.state[p]["hessian"] = torch.zeros_like(p)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        optimizer.step()
    weights = zip(before, model.parameters(), strict=True)
    return type(caught.value), str(caught.value), all(bits_equal(old, whole(weight)) for old, weight in weights)


@pytest.mark.parametrize(
    "cell", [one for one, remainders in WHOLE_CELLS if not remainders and one.dtype != torch.float32], ids=str
)
def test_state_that_a_method_made_of_16_bit_weights_is_an_error(cell: Cell, ranks: RankPool) -> None:
    """The next step names it, on every rank alike, and nothing has changed. That of fp32 parameters is fp32."""
    culprits = (0,) if cell.world_size == 1 else (1,)
    told = ranks.run(cell.world_size, _careless, cell, culprits)
    assert all(message == told[0][1] for _, message, _ in told)
    for kind, message, kept in told:
        assert kind is UsageError
        assert "'hessian'" in message
        assert "with optimizer.main_grads() as inner" in message
        assert kept


def test_state_that_is_16_bit_on_purpose_stays_so() -> None:
    """It steps as it does alone: only state that 16-bit parameters caused is widened, or an error."""
    model, optimizer = _wrapped(Bf16Momentum)
    alone = Given(SHAPES)
    inner = Bf16Momentum(list(alone.named_parameters()))
    alone(integers(SHAPES, 0)).backward()
    for _ in range(2):
        optimizer.get_loss_scale()
        assert optimizer.step().success
        inner.step()
    assert {state["m"].dtype for state in optimizer._inner.state.values()} == {torch.bfloat16}
    for weight, right in zip(model.parameters(), alone.parameters(), strict=True):
        assert bits_equal(weight, right.detach().half())
