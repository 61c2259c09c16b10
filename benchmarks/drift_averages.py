"""How far a momentum of 8 bits leads SGD and Lion away from the path that they take in fp64.

Gradients, sizes of elements and drift are those of `benchmarks/drift.py`. Beside megascale's codes stand fp32, bf16,
and codes of equal distances rounded to nearest. SGD has momentum 0.9 and 0.99, Lion the betas of its paper.

Prints a table, and writes it where ``--out`` says. Takes a minute on one core.

    python benchmarks/drift_averages.py --out benchmarks/results/drift_averages.md
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megascale.kernels.compact_averages import decode_average, encode_average
from megascale.kernels.compact_moments import GROUP, dither

SIGMAS, STEPS, NUMEL = (0.3, 1.0, 2.0), (4_000, 20_000), 2048
LION_RATE, SGD_RATE = 1e-6, 1e-4

Held = Callable[[Tensor, int], Tensor]
"""Rounds an average, after a step, to what is held of it."""
Rule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Returns the parameters and the average after a step, from them and a gradient."""


def ours(average: Tensor, step: int) -> Tensor:
    """Return what megascale's codes stand for; settings lie one after the other in one parameter."""
    flat = average.reshape(-1)
    codes, scale = encode_average(flat, dither(0, flat.numel(), torch.tensor(float(step))))
    return decode_average(codes, scale).view(average.shape)


def evenly(average: Tensor, step: int) -> Tensor:
    """Round to the nearest of 255 numbers at equal distances, in groups as ours."""
    groups = average.view(-1, GROUP)
    unit = groups.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / unit).round() * unit).view(average.shape)


HELD: dict[str, Held] = {
    "fp32": lambda average, step: average,
    "bf16": lambda average, step: average.bfloat16().float(),
    "megascale, int8": ours,
    "equal distances, int8": evenly,
}


def lion(params: Tensor, average: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Lion without weight decay, betas 0.9 and 0.99."""
    return params - LION_RATE * (0.9 * average + 0.1 * grad).sign(), 0.99 * average + 0.01 * grad


def sgd(momentum: float) -> Rule:
    """Return SGD with a momentum."""

    def rule(params: Tensor, average: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        velocity = momentum * average + grad
        return params - SGD_RATE * velocity, velocity

    return rule


RULES: dict[str, Rule] = {"Lion": lion, "SGD, momentum 0.9": sgd(0.9), "SGD, momentum 0.99": sgd(0.99)}


def measure(rule: Rule, steps: tuple[int, ...]) -> dict[tuple[int, str], list[float]]:
    """Return the drift after so many steps of each way to hold the average, a number for each sigma."""
    generator = torch.Generator().manual_seed(0)
    start, bias, spread = (torch.randn(NUMEL, generator=generator) for _ in range(3))
    sizes = torch.stack([1e-3 * torch.exp(sigma * spread) for sigma in SIGMAS])
    begin = (0.02 * start).half().float().expand_as(sizes).contiguous()
    exact = begin.double(), torch.zeros_like(sizes, dtype=torch.float64)
    held = {name: (begin.clone(), torch.zeros_like(sizes)) for name in HELD}
    found: dict[tuple[int, str], list[float]] = {}
    for step in range(1, max(steps) + 1):
        grad = (0.2 * bias + torch.randn(NUMEL, generator=generator)) * sizes
        exact = rule(*exact, grad.double())
        for name, keep in HELD.items():
            params, average = rule(*held[name], grad)
            held[name] = params, keep(average, step)
        if step in steps:
            way = (exact[0] - begin).square().mean(1).sqrt()
            for name, (params, _) in held.items():
                found[step, name] = ((params - exact[0]).square().mean(1).sqrt() / way).tolist()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="after which drift is measured")
    parser.add_argument("--out", type=Path, help="a file for the table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"| rule | momentum held as | steps | {' | '.join(f'sigma {sigma:g}' for sigma in SIGMAS)} |"]
    lines.append("|---|---|---|" + "---|" * len(SIGMAS))
    for title, rule in RULES.items():
        for (step, name), drifts in measure(rule, tuple(given.steps)).items():
            lines.append(f"| {title} | {name} | {step:,} | {' | '.join(f'{drift:.2g}' for drift in drifts)} |")
    text = "\n".join(lines)
    print(text)
    if given.out is not None:
        given.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
