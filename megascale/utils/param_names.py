"""Names of parameters without the prefixes of wrappers: DistributedDataParallel's and torch.compile's."""

COMPILED = "_orig_mod"
"""What torch.compile puts in front of the names of the module inside, and in their middle where a part is compiled."""
WRAPPERS = ("module", COMPILED)
"""DistributedDataParallel's, and torch.compile's."""


def bare(name: str) -> str:
    """Return ``name`` without the prefixes ``module.`` and ``_orig_mod.``, in any order and number.

    ``_orig_mod.`` is left out of the middle, too: no attribute of a user's has that name.
    """
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in WRAPPERS:
        parts = parts[1:]
    return ".".join([*(part for part in parts[:-1] if part != COMPILED), parts[-1]])
