"""Lives of an optimizer: the same actions, one after the other, with main params in host memory and without."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.checkpoint import Checkpointer
from megascale.errors import MegascaleError
from megascale.grad_sync import GradSync
from megascale.utils.dtensors import to_local
from megascale.utils.nests import map_tensors
from tests.meshes import mesh_of
from tests.training import Tiny, bits_equal, model

ACTIONS = (
    "step",
    "overflow",
    "twice",
    "clip",
    "rate",
    "read",
    "load",
    "rebuild",
    "save",
    "freeze",
    "grow",
    "halve",
    "write the same",
    "halves of a step",
)


class Life:
    """One model and its optimizer, whose last layer is added to it by an action.

    Args:
        held: "replicated", "synced", "fsdp2", or a DistributedOptimizer's shard.
        options: fields of the config.
        folder: for checkpoints.
    """

    def __init__(self, held: str, options: dict[str, Any], folder: Path) -> None:
        self.held, self.options, self.folder = held, options, folder
        self.has_grown = self.is_frozen = False
        self.module, self.optimizer = self._built()

    def _built(self) -> tuple[Tiny, MixedPrecisionOptimizer]:
        module = model()
        if self.held == "fsdp2":
            mesh = mesh_of((dist.get_world_size(),), ("dp",))
            for layer in (*module.children(), module):
                fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        layers = ["first", "norm", "second", *(["head"] if self.has_grown else [])]
        named = [self._named(module, layer) for layer in layers]
        groups: list[dict[str, Any]] = [
            {"params": [*named[0], *named[1]]},
            {"params": named[2], "lr": 3e-3, "weight_decay": 0.1},
            *({"params": one} for one in named[3:]),
        ]
        inner = torch.optim.AdamW(groups, lr=1e-2)
        config = OptimizerConfig(fp16=True, **self.options)
        scaler = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1)
        if self.held in ("elements", "parameters"):
            return module, DistributedOptimizer(inner, config, scaler, modules=module, shard=self.held, bucket_numel=24)
        sync = GradSync(module.named_parameters()) if self.held == "synced" else None
        return module, MixedPrecisionOptimizer(inner, config, scaler, grad_sync=sync)

    @staticmethod
    def _named(module: nn.Module, layer: str) -> list[tuple[str, nn.Parameter]]:
        return [(name, param) for name, param in module.named_parameters() if name.startswith(layer)]

    def act(self, action: str, at: int) -> Any:
        """Do one of ACTIONS, of which most end with a step. Returns what can be compared; of an error its message."""
        try:
            return self._acted(action, at)
        except MegascaleError as error:
            return f"{type(error).__name__}: {error}"

    def _acted(self, action: str, at: int) -> Any:
        optimizer = self.optimizer
        if action == "read":
            return {name: to_local(main).clone() for name, main in optimizer.main_params()}
        if action == "rebuild":
            weights, state = self.module.state_dict(), optimizer.state_dict()
            self.module, self.optimizer = self._built()
            self.module.load_state_dict(weights)
            self.optimizer.load_state_dict(state)
            self._freeze()
        elif action == "save":
            Checkpointer(self.folder).save(at, self.module, optimizer)
            self.module, self.optimizer = self._built()
            Checkpointer(self.folder).load(self.module, self.optimizer)
            self._freeze()
        elif action == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        elif action == "freeze":
            self.is_frozen = not self.is_frozen
            self._freeze()
        elif action == "grow" and not self.has_grown:
            self.has_grown = True
            optimizer.add_param_group({"params": self._named(self.module, "head"), "lr": 2e-2})
        elif action == "halve":
            self.module.load_state_dict({name: value / 2 for name, value in self.module.state_dict().items()})
        elif action == "write the same":
            self.module.load_state_dict({name: value.clone() for name, value in self.module.state_dict().items()})
        elif action == "clip":
            optimizer.clip_grad = 0.05 if optimizer.clip_grad == 1.0 else 1.0
        elif action == "rate":
            optimizer.param_groups[0]["lr"] *= 0.5
        return self._step(at, action)

    def _freeze(self) -> None:
        """Freeze a parameter, which was trained when the optimizer was built, or train it again."""
        self.module.norm.weight.requires_grad_(not self.is_frozen)

    def _step(self, at: int, action: str) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.optimizer.zero_grad()
        self.module.zero_grad()
        sync, parts = self.optimizer._member.grad_sync, 2 if action == "twice" else 1
        for part in range(parts):
            seed = 100 * at + 10 * part + rank
            data = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).half()
            poisoned = action == "overflow" and rank == 0
            with sync.no_sync() if isinstance(sync, GradSync) and part + 1 < parts else nullcontext():
                loss = self.module(data).float().square().mean() * (torch.inf if poisoned else 1.0)
                self.optimizer.scale_loss(loss).backward()
        if action == "halves of a step":
            found_inf = self.optimizer.prepare_grads()
            return found_inf, tuple(self.optimizer.step_with_ready_grads())
        return tuple(self.optimizer.step())

    def end(self) -> dict[str, Any]:
        """Return all state: of DTensors this rank's part."""
        self.optimizer.finish_param_gather()
        weights = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
        found: dict[str, Any] = map_tensors(
            to_local, {"optimizer": dict(self.optimizer.state_dict()), "model": weights}
        )
        return found


def same(a: Any, b: Any) -> bool:
    """Whether two nests are equal, tensors bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and bits_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def first_difference(
    held: str, stored: dict[str, Any], ways: list[dict[str, Any]], actions: list[str], folder: Path
) -> str:
    """Live without offload and in each way; return where two lives first differ, nothing where they do not."""
    lives = [Life(held, stored | way, folder / str(at)) for at, way in enumerate([{}, *ways])]
    for at, action in enumerate(actions):
        plain, *others = [life.act(action, at) for life in lives]
        for way, other in zip(ways, others, strict=True):
            if not same(plain, other):
                return f"action {at} of {actions}, {way}: {other} in place of {plain}"
    plain, *others = [life.end() for life in lives]
    return next(
        (f"the end of {actions}, {way}" for way, one in zip(ways, others, strict=True) if not same(plain, one)), ""
    )
