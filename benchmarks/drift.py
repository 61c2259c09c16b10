"""How far 8-bit moments lead AdamW away from the path that it takes in fp64, beside other rules' moments.

Every rule gets the same gradients for 20,000 steps of AdamW with a small learning rate, where errors of moments show
that short training hides. Gradients do not depend on the parameters. Each element has a size of its own, drawn from a
lognormal distribution of spread sigma; its gradients have noise of that size and a mean of about 0.2 times it. So
elements that share a scale differ in size. Main params are fp32 for all rules. Drift is the root mean square, over
elements, of the distance from the path in fp64, divided by that of the way gone in fp64.

In the settings in which gradients *turn*, all means change their sign after 2,000 steps, and the gradients of every
fourth element end: first moments must follow, with a large beta1 too.

Prints a table, and writes it where ``--out`` says. Takes a minute on one core.

    python benchmarks/drift.py --out benchmarks/results/drift.md
"""

import argparse
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import torch
from backend import print_backend
from torch import Tensor

from megascale.kernels.compact_moments import decode_moments, encode_moments

STEPS, TURN = (4_000, 20_000), 2_000
NUMEL, BETA2, EPS = 2048, 0.999, 1e-8
CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
GROUP, TORCHAO_BLOCK = 32, 256


class Setting(NamedTuple):
    """What gradients and the rule are given."""

    sigma: float
    rate: float
    beta1: float = 0.9
    turns: bool = False

    def __str__(self) -> str:
        """The heading of a column."""
        of = f"sigma {self.sigma:g}, lr {self.rate:g}"
        return f"{of}, beta1 {self.beta1:g}, gradients turn" if self.turns else of


SETTINGS = [Setting(sigma, rate) for sigma in (0.3, 1.0, 2.0) for rate in (1e-6, 1e-7)]
SETTINGS += [Setting(1.0, 1e-6, beta1, True) for beta1 in (0.9, 0.99, 0.999)]


class Rule(ABC):
    """AdamW without weight decay in fp32. How moments are kept between steps is the rule's.

    Args:
        params: shape [settings, NUMEL].
        rate, beta1: fp64, shape [settings, 1].
    """

    name = "fp32"

    def __init__(self, params: Tensor, rate: Tensor, beta1: Tensor) -> None:
        self.params, self._rate, self._beta1 = params.clone(), rate, beta1
        self.keep(torch.zeros_like(params), torch.zeros_like(params), 0)

    def step(self, grad: Tensor, count: int) -> None:
        """Take step ``count``, from 1. grad: in the dtype of ``params``, shape [settings, NUMEL]."""
        beta1, rest, size = (
            number.to(grad.dtype) for number in (self._beta1, 1 - self._beta1, self._rate / (1 - self._beta1**count))
        )
        first, second = self.kept()
        first, second = beta1 * first + rest * grad, BETA2 * second + (1 - BETA2) * grad * grad
        denominator = second.sqrt() * (1 / math.sqrt(1 - BETA2**count)) + EPS
        self.params -= size * first / denominator
        self.keep(first, second, count)

    @abstractmethod
    def keep(self, first: Tensor, second: Tensor, count: int) -> None:
        """Store the moments."""

    @abstractmethod
    def kept(self) -> tuple[Tensor, Tensor]:
        """Return the moments as stored."""


class Plain(Rule):
    """Moments in the dtype of the gradients."""

    def keep(self, first: Tensor, second: Tensor, count: int) -> None:
        """Store them."""
        self._moments = first, second

    def kept(self) -> tuple[Tensor, Tensor]:
        """Return them."""
        return self._moments


class Ours(Rule):
    """megascale's codes of 8 bits."""

    name = "megascale, int8 and uint8"

    def keep(self, first: Tensor, second: Tensor, count: int) -> None:
        """Encode; settings lie one after the other in one parameter."""
        self._state = encode_moments(first, second, CODES, 0, torch.tensor(float(count)))

    def kept(self) -> tuple[Tensor, Tensor]:
        """Decode."""
        moments = decode_moments(self._state)
        return moments["exp_avg"], moments["exp_avg_sq"]


