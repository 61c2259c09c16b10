"""``megascale estimate MODEL``: what a run will need, from sizes alone."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megascale.cli import fit, hugging_face
from megascale.cli.bench import measured_bandwidth
from megascale.config import AUTO, OFFLOAD_COMPUTE
from megascale.errors import ArgumentError
from megascale.estimation import Estimate, Setup, estimate
from megascale.estimation.setup import COMMUNICATION, MOMENTS, SHARDINGS, SHARDS
from megascale.estimation.sizes import AS_IS, PRECISIONS
from megascale.estimation.timeline import BUSES, machine_of, timeline

NAME = "estimate"
HELP = "print what a run will need: bytes per rank by kind, checkpoint, collectives, time; nothing is allocated"
FIELDS = [field.name for field in fields(Setup) if field.name != "rank"]
AS_TYPED = {
    f"{name} {verb}": f"--{name.replace('_', '-')} {verb}"
    for verb in ("must", "needs")
    for name in (*FIELDS, "memory_bandwidth", "link_bandwidth", "host_bandwidth", "gpu", "bus", "tokens")
}
DTYPES = PRECISIONS
FIRST_DTYPES, SECOND_DTYPES = {**PRECISIONS, "int8": torch.int8}, {**PRECISIONS, "uint8": torch.uint8}
MEASURE = "measure"
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""What the last letter of a number of parameters means."""
DTYPE_NAMES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
"""Precisions by torch's names of dtypes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        help="a number of parameters, such as 7B, 124M or 7e9; a Hugging Face config.json, or the folder of one; "
        "package.module:callable that returns a module (called without arguments, on the meta device); or a JSON file "
        "of shapes, as a list or by name",
    )
    parser.add_argument(
        "--precision",
        type=lambda name: DTYPE_NAMES.get(name, name),
        choices=(*PRECISIONS, AS_IS),
        default="fp16",
        help="of the model (default fp16); torch's names of dtypes are understood, too",
    )
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--sharding", choices=SHARDINGS, default="replicated", help="default: replicated")
    parser.add_argument(
        "--optimizer",
        choices=MOMENTS,
        default="adamw",
        help="momentum: SGD with it; muon: for hidden matrices, beside AdamW for all else (default adamw)",
    )
    parser.add_argument("--shard", choices=SHARDS, default="auto", help="what a shard holds (default: auto)")
    parser.add_argument(
        "--exp-avg-dtype", choices=FIRST_DTYPES, default="fp32", help="of the first moment (default fp32)"
    )
    parser.add_argument(
        "--exp-avg-sq-dtype", choices=SECOND_DTYPES, default="fp32", help="of the second (default fp32)"
    )
    parser.add_argument("--store-param-remainders", action="store_true", help="hold main params as 16-bit remainders")
    parser.add_argument("--grad-dtype", choices=DTYPES, default="fp32", help="of main grads (default fp32)")
    parser.add_argument("--reduce-dtype", choices=DTYPES, help="of gradients in messages (default: as main grads)")
    parser.add_argument("--bucket-numel", type=int, default=Setup.bucket_numel, help="elements of a bucket")
    parser.add_argument("--communication", choices=COMMUNICATION, default="nccl", help="default: nccl")
    parser.add_argument(
        "--memory-bandwidth", metavar="GB/S", help=f"of the device; {MEASURE!r} measures that of this machine"
    )
    parser.add_argument("--link-bandwidth", metavar="GB/S", help="that leave one rank")
    parser.add_argument(
        "--gpu", help=f"does it fit into this card's memory? one of {', '.join(fit.GPUS)}, or a number of GB"
    )
    _add_offload(parser)
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw bytes per rank against the number of ranks")


def _add_offload(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of main params and state in host memory, and of one iteration's timeline."""
    parser.add_argument(
        "--optimizer-cpu-offload", action="store_true", help="main params and state in host memory, updated there"
    )
    parser.add_argument(
        "--optimizer-offload-fraction", type=float, default=1.0, metavar="X", help="of their elements (default 1)"
    )
    parser.add_argument(
        "--optimizer-offload-compute",
        choices=[one for one in OFFLOAD_COMPUTE if one != AUTO],
        default="host",
        help="who updates them: the host, or the device, which they visit slice by slice (default: host)",
    )
    parser.add_argument(
        "--optimizer-offload-grad-bytes",
        type=_number_of_bytes,
        metavar="BYTES",
        help="of host memory that copies of gradients take at most, such as 4e9 (default: all that they have)",
    )
    parser.add_argument(
        "--overlap-cpu-optimizer-d2h-h2d", action="store_true", help="the update there overlaps the next forward pass"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="of a rank in a step: print what of an iteration is hidden behind forward and backward; needs --gpu",
    )
    parser.add_argument(
        "--bus", default="pcie5", help=f"between GPU and host, with --tokens: {', '.join(BUSES)}, or GB/s each way"
    )
    parser.add_argument(
        "--host-bandwidth",
        metavar="GB/S",
        default="100",
        help=f"of a rank's share of host memory, with --tokens (default 100); {MEASURE!r} measures it here",
    )
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw that iteration, as .svg or .png")


