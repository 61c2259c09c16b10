"""Main params that a checkpoint holds as remainders, decoded with the weights that were saved beside them.

A remainder is int16, see :mod:`megascale.kernels.remainders`; no main param has that dtype otherwise.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megascale.checkpoint.contents import MAIN_PARAMS, PARAM_NAMES
from megascale.checkpoint.files import PlannedRead
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import join, leaves, unflatten
from megascale.errors import CheckpointError
from megascale.kernels.remainders import REMAINDER_DTYPE, decode
from megascale.main_params.shard import ParamShard
from megascale.utils.dtensors import dtensor_like, to_local


def is_remainder(key: str, dtype: torch.dtype) -> bool:
    """Whether a saved tensor is the remainder of a main param."""
    return dtype == REMAINDER_DTYPE and key.startswith(f"{MAIN_PARAMS}/")


def decode_(folder: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
    """Replace remainders among ``tensors``, read from a checkpoint, by main params in fp32, placed alike.

    ``tensors``: by the keys of the saved ones: whole tensors, DTensors or ParamShards.

    Raises CheckpointError for a remainder without its weights.
    """
    held = {key: value for key, value in tensors.items() if is_remainder(key, value.dtype)}
    if not held:
        return
    saved = _weights(manifest)
    weights: dict[str, tuple[str, Tensor]] = {}
    for key, remainder in held.items():
        if key not in saved:
            raise CheckpointError(
                f"{folder} holds {key!r} as a remainder and no weights beside it; save model and optimizer together"
            )
        weight_key, dtype = saved[key]
        weight = (
            remainder.like(dtype) if isinstance(remainder, ParamShard) else torch.empty_like(remainder, dtype=dtype)
        )
        weights[key] = weight_key, weight
    PlannedRead(folder, manifest, dict(weights.values())).read()
    for key, (_, weight) in weights.items():
        tensors[key] = _decoded(weight, tensors[key])


def _weights(manifest: Manifest) -> dict[str, tuple[str, torch.dtype]]:
    """Return key and dtype of the weights of each main param, by the key of that."""
    names: Mapping[str, str] = unflatten(manifest.trees.get(PARAM_NAMES, {"dict": []}), {})
    return {
        join(MAIN_PARAMS, names.get(name, name)): (key, dtype)
        for name, node in manifest.trees["model"]["dict"]
        for key, _, dtype in leaves(node)
    }


def _decoded(weight: Tensor, remainder: Tensor) -> Tensor:
    if isinstance(weight, ParamShard) and isinstance(remainder, ParamShard):
        return ParamShard(decode(weight.piece, remainder.piece), weight.shape, weight.start)
    with torch.no_grad():
        value = decode(to_local(weight), to_local(remainder))
    return dtensor_like(value, remainder) if isinstance(remainder, DTensor) else value
