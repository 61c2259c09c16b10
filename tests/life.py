"""The life of an optimizer: the same actions, in any order, on it and on tests/reference_optimizer.py.

    python -m tests.life --number 7 --ranks 2     # one life; says what went wrong, and after which actions
    python -m tests.life --lives 200 --ranks 4    # lives that no test has, of a seed that is printed; again: --seed

A number stands for a life: five rules, three layouts and three forms of state in turn, and what random.Random draws
from it: dtype, backend, where state lives, forty actions. Gradients are given: small multiples of 2**-6, so that
what micro-batches and ranks add up to is exact in any order, and the reference can be told the mean over all ranks.

After each action, or where a life reads seldom after those that read, all of this is the reference's: success, norm and
number of zeros; loss scale and trackers; main params, moments and step counts; the options of the param groups; and
weights are their main params' rounding. In bits, but for these tolerances:

- 8-bit moments are within one code; the reference goes on with what they stand for.
- Remainders may move a main param by an ulp or 2**-40; the reference goes on with it.
- Muon's iterations, and the backend ``torch``, round otherwise: see :meth:`Life._atol`.
"""

import argparse
import copy
import math
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megascale import DistributedOptimizer, DynamicGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
from megascale.checkpoint import Checkpointer
from megascale.errors import StateDictError, UsageError
from megascale.grad_sync import GradSync
from tests.cells import Given
from tests.meshes import hybrid_groups, mesh_of
from tests.pool import RankPool
from tests.reference_optimizer import MOMENTS, ReferenceOptimizer, Result
from tests.training import bits_equal

LENGTH = 40
UNIT = 2.0**-6
SCALE, MOST_SCALE, INTERVAL, HYSTERESIS = 2.0**8, 2.0**12, 3, 2

INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups),
    "adam": lambda groups: torch.optim.Adam(groups),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "lion": lambda groups: Lion(groups),
    "muon": lambda groups: torch.optim.Muon(groups),
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "adamw": [
        {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
        {"lr": 3e-3, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.1},
    ],
    "adam": [
        {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
        {"lr": 3e-3, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.1},
    ],
    "sgd": [{"lr": 2e-2, "momentum": 0.9, "nesterov": False}, {"lr": 1e-2, "momentum": 0.5, "nesterov": True}],
    "lion": [
        {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0},
        {"lr": 3e-3, "betas": (0.8, 0.97), "weight_decay": 0.1},
    ],
    "muon": [{"lr": 1e-2, "momentum": 0.95, "weight_decay": 0.1}, {"lr": 3e-3, "momentum": 0.9, "weight_decay": 0.0}],
}
"""Of the param groups in turn."""

SHAPES = ((33, 47), (7,), (4, 64), (2, 3, 4), (12,))
"""The last one is trained once a group is added."""
PLACES = ["replaced", "strided", "misaligned"]
"""Of gradients that a program makes in the place of backward's."""
MATRICES = ((33, 47), (12, 7), (4, 64), (7, 12), (5, 9))
GROUPS_OF_CODES = ((33, 64), (256,), (4, 64), (8, 32), (128,))
"""What FSDP2 may cut where moments are codes: parts of whole groups of 32 elements."""


@dataclass(frozen=True)
class Setup:
    """What a life is of.

    Attributes:
        layout: "replicated", "synced" (a GradSync), "elements", "parameters" (a DistributedOptimizer's), "hybrid" (by
            elements within each half of four ranks, which repeat one another) or "fsdp2".
        fields: of the config.
        ahead: weights are gathered while the next forward has begun; of a DistributedOptimizer.
        reads_seldom: state is compared after the actions that read it alone, so that the others find it as it was left.
    """

    rule: str
    layout: str
    dtype: torch.dtype
    fields: dict[str, Any] = field(default_factory=dict)
    ahead: bool = False
    reads_seldom: bool = False

    @staticmethod
    def of(number: int, ranks: int, device: str) -> "Setup":
        """Return the setup of the life with this number."""
        draw = random.Random(number)
        rule = list(INNER)[number % 5]
        layout = ("replicated", "zero1", "fsdp2")[number % 3]
        state = ("fp32", "moments", "remainders")[(number // 5 + number // 15) % 3]
        if layout == "replicated":
            layout = "synced" if ranks > 1 else draw.choice(["replicated", "synced"])
        if layout == "zero1":
            sharded = ["elements", "parameters"] + ["hybrid"] * (ranks == 4)
            layout = "parameters" if rule == "muon" else draw.choice(sharded)
        fields: dict[str, Any] = {"backend": "reference" if device == "cuda" else draw.choice(["reference", "native"])}
        if rule != "muon" and device == "cpu" and draw.random() < 0.2:
            fields["backend"] = "torch"
        codes = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
        halves: dict[str, Any] = {"exp_avg_dtype": draw.choice([torch.bfloat16, torch.float16])}
        is_adam = rule.startswith("adam")
        if is_adam:
            halves["exp_avg_sq_dtype"] = torch.bfloat16
        if state == "moments":
            fields |= codes if is_adam and draw.random() < 0.5 else halves
        if state == "remainders":
            fields |= {"store_param_remainders": True} | (codes if is_adam and draw.random() < 0.5 else {})
        dtypes = [torch.float16, torch.bfloat16] + [torch.float32] * (state != "remainders")
        dtype = draw.choice(dtypes)
        if rule == "muon":
            fields["muon_ns_dtype"] = torch.float32
        elif dtype != torch.float32 and draw.random() < 0.5:
            fields["optimizer_cpu_offload"] = True
            fields["overlap_cpu_optimizer_d2h_h2d"] = draw.random() < 0.7
            fields["optimizer_offload_fraction"] = draw.choice([1.0, 0.5])
        is_free = state != "remainders" and fields.get("exp_avg_dtype") != torch.int8
        is_free = is_free and rule != "muon" and fields["backend"] != "torch"
        return Setup(rule, layout, dtype, fields, draw.random() < 0.5, is_free and draw.random() < 0.5)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters."""
        if self.rule == "muon":
            return MATRICES
        return GROUPS_OF_CODES if self.layout == "fsdp2" and self.has_codes else SHAPES

    @property
    def has_codes(self) -> bool:
        """Whether moments are 8-bit codes."""
        return self.fields.get("exp_avg_dtype") == torch.int8

    @property
    def has_remainders(self) -> bool:
        """Whether main params are held as remainders."""
        return bool(self.fields.get("store_param_remainders", False))

    @property
    def is_exact(self) -> bool:
        """Whether the order of arithmetic is the reference's."""
        return self.rule != "muon" and self.fields["backend"] != "torch"


class Watched(Given):
    """Remembers the weights that forward has used, whole."""

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        """See :class:`Given`."""
        self.seen = [weight.detach().clone() for weight in self.weights]
        return super().forward(grads)


class Life:
    """An optimizer, its reference, and what is done to both. Ranks live together, each with a reference of its own.

    Args:
        folder: for checkpoints, the same on all ranks.
    """

    def __init__(self, setup: Setup, folder: Path, device: str = "cpu") -> None:
        self.setup, self.folder, self.device = setup, folder, device
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.clip_grad = 0.0
        self.has_added = self.is_away = False
        self.frozen: set[str] = set()
        self.saved: tuple[ReferenceOptimizer, bool] | None = None
        self.num_saved = self.num_steps = 0
        self.draw = random.Random(0)
        self._build()
        self.reference = ReferenceOptimizer(setup.rule, SCALE, MOST_SCALE, INTERVAL, HYSTERESIS)
        for index, group in enumerate(self._groups()):
            self._add_to_reference(group, index)

    def _build(self) -> None:
        """Make a model and its optimizer: at first, and where a program begins anew."""
        setup = self.setup
        self.module = Watched(setup.shapes, seed=self.num_saved).to(self.device, setup.dtype)
        if setup.layout == "fsdp2":
            mesh = mesh_of((self.ranks,)) if self.device == "cpu" else init_device_mesh(self.device, (self.ranks,))
            fully_shard(self.module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        groups = [{"params": group} | self._options(index) for index, group in enumerate(self._groups())]
        inner = INNER[setup.rule](groups)
        config = OptimizerConfig(
            fp16=setup.dtype == torch.float16,
            bf16=setup.dtype == torch.bfloat16,
            clip_grad=self.clip_grad,
            log_num_zeros_in_grad=True,
            **setup.fields,
        )
        self.scaler = DynamicGradScaler(SCALE, 1.0, 2.0, 0.5, INTERVAL, HYSTERESIS, max_scale=MOST_SCALE)
        self.sync = GradSync(self.module.named_parameters(), bucket_numel=600) if setup.layout == "synced" else None
        if setup.layout in ("elements", "parameters", "hybrid"):
            self.optimizer: MixedPrecisionOptimizer = DistributedOptimizer(
                inner,
                config,
                self.scaler,
                modules=self.module,
                shard="elements" if setup.layout == "hybrid" else setup.layout,
                groups=self._halves() if setup.layout == "hybrid" else None,
                bucket_numel=600,
                overlap_param_gather=setup.ahead,
            )
        else:
            self.optimizer = MixedPrecisionOptimizer(inner, config, self.scaler, grad_sync=self.sync)

    def _halves(self) -> Any:
        """Return four ranks as two copies of two shards each."""
        if self.device == "cpu":
            return hybrid_groups()
        return init_device_mesh(self.device, (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))

    def _groups(self) -> list[list[tuple[str, Any]]]:
        named = list(self.module.named_parameters())
        return [named[0:4:2], named[1:4:2], *([named[4:]] if self.has_added else [])]

    def _options(self, index: int) -> dict[str, Any]:
        return dict(OPTIONS[self.setup.rule][index % 2])

    def _add_to_reference(self, group: list[tuple[str, Any]], index: int) -> None:
        for name, param in group:
            self.reference.add(name, _whole(param), self._options(index))

    # What is done

    def act(self, action: str, seed: int) -> None:
        """Do one of ACTIONS and compare. ``seed``: of all that it draws."""
        self.draw = random.Random(seed)
        if self.is_away and action not in ("offload", "reload", "read", "read weights", "save"):
            self._reload()
        ACTIONS[action](self)
        if action in READS or not self.setup.reads_seldom:
            self.compare()

    def _step(
        self, *, batches: int = 1, overflows: bool = False, halves: bool = False, unused: str = "", change: str = ""
    ) -> None:
        """Forward, backward and step.

        Args:
            halves: prepare_grads() and step_with_ready_grads().
            unused: a parameter that the loss does not depend on.
            change: what becomes of the gradients before the step.
        """
        seed, poison = self.draw.getrandbits(30), None
        if overflows:
            trained = [name for name in self.reference.main if name not in self.frozen]
            poison = (self.draw.randrange(self.ranks), self.draw.randrange(batches), self.draw.choice(trained))
        self.optimizer.zero_grad()
        if change == "dropped":
            self.optimizer.scale_loss(
                self.module(self._given(self._grads(seed + 1, 0, self.rank, None, "")))
            ).backward()
            self.optimizer.zero_grad()
        for batch in range(batches):
            grads = self._grads(seed, batch, self.rank, poison, unused)
            with self._unreduced() if batch < batches - 1 else self._reduced():
                self.optimizer.scale_loss(self.module(self._given(grads))).backward()
        factor = self._change_gradients(change) if change else 1.0
        names = [name for name, _ in self.module.named_parameters()]
        self._compare_weights(dict(zip(names, self.module.seen, strict=True)))
        before = self._bits() if overflows and not self.setup.reads_seldom else {}
        if halves:
            found_inf = self.optimizer.prepare_grads()
            assert bool(found_inf) == overflows
            found = self.optimizer.step_with_ready_grads()
        else:
            found = self.optimizer.step()
        mean = {name: grad * factor for name, grad in self._mean(seed, batches, poison, unused).items()}
        self._compare_results(found, self._reference_step(mean))
        self.num_steps += 1
        if before:  # a skipped step changes no bit: also of codes and remainders
            after = self._bits()
            assert before.keys() == after.keys()
            for name, value in before.items():
                assert bits_equal(value, after[name]), f"a skipped step has changed {name}"

    def _reference_step(self, grads: dict[str, Tensor]) -> Result:
        """Take the reference's step, and round its moments to 16 bits where these are held so."""
        result = self.reference.step(grads, self.clip_grad)
        for state in self.reference.state.values():
            for moment in MOMENTS[self.setup.rule]:
                dtype = self.setup.fields.get("exp_avg_sq_dtype" if moment == "exp_avg_sq" else "exp_avg_dtype")
                if dtype in (torch.float16, torch.bfloat16):
                    state[moment] = state[moment].to(dtype).float()
        return result

    def _grads(
        self, seed: int, batch: int, rank: int, poison: tuple[int, int, str] | None, unused: str
    ) -> dict[str, Tensor | None]:
        """Return the unscaled gradients of a micro-batch on a rank, fp32; None: the loss does not depend on it."""
        generator = torch.Generator().manual_seed(seed + 100 * batch + rank)
        grads: dict[str, Tensor | None] = {}
        for (name, param), shape in zip(self.module.named_parameters(), self.setup.shapes, strict=True):
            grad = torch.randint(-15, 16, shape, generator=generator) * UNIT
            if poison == (rank, batch, name):
                grad.view(-1)[-1] = math.inf if seed % 2 else math.nan
            is_used = name != unused and param.requires_grad and name in self.reference.main
            grads[name] = grad if is_used else None
        return grads

    def _given(self, grads: Mapping[str, Tensor | None]) -> list[Tensor | None]:
        return [None if grad is None else grad.to(self.device) for grad in grads.values()]

    def _mean(self, seed: int, batches: int, poison: tuple[int, int, str] | None, unused: str) -> dict[str, Tensor]:
        """Return the mean over ranks of what micro-batches add up to."""
        every = [
            self._grads(seed, batch, rank, poison, unused) for batch in range(batches) for rank in range(self.ranks)
        ]
        mean: dict[str, Tensor] = {}
        for name in self.reference.main:
            parts = [part for grads in every if (part := grads[name]) is not None]
            if parts:
                mean[name] = torch.stack(parts).sum(0) / self.ranks
            elif name == unused and name not in self.frozen and self.setup.layout not in ("replicated", "fsdp2"):
                mean[name] = torch.zeros_like(self.reference.main[name])  # where buckets are reduced it counts as zeros
        return mean

    def _unreduced(self) -> AbstractContextManager[None]:
        """Return a context for a backward that ranks do not reduce yet."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(False)
        if self.sync is not None:
            return self.sync.no_sync()
        return self.optimizer.no_sync() if isinstance(self.optimizer, DistributedOptimizer) else nullcontext()

    def _reduced(self) -> AbstractContextManager[None]:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(True)
        return nullcontext()

    def _unused(self) -> None:
        self._step(unused=self.draw.choice([name for name in self.reference.main if name not in self.frozen]))

    def _changed_gradients(self) -> None:
        """Gradients are written after backward, or are other tensors when the step comes, at odd addresses too."""
        self._step(change=self.draw.choice(["written", "dropped"] + PLACES * (self.setup.layout == "replicated")))

    def _change_gradients(self, way: str) -> float:
        """Change what backward has left. Returns what it is multiplied by."""
        if isinstance(sync := self.optimizer._member.grad_sync, GradSync):
            sync.finish()
        for param in self.module.parameters():
            grad = sync.local_grad(param) if isinstance(sync, GradSync) else param.grad
            if grad is None or not param.requires_grad:
                continue
            if way == "written":
                grad.mul_(0.5)
            elif way == "replaced":
                param.grad = grad * 0.5
            elif way == "strided":
                param.grad = torch.stack([grad, grad], -1)[..., 0]
            elif way == "misaligned":
                param.grad = torch.cat([grad.new_zeros(1), grad.reshape(-1)])[1:].view(grad.shape)
        return 0.5 if way in ("written", "replaced") else 1.0

    def _clip(self) -> None:
        self.clip_grad = self.optimizer.clip_grad = self.draw.choice([0.0, 0.5, 3.0])
        self._step()

    def _rate(self) -> None:
        index = self.draw.randrange(len(self.optimizer.param_groups))
        rate = self.draw.choice([0.0, 5e-3, 2e-2])
        self.optimizer.param_groups[index]["lr"] = rate
        for name, _ in self._groups()[index]:
            self.reference.options[name]["lr"] = rate
        self._step()

    def _freeze(self) -> None:
        """Freeze a trained parameter; one of each group goes on."""
        name = self.draw.choice([f"weights.{index}" for index in (0, 1)])
        self.frozen.add(name)
        self._set_frozen()
        self._step()

    def _unfreeze(self) -> None:
        self.frozen.clear()
        self._set_frozen()
        self._step()

    def _set_frozen(self) -> None:
        for name, param in self.module.named_parameters():
            param.requires_grad_(name not in self.frozen)
            if name in self.frozen:
                param.grad = None

    def _add_group(self) -> None:
        if not self.has_added:
            self.has_added = True
            group = self._groups()[2]
            self.optimizer.add_param_group({"params": group} | self._options(2))
            self._add_to_reference(group, 2)
        self._step()

    def _save(self) -> None:
        self.num_saved += 1
        with Checkpointer(self.folder, keep_last=1, async_save=self.draw.random() < 0.5) as checkpoints:
            checkpoints.save(self.num_saved, self.module, self.optimizer)
            self.saved = copy.deepcopy(self.reference), self.has_added

    def _load(self) -> None:
        """Begin anew from the last checkpoint; without one, load what the optimizer itself would save."""
        if self.saved is None:
            self.optimizer.load_state_dict(self.optimizer.state_dict())
            return
        reference, self.has_added = self.saved
        self.reference = copy.deepcopy(reference)
        self._build()
        Checkpointer(self.folder).load(self.module, self.optimizer)
        self._set_frozen()

    def _restart(self) -> None:
        """Begin anew from two state dicts in memory."""
        weights, state = self.module.state_dict(), self.optimizer.state_dict()
        self._build()
        self.module.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        self._set_frozen()

    def _refused_load(self) -> None:
        """A state dict that lacks something on one rank: all ranks refuse it, and nothing has changed."""
        state = self.optimizer.state_dict()
        if self.draw.randrange(self.ranks) == self.rank:
            if self.setup.dtype == torch.float32:
                del state["grad_scaler"]["scale"]
            else:
                del state["main_params"][next(name for name in self.reference.main if name not in self.frozen)]
        _require(StateDictError, self.optimizer.load_state_dict, state)

    def _offload(self) -> None:
        """Move state away; what reads it at once finds every bit."""
        before = [_local(main).clone() for _, main in self.optimizer.main_params()]
        self.optimizer.offload()
        self.is_away = True
        after = [_local(main).clone() for _, main in self.optimizer.main_params()]
        assert all(map(bits_equal, before, after)), "main params in host memory are others"
        _require(UsageError, self.optimizer.load_state_dict, self.optimizer.state_dict())

    def _reload(self) -> None:
        self.optimizer.reload()
        self.is_away = False

    def _write(self) -> None:
        """Weights are written: in place, by a load into the module, in other memory, or in a way that torch does not
        count. The next step goes on from them.
        """
        ways = ["in place", "load", "uncounted", *(["moved"] if self.setup.layout != "fsdp2" else [])]
        way, name = self.draw.choice(ways), self.draw.choice(list(self.reference.main))
        self.optimizer.finish_param_gather()
        weights = dict(self.module.named_parameters())
        names = [name] if way in ("in place", "moved") else list(self.reference.main)
        if way == "moved" and self.setup.has_remainders:  # which then stand for any weight that torch did not count
            weights[name].data, names = weights[name].detach().clone(), []
        with torch.no_grad():
            if way == "in place":
                weights[name].mul_(-1)
            elif way == "moved" and names:
                weights[name].data = -weights[name].detach()
            elif way == "load":
                self.module.load_state_dict({key: -value for key, value in self.module.state_dict().items()})
            elif way == "uncounted":
                for each in names:
                    _local(weights[each].data).mul_(-1)
                self.optimizer.reload_model_params()
        for each in names:
            # Each element is another one, so that every main param is the weight that was written.
            self.reference.main[each] = -self.reference.main[each].to(self.setup.dtype).float()
        self._step()

    def _read_weights(self) -> None:
        """A module's state dict waits for the weights of a step; other readers call finish_param_gather() first."""
        if self.draw.random() < 0.5:
            self._compare_weights(self.module.state_dict())
        else:
            self.optimizer.finish_param_gather()
            self._compare_weights(dict(self.module.named_parameters()))

    # Comparison

    def _compare_results(self, found: Any, expected: Result) -> None:
        success, norm, zeros = (torch.as_tensor(value).cpu() for value in found)
        assert bool(success) == expected.success, f"success {success} in place of {expected.success}"
        assert int(zeros) == expected.num_zeros, f"{zeros} zeros in place of {expected.num_zeros}"
        if expected.success:
            same = bits_equal(norm.reshape(()), expected.grad_norm)
            assert same, f"norm {norm} in place of {expected.grad_norm}"

    def compare(self) -> None:
        """Compare all state. What the form of state allows to differ is taken from the library from now on."""
        reference, packed = self.reference, self.optimizer.state_dict()
        scaler = packed["grad_scaler"]
        now = float(scaler["scale"]), scaler["growth_tracker"], scaler["hysteresis_tracker"]
        assert now == (reference.scale, reference.growth, reference.hysteresis)
        if self.setup.dtype != torch.float32:
            assert set(packed["main_params"]) == set(reference.main)
        if self.setup.is_exact:
            self._compare_weights(dict(self.module.named_parameters()))
        for name, main in reference.main.items():
            held = packed["main_params"].get(name)
            self._compare_main(name, main, _whole(dict(self.module.named_parameters())[name] if held is None else held))
            states = {key: _whole(value) for key, value in packed["optimizer"]["state"].get(name, {}).items()}
            assert states or reference.state[name]["step"] == 0, f"{name} has no state"
            self._compare_state(name, states)
        for index, group in enumerate(self._groups()):
            options = packed["optimizer"]["param_groups"][index]
            for key, value in reference.options[group[0][0]].items():
                assert options[key] == value, (index, key, options[key], value)

    def _compare_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, main in self.reference.main.items():
            weight = _whole(weights[name])
            assert bits_equal(weight, main.to(self.setup.dtype)), f"{name}: {_first(weight, main)}"

    def _atol(self, name: str) -> float:
        """What another order of arithmetic may make of a main param's update: rules move by some rates at most."""
        return 2e-3 * self.reference.options[name]["lr"] + 1e-6

    def _compare_main(self, name: str, expected: Tensor, found: Tensor) -> None:
        self_rounded = found.to(self.setup.dtype)
        weight = _whole(dict(self.module.named_parameters())[name])
        assert bits_equal(self_rounded, weight), f"{name} is not its main param's rounding: {_first(weight, found)}"
        if self.setup.is_exact and not self.setup.has_remainders:
            assert bits_equal(found, expected), f"main param {name}: {_first(found, expected)}"
            return
        atol = 0.0 if self.setup.is_exact else self._atol(name)
        apart = (found - expected).abs() - (2.0**-23 * expected.abs()).clamp(min=2.0**-40)
        assert bool((apart <= atol).all()), f"main param {name}: {_first(found, expected)}"
        self.reference.main[name] = found

    def _compare_state(self, name: str, found: Mapping[str, Tensor]) -> None:
        expected = self.reference.state[name]
        if "step" in found:
            assert int(found["step"]) == expected["step"], (name, found["step"], expected["step"])
        if not found:
            return
        if self.setup.has_codes:
            return self._compare_codes(name, found)
        for moment in MOMENTS[self.setup.rule]:
            value = found[moment].view(expected[moment].shape)
            if self.setup.is_exact:
                assert bits_equal(value, expected[moment].to(value.dtype)), f"{moment} of {name}"
            else:
                rtol = max(4 * torch.finfo(value.dtype).eps, 1e-5)
                assert torch.allclose(value.float(), expected[moment], rtol=rtol, atol=1e-7), f"{moment} of {name}"
            expected[moment] = value.float()

    def _compare_codes(self, name: str, found: Mapping[str, Tensor]) -> None:
        """Decode as docs/numerics.md says: roots are bit patterns cut to a group's shift, quotients are linear."""
        expected, shape = self.reference.state[name], self.reference.main[name].shape
        codes = {moment: _by_groups(found[moment].reshape(-1)) for moment in MOMENTS["adam"]}
        bits = found["exp_avg_sq_scale"].reshape(-1, 1).view(torch.int32)
        shift = 16 + (bits & 3)
        any_code = codes["exp_avg_sq"].bool().any(1, keepdim=True)
        floor = torch.where(any_code, bits & ~3, 0)
        root = (floor + (codes["exp_avg_sq"].int() << shift)).view(torch.float32)
        above = (floor + ((codes["exp_avg_sq"].int() + 1) << shift)).view(torch.float32)
        scale = found["exp_avg_scale"].reshape(-1, 1)
        first, second = codes["exp_avg"].float() * scale * root, root.square()
        exact = {moment: _by_groups(expected[moment].reshape(-1)) for moment in MOMENTS["adam"]}
        code, least = above - root, floor.view(torch.float32)
        apart = (exact["exp_avg_sq"].sqrt().maximum(least) - root).abs()
        assert bool((apart <= code * 1.001).all()), f"exp_avg_sq of {name} is off by more than a code"
        apart = (exact["exp_avg"] - first).abs() - 1e-5 * exact["exp_avg"].abs()
        assert bool((apart <= 1.01 * scale * root).all()), f"exp_avg of {name} is off by more than a code"
        numel = shape.numel()
        expected["exp_avg"] = first.reshape(-1)[:numel].view(shape)
        expected["exp_avg_sq"] = second.reshape(-1)[:numel].view(shape)

    def _bits(self) -> dict[str, Tensor]:
        """Return all that a skipped step must not write."""
        packed = self.optimizer.state_dict()
        found = {f"main param {name}": _whole(value) for name, value in packed["main_params"].items()}
        for name, states in packed["optimizer"]["state"].items():
            found |= {f"{key} of {name}": _whole(value) for key, value in states.items()}
        return found | {name: _whole(value) for name, value in self.module.named_parameters()}


def _require(error: type[Exception], call: Callable[..., object], *arguments: object) -> None:
    """Require that a call is refused."""
    try:
        call(*arguments)
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


def _whole(value: Any) -> Tensor:
    """Return a copy on the host of a tensor, of all ranks' parts."""
    whole = value.detach()
    if hasattr(whole, "full_tensor"):
        whole = whole.to(whole.device_mesh.device_type).full_tensor()  # whose collectives carry no state in host memory
    return whole.cpu().clone()


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _by_groups(flat: Tensor) -> Tensor:
    return torch.cat([flat, flat.new_zeros(-len(flat) % 32)]).view(-1, 32)


def _first(found: Tensor, expected: Tensor) -> str:
    index = int((found.float() != expected.to(found.dtype).float()).reshape(-1).int().argmax())
    return f"element {index} is {found.reshape(-1)[index]!r} in place of {expected.reshape(-1)[index]!r}"


ACTIONS: dict[str, Callable[[Life], object]] = {
    "step": Life._step,
    "overflow": lambda life: life._step(overflows=True, batches=life.draw.randint(1, 2)),
    "clip": Life._clip,
    "accumulate": lambda life: life._step(batches=life.draw.randint(2, 3)),
    "freeze": Life._freeze,
    "unfreeze": Life._unfreeze,
    "add a group": Life._add_group,
    "save": Life._save,
    "load": Life._load,
    "offload": Life._offload,
    "reload": Life._reload,
    "read": Life.compare,
    "write weights": Life._write,
    "rate": Life._rate,
    "halves of a step": lambda life: life._step(halves=True, overflows=life.draw.random() < 0.3),
    "unused parameter": Life._unused,
    "changed gradients": Life._changed_gradients,
    "restart": Life._restart,
    "refused load": Life._refused_load,
    "read weights": Life._read_weights,
}
READS = {"save", "load", "read", "restart", "refused load"}
"""The actions that read all state: after these a life that reads seldom is compared, too."""


def actions_of(number: int) -> list[str]:
    """Return the actions of a life: half of them steps."""
    draw = random.Random(number + 1)
    others = [action for action in ACTIONS if action != "step"]
    return [draw.choice(others) if draw.random() < 0.7 else "step" for _ in range(LENGTH)]


def live(
    number: int, folder: Path, device: str = "cpu", setup: Setup | None = None, actions: Sequence[str] = ()
) -> list[str]:
    """Live one life. All ranks call this together. Returns its actions.

    Args:
        number: what is not given, a setup and actions, is drawn from it.
        folder: for checkpoints, the same on all ranks.
        device: "cpu" or "cuda".
        setup: see :class:`Setup`.
        actions: one after the other, of ACTIONS.

    Raises AssertionError, with the life's number, setup and the action at which it went wrong.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    setup = setup or Setup.of(number, ranks, device)
    actions = list(actions) or actions_of(number)
    where = ""
    try:
        life = Life(setup, folder, device)
        for at, action in enumerate([*actions, "read"]):
            where = f"at action {at}, {action!r}, of {actions[: at + 1]}"
            life.act(action, seed=1000 * number + at)
    except Exception as error:
        raise AssertionError(f"life {number} {where}\n{setup}: {type(error).__name__}: {error}") from error
    return actions


def main() -> int:
    """Live lives, in this process or on ranks."""
    parser = argparse.ArgumentParser(description="Live lives of an optimizer beside its reference.")
    parser.add_argument("--lives", type=int, default=1)
    parser.add_argument("--number", type=int, help="of the first life; drawn from the seed where it is left out")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    first = random.Random(given.seed).randrange(10**9) if given.number is None else given.number
    print(f"seed {given.seed}: lives {first} to {first + given.lives - 1} on {given.ranks} ranks", flush=True)
    ranks = RankPool()
    for number in range(first, first + given.lives):
        with tempfile.TemporaryDirectory() as folder:
            ranks.run(given.ranks, live, number, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
