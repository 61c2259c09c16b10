"""Lion: the sign of an interpolated momentum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from megascale.lion import Lion
from megascale.rules.options import number, pair, values_of
from megascale.rules.rule import FIRST, Hyper, Moment, Options, Rule, Values, Variant

if TYPE_CHECKING:
    from megascale.config import OptimizerConfig


@dataclass(frozen=True)
class LionHyper(Hyper):
    """Hyperparameters of Lion (arXiv 2302.06675), by the names of torch's optimizers."""

    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool
    decoupled: ClassVar[bool] = True


class LionRule(Rule):
    """megascale.Lion. The rule is the same at every step."""

    name = "lion"
    kinds = (Lion,)
    moments = (Moment("exp_avg", FIRST),)
    numbers = ("betas", "weight_decay")
    flags = ("maximize",)
    kernel = "lion_"
    decoupled = (Lion,)
    variants: ClassVar[Mapping[str, Variant]] = {"lion": Variant(Lion)}
    fields: ClassVar[Mapping[str, Values]] = {"lion_beta1": values_of("betas", 0), "lion_beta2": values_of("betas", 1)}

    @override
    def hyper(self, options: Options, lr: float | Tensor, kind: type) -> LionHyper:
        beta1, beta2 = pair(options, "betas")
        return LionHyper(lr, beta1, beta2, number(options, "weight_decay"), bool(options["maximize"]))

    @override
    def build(self, config: "OptimizerConfig", groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        betas = (config.lion_beta1, config.lion_beta2)
        return Lion(groups, lr=lr, betas=betas, weight_decay=config.weight_decay)
