"""One optimizer on one backend, as the random lives of :mod:`tests.backend_machine` set it up and compare it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import MegascaleError
from megascale.kernels.tensors import forms
from tests.backend_mischief import has_memory
from tests.training import bits_equal

SHAPES = [(3, 5), (70,), (), (0,), (2, 3, 4), (1,), (33,)]


DTYPES = {
    "fp16": [torch.float16],
    "bf16": [torch.bfloat16],
    "fp32": [torch.float32],
    "fp16, fp32": [torch.float16, torch.float32],
    "all": [torch.float16, torch.bfloat16, torch.float32, torch.float64],
}


INNER: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD with dampening": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, dampening=0.3),
    "Lion": lambda groups: Lion(groups, lr=1e-3, weight_decay=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
}


OPTIONS: dict[str, list[Any]] = {
    "lr": [0.0, 1e-3, 0.5, torch.tensor(1e-2), torch.tensor([1e-2]), torch.tensor(1e-2, dtype=torch.bfloat16)],
    "weight_decay": [0.0, 0.3],
    "momentum": [0.0, 0.5],
    "dampening": [0.0, 0.5],
    "nesterov": [False, True],
    "amsgrad": [False, True],
    "maximize": [False, True],
    "betas": [(0.0, 0.5), (0.9, 0.95), (torch.tensor(0.9), torch.tensor(0.99))],
    "eps": [1e-8, 1e-3],
}


SECOND = {torch.int8: torch.uint8}
"""The dtype of the second moment beside such a first one, where that is another."""


COLUMNS = "columns"
"""Added to a backend's name: forms are compared part by part, as in a torch without guards."""
GUARDS = forms.TensorGuards


class World:
    """One optimizer on one backend.

    Attributes:
        is_exact: whether its bits are the reference's: torch's own kernels, and what only differs in how a norm was
            added up, may differ in the last bits.
        mains: live main params or remainders by name, as they were after the last call that did not fail.
        saved: state dicts, ours and the inner optimizer's.
    """

    def __init__(self, name: str, setup: "Setup") -> None:
        self.name = name
        self.backend = name.removesuffix(f" {COLUMNS}")
        self.setup = setup
        self.is_exact = self.backend != "torch" and setup.clip_grad == 0
        self.is_loose = setup.moments != torch.float32
        self.mains: dict[str, Tensor] = {}
        self.saved: list[dict[str, Any]] = []
        generator = torch.Generator().manual_seed(setup.seed)
        dtypes = DTYPES[setup.dtypes]
        self.params = [
            nn.Parameter(torch.randn(shape, generator=generator).to(dtypes[index % len(dtypes)]))
            for index, shape in enumerate(SHAPES)
        ]
        with self.active():
            self.build([self.params[:4], self.params[4:]])
            self.look()

    def build(self, groups: list[list[nn.Parameter]]) -> None:
        """Make the optimizers."""
        setup = self.setup
        fp16 = any(param.dtype == torch.float16 for param in self.params)
        self.inner = INNER[setup.inner]([{"params": group} for group in groups])
        self.scaler = DynamicGradScaler(2.0**6, 1.0, 2.0, 0.5, 3, setup.hysteresis)
        config = OptimizerConfig(
            fp16=fp16,
            bf16=not fp16 and any(param.dtype == torch.bfloat16 for param in self.params),
            clip_grad=setup.clip_grad,
            log_num_zeros_in_grad=True,
            backend=self.backend,
            store_param_remainders=setup.remainders,
            exp_avg_dtype=setup.moments,
            exp_avg_sq_dtype=SECOND.get(setup.moments, setup.moments)
            if setup.inner.startswith("Adam")
            else torch.float32,
        )
        self.optimizer = MixedPrecisionOptimizer(self.inner, config, self.scaler)

    def look(self) -> None:
        """Find what holds the main params."""
        self.mains = {param.name: param.memory for param in self.optimizer._member.main_params}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Read tensors as this world does."""
        forms.TensorGuards = None if self.name.endswith(COLUMNS) else GUARDS
        try:
            yield
        finally:
            forms.TensorGuards = GUARDS

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a step may write, as it is: nothing is followed meanwhile."""
        found = {f"model {index}": param.data for index, param in enumerate(self.params)}
        found |= {f"main {name}": main.data for name, main in self.mains.items()}
        for index, param in enumerate(self.params):
            for key, value in self.inner.state.get(param, {}).items():
                found[f"{key} {index}"] = torch.as_tensor(value)
        trackers = (self.scaler._growth_tracker, self.scaler._hysteresis_tracker)
        found |= {f"tracker {index}": torch.as_tensor(value) for index, value in enumerate(trackers)}
        found |= {"scale": self.scaler.scale, "skipped": self.optimizer.num_skipped_steps}
        return {key: tensor if has_memory(tensor) else torch.zeros(0) for key, tensor in found.items()}

    def runs_own_step(self) -> bool:
        """Whether the inner optimizer's own step updates, not our kernels."""
        betas = [beta for group in self.inner.param_groups for beta in group.get("betas", ())]
        return isinstance(self.inner, torch.optim.RMSprop) or any(isinstance(beta, Tensor) for beta in betas)

    def options(self) -> list[dict[str, str]]:
        """Return the options of all param groups, and who is in them."""
        ids = {id(param): index for index, param in enumerate(self.params)}
        return [
            {key: repr(value) for key, value in group.items() if key != "params"}
            | {"params": repr([ids[id(param)] for param in group["params"]])}
            for group in self.inner.param_groups
        ]


