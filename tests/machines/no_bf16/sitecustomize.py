"""With this folder on PYTHONPATH torch finds a CPU without products of bf16, in every process of Python.

It is the one function by which the library asks for them, :func:`megascale.kernels.newton_schulz.iteration_dtype`, that
asks torch.cpu.get_capabilities.
"""

import importlib.util

if importlib.util.find_spec("torch") is not None:
    import torch

    setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False, "amx_tile": False})  # noqa: B010
