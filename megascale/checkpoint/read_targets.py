"""ReadTargets: decides whether a saved tensor is read into new memory or straight into a live shard."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megascale.base_optimizer import MegascaleOptimizer
from megascale.checkpoint.contents import MAIN_PARAMS, model_state, names_in, shards_of
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import Tree, flatten, join, leaves
from megascale.checkpoint.remainders import is_remainder
from megascale.main_params.shard import ParamShard
from megascale.step.torch_states import PER_PARAMETER
from megascale.utils.dtypes import HALF_DTYPES


@dataclass(frozen=True)
class ReadTargets:
    """The live tensors of model and optimizer, by the keys of the saved tensors.

    Attributes:
        live: tensors that determine the placement of a saved tensor; ParamShards among them may be read in place.
        rounded: names in the model that are not read, as the optimizer rounds them from loaded main params.
    """

    live: Mapping[str, Tensor] = field(default_factory=dict)
    rounded: frozenset[str] = frozenset()
    _in_place: bool = False

    @classmethod
    def of(cls, manifest: Manifest, model: nn.Module, optimizer: MegascaleOptimizer | None) -> "ReadTargets":
        """Return references to live tensors. ``optimizer``: None if its state is not to be loaded."""
        if optimizer is None:
            return cls(flatten(model_state(model), "model")[1])
        shards = shards_of(optimizer)
        state = model_state(model, shards)
        packed = optimizer._pack(copy=False, decode=False, to_load=True)
        names = names_in(packed, optimizer)
        in_place = not _may_overflow(manifest, state)
        # 16-bit model params are rounded from their main params, or else loaded whole, like a write by the user.
        own_mains = {param: shard for param, shard in shards.items() if shard.dtype not in HALF_DTYPES}
        live = flatten(model_state(model, own_mains if in_place else {}), "model")[1]
        live |= flatten(packed, "optimizer")[1]
        for param, shard in shards.items():
            # An fp32 model param is its own main param.
            live.setdefault(join(MAIN_PARAMS, names[param]), shard)
        own = {key for one in optimizer._live_states() for key in one.rounded_params()}
        saved = {key for key, _, _ in leaves(manifest.trees["optimizer"])}
        rounded = frozenset(
            name
            for name, param in model_state(model).items()
            if id(param) in own and join(MAIN_PARAMS, names[id(param)]) in saved
        )
        return cls(live, rounded, in_place)

    def templates(self, tree: Tree) -> dict[str, Tensor]:
        """Return a tensor to read into for every leaf of ``tree``.

        The live ParamShard of that key if it has the saved dtype; else new memory, with the placement of the live
        tensor if that is a shard, or whole on the host. Remainders are read into new memory, to be decoded.
        """
        templates: dict[str, Tensor] = {}
        for key, shape, dtype in leaves(tree):
            like = self.live.get(key, self.live.get(_main_param_key(key)))
            if like is None or tuple(like.shape) != shape:
                templates[key] = torch.empty(shape, dtype=dtype, device="cpu")
            elif isinstance(like, ParamShard):
                fits = key in self.live and like.dtype == dtype and not is_remainder(key, dtype)
                templates[key] = like if self._in_place and fits else like.like(dtype)
            elif isinstance(like, DTensor):
                templates[key] = torch.empty_like(like, dtype=dtype)
            else:
                templates[key] = torch.empty(shape, dtype=dtype, device="cpu")
        return templates


def _may_overflow(manifest: Manifest, state: Mapping[str, Any]) -> bool:
    """Return whether saved main params may overflow this model's fp16: then they must be read and checked first."""
    saved = {name: [dtype for _, _, dtype in leaves(tree)] for name, tree in manifest.trees["model"]["dict"]}
    return any(
        isinstance(value, ParamShard)
        and value.dtype == torch.float16
        and saved.get(name, [value.dtype]) != [value.dtype]
        for name, value in state.items()
    )


def _main_param_key(key: str) -> str:
    """Return the key of the main param that an optimizer state tensor belongs to: both have one placement.

    A step count has none: of a 0-d parameter it has the shape, but each rank has its own.
    """
    parts = key.split("/")
    of_state = parts[:3] == ["optimizer", "optimizer", "state"] and len(parts) > 4 and parts[-1] not in PER_PARAMETER
    return f"{MAIN_PARAMS}/{parts[3]}" if of_state else ""
