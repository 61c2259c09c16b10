"""What torch's state dict functions were told and do not pass on, read from their frames.

``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict(model, optimizer, state, options=...)`` calls
``optimizer.load_state_dict(state)``, which has no argument for options. ``StateDictOptions(strict=False)`` asks to skip
what is missing, and a load that raises instead would break that promise of torch's. The options stand in a local
variable of torch's function, ``info``, further up the stack; no public name leads there. Where a torch calls it
otherwise, the load is strict, as without options.
"""

import sys
from types import FrameType

TORCH_MODULE = "torch.distributed.checkpoint.state_dict"


def is_told_to_skip() -> bool:
    """Return whether a caller passed ``StateDictOptions(strict=False)`` to torch's functions."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == TORCH_MODULE and "info" in frame.f_locals:
            return not getattr(frame.f_locals["info"], "strict", True)
        frame = frame.f_back
    return False
