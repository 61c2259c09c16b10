"""Trains with every rule, dtype and kind of moments, and prints digests of all state: run where a wheel is installed.

    python tests/wheel_training.py

Prints a line of JSON: where megascale lies, the backend, what its library says in the log, and each case's digest.
"""

import hashlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import megascale
from megascale import DynamicGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "Adam, L2": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "AdamW, amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, weight_decay=0.1),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "Lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CLIPS = {"clipped": 1.0, "unclipped": 0.0}
SIZES = (70_001, 33, 1, 500)
STEPS, POISONED = 4, 2


def digest(rule: str, dtype: torch.dtype, moments: torch.dtype, clip_grad: float) -> str:
    """Return the digest of all tensors after some steps, of which one is skipped."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]
    fields: dict[str, Any] = {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16, "clip_grad": clip_grad}
    if moments != torch.float32:
        fields |= {"exp_avg_dtype": moments} | ({"exp_avg_sq_dtype": moments} if rule.startswith("Adam") else {})
    scaler = DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 2, 1)
    optimizer = MixedPrecisionOptimizer(RULES[rule](params), OptimizerConfig(**fields), scaler)
    for step in range(STEPS):
        for param in params:
            param.grad = (torch.randn_like(param) * optimizer.get_loss_scale()).to(dtype)
        if step == POISONED and params[1].grad is not None:
            params[1].grad[0] = math.inf
        optimizer.step()
    found = hashlib.sha256()
    for tensor in itertools.chain(params, _tensors(optimizer.state_dict())):
        found.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)


def main() -> None:
    """Print the line."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megascale.kernels.native")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    digests = {
        f"{rule}, {name}, moments {moments}, {clip}": digest(rule, dtype, moments, CLIPS[clip])
        for rule, (name, dtype), clip in itertools.product(RULES, DTYPES.items(), CLIPS)
        for moments in ((torch.float32, torch.float16, torch.bfloat16) if rule != "SGD" else (torch.float32,))
    }
    backend = megascale.kernels.select_backend().name
    print(json.dumps({"file": megascale.__file__, "backend": backend, "said": said, "digests": digests}))


if __name__ == "__main__":
    main()
