"""The step in a CUDA graph: replays equal eager steps bitwise; skips, growth and learning rates take effect in them."""

import math
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor

from megascale import (
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    StepGraph,
)
from megascale.errors import UsageError
from tests.training import INNER, Tiny, grad_of, model, same_bits, set_grads, snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")]

BACKENDS = ["torch", "triton"]


def _made(inner: str, backend: str, sharded: bool = False) -> tuple[Tiny, MixedPrecisionOptimizer]:
    module = model().cuda()
    config = OptimizerConfig(fp16=True, clip_grad=1.0, backend=backend, log_num_zeros_in_grad=True)
    scaler = DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 4, 1)
    if sharded:
        return module, DistributedOptimizer(INNER[inner](module), config, scaler, modules=module, grads_are_scaled=True)
    return module, MixedPrecisionOptimizer(INNER[inner](module), config, scaler, grads_are_scaled=True)


def _as_tensor_rates(optimizer: MixedPrecisionOptimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64, device="cuda")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inner", ["adamw_fused", "sgd_momentum_fused", "lion"])
def test_replays_of_the_step_equal_eager_steps(inner: str, backend: str) -> None:
    """30 replays, skips and growth among them, a learning rate changed half-way: the bits of 30 eager steps."""
    module, optimizer = _made(inner, backend)
    twin, eager = _made(inner, backend)
    _as_tensor_rates(eager)
    set_grads(module, 0)
    set_grads(twin, 0)
    before = snapshot(optimizer, module)
    graph = StepGraph(optimizer)
    assert same_bits(before, snapshot(optimizer, module)), "construction trains nothing"
    for step in range(30):
        for one in (module, twin):
            grads = [grad_of(param) for param in one.parameters()]
            set_grads(one, step, 64.0)
            for param, grad in zip(one.parameters(), grads, strict=True):
                param.grad = grad.copy_(grad_of(param))
            if step % 7 == 3:
                grad_of(one.first.weight)[0, 0] = math.nan
        if step == 15:
            optimizer.param_groups[0]["lr"] = 3e-3
            eager.param_groups[0]["lr"].fill_(3e-3)
        ours, theirs = graph.replay(), eager.step()
        assert torch.equal(ours.success, theirs.success)
        assert torch.equal(ours.num_zeros_in_grad, theirs.num_zeros_in_grad)
        assert same_bits(snapshot(optimizer, module), snapshot(eager, twin))
        assert torch.equal(optimizer.get_loss_scale(), eager.get_loss_scale())
    assert optimizer.num_skipped_steps.item() == eager.num_skipped_steps.item() == 4


FRESH = """
import sys
import torch
from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, StepGraph

def made():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 1).half().cuda()
    inner = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, dtype=torch.float64, device="cuda"))
    config = OptimizerConfig(fp16=True, clip_grad=1.0, backend=sys.argv[1])
    return model, MixedPrecisionOptimizer(inner, config, DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 2, 2))

inputs = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(1)).half().cuda()
x = torch.zeros_like(inputs[0])
model, optimizer = made()
graph = StepGraph(optimizer, lambda: optimizer.scale_loss(model(x).float().square().mean()).backward())
for batch in inputs:  # nothing has run in this process before the graph was captured
    x.copy_(batch)
    result = graph.replay()
twin, eager = made()
for batch in inputs:
    eager.zero_grad()
    eager.scale_loss(twin(batch).float().square().mean()).backward()
    eager.step()
assert bool(result.success)
assert optimizer.get_loss_scale().item() == eager.get_loss_scale().item() > 2.0**10
assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters()))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_is_the_first_thing_of_a_process(backend: str) -> None:
    """CUDA refuses to load a kernel while it captures: a process that has launched none yet captures all the same."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", FRESH, backend], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("sharded", [False, True])
def test_forward_and_backward_in_the_graph(sharded: bool) -> None:
    """Forward, backward and step replayed on new inputs: the bits of the same loop run eagerly."""
    made = [_made("adamw_fused", "torch", sharded) for _ in range(2)]
    inputs = [torch.zeros(8, 4, dtype=torch.float16, device="cuda") for _ in made]

    def forward_backward(index: int) -> Tensor:
        module, optimizer = made[index]
        loss: Tensor = module(inputs[index]).float().square().mean()
        optimizer.scale_loss(loss).backward()
        return loss.detach()

    graph = StepGraph(made[0][1], lambda: forward_backward(0))
    _as_tensor_rates(made[1][1])
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        batch = torch.randn(8, 4, generator=generator) * (math.inf if step == 9 else 1.0)
        for one in inputs:
            one.copy_(batch)
        graph.replay()
        made[1][1].zero_grad(set_to_none=False)
        loss = forward_backward(1)
        made[1][1].step()
        assert torch.equal(graph.output, loss) or step == 9
        assert same_bits(snapshot(made[0][1], made[0][0]), snapshot(made[1][1], made[1][0]))
    assert made[0][1].num_skipped_steps.item() == 1


def test_graphs_and_eager_steps_take_turns() -> None:
    """Two graphs of one optimizer, for batches of two lengths, and eager steps between: the bits of eager steps alone.

    Before its first replay a graph's memory holds nothing, and no replay of the other one reads it.
    """
    made = [_made("adamw_fused", "triton") for _ in range(2)]
    inputs = [torch.zeros(rows, 4, dtype=torch.float16, device="cuda") for rows in (8, 5)]

    def forward_backward(index: int, rows: int) -> None:
        module, optimizer = made[index]
        optimizer.scale_loss(module(inputs[rows]).float().square().mean()).backward()

    def eager(index: int, rows: int) -> None:
        made[index][1].zero_grad(set_to_none=False)
        forward_backward(index, rows)
        made[index][1].step()

    graphs = [StepGraph(made[0][1], partial(forward_backward, 0, rows)) for rows in range(2)]
    _as_tensor_rates(made[1][1])
    generator = torch.Generator().manual_seed(0)
    for step, turn in enumerate([0, 0, 0, 2, 0, 1, 1, 2, 2, 1, 0]):
        rows = turn % 2
        inputs[rows].copy_(torch.randn(inputs[rows].shape, generator=generator) * (math.inf if step == 6 else 1.0))
        if turn == 2:
            eager(0, rows)
        else:
            graphs[turn].replay()
        eager(1, rows)
        assert same_bits(snapshot(made[0][1], made[0][0]), snapshot(made[1][1], made[1][0]))
    assert made[0][1].num_skipped_steps.item() == 1


def test_replay_notices_what_has_moved() -> None:
    """New gradients or loaded state lie elsewhere: the replay is refused. Weights loaded in place are followed."""
    module, optimizer = _made("adamw_fused", "torch")
    set_grads(module, 0)
    graph = StepGraph(optimizer)
    graph.replay()
    with torch.no_grad():
        module.head.weight.fill_(0.5)
    graph.replay()
    assert (module.head.weight.float() - 0.5).abs().max().item() < 0.1
    kept = module.head.weight.grad
    module.head.weight.grad = grad_of(module.head.weight).clone()
    with pytest.raises(UsageError, match="gradients have moved"):
        graph.replay()
    module.head.weight.grad = kept
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(UsageError, match="make a new StepGraph"):
        graph.replay()
