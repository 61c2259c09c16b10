"""The versions of torch that megascale supports, and the error for a torch that lacks a name which megascale uses."""

from traceback import walk_tb
from types import ModuleType

import torch

from megascale.errors import UnsupportedTorchError

OLDEST, NEWEST = "2.11", "2.15"
"""What CI tests is these two, and the one that .ci/torch.txt pins."""


def explained(error: Exception) -> Exception:
    """Return UnsupportedTorchError for an error of megascale's own use of a name that torch lacks, else the error.

    Such a name is what cannot be imported from torch, or a private attribute of one of its modules, classes or objects.
    """
    if isinstance(error, ImportError):
        owner = error.name or ""  # none of an UnsupportedTorchError, which comes back as it is
    elif isinstance(error, AttributeError) and (error.name or "").startswith("_"):
        holder = error.obj if isinstance(error.obj, ModuleType | type) else type(error.obj)
        owner = holder.__name__ if isinstance(holder, ModuleType) else holder.__module__
    else:
        return error
    users = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    users = [user for user in users if user not in ("torch", "importlib")]  # who asked, last
    if owner.partition(".")[0] != "torch" or users[-1:] != ["megascale"]:
        return error
    found = UnsupportedTorchError(
        f"torch {torch.__version__} lacks what megascale needs: {error}; megascale supports torch {OLDEST} to "
        f"{NEWEST}: install one of these, or a megascale that is made for yours"
    )
    found.__cause__ = error
    return found
