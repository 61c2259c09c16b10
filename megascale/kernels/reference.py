"""The reference backend, which specifies all others: plain tensor code, one parameter at a time.

Statistics accumulate in fp64. The update's arithmetic is in the main param's dtype.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megascale.kernels.compact_moments import decode_moments, encode_moments, exact_root
from megascale.kernels.decision import Decision, TensorStats, TorchDecisions
from megascale.kernels.protocol import Operands
from megascale.kernels.rounding import TorchRounding, of_trained
from megascale.kernels.tensors.tensor_list import TensorList
from megascale.rules import AdamHyper, Hyper, LionHyper, SgdHyper


class ReferenceBackend(TorchDecisions, TorchRounding):
    """Readable and slow. Every other backend extends it, and is tested against it.

    Every method takes local tensors on one device, and waits for none. Updates change nothing, bit for bit, where
    ``decision.found_inf`` is set. They return a bool tensor of shape [parameters]: whether the main param's rounding
    into fp16 is not finite; False where there is no gradient.
    """

    name = "reference"

    def kind_of(self, hyper: Hyper) -> object:
        """Return a key. One call may update neighbouring param groups whose keys are equal: here none are.

        An update whose keys can be equal takes further arguments, the hyperparameters of each param group but the
        first; ``operands.groups`` says how many parameters each group has.
        """
        return object()

    def measure(self, grads: Sequence[Tensor | None], count_zeros: bool) -> TensorStats:
        """Measure ``grads``, of any dtypes, at least one of which is there. Every statistic of a None is 0."""
        device = TensorList.of(grads).filled[0].device
        nothing = torch.zeros((), dtype=torch.float64, device=device)

        def of_each(count: Callable[[Tensor], Tensor]) -> Tensor:
            return torch.stack([nothing if grad is None else count(grad) for grad in grads])

        return TensorStats(
            sum_squares=of_each(lambda grad: grad.double().square().sum()),
            non_finite=of_each(lambda grad: grad.double().isfinite().logical_not().sum(dtype=torch.float64)),
            zeros=of_each(lambda grad: (grad == 0).sum(dtype=torch.float64)) if count_zeros else None,
        )

    @of_trained
    def adam_(self, operands: Operands, hyper: AdamHyper, decision: Decision) -> Tensor:
        """Update with state ``exp_avg``, ``exp_avg_sq`` (and ``max_exp_avg_sq``), then round main into model."""
        found, lr = decision.found_inf != 0, _exact(hyper.lr)
        for index, (main, grad, step) in enumerate(zip(operands.main, operands.grad, operands.step, strict=True)):
            state = {name: tensors[index] for name, tensors in operands.state.items()}
            g = _gradient(grad, main, hyper.maximize, decision)
            p = main
            if hyper.decoupled:
                p = main * _as(main, 1 - lr * hyper.weight_decay)
            elif hyper.weight_decay != 0:
                g = g + hyper.weight_decay * main
            t = (step + 1).to(torch.float64)
            correction1 = 1 - hyper.beta1**t
            inv_correction2_sqrt = 1 / (1 - hyper.beta2**t).sqrt()
            held = decode_moments(state) if operands.has_codes else state
            exp_avg = hyper.beta1 * held["exp_avg"].to(main.dtype) + (1 - hyper.beta1) * g
            exp_avg_sq = hyper.beta2 * held["exp_avg_sq"].to(main.dtype) + (1 - hyper.beta2) * g * g
            new = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            if operands.has_codes:
                start = operands.start[index] if operands.start else 0
                dtypes = {name: tensor.dtype for name, tensor in state.items()}
                new = encode_moments(exp_avg, exp_avg_sq, dtypes, start, step + 1)
            second = exp_avg_sq
            if hyper.amsgrad:
                second = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"].to(main.dtype), exp_avg_sq)
            denominator = exact_root(second) * inv_correction2_sqrt.to(main.dtype) + hyper.eps
            p = p - (lr / correction1).to(main.dtype) * exp_avg / denominator
            for name, value in new.items():
                _land_(state[name], value, found)
            _land_(main, p, found)
            step.add_(1 - decision.found_inf)
        return self.write_back_(operands)

    @of_trained
    def sgd_(self, operands: Operands, hyper: SgdHyper, decision: Decision) -> Tensor:
        """Update with state ``momentum_buffer`` (where momentum is not 0), then round main into model.

        torch's first momentum buffer is the gradient itself, not dampened. Buffers here start as zeros, so with
        dampening the step count tells, on the device, whether a buffer is new.
        """
        found, lr = decision.found_inf != 0, _exact(hyper.lr)
        for index, (main, grad) in enumerate(zip(operands.main, operands.grad, strict=True)):
            g = _gradient(grad, main, hyper.maximize, decision)
            if hyper.weight_decay != 0:
                g = g + hyper.weight_decay * main
            if hyper.momentum != 0:
                grad_weight: float | Tensor = 1 - hyper.dampening
                if hyper.dampening != 0:
                    grad_weight = torch.where(operands.step[index] == 0, 1.0, grad_weight)
                buffer = operands.state["momentum_buffer"][index]
                velocity = hyper.momentum * buffer.to(main.dtype) + grad_weight * g
                _land_(buffer, velocity, found)
                g = g + hyper.momentum * velocity if hyper.nesterov else velocity
            _land_(main, main - _as(main, lr) * g, found)
            if hyper.momentum != 0 and hyper.dampening != 0:
                operands.step[index].add_(1 - decision.found_inf)
        return self.write_back_(operands)

    @of_trained
    def lion_(self, operands: Operands, hyper: LionHyper, decision: Decision) -> Tensor:
        """Update with state ``exp_avg``, then round main into model."""
        found, lr = decision.found_inf != 0, _exact(hyper.lr)
        for index, (main, grad) in enumerate(zip(operands.main, operands.grad, strict=True)):
            g = _gradient(grad, main, hyper.maximize, decision)
            held = operands.state["exp_avg"][index]
            average = held.to(main.dtype)
            direction = (hyper.beta1 * average + (1 - hyper.beta1) * g).sign()
            p = main * _as(main, 1 - lr * hyper.weight_decay) - _as(main, lr) * direction
            _land_(held, hyper.beta2 * average + (1 - hyper.beta2) * g, found)
            _land_(main, p, found)
        return self.write_back_(operands)


Backend = ReferenceBackend
"""Any backend."""


def _exact(lr: float | Tensor) -> float | Tensor:
    """Return a rate with the precision of a Python number: what follows from it is rounded once."""
    return lr.to(torch.float64) if isinstance(lr, Tensor) else lr


def _as(main: Tensor, number: float | Tensor) -> float | Tensor:
    """Return a tensor ``number`` in the dtype of ``main``, a Python number as it is: torch rounds that."""
    return number.to(main.dtype) if isinstance(number, Tensor) else number


def _gradient(grad: Tensor, main: Tensor, maximize: bool, decision: Decision) -> Tensor:
    unscaled = grad.to(main.dtype) * decision.coefficient
    return -unscaled if maximize else unscaled


def _land_(target: Tensor, value: Tensor, found: Tensor) -> None:
    """Write ``value`` if the step lands, the old bits if it is skipped."""
    target.copy_(torch.where(found, target, value.view(target.shape).to(target.dtype)))