def _number_of_bytes(text: str) -> int:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"must be a number of bytes, such as 4e9, got {text!r}") from None


def run(given: argparse.Namespace) -> int:
    """Print the estimate, and draw it where asked."""
    setup: dict[str, Any] = {name: getattr(given, name) for name in FIELDS}
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "grad_dtype", "reduce_dtype"):
        setup[name] = (FIRST_DTYPES | SECOND_DTYPES).get(setup[name])
    found = estimate(
        model_of(given.model),
        precision=given.precision,
        memory_bandwidth=_bandwidth("memory_bandwidth", given.memory_bandwidth),
        link_bandwidth=_bandwidth("link_bandwidth", given.link_bandwidth),
        **setup,
    )
    print(found)
    if given.gpu is not None:
        print("\n".join(("", *fit.lines(found, given.gpu))))
    _tell_timeline(found, given)
    if given.png is not None:
        from megascale.estimation.picture import draw  # needs matplotlib

        _write("--png", given.png, lambda: draw(found, given.png))
    return 0


def _tell_timeline(found: Estimate, given: argparse.Namespace) -> None:
    """Print, and draw where asked, one iteration of ``--tokens``."""
    if given.tokens is None:
        if given.timeline is not None:
            raise ArgumentError("--timeline needs --tokens: how long forward and backward take depends on them")
        return
    if given.gpu is None:
        raise ArgumentError("--tokens needs --gpu: how long forward and backward take depends on it")
    host_bandwidth = _bandwidth("host_bandwidth", given.host_bandwidth)
    machine = machine_of(
        given.gpu, given.bus, host_bandwidth or 0.0, link_bandwidth=_bandwidth("link_bandwidth", given.link_bandwidth)
    )
    iteration = timeline(found, machine, tokens=given.tokens)
    print(f"\n{iteration}")
    if given.timeline is not None:
        from megascale.estimation.picture import draw_timeline  # needs matplotlib

        _write("--timeline", given.timeline, lambda: draw_timeline(iteration, given.timeline))


def _write(option: str, path: Path, draw: Callable[[], None]) -> None:
    try:
        draw()
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{option} {path} cannot be written: {error}") from None


def model_of(text: str) -> nn.Module | dict[str, Any] | list[Any] | int:
    """Return the model that ``text`` names, see the command's help. Raises ArgumentError, naming it, for none."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1.0)
    try:
        numel = round(float(number) * unit, 3)
    except (ValueError, OverflowError):
        return _built(text) if ":" in text else _shapes_in(Path(text))
    if not 1 <= numel < math.inf:
        raise ArgumentError(f"model {text!r} must be a number of parameters, 1 or more and finite")
    return int(numel)


def _built(text: str) -> nn.Module:
    module, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module in the current folder
    try:
        make: Any = import_module(module)
        for part in name.split("."):
            make = getattr(make, part)
        with torch.device("meta"):
            made = make()
    except Exception as error:  # whatever the user's module raises
        raise ArgumentError(f"model {text!r} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ArgumentError(f"model {text!r} must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _shapes_in(path: Path) -> dict[str, Any] | list[Any]:
    try:
        file = path / "config.json" if path.is_dir() else path
        shapes = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"model {str(path)!r} is not a number such as 7B or 7e9, a Hugging Face config.json, "
            f"package.module:callable, or a JSON file of shapes (a model of the hub is not downloaded: give "
            f"its config.json): {error}"
        ) from None
    if hugging_face.is_config(shapes):
        return dict(hugging_face.shapes_of(shapes))
    if not isinstance(shapes, (dict, list)):
        raise ArgumentError(f"model {str(path)!r} must hold a list of shapes, or shapes by name")
    return shapes


def _bandwidth(name: str, text: str | None) -> float | None:
    """Return bytes a second."""
    if text is None:
        return None
    if text == MEASURE and name != "link_bandwidth":
        return measured_bandwidth(torch.device("cpu") if name == "host_bandwidth" else None)
    try:
        return float(text) * 1e9
    except ValueError:
        raise ArgumentError(f"{name} must be a number of GB a second, got {text!r}") from None
