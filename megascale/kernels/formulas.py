"""The updates and the statistics as plain tensor code over one row, in the reference's order of operations.

Written for a compiler: every number that may change from step to step comes in a tensor of scalars, so that nothing is
compiled anew; what is chosen by keyword is chosen when compiling. A row's tensors are 1-D and equally long. ``model``
is None where the main param is the model param. Updates return whether the rounding of a main param into fp16 is not
finite, 0-d bool, or None where the model param is no fp16 copy.

``*_scalars`` make the fp32 table of scalars, shape [rows, n], from step counts of shape [rows] without a host read.
"""

import math

import torch
from torch import Tensor

from megascale.kernels.decision import Decision
from megascale.kernels.operands import FP16_OVERFLOW, AdamHyper, LionHyper, SgdHyper
from megascale.kernels.reference import stats_dtype

STATS_WIDTH = 4096
"""Elements whose squares are summed in fp32 before they are summed in the statistics dtype."""


def adam(
    scalars: Tensor,
    main: Tensor,
    grad: Tensor,
    model: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    *,
    l2: bool,
) -> Tensor | None:
    """Update one row by Adam or AdamW. ``l2``: weight decay goes through the gradient."""
    found_inf, coefficient, decay, weight_decay, beta1, rest1, beta2, rest2, eps, step_size, inv_correction2 = (
        scalars.unbind()
    )
    found = found_inf != 0
    g = grad.to(main.dtype) * coefficient
    if l2:
        g = g + weight_decay * main
    average = beta1 * exp_avg.to(main.dtype) + rest1 * g
    average_sq = beta2 * exp_avg_sq.to(main.dtype) + rest2 * g * g
    second = average_sq
    if max_exp_avg_sq is not None:
        second = torch.maximum(max_exp_avg_sq.to(main.dtype), average_sq)
        _land_(max_exp_avg_sq, second, found)
    denominator = second.sqrt() * inv_correction2 + eps
    updated = main * decay - step_size * average / denominator
    _land_(exp_avg, average, found)
    _land_(exp_avg_sq, average_sq, found)
    return _publish_(main, model, updated, found)


def adam_scalars(hyper: AdamHyper, decision: Decision, steps: Tensor) -> Tensor:
    """Return the scalars of :func:`adam`: bias corrections in fp64, as the reference has them."""
    t = (steps + 1).to(stats_dtype(steps.device))
    lr = _plain(hyper.lr)
    return _table(
        len(steps),
        decision,
        -decision.coefficient if hyper.maximize else decision.coefficient,
        1 - lr * hyper.weight_decay if hyper.decoupled else 1.0,
        hyper.weight_decay,
        hyper.beta1,
        1 - hyper.beta1,
        hyper.beta2,
        1 - hyper.beta2,
        hyper.eps,
        lr / (1 - hyper.beta1**t),
        1 / (1 - hyper.beta2**t).sqrt(),
    )


def sgd(
    scalars: Tensor,
    main: Tensor,
    grad: Tensor,
    model: Tensor | None,
    momentum_buffer: Tensor | None = None,
    *,
    l2: bool,
    nesterov: bool,
) -> Tensor | None:
    """Update one row by SGD. ``l2``: there is weight decay."""
    found_inf, coefficient, lr, weight_decay, momentum, kept = scalars.unbind()
    found = found_inf != 0
    g = grad.to(main.dtype) * coefficient
    if l2:
        g = g + weight_decay * main
    if momentum_buffer is not None:
        velocity = momentum * momentum_buffer.to(main.dtype) + kept * g
        _land_(momentum_buffer, velocity, found)
        g = g + momentum * velocity if nesterov else velocity
    return _publish_(main, model, main - lr * g, found)


def sgd_scalars(hyper: SgdHyper, decision: Decision, steps: Tensor) -> Tensor:
    """Return the scalars of :func:`sgd`. A buffer's first gradient is not dampened."""
    kept: float | Tensor = 1 - hyper.dampening
    if hyper.momentum != 0 and hyper.dampening != 0:
        kept = torch.where(steps == 0, 1.0, kept)
    return _table(
        len(steps),
        decision,
        -decision.coefficient if hyper.maximize else decision.coefficient,
        hyper.lr,
        hyper.weight_decay,
        hyper.momentum,
        kept,
    )


def lion(scalars: Tensor, main: Tensor, grad: Tensor, model: Tensor | None, exp_avg: Tensor) -> Tensor | None:
    """Update one row by Lion."""
    found_inf, coefficient, decay, lr, beta1, rest1, beta2, rest2 = scalars.unbind()
    found = found_inf != 0
    g = grad.to(main.dtype) * coefficient
    average = exp_avg.to(main.dtype)
    updated = main * decay - lr * (beta1 * average + rest1 * g).sign()
    _land_(exp_avg, beta2 * average + rest2 * g, found)
    return _publish_(main, model, updated, found)


def lion_scalars(hyper: LionHyper, decision: Decision, steps: Tensor) -> Tensor:
    """Return the scalars of :func:`lion`. Every step is alike: of ``steps`` only the length counts."""
    lr = _plain(hyper.lr)
    return _table(
        len(steps),
        decision,
        -decision.coefficient if hyper.maximize else decision.coefficient,
        1 - lr * hyper.weight_decay,
        lr,
        hyper.beta1,
        1 - hyper.beta1,
        hyper.beta2,
        1 - hyper.beta2,
    )


def statistics(grad: Tensor, *, count_zeros: bool) -> Tensor:
    """Return sum of squares, non-finite count and, with ``count_zeros``, zeros of a 2-D tensor, in the wide dtype."""
    exact = stats_dtype(grad.device)
    wide = grad.to(torch.float32)
    stats = [(wide * wide).sum(1).sum(dtype=exact), _count((wide.abs() < math.inf).logical_not(), exact)]
    if count_zeros:
        stats.append(_count(wide == 0, exact))
    return torch.stack(stats)


def _count(marks: Tensor, exact: torch.dtype) -> Tensor:
    return marks.sum(1, dtype=torch.int32).sum(dtype=torch.int64).to(exact)


def _land_(target: Tensor, value: Tensor, found: Tensor) -> None:
    """Write ``value`` where the step lands, the old bits where it is skipped."""
    if target.dtype == value.dtype:
        target.copy_(torch.where(found, target, value))
    else:
        # As integers: compiled code holds 16-bit floats in fp32, and the way back changes the bits of a NaN.
        chosen = torch.where(found, target.view(torch.int16), value.to(target.dtype).view(torch.int16))
        target.copy_(chosen.view(target.dtype))


def _publish_(main: Tensor, model: Tensor | None, value: Tensor, found: Tensor) -> Tensor | None:
    value = torch.where(found, main, value)
    main.copy_(value)
    if model is None:
        return None
    model.copy_(value)
    return (value.abs() < FP16_OVERFLOW).all().logical_not() if model.dtype == torch.float16 else None


def _plain(lr: float | Tensor) -> float | Tensor:
    """Return a learning rate that broadcasts against anything. A tensor may hold it in shape [1]."""
    return lr.reshape(()) if isinstance(lr, Tensor) else lr


def _table(rows: int, decision: Decision, *values: float | Tensor) -> Tensor:
    device = decision.found_inf.device
    columns = [
        value.to(device, torch.float32, non_blocking=True).reshape(-1)
        if isinstance(value, Tensor)
        else torch.full((1,), value, dtype=torch.float32, device=device)
        for value in (decision.found_inf, *values)
    ]
    return torch.stack([column.expand(rows) for column in columns], dim=1)
