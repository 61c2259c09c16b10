"""Train one small GPT in fp32, in fp16, and in fp16 with compact state, on the same batches, and compare the losses.

    python benchmarks/curve.py --steps 800 --seeds 3 --device cuda --out benchmarks/results/curve

The model has GPT-2's shape, cut to 6 layers of width 384 with 6 heads, and reads bytes: 256 of them in each of 64
sequences per step. The text is the source of Python's standard library, which every Python ships; the last 5 % are for
validation. AdamW, 1e-3 after 100 steps of warm-up, then a cosine down to a tenth, clipping to norm 1.

fp32: plain torch, without TF32. fp16: parameters cast by cast_model, fp32 main params, dynamic loss scale. compact:
the same with 8-bit moments and 16-bit remainders in place of main params. Runs of one seed begin with the same
parameters and see the same batches. ``--out PREFIX`` writes PREFIX.md, and every point to PREFIX.csv,
of which ``--draw PREFIX.csv PICTURE.svg`` draws the training losses without training.
"""

import argparse
import csv
import hashlib
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import svg
import torch
from backend import print_backend
from peers.report import place
from torch import Tensor, nn
from torch.nn import functional as F

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, cast_model

WARM_UP, LR, CLIP = 100, 1e-3, 1.0
EVERY = 10  # steps of training whose mean loss is one point
WAYS = ("fp32", "fp16", "compact")


