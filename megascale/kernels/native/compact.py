"""The table of pointers for compact.h: updates of moments held as 8-bit codes.

See :mod:`megascale.kernels.compact_moments`.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from megascale.kernels.compact_moments import SCALE_SUFFIX
from megascale.kernels.protocol import Operands
from megascale.kernels.tensors.tensor_list import TensorList
from megascale.rules import CODE_DTYPES

# The columns of compact.h's CompactRow, all 8 bytes wide.
MAIN, MODEL, FIRST, SECOND, FIRST_SCALE, SECOND_SCALE, STEP, MODEL_TYPE, START, REMAINDER = range(10)
COLUMNS = 10
MOMENTS = {"exp_avg": (FIRST, FIRST_SCALE), "exp_avg_sq": (SECOND, SECOND_SCALE)}
CPU = torch.device("cpu")


def compact_rows(operands: Operands, types: dict[torch.dtype, int]) -> NDArray[np.int64] | None:
    """Return compact.h's rows; None unless all operands are contiguous, on the CPU and of supported dtypes.

    Args:
        operands: at least one, with moments of which one or both are codes.
        types: native.c's codes of dtypes.
    """
    moments = {name: TensorList(operands.state[name]) for name in MOMENTS}
    models = TensorList(operands.model)
    mains = models if operands.remainder else TensorList(operands.main)
    lists = [mains, models, *moments.values()]
    if not all(one.forms.contiguous and one.forms.devices <= {CPU} for one in lists):
        return None
    if not operands.remainder and mains.forms.kinds != {torch.float32}:
        return None
    dtypes = [one.forms.kinds for one in moments.values()]
    if not all(len(found) == 1 and found <= {torch.float32, *CODE_DTYPES} for found in dtypes):
        return None
    rows: NDArray[np.int64] = np.zeros((len(operands.main), COLUMNS), dtype=np.int64)
    if operands.remainder:
        rows[:, MODEL], rows[:, REMAINDER] = models.pointers, TensorList(operands.remainder).pointers
    else:
        rows[:, MAIN] = mains.pointers
        # An fp32 model param is its own main param.
        rows[:, MODEL] = np.where(models.pointers == mains.pointers, 0, models.pointers)
    rows[:, MODEL_TYPE] = models.forms.dtype_codes(types)
    for name in moments:
        column, scale = MOMENTS[name]
        rows[:, column] = moments[name].pointers
        if moments[name].forms.kinds <= set(CODE_DTYPES):
            rows[:, scale] = TensorList(operands.state[name + SCALE_SUFFIX]).pointers
    rows[:, STEP] = TensorList(operands.step).pointers
    rows[:, START] = operands.start or 0
    return rows
