"""Gradients of many ranks: added up in fp32, reduced bucket by bucket while backward goes on, without DDP."""

from megascale.grad_sync.sync import GradSync

__all__ = ["GradSync"]