class Block(nn.Module):
    """One layer: attention and MLP, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shape [batch, context, width] as the input."""
        batch, context, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.narrow(F.gelu(self.widen(self.before_mlp(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2's shape on bytes; the head is the embedding."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                residual = name.endswith(("project.weight", "narrow.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per byte, fp32, 0-d. ``tokens``, ``targets``: int64, shape [batch, context]."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.last(x), self.bytes.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


Point = tuple[int, float, float | None]
"""A step, the training loss of the ten steps up to it, and the validation loss, where that was measured."""


@dataclass
class Run:
    """One training run, and what it took."""

    way: str
    seed: int
    points: list[Point] = field(default_factory=list)
    tokens_per_second: float = 0.0
    skipped: int = 0

    @property
    def final(self) -> float:
        """Validation loss at the end, nats per byte."""
        return next(loss for _, _, loss in reversed(self.points) if loss is not None)


class Text:
    """The standard library's source, and batches of it."""

    def __init__(self, device: torch.device, context: int, batch: int) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        left_out = {"site-packages", "test", "tests"}
        files = [file for file in sorted(library.rglob("*.py")) if not left_out & {*file.parts}]
        text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.numel = len(text)
        self.training, self.validation = text.to(device).split([self.numel - self.numel // 20, self.numel // 20])
        self.context, self.batch = context, batch

    def draw(self, text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return tokens and the ones that follow, int64, shape [batch, context] each."""
        starts = torch.randint(len(text) - self.context - 1, (self.batch, 1), generator=generator)
        at = (starts + torch.arange(self.context)).to(text.device)
        return text[at].long(), text[at + 1].long()


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine to a tenth."""
    if step < WARM_UP:
        return LR * (step + 1) / WARM_UP
    return LR * (0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(steps - WARM_UP, 1)))


def step_of(way: str, model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[Tensor], None], Callable[[], int]]:
    """Return the optimizer, backward and step from a loss, and the number of skipped steps."""
    if way == "fp32":
        plain = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)

        def backward_and_step(loss: Tensor) -> None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            plain.step()

        return plain, backward_and_step, lambda: 0
    cast_model(model, torch.float16)
    held = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8, "store_param_remainders": True}
    config = OptimizerConfig(fp16=True, clip_grad=CLIP, **(held if way == "compact" else {}))  # type: ignore[arg-type]
    inner = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    optimizer = MixedPrecisionOptimizer(inner, config, DynamicGradScaler(initial_scale=2.0**16))

    def scaled_step(loss: Tensor) -> None:
        optimizer.scale_loss(loss).backward()
        optimizer.step()

    return optimizer, scaled_step, lambda: int(optimizer.num_skipped_steps)


def train(way: str, seed: int, text: Text, given: argparse.Namespace, device: torch.device) -> Run:
    """Train one run."""
    torch.manual_seed(seed)
    model = Gpt(given.layers, given.width, given.heads, text.context).to(device)
    optimizer, backward_and_step, skipped = step_of(way, model)
    run, batches = Run(way, seed), torch.Generator().manual_seed(seed)
    losses: list[Tensor] = []
    begin = spent = time.perf_counter()
    for step in range(given.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, given.steps)
        optimizer.zero_grad()
        loss = model(*text.draw(text.training, batches))
        backward_and_step(loss)
        losses.append(loss.detach())
        if (step + 1) % EVERY == 0:
            mean = torch.stack(losses).mean().item()
            losses.clear()
            validates = (step + 1) % given.validate == 0 or step + 1 == given.steps
            paused = time.perf_counter()
            run.points.append((step + 1, mean, validation_loss(model, text) if validates else None))
            begin += time.perf_counter() - paused
    spent = time.perf_counter() - begin
    run.tokens_per_second = given.steps * text.batch * text.context / spent
    run.skipped = skipped()
    return run


@torch.no_grad()
def validation_loss(model: nn.Module, text: Text, batches: int = 20) -> float:
    """Return the mean loss on the same batches at every call."""
    generator = torch.Generator().manual_seed(-1)
    return torch.stack([model(*text.draw(text.validation, generator)) for _ in range(batches)]).mean().item()


def table(runs: list[Run]) -> list[str]:
    """Return the table: a row per way, then how far apart runs of one seed are."""
    lines = [
        "| | validation loss at the end: mean (each seed) | beside fp32 of the same seed | tokens per second | skips |",
        "|---|---|---|---|---|",
    ]
    plain = {run.seed: run.final for run in runs if run.way == "fp32"}
    for way in WAYS:
        ours = [run for run in runs if run.way == way]
        finals = ", ".join(f"{run.final:.4f}" for run in ours)
        beside = ", ".join(f"{run.final - plain[run.seed]:+.4f}" for run in ours) if way != "fp32" else "-"
        speed = statistics.median(run.tokens_per_second for run in ours)
        skipped = ", ".join(str(run.skipped) for run in ours) if way != "fp32" else "-"
        mean = statistics.mean(run.final for run in ours)
        lines.append(f"| {way} | {mean:.4f} ({finals}) | {beside} | {speed:,.0f} | {skipped} |")
    spread = max(plain.values()) - min(plain.values())
    gap = max(abs(mine[1] - theirs[1]) for mine, theirs in pairs(runs))
    return [
        *lines,
        "",
        f"The seeds of fp32 end {spread:.4f} apart. From step {WARM_UP} on, a point of training (the mean of {EVERY} "
        f"steps) differs by at most {gap:.4f} from fp32's of the same seed.",
    ]


def pairs(runs: list[Run]) -> list[tuple[Point, Point]]:
    """Return points of runs in 16 bits beside the same point of fp32."""
    plain = {run.seed: run.points for run in runs if run.way == "fp32"}
    others = [run for run in runs if run.way != "fp32"]
    found = [pair for run in others for pair in zip(run.points, plain[run.seed], strict=True)]
    return [pair for pair in found if pair[0][0] > WARM_UP] or found


def page(runs: list[Run], text: Text, given: argparse.Namespace) -> list[str]:
    """Return the lines of the page."""
    name = torch.cuda.get_device_name() if given.device.startswith("cuda") else "the CPU"
    numel = sum(param.numel() for param in Gpt(given.layers, given.width, given.heads, given.context).parameters())
    arguments = " ".join(sys.argv[1:]).partition(" --out")[0]
    return [
        f"## One GPT trained in fp32, fp16 and compact fp16, on {name}",
        "",
        place(torch.device(given.device), torch.get_num_threads()),
        "",
        f"`python benchmarks/curve.py {arguments}`",
        "",
        f"{given.layers} layers of width {given.width}: {numel:,} parameters. {text.numel:,} bytes of Python's "
        f"standard library; {given.steps} steps of {given.batch} times {given.context} bytes. Losses in nats per byte.",
        "",
        *table(runs),
    ]


def write(out: Path, lines: list[str], runs: list[Run]) -> None:
    """Write the page, and every point as CSV."""
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    with out.with_suffix(".csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["way", "seed", "step", "training loss", "validation loss"])
        for run in runs:
            for step, loss, held in run.points:
                rows.writerow([run.way, run.seed, step, f"{loss:.6f}", "" if held is None else f"{held:.6f}"])


STROKES = {"fp32": ("#9a9a9a", 7.0), "fp16": ("#1f83c4", 3.0), "compact": ("#d55e00", 1.3)}
LOSSES = (2.0, 2.5, 3.0, 3.5)
"""Lines across; losses above the last are left out: the first steps."""


def read_curves(points: Path) -> dict[str, dict[int, list[float]]]:
    """Return the training loss of every seed, by way and step."""
    curves: dict[str, dict[int, list[float]]] = {}
    with points.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            curves.setdefault(row["way"], {}).setdefault(int(row["step"]), []).append(float(row["training loss"]))
    return curves


def draw(points: Path) -> str:
    """Return the picture of a run's points. The lines lie upon each other: each is thinner than the one below."""
    curves = read_curves(points)
    seeds = len(next(iter(curves["fp32"].values())))
    title = f"Training loss of a GPT in nats per byte, {seeds} seeds: fp16 and compact fp16 lie on fp32"
    shapes = [svg.text(0, svg.SIZE, "Training loss, nats per byte, mean of ten steps", bold=True)]
    shapes += svg.bands(curves, svg.Axes(LOSSES, 100, right=16), STROKES)
    foot = svg.TOP + svg.HEIGHT + 38
    shapes.append(svg.text(svg.LEFT, foot, f"step; line: mean of {seeds} seeds, band: lowest to highest", size=12))
    names, foot = svg.legend([(name, colour) for name, (colour, _) in STROKES.items()], foot + 10)
    source = f"{points.name} {hashlib.sha256(points.read_bytes()).hexdigest()}"
    return svg.picture(title, [*shapes, *names], foot, source)


def main() -> int:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("width", 384), ("heads", 6), ("context", 256), ("batch", 64), ("steps", 800)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--validate", type=int, default=100, help="steps between validations, a multiple of 10")
    parser.add_argument("--device", default=str(torch.accelerator.current_accelerator(check_available=True) or "cpu"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("POINTS", "PICTURE"))
    given = parser.parse_args()
    if given.draw:
        points, picture = given.draw
        picture.write_text(draw(points), encoding="utf-8")
        return 0
    print_backend()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(given.device)
    text = Text(device, given.context, given.batch)
    runs = []
    for seed in range(given.seeds):
        for way in WAYS:
            runs.append(train(way, seed, text, given, device))
            print(way, seed, f"{runs[-1].final:.4f}", f"{runs[-1].tokens_per_second:,.0f} tokens/s", file=sys.stderr)
        written = page(runs, text, given)  # after every seed, so that a run that is cut short leaves the seeds it had
        if given.out:
            write(given.out, written, runs)
    print("\n".join(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
