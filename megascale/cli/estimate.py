"""``megascale estimate MODEL``: the memory that a run needs per rank, whether it fits a card, and what would."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megascale.cli import parser_of
from megascale.config import COMPACT_STATE
from megascale.errors import ArgumentError
from megascale.estimation import AS_IS, OPTIMIZERS, PRECISIONS, SHARDINGS, Estimate, Setup, estimate
from megascale.utils.program import run_program

FIELDS = [field.name for field in fields(Setup)]
AS_TYPED = {
    f"{name} {verb}": f"--{name.replace('_', '-')} {verb}" for verb in ("must", "needs") for name in (*FIELDS, "gpu")
}
DTYPES = {**PRECISIONS, "int8": torch.int8, "uint8": torch.uint8}
DTYPE_NAMES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
"""Precisions by torch's names of dtypes."""
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""What the last letter of a number of parameters means."""
GPUS = {
    **{"h100": 80, "h200": 141, "b200": 180, "a100": 80, "a100-40": 40, "l40s": 48, "a10": 24, "l4": 24, "t4": 16},
    **{"v100": 32, "v100-16": 16, "rtx3090": 24, "rtx4090": 24, "rtx5090": 32},
}
"""Memory of a card in GB, as its maker names it."""
SMALLER: dict[str, dict[str, Any]] = {
    "": {},
    "--compact-state": COMPACT_STATE,
    "--optimizer-cpu-offload": {"optimizer_cpu_offload": True},
}
"""What makes a run smaller, as it is typed, beside more ranks."""
MOST_RANKS = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    return run_program(_run, arguments, as_typed=AS_TYPED)


def _run(arguments: list[str]) -> int:
    """Print the estimate, and whether it fits the card."""
    parser = parser_of("estimate")
    parser.add_argument(
        "model", help="number of parameters, such as 7B or 124M; or a Hugging Face config.json, or the folder of one"
    )
    parser.add_argument(
        "--precision",
        type=lambda name: DTYPE_NAMES.get(name, name),
        choices=(*PRECISIONS, AS_IS),
        default="fp16",
        help="dtype of the parameters (default fp16)",
    )
    parser.add_argument("--ranks", type=int, default=1, help="number of data-parallel ranks (default 1)")
    parser.add_argument(
        "--sharding",
        default="ddp",
        help=f"what is cut over the ranks: {', '.join(SHARDINGS)}, or a name of FSDP's, DeepSpeed's or "
        "Megatron-Core's, such as FULL_SHARD, zero3, optim (default ddp)",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="momentum: SGD with momentum")
    for name, what in (
        ("exp-avg-dtype", "Adam's first moment, or momentum"),
        ("exp-avg-sq-dtype", "Adam's second moment"),
        ("grad-dtype", "main grads of GradSync and DistributedOptimizer"),
    ):
        parser.add_argument(f"--{name}", choices=DTYPES, default="fp32", help=f"dtype of {what} (default fp32)")
    parser.add_argument("--store-param-remainders", action="store_true", help="main params as 16-bit remainders")
    parser.add_argument("--compact-state", action="store_true", help="these remainders, and 8-bit moments")
    parser.add_argument("--optimizer-cpu-offload", action="store_true", help="main params and state in host memory")
    parser.add_argument(
        "--optimizer-offload-fraction", type=float, default=1.0, metavar="X", help="share of them there"
    )
    parser.add_argument("--gpu", help=f"does it fit this card? one of {', '.join(GPUS)}, or a number of GB")
    given = parser.parse_args(arguments)
    setup = {name: getattr(given, name) for name in FIELDS}
    setup |= {name: DTYPES[value] for name, value in setup.items() if name.endswith("dtype")}
    setup |= COMPACT_STATE if given.compact_state else {}
    model = model_of(given.model)
    found = estimate(model, precision=given.precision, **setup)
    print(found)
    if given.gpu is not None:
        print("\n".join(("", *_fit(model, given.precision, found, given.gpu))))
    return 0


def _fit(model: nn.Module | int, precision: str, found: Estimate, gpu: str) -> Iterator[str]:
    """Yield whether the run fits a card, and if not, the options with the fewest ranks that make it fit.

    In the order of the page *Memory*: compact state, more ranks, and host memory last, which takes time.
    """
    try:
        memory = float(GPUS.get(gpu.lower(), gpu)) * 1e9
    except ValueError:
        memory = 0.0
    if not 0 < memory < math.inf:
        raise ArgumentError(f"gpu must be one of {', '.join(GPUS)}, or its memory in GB, got {gpu!r}")
    yield f"Does it fit? ({gpu.upper() + ', ' if gpu.lower() in GPUS else ''}{memory / 1e9:g} GB)"
    if found.total <= memory:
        yield f"  yes: {(memory - found.total) / 1e9:,.1f} GB per rank are left for activations"
        return
    yield f"  no: {(found.total - memory) / 1e9:,.1f} GB per rank too much, and activations come on top"
    fitting: list[tuple[bool, bool, str]] = []
    for options, changes in SMALLER.items():
        try:
            replace(found.setup, **changes)
        except ArgumentError:  # an optimizer whose moments are no codes
            continue
        # More ranks hold less only where they cut. One rank cuts nothing, so that the first sharding says all of it.
        for sharding in dict.fromkeys((found.setup.sharding, "zero1", "fsdp2")):
            doubled = (found.setup.ranks << power for power in range(MOST_RANKS.bit_length()))
            for ranks in doubled if sharding in ("zero1", "fsdp2") else [found.setup.ranks]:
                smaller = replace(found.setup, ranks=ranks, sharding=sharding, **changes)
                total = estimate(model, precision=precision, **vars(smaller)).total
                if total <= memory:
                    typed = f"--ranks {ranks} --sharding {sharding} {options}" if ranks > 1 else options
                    said = f"  fits with {typed.strip()}: {total / 1e9:,.1f} GB per rank"
                    fitting.append((smaller.optimizer_cpu_offload, ranks > found.setup.ranks, said))
                    break
            else:
                continue
            if ranks == 1:
                break
    none = f"  nor does it with compact state on {MOST_RANKS:,} sharded ranks: take a larger card"
    yield from [said for *_, said in sorted(fitting, key=lambda option: option[:2])] or [none]


def model_of(text: str) -> nn.Module | int:
    """Return the model that ``text`` names, see the command's help. Raises ArgumentError, naming it, for none."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1.0)
    try:
        numel = round(float(number) * unit, 3)
    except (ValueError, OverflowError):
        return _built(Path(text))
    if not 1 <= numel < 2**63:  # as many as torch can count
        raise ArgumentError(f"model {text!r} must be a number of parameters, 1 or more and less than 2**63")
    return int(numel)


def _built(path: Path) -> nn.Module:
    """Return the model of a Hugging Face config, on the meta device. Nothing is downloaded."""
    if not (path / "config.json").is_file() and not path.is_file():
        raise ArgumentError(
            f"model {str(path)!r} is neither a number of parameters, such as 7B or 7e9, nor a Hugging Face config.json "
            "on this machine: a model of the hub is not downloaded"
        )
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ArgumentError(
            f"model {str(path)!r} is read by transformers, which is not installed: install it, or give the number of "
            "parameters, such as 7B"
        ) from None
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    except Exception as error:  # whatever transformers raises for a config that it does not know
        raise ArgumentError(f"model {str(path)!r} cannot be built: {type(error).__name__}: {error}") from None
    return model
