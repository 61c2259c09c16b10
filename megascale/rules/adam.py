"""Adam and AdamW, with and without AMSGrad."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from megascale.rules.options import number, pair, values_of
from megascale.rules.rule import (
    FIRST,
    FIRST_DTYPE,
    SECOND,
    SECOND_DTYPE,
    Hyper,
    Moment,
    Options,
    Rule,
    Values,
    Variant,
)

if TYPE_CHECKING:
    from megascale.config import OptimizerConfig


@dataclass(frozen=True)
class AdamHyper(Hyper):
    """Hyperparameters of Adam (arXiv 1412.6980) and AdamW (``decoupled``, arXiv 1711.05101), by torch's names."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool
    maximize: bool


class AdamRule(Rule):
    """torch.optim.Adam and torch.optim.AdamW."""

    name = "adam"
    kinds = (torch.optim.Adam, torch.optim.AdamW)
    moments = (
        Moment("exp_avg", FIRST, FIRST_DTYPE),
        Moment("exp_avg_sq", SECOND, SECOND_DTYPE),
        Moment("max_exp_avg_sq", SECOND),
    )
    numbers = ("betas", "eps", "weight_decay")
    flags = ("amsgrad", "maximize")
    may_read = ("decoupled_weight_decay",)
    optional_state = ("max_exp_avg_sq",)
    kernel = "adam_"
    decoupled = (torch.optim.AdamW,)
    variants: ClassVar[Mapping[str, Variant]] = {
        "adamw": Variant(torch.optim.AdamW, {"amsgrad": False}),
        "adam": Variant(torch.optim.Adam, {"amsgrad": False}),
        "amsgrad": Variant(torch.optim.Adam, {"amsgrad": True}),
    }
    fields: ClassVar[Mapping[str, Values]] = {
        "adam_beta1": values_of("betas", 0),
        "adam_beta2": values_of("betas", 1),
        "adam_eps": values_of("eps"),
    }

    @override
    def state_names(self, options: Options) -> list[str]:
        return ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if options["amsgrad"] else [])

    @override
    def counts_steps(self, options: Options) -> bool:
        return True  # the bias correction

    @override
    def hyper(self, options: Options, lr: float | Tensor, kind: type) -> AdamHyper:
        beta1, beta2 = pair(options, "betas")
        return AdamHyper(
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=number(options, "eps"),
            weight_decay=number(options, "weight_decay"),
            decoupled=bool(options.get("decoupled_weight_decay", kind in self.decoupled)),
            amsgrad=bool(options["amsgrad"]),
            maximize=bool(options["maximize"]),
        )

    @override
    def build(self, config: "OptimizerConfig", groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        betas = (config.adam_beta1, config.adam_beta2)
        return kind(groups, lr=lr, betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay)
