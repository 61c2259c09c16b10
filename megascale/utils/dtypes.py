"""Dtypes that the library treats alike."""

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The 16-bit floating point types: their parameters get fp32 main params."""