class FlashOptim(Rule):
    """FlashOptim's moments: softsign of the first, root of the second, groups of 32 with fp16 scales, to nearest."""

    name = "FlashOptim's rule"

    def keep(self, first: Tensor, second: Tensor, count: int) -> None:
        """Round to nearest."""
        grouped, root = first.view(-1, GROUP), second.sqrt().view(-1, GROUP)
        self._largest = grouped.abs().amax(1, keepdim=True).half().float()
        self._top = root.amax(1, keepdim=True).half().float()
        ratio = 254 * grouped / (self._largest + grouped.abs())
        self._first = ratio.nan_to_num(0.0).round().clamp(-127, 127)
        self._second = (255 * root / self._top).nan_to_num(0.0).round().clamp(0, 255)
        self._shape = first.shape

    def kept(self) -> tuple[Tensor, Tensor]:
        """Return what is left of the moments."""
        first = self._first / (254 - self._first.abs()) * self._largest
        return first.view(self._shape), (self._second / 255 * self._top).square().view(self._shape)


class Torchao(Rule):
    """torchao's AdamW8bit: both moments in blocks of 256 to the nearest entry of a dynamic tree (arXiv 1511.04561)."""

    name = "torchao's AdamW8bit rule"

    def keep(self, first: Tensor, second: Tensor, count: int) -> None:
        """Round to nearest."""
        self._shape = first.shape
        self._moments = _nearest(first, True), _nearest(second, False)

    def kept(self) -> tuple[Tensor, Tensor]:
        """Return what is left of the moments."""
        first, second = self._moments
        return first.view(self._shape), second.view(self._shape)


def _nearest(values: Tensor, signed: bool) -> Tensor:
    blocks = values.view(-1, TORCHAO_BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
    entries = _TREES[signed]
    middles = (entries[1:] + entries[:-1]) / 2
    return entries[torch.bucketize(blocks / scale, middles)] * scale


def _tree(signed: bool) -> Tensor:
    """Return the 256 entries of bitsandbytes' and torchao's dynamic map: seven decades, each halved again and again."""
    entries = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, (2**decade if signed else 2 ** (decade + 1)) + 1)
        means = (10 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        entries += means + ([-mean for mean in means] if signed else [])
    return torch.tensor(sorted(entries))


_TREES = {signed: _tree(signed) for signed in (True, False)}


def measure(steps: tuple[int, ...]) -> dict[tuple[str, int], list[float]]:
    """Return the drift of each rule after so many steps, a number for each setting."""
    generator = torch.Generator().manual_seed(0)
    start, bias, spread = (torch.randn(NUMEL, generator=generator) for _ in range(3))
    sizes = torch.stack([1e-3 * torch.exp(setting.sigma * spread) for setting in SETTINGS])
    turns = torch.tensor([[setting.turns] for setting in SETTINGS])
    ends = turns & (torch.arange(NUMEL) % 4 == 0)
    params = (0.02 * start).half().float().expand_as(sizes).contiguous()
    numbers = [torch.tensor([[each] for each in column], dtype=torch.float64) for column in zip(*SETTINGS, strict=True)]
    exact = Plain(params.double(), *numbers[1:3])
    rules = [kind(params, *numbers[1:3]) for kind in (Plain, Ours, FlashOptim, Torchao)]
    found: dict[tuple[str, int], list[float]] = {}
    for count in range(1, max(steps) + 1):
        turned = turns & (count > TURN)
        mean = torch.where(turned, -0.2 * bias, 0.2 * bias)
        grad = (mean + torch.randn(NUMEL, generator=generator)) * sizes
        grad = torch.where(ends & turned, 0.0, grad)
        exact.step(grad.double(), count)
        for rule in rules:
            rule.step(grad, count)
        if count in steps:
            way = _size(exact.params - params)
            for rule in rules:
                found[rule.name, count] = (_size(rule.params - exact.params) / way).tolist()
    return found


def _size(distance: Tensor) -> Tensor:
    return distance.square().mean(1).sqrt()


def table(found: dict[tuple[str, int], list[float]]) -> str:
    """Return a Markdown table."""
    headings = " | ".join(map(str, SETTINGS))
    lines = [f"| moments | steps | {headings} |", "|---|---|" + "---|" * len(SETTINGS)]
    for (name, count), drifts in sorted(found.items(), key=lambda item: item[0][1]):
        lines.append(f"| {name} | {count:,} | {' | '.join(f'{drift:.2g}' for drift in drifts)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="after which drift is measured")
    parser.add_argument("--out", type=Path, help="a file for the table")
    given = parser.parse_args()
    print_backend()
    torch.set_num_threads(1)
    text = table(measure(tuple(given.steps)))
    print(text)
    if given.out is not None:
        given.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
