"""torch.amp's API for 16-bit training on many ranks: change the import and keep the loop."""

from megascale.amp.autocast import autocast, set_half_dtype
from megascale.amp.grad_scaler import GradScaler
from megascale.amp.optimizer_step import optimizer_step

__all__ = ["GradScaler", "autocast", "optimizer_step", "set_half_dtype"]
