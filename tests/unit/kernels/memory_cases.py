"""A training of one model on any backend, to change its tensors between steps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import MegascaleError
from tests.training import bits_equal

BACKENDS = ["reference", "torch", "native", pytest.param("triton", marks=pytest.mark.slow)]
"""Triton's interpreter takes as long as the others together; odd gradients it reads in the quick tests too."""

SHAPES = [(4, 4), (16,), (3, 8), ()]


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd_momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.3),
    "lion": lambda params: Lion(params, lr=1e-2),
}


class Training:
    """A few parameters that are trained on random gradients, the same for equal seeds."""

    def __init__(self, backend: str, make: Make = MAKERS["adamw"], dtype: torch.dtype = torch.float16) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
        fp16, bf16 = dtype == torch.float16, dtype == torch.bfloat16
        self.inner = make(self.params)
        self.scaler = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 2, 1) if fp16 else None
        config = OptimizerConfig(fp16=fp16, bf16=bf16, backend=backend)
        self.optimizer = MixedPrecisionOptimizer(self.inner, config, self.scaler, grads_are_scaled=True)

    def backward(self) -> None:
        """Make gradients."""
        for param in self.params:
            param.grad = torch.randn(param.shape).to(param.dtype)

    def step(self, times: int = 1) -> None:
        """Take steps."""
        for _ in range(times):
            self.backward()
            self.optimizer.step()

    def everything(self) -> list[Tensor]:
        """Copies of all that a step may change."""
        mains = [main for _, main in self.optimizer.main_params()]
        states = [
            value if isinstance(value, Tensor) else torch.tensor(value)
            for param in self.params
            for _, value in sorted(self.inner.state.get(param, {}).items())
        ]
        scaler = [] if self.scaler is None else [torch.tensor(float(v)) for v in self.scaler.state_dict().values()]
        tensors = [*self.params, *mains, *states, *scaler, self.optimizer.num_skipped_steps]
        return [tensor.detach().clone() for tensor in tensors]

    def refused(self, error: type[MegascaleError], match: str) -> None:
        """Expect that a step raises, and that nothing has changed."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        states = {id(p): {k: (v, v._version) for k, v in self.inner.state.get(p, {}).items()} for p in self.params}
        skipped = int(self.optimizer.num_skipped_steps)
        with pytest.raises(error, match=match):
            self.optimizer.step()
        assert skipped == int(self.optimizer.num_skipped_steps)
        if self.scaler is not None:
            assert self.scaler.state_dict() == scaler
        for param in self.params:
            for key, (value, version) in states[id(param)].items():
                assert self.inner.state[param][key] is value
                assert value._version == version


def same_training(one: Training, other: Training, *, rounding: bool = False) -> bool:
    """Whether all bits are; with ``rounding``, whether all numbers are but for their last bits."""
    pairs = zip(one.everything(), other.everything(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) if rounding else bits_equal(a, b) for a, b in pairs)


def go_on(training: Training, left: Training) -> None:
    """Take the step that was refused, and one more; the other one was never disturbed."""
    for one in (training, left):
        one.optimizer.step()
        torch.manual_seed(2)
        one.step()
    assert same_training(training, left)
