"""Matrix multiplications with 16-bit operands, fp32 accumulation and 16-bit results, on every device.

Tensor cores do this natively. CPUs without 16-bit matrix instructions are 20 to 100 times slower at it than in fp32:
there operands are widened, multiplied in fp32, and the result is rounded. Gradients pass through the same casts, so
gradients of activations and parameters are rounded to 16 bits too.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


def _widened(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16)


class Linear(nn.Linear):
    """torch.nn.Linear, fast in 16 bits on CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features] in the input's dtype."""
        if not _widened(input):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(input.float(), self.weight.float(), bias).to(input.dtype)


class Conv2d(nn.Conv2d):
    """torch.nn.Conv2d, fast in 16 bits on CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [batch, in_channels, height, width] to [batch, out_channels, ...] in the input's dtype."""
        if not _widened(input):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.float()
        return self._conv_forward(input.float(), self.weight.float(), bias).to(input.dtype)
