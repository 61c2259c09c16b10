"""torch.amp's API for 16-bit training on many ranks: change the import and keep the loop."""

from megascale.amp.autocast import autocast, get_half_dtype, set_half_dtype
from megascale.amp.grad_scaler import GradScaler
from megascale.amp.optimizer_step import optimizer_step

__all__ = ["GradScaler", "autocast", "get_half_dtype", "optimizer_step", "set_half_dtype"]
