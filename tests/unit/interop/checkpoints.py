"""Checkpoints in the peers' layouts, written by hand, with weights and moments that no two parameters share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.training import Tiny, bits_equal

SCALER = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10, "_growth_tracker": 7}
MEGATRON_SCALER = {"scale": torch.tensor([512.0]), "growth_tracker": 7, "hysteresis_tracker": 1}


def trained(dtype: torch.dtype = torch.float32, seed: int = 0, named: bool = False) -> tuple[nn.Module, Any]:
    """Return a model in which no two weights are alike, and its AdamW after three steps."""
    torch.manual_seed(seed)
    model = Tiny().to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=0.01)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    return model, optimizer


def torch_checkpoint(**more: Any) -> dict[str, Any]:
    """Return a checkpoint of torch's."""
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": SCALER} | more


class Halves:
    """fp32 masters, their moments, and the fp16 weights that they round to: what 16-bit peers have."""

    def __init__(self) -> None:
        masters, self.optimizer = trained()
        self.names = [name for name, _ in masters.named_parameters()]
        self.masters = {name: param.detach() for name, param in masters.named_parameters()}
        self.states = {name: self.optimizer.state[param] for name, param in masters.named_parameters()}
        self.model = {name: master.half() for name, master in self.masters.items()}
        self.groups = [[n for n in self.names if self.masters[n].dim() > 1], [n for n in self.names if "bias" in n]]
        self.groups[1] += [name for name in self.names if name not in sum(self.groups, [])]  # noqa: RUF017

    def megatron(self, groups: Sequence[Sequence[str]] | None = None) -> dict[str, Any]:
        """Return the state dict of a Float16 optimizer of Megatron-Core's."""
        groups = self.groups if groups is None else groups
        flat = [name for group in groups for name in group]
        inner = {
            "state": {index: self.states[name] for index, name in enumerate(flat)},
            "param_groups": [
                {"lr": 0.5, "wd_mult": 1.0, "params": [flat.index(name) for name in group]} for group in groups
            ],
        }
        mains = [[self.masters[name] for name in group] for group in groups]
        return {"optimizer": inner, "grad_scaler": MEGATRON_SCALER, "fp32_from_fp16_params": mains}

    def zero(self, folder: Path, ranks: int = 1, gap: int = 0) -> Path:
        """Write a ZeRO-1 checkpoint: each group flat, with gaps, padded and cut over ranks."""
        folder.mkdir()
        shards: list[dict[str, Any]] = [{"partitions": [], "states": [], "padding": []} for _ in range(ranks)]
        for group in self.groups:
            tensors = {"main": self.masters} | {
                key: {name: self.states[name][key] for name in group} for key in ("exp_avg", "exp_avg_sq")
            }
            flat = {key: self._flat([values[name] for name in group], gap, ranks) for key, values in tensors.items()}
            padding = flat["main"].numel() - self._flat([self.masters[n] for n in group], gap, 0).numel()
            size = flat["main"].numel() // ranks
            for rank, shard in enumerate(shards):
                cut = {key: value[rank * size : (rank + 1) * size] for key, value in flat.items()}
                lean = size - padding if rank == ranks - 1 else size
                shard["partitions"].append(cut["main"][:lean])
                kept = {key: cut[key] for key in ("exp_avg", "exp_avg_sq")}
                shard["states"].append({"step": torch.tensor(3.0)} | kept)
        for rank, shard in enumerate(shards):
            options = [{"lr": 0.5, "params": [index]} for index in range(len(self.groups))]
            base = {"state": dict(enumerate(shard["states"])), "param_groups": options}
            state = {
                "loss_scaler": None, "single_partition_of_fp32_groups": shard["partitions"], "zero_stage": 1,
                "partition_count": [ranks] * len(self.groups), "base_optimizer_state": base,
                "param_alignment_paddings": [[gap] * (len(group) - 1) + [0] for group in self.groups],
            }  # fmt: skip
            torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        shapes = [{name: self.masters[name].shape for name in group} for group in self.groups]
        content = {"module": self.model, "param_shapes": shapes, "optimizer": None}
        torch.save(content, folder / "mp_rank_00_model_states.pt")
        return folder

    @staticmethod
    def _flat(tensors: Sequence[Tensor], gap: int, ranks: int) -> Tensor:
        parts = [part for tensor in tensors for part in (tensor.reshape(-1), torch.zeros(gap))]
        flat = torch.cat(parts[:-1])
        return flat if ranks == 0 else torch.cat([flat, torch.zeros(-flat.numel() % (2 * ranks))])

    def assert_converted(self, state: Mapping[str, Any]) -> None:
        """Main params, moments and steps are under their names, bit for bit."""
        assert state["main_params"].keys() == self.masters.keys()
        assert all(bits_equal(tensor, self.masters[name]) for name, tensor in state["main_params"].items())
        for name in self.names:
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert bits_equal(state["optimizer"]["state"][name][key], self.states[name][key]), (name, key)
        assert [group["params"] for group in state["optimizer"]["param_groups"]] == self.groups
