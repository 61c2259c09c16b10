"""Muon: momentum, of which Newton-Schulz iterations take the orthogonal factor."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from megascale.errors import ArgumentError
from megascale.rules.options import number, values_of
from megascale.rules.rule import FIRST, Hyper, Moment, Options, Rule, Values, Variant
from megascale.utils import validate

if TYPE_CHECKING:
    from megascale.config import OptimizerConfig

Coefficients = tuple[float, float, float]
"""a, b, c of one iteration X <- aX + (bA + cAA)X with A = XX^T."""

QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)
"""Few iterations suffice, as it is steep at 0, but singular values end anywhere between 0.7 and 1.2.
Source: kellerjordan.github.io/posts/muon."""

_POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_SAFETY = 1.01

POLAR_EXPRESS: tuple[Coefficients, ...] = (
    *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
    (1.875, -1.25, 0.375),
)
"""Polar Express (arXiv 2505.16932): one polynomial for each iteration, the best of its degree for singular values from
1e-3 to 1. A safety factor of 1.01 allows for the rounding of bf16. Further iterations repeat the last polynomial."""

COEFFICIENTS: dict[str, Any] = {"quintic": QUINTIC, "polar_express": POLAR_EXPRESS}
"""By ``OptimizerConfig.muon_coefficient_type``."""
_TYPES = {value: name for name, value in COEFFICIENTS.items()}
ADJUST_LR_FNS = ("original", "match_rms_adamw")
NS_DTYPES = (None, torch.bfloat16, torch.float32)
MOST_ITERATIONS = 99


def iterations(coefficients: Sequence[Coefficients], steps: int) -> tuple[Coefficients, ...]:
    """Return one triple for each of ``steps`` iterations. If there are fewer, the last one is repeated."""
    return tuple(coefficients[min(index, len(coefficients) - 1)] for index in range(steps))


@dataclass(frozen=True)
class MuonHyper(Hyper):
    """Hyperparameters of Muon, by the names of torch.optim.Muon.

    Attributes:
        coefficients: one triple per iteration.
    """

    weight_decay: float
    momentum: float
    nesterov: bool
    coefficients: tuple[Coefficients, ...]
    eps: float
    adjust_lr_fn: str | None

    def lr_of(self, shape: torch.Size) -> float | Tensor:
        """Return the learning rate for a matrix of ``shape``, adjusted as torch adjusts it."""
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * (0.2 * math.sqrt(max(rows, columns)))
        return self.lr * math.sqrt(max(1, rows / columns))


def _of_muon(values: Values) -> Values:
    """Return a function that lists what ``values`` does of a Muon, and nothing of other optimizers."""
    return lambda optimizer: values(optimizer) if isinstance(optimizer, torch.optim.Muon) else []


class MuonRule(Rule):
    """torch.optim.Muon's rule for hidden matrices, also with a triple of coefficients for each iteration."""

    name = "muon"
    beside = "adam"
    """The rule of all other parameters."""
    kinds = (torch.optim.Muon,)
    moments = (Moment("momentum_buffer", FIRST),)
    numbers = ("momentum", "weight_decay", "eps")
    flags = ("nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
    kernel = None
    is_elementwise = False
    variants: ClassVar[Mapping[str, Variant]] = {"muon": Variant(torch.optim.Muon)}
    fields: ClassVar[Mapping[str, Values]] = {
        "muon_momentum": _of_muon(values_of("momentum")),
        "muon_nesterov": _of_muon(values_of("nesterov")),
        "muon_num_ns_steps": _of_muon(values_of("ns_steps")),
        "muon_coefficient_type": _of_muon(
            lambda optimizer: [_TYPES.get(value, value) for value in values_of("ns_coefficients")(optimizer)]
        ),
        "muon_adjust_lr_fn": _of_muon(values_of("adjust_lr_fn")),
        "muon_adam_lr": lambda optimizer: [] if isinstance(optimizer, torch.optim.Muon) else values_of("lr")(optimizer),
        "muon_ns_dtype": _of_muon(lambda optimizer: [torch.bfloat16, torch.float32]),
    }

    @override
    def hyper(self, options: Options, lr: float | Tensor, kind: type) -> MuonHyper:
        if options["adjust_lr_fn"] is not None:
            validate.one_of("adjust_lr_fn of a param group", options["adjust_lr_fn"], ADJUST_LR_FNS)
        steps = validate.integer("ns_steps of a param group", options["ns_steps"], minimum=0, maximum=MOST_ITERATIONS)
        return MuonHyper(
            lr=lr,
            weight_decay=number(options, "weight_decay"),
            momentum=number(options, "momentum"),
            nesterov=bool(options["nesterov"]),
            coefficients=iterations(_triples(options), steps),
            eps=number(options, "eps"),
            adjust_lr_fn=options["adjust_lr_fn"],
        )

    @override
    def build(self, config: "OptimizerConfig", groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            groups,
            lr=lr,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            ns_coefficients=COEFFICIENTS[config.muon_coefficient_type],
            ns_steps=config.muon_num_ns_steps,
            adjust_lr_fn=config.muon_adjust_lr_fn,
        )


def _triples(options: Mapping[str, Any]) -> list[Coefficients]:
    """Return ``ns_coefficients``: three numbers, or such a triple for each iteration."""
    value = options["ns_coefficients"]
    rows = [value] if isinstance(value, Collection) and all(isinstance(one, int | float) for one in value) else value
    are_triples = isinstance(rows, Collection) and all(
        isinstance(row, Collection) and len(row) == 3 and all(isinstance(one, int | float) for one in row)
        for row in rows
    )
    if not are_triples or not rows:
        raise ArgumentError(
            "ns_coefficients of a param group must be three numbers, or a list of such triples, one for each "
            f"iteration; got {value!r}"
        )
    return [(float(a), float(b), float(c)) for a, b, c in rows]
