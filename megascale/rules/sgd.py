"""SGD, with and without momentum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from megascale.rules.options import number, values_of
from megascale.rules.rule import FIRST, Hyper, Moment, Options, Rule, Values, Variant

if TYPE_CHECKING:
    from megascale.config import OptimizerConfig


@dataclass(frozen=True)
class SgdHyper(Hyper):
    """Hyperparameters of SGD with momentum, as torch.optim has them."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    decoupled: ClassVar[bool] = False


class SgdRule(Rule):
    """torch.optim.SGD."""

    name = "sgd"
    kinds = (torch.optim.SGD,)
    moments = (Moment("momentum_buffer", FIRST),)
    numbers = ("momentum", "dampening", "weight_decay")
    flags = ("nesterov", "maximize")
    optional_state = ("momentum_buffer", "step")
    kernel = "sgd_"
    variants: ClassVar[Mapping[str, Variant]] = {
        "sgd": Variant(torch.optim.SGD, {"momentum": 0.0, "dampening": 0.0}),
        "momentum": Variant(torch.optim.SGD, {"momentum": 0.9, "dampening": 0.0}),
    }
    fields: ClassVar[Mapping[str, Values]] = {"sgd_momentum": values_of("momentum")}

    @override
    def state_names(self, options: Options) -> list[str]:
        return ["momentum_buffer"] if options["momentum"] != 0 else []

    @override
    def counts_steps(self, options: Options) -> bool:
        # With dampening the first landed step differs; see the reference backend.
        return bool(options["momentum"] != 0 and options["dampening"] != 0)

    @override
    def hyper(self, options: Options, lr: float | Tensor, kind: type) -> SgdHyper:
        return SgdHyper(
            lr=lr,
            momentum=number(options, "momentum"),
            dampening=number(options, "dampening"),
            weight_decay=number(options, "weight_decay"),
            nesterov=bool(options["nesterov"]),
            maximize=bool(options["maximize"]),
        )

    @override
    def build(self, config: "OptimizerConfig", groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=lr, momentum=config.sgd_momentum, weight_decay=config.weight_decay)
