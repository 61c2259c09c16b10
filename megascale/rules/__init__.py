"""The optimizers whose updates run on kernels, one object each, and every table that follows from them.

To add one see docs/own_optimizer.md#add-an-optimizer-rule.
"""

import torch

from megascale.rules.adam import AdamHyper, AdamRule
from megascale.rules.lion import LionHyper, LionRule
from megascale.rules.muon import MuonHyper, MuonRule
from megascale.rules.rule import (
    CODE_DTYPES,
    FIRST,
    FIRST_DTYPE,
    SECOND,
    SECOND_DTYPE,
    Hyper,
    Moment,
    Rule,
    Variant,
)
from megascale.rules.sgd import SgdHyper, SgdRule

ADAM, SGD, LION, MUON = AdamRule(), SgdRule(), LionRule(), MuonRule()

RULES: tuple[Rule, ...] = (ADAM, SGD, LION, MUON)
"""In the order in which messages list them."""

BY_NAME = {rule.name: rule for rule in RULES}
CONFIGURABLE = tuple(rule.name for rule in RULES if type(rule).build is not Rule.build)
"""The names that ``OptimizerConfig.optimizer`` takes."""
BY_KIND = {kind: rule for rule in RULES for kind in rule.kinds}
KINDS = tuple(BY_KIND)
"""The classes whose steps are taken over."""
VARIANTS = {name: (rule, variant) for rule in RULES for name, variant in rule.variants.items()}
"""By the names that an estimate takes: a rule, and the options that decide which state it keeps."""


_EVERY_MOMENT = [moment for rule in RULES for moment in rule.moments]
MOMENTS = {
    one.name: next(moment for moment in _EVERY_MOMENT if moment.name == one.name)
    for one in sorted(_EVERY_MOMENT, key=lambda one: one.field != FIRST)
}
"""All moments by name, first moments before second ones. Of one name the first rule's: only that may be codes."""
MOMENT_CODES = {moment.name: moment.codes for moment in ADAM.moments if moment.codes is not None}
"""The moments that may be 8-bit codes, of Adam and AdamW only, and the dtype of these."""

ELEMENTWISE = frozenset(
    {
        *(kind for kind, rule in BY_KIND.items() if rule.is_elementwise),
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam),
        *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
    }
)
"""By exact type: optimizers that update each element from its own gradient and state, so that a parameter can be cut
anywhere. Those of torch that have no rule run their own ``step()``."""


def kinds_without(dtype_field: str) -> tuple[type[torch.optim.Optimizer], ...]:
    """Return the optimizers that have no moment of a field, :data:`FIRST` or :data:`SECOND`."""
    return tuple(kind for kind, rule in BY_KIND.items() if all(one.field != dtype_field for one in rule.moments))


__all__ = [
    "ADAM",
    "BY_KIND",
    "BY_NAME",
    "CODE_DTYPES",
    "CONFIGURABLE",
    "ELEMENTWISE",
    "FIRST",
    "FIRST_DTYPE",
    "KINDS",
    "LION",
    "MOMENTS",
    "MOMENT_CODES",
    "MUON",
    "RULES",
    "SECOND",
    "SECOND_DTYPE",
    "SGD",
    "VARIANTS",
    "AdamHyper",
    "Hyper",
    "LionHyper",
    "Moment",
    "MuonHyper",
    "Rule",
    "SgdHyper",
    "Variant",
    "kinds_without",
]