class Setup:
    """What all worlds begin with."""

    def __init__(
        self,
        inner: str,
        dtypes: str,
        moments: torch.dtype,
        remainders: bool,
        clip_grad: float,
        hysteresis: int,
        seed: int,
    ) -> None:
        self.inner, self.dtypes, self.clip_grad, self.hysteresis, self.seed = inner, dtypes, clip_grad, hysteresis, seed
        self.remainders = remainders
        self.moments = torch.float32 if inner in ("RMSprop", "SGD") else moments


def saved_by(world: World, index: int) -> dict[str, Any]:
    """Return a state dict that a world has saved."""
    return world.saved[index % len(world.saved)]


def give_gradients(world: World, seed: int, scale: float) -> None:
    """Write random gradients, the same in every world."""
    generator = torch.Generator().manual_seed(seed)
    for param in world.params:
        grad = (torch.randn(param.shape, generator=generator) * scale * world.scaler.scale.item()).to(param.dtype)
        param.grad = None
        if param.grad_dtype != param.dtype:
            param.grad_dtype = param.dtype
        param.grad = grad if param.requires_grad else None


def outcome_of(function: Callable[[World], Any], world: World) -> Any:
    """Return what a rule returns, or the error of ours that it raises."""
    try:
        return function(world)
    except MegascaleError as error:
        return error


def same_outcome(expected: Any, found: Any) -> bool:
    """Return whether two worlds have had the same result, or the same error."""
    if isinstance(expected, MegascaleError):
        return type(expected) is type(found) and str(expected) == str(found)
    if isinstance(expected, tuple):
        return isinstance(found, tuple) and all(map(same_outcome, expected, found))
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and torch.allclose(expected.double(), found.double(), 1e-4, equal_nan=True)
    return type(expected) is type(found)


def agree(found: Tensor, expected: Tensor, world: World) -> bool:
    """Whether a tensor of a world is the reference's: its bits, or within rounding where it is not exact.

    Which of its many bit patterns a NaN has is nobody's promise: the CPU takes one operand's or the other's.
    """
    if world.is_exact:
        return bits_equal(_with_one_nan(found), _with_one_nan(expected))
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if found.dtype == torch.int16:  # remainders: what rounding took away is within rounding
        return True
    precision = 4 * torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
    if world.is_loose:
        precision = max(precision, 0.05)
    return torch.allclose(
        found.double(), expected.double(), rtol=max(precision, 1e-5), atol=max(precision, 1e-6), equal_nan=True
    )


def _with_one_nan(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isnan(), math.nan, tensor) if tensor.is_floating_point() else tensor
