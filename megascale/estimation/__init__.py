"""Estimate what a run needs, before it runs: memory, checkpoint, messages and time, from sizes alone."""

from megascale.estimation.collectives import Collective
from megascale.estimation.estimates import Estimate, estimate
from megascale.estimation.setup import Setup
from megascale.estimation.sizes import ModelSizes, ParamSpec

__all__ = ["Collective", "Estimate", "ModelSizes", "ParamSpec", "Setup", "estimate"]
