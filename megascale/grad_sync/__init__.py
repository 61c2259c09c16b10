"""Accumulates gradients in fp32 and reduces them over ranks, bucket by bucket during backward, without DDP."""

from megascale.grad_sync.sync import GradSync

__all__ = ["GradSync"]
