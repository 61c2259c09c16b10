"""Tests on an accelerator."""

import torch


def device() -> torch.device:
    """Return this machine's accelerator, or its CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
