"""Operands of a few rows of any dtype, and updates by any rule, for tests of the triton backend."""

import torch
from torch import Tensor

from megascale.kernels import AdamHyper, Decision, LionHyper, Operands, ReferenceBackend, SgdHyper
from megascale.kernels.triton.backend import TritonBackend
from tests.training import bits_equal

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
CHUNK = 64

Hyper = AdamHyper | SgdHyper | LionHyper

HYPERS: dict[str, Hyper] = {
    "adamw": AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True, False, False),
    "adam_l2_amsgrad": AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.1, False, True, False),
    "adam_maximize": AdamHyper(1e-2, 0.0, 0.95, 1e-6, 0.0, False, False, True),
    "adamw_lr_tensor": AdamHyper(torch.tensor(1e-2, device=DEVICE), 0.9, 0.999, 1e-8, 0.1, True, False, False),
    "sgd": SgdHyper(1e-2, 0.0, 0.0, 0.0, False, False),
    "sgd_nesterov": SgdHyper(1e-2, 0.9, 0.0, 0.1, True, False),
    "sgd_dampening_maximize": SgdHyper(1e-2, 0.9, 0.3, 0.0, False, True),
    "lion": LionHyper(1e-3, 0.9, 0.99, 0.1, False),
    "lion_maximize_lr_tensor": LionHyper(torch.tensor(1e-3, device=DEVICE), 0.95, 0.98, 0.0, True),
}

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
# Of one row: elements, dtypes of gradient, model (None: the main param itself) and state.
Row = tuple[int, torch.dtype, torch.dtype | None, torch.dtype]
ROWS: list[Row] = [
    (0, HALF, HALF, SINGLE),
    (3 * CHUNK + 5, HALF, HALF, SINGLE),
    (1, HALF, HALF, SINGLE),
    (2 * CHUNK, BRAIN, BRAIN, BRAIN),
    (17, SINGLE, None, SINGLE),
    (48, SINGLE, HALF, HALF),
    (CHUNK, HALF, SINGLE, SINGLE),
]


def decision_of(skip: bool = False, coefficient: float = 0.37) -> Decision:
    """Return a decision on the device."""
    scalars = torch.tensor([float(skip), coefficient, 1.0, 0.0], device=DEVICE)
    return Decision(*scalars.unbind())


def operands_of(rows: list[Row] = ROWS, seed: int = 0) -> Operands:
    """Return one operand a row, with random main params and zeros for everything else."""
    generator = torch.Generator().manual_seed(seed)
    grads: list[Tensor] = []
    operands = Operands(
        grad=grads, state={"exp_avg": [], "exp_avg_sq": [], "max_exp_avg_sq": [], "momentum_buffer": []}
    )
    for numel, grad, model, state in rows:
        main = torch.randn(numel, generator=generator).to(DEVICE)
        operands.main.append(main)
        operands.model.append(main if model is None else main.to(model))
        grads.append(torch.zeros(numel, dtype=grad, device=DEVICE))
        operands.step.append(torch.zeros((), device=DEVICE))
        for tensors in operands.state.values():
            tensors.append(torch.zeros(numel, dtype=state, device=DEVICE))
    return operands


def set_grads(operands: Operands, seed: int) -> None:
    """Write random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for grad in operands.grad:
        grad.copy_(torch.randn(grad.shape, generator=generator))


def update(backend: TritonBackend | ReferenceBackend, operands: Operands, hyper: Hyper, decision: Decision) -> Tensor:
    """Update by the hyperparameters' rule."""
    if isinstance(hyper, AdamHyper):
        return backend.adam_(operands, hyper, decision)
    if isinstance(hyper, SgdHyper):
        return backend.sgd_(operands, hyper, decision)
    return backend.lion_(operands, hyper, decision)


def everything(operands: Operands) -> list[Tensor]:
    """Return all tensors of the operands."""
    states = [tensor for tensors in operands.state.values() for tensor in tensors]
    return [*operands.model, *operands.main, *operands.grad, *states, *operands.step]


def same_operands(left: Operands, right: Operands) -> bool:
    """Return whether all tensors have the same bits."""
    return all(bits_equal(a, b) for a, b in zip(everything(left), everything(right), strict=True))
