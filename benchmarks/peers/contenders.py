"""Who takes part in step.py, where each is built, and what must be installed for it."""

from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from peers.work import Stepper, UnavailableError, Work

BASELINE = "megascale"
REFERENCE = "masters"
MEGATRON = ".ci/install_integrations"
DEEPSPEED = "DS_ACCELERATOR=cpu pip install --no-deps --no-build-isolation --no-binary deepspeed deepspeed==0.19.8"


@dataclass(frozen=True)
class Entry:
    """A contender: its name, the function that builds it, what must be importable, how to install that, and a note."""

    name: str
    module: str
    build: str
    needs: str = "torch"
    install: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether what it needs can be imported."""
        try:
            return find_spec(self.needs) is not None
        except ModuleNotFoundError:
            return False

    def make(self, work: Work) -> Stepper:
        """Build it.

        Raises:
            UnavailableError: if it is not installed, or cannot run here.
        """
        if not self.is_installed:
            raise UnavailableError(f"not installed: {self.install}")
        build = getattr(import_module(f"peers.{self.module}"), self.build)
        stepper: Stepper = build(replace(work, options=self.options))
        return stepper


def backend_entry(name: str) -> Entry:
    """Return megascale on one of its backends."""
    return Entry(f"megascale, {name}", "step_ours", "plain", options={"backend": name})


OURS = Entry(BASELINE, "step_ours", "plain")
MASTERS = Entry(REFERENCE, "step_by_hand", "masters", note="written by hand: fp32 masters, torch's fused AdamW")
TORCH_AMP = Entry("torch amp", "step_by_hand", "torch_amp", note="GradScaler, fp32 parameters, torch's fused AdamW")
MEGATRON_CORE = Entry("Megatron-Core", "step_megatron", "build", "megatron.core", MEGATRON, note="as it is installed")
MEGATRON_FUSED = Entry(
    "Megatron-Core, fused AdamW",
    "step_megatron",
    "build",
    "megatron.core",
    MEGATRON,
    {"fused": True},
    "with torch's fused AdamW inside",
)
PEERS = (
    MASTERS,
    TORCH_AMP,
    MEGATRON_CORE,
    MEGATRON_FUSED,
    Entry(
        "DeepSpeed FP16_Optimizer",
        "step_deepspeed",
        "build",
        "deepspeed",
        DEEPSPEED,
        note="no ZeRO, its fused Adam; bf16: scales no loss",
    ),
    Entry("apex FusedAdam", "step_fused_adam", "apex", "amp_C", "build NVIDIA/apex from source"),
    Entry(
        "TransformerEngine FusedAdam",
        "step_fused_adam",
        "transformer_engine",
        "transformer_engine.pytorch",
        "pip install transformer_engine[pytorch]",
    ),
    Entry(
        "FlashOptim AdamW",
        "step_fused_adam",
        "flashoptim",
        "flashoptim",
        "pip install --no-deps flashoptim==0.1.4",
        note="24-bit masters, 8-bit moments, no overflow check",
    ),
)
"""Everybody but megascale."""
