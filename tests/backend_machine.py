"""The same random life on every backend: a state machine, and the program that runs it.

A world is one optimizer on one backend, with parameters of its own. Every rule does the same to all worlds; after it
all of them hold the same bits as the world of the `reference` backend, or have raised the same named error and changed
nothing. What users may do to the tensors that we hold addresses of is in :mod:`tests.backend_mischief` and
:mod:`tests.state_mischief`.

Run as a program it prints one line of JSON, the counts of what it has done. Should the process die, the file named by
``--trace`` holds what it was doing.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn

from megascale.errors import InnerStepError, MainParamOverflowError, MegascaleError, NonFiniteParamError
from tests.backend_mischief import GRADIENTS, Place, Undo
from tests.backend_world import (
    DTYPES,
    INNER,
    OPTIONS,
    Setup,
    World,
    agree,
    give_gradients,
    outcome_of,
    same_outcome,
    saved_by,
)
from tests.state_mischief import FOR_KERNELS, MISCHIEF
from tests.training import bits_equal

INDEX = st.integers(0, 15)
SEEDS = st.integers(0, 2**16)

LATE = (MainParamOverflowError, NonFiniteParamError, InnerStepError)
"""Errors that are known once a step has been taken: about values, and of an optimizer's own step()."""


class BackendMachine(RuleBasedStateMachine):
    """See the module. ``backends``: the worlds beside the reference's."""

    backends: list[str]
    trace: Path | None = None
    examples = steps = errors = 0

    @initialize(
        inner=st.sampled_from(list(INNER)),
        dtypes=st.sampled_from(list(DTYPES)),
        moments=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8]),
        remainders=st.booleans(),
        clip_grad=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
        hysteresis=st.integers(1, 2),
        seed=SEEDS,
    )
    def begin(self, **drawn: Any) -> None:
        """All worlds begin alike."""
        type(self).examples += 1
        if self.trace is not None:
            self.trace.write_text("")
        self.write(f"begin {drawn}")
        setup = Setup(**drawn)
        if setup.moments == torch.int8 and not self.has_codes(setup):
            setup.moments = torch.float32
        self.worlds = [World(name, setup) for name in ("reference", *self.backends)]
        self.compare()

    def has_codes(self, setup: Setup) -> bool:
        """Whether these optimizers may have 8-bit moments on all backends."""
        return setup.inner != "RMSprop" and setup.dtypes != "all"

    # What happens to all worlds

    def write(self, line: str) -> None:
        """Tell what comes next: in a report of hypothesis, and in the file that outlives the process."""
        note(line)
        if self.trace is not None:
            with self.trace.open("a") as file:
                file.write(line + "\n")

    def call(self, name: str, function: Callable[[World], Any]) -> bool:
        """Call the library in every world. Returns whether it raised: in all alike, and unless late nothing changed."""
        type(self).steps += 1
        outcomes = []
        for world in self.worlds:
            self.write(f"  {world.name}: {name}")
            before = {key: tensor.clone() for key, tensor in world.tensors().items()}, world.options()
            with world.active():
                outcome = outcome_of(function, world)
                if not isinstance(outcome, MegascaleError):
                    world.look()
            if isinstance(outcome, MegascaleError) and not isinstance(outcome, LATE):
                self.unchanged(world, *before, f"{name} raised {type(outcome).__name__}: {outcome}")
            outcomes.append(outcome)
        for world, outcome in zip(self.worlds, outcomes, strict=True):
            told = f"{name}: reference {outcomes[0]!r}, {world.name} {outcome!r}"
            assert same_outcome(outcomes[0], outcome), told
        self.compare()
        failed = isinstance(outcomes[0], MegascaleError)
        type(self).errors += failed
        self.write(f"  -> {outcomes[0]!r}")
        return failed

    def do(self, name: str, function: Callable[[World], Any]) -> list[Any] | None:
        """Do in every world what users do with torch alone. Returns what it returned; None where torch refuses it."""
        self.write(name)
        done, refusals = [], []
        for world in self.worlds:
            try:
                done.append(function(world))
            except (RuntimeError, TypeError, ValueError, LookupError) as error:
                refusals.append(error)
        if not refusals:
            return done
        self.write(f"  torch refuses: {refusals[0]!r}")
        assert not done, "torch has refused it to one world and not to another"
        return None

    def unchanged(self, world: World, tensors: dict[str, Tensor], options: object, what: str) -> None:
        """Compare a world with what it was."""
        now = world.tensors()
        assert now.keys() == tensors.keys(), f"{world.name}: {what}, but tensors came or went"
        for key, tensor in now.items():
            assert bits_equal(tensor, tensors[key]), f"{world.name}: {what}, but {key} has changed"
        assert world.options() == options, f"{world.name}: {what}, but options have changed"

    def compare(self) -> None:
        """Compare all worlds with the reference's."""
        reference, *others = self.worlds
        expected, options = reference.tensors(), reference.options()
        for world in others:
            found = world.tensors()
            assert found.keys() == expected.keys(), (world.name, found.keys() ^ expected.keys())
            for key, tensor in found.items():
                told = f"{world.name}: {key} is {tensor}, the reference's {expected[key]}"
                assert agree(tensor, expected[key], world), told
            assert world.options() == options, world.name

    def step(self) -> bool:
        """Take a step in all worlds."""
        return self.call("step", lambda world: world.optimizer.step())

    def give_gradients(self, seed: int, scale: float = 1.0) -> None:
        """Give every trainable parameter a gradient."""
        self.do(f"gradients of seed {seed} times {scale}", lambda world: give_gradients(world, seed, scale))

    # Rules: steps

    @rule(seed=SEEDS, scale=st.sampled_from([1.0, 1.0, 30.0, 1e-4, 0.0]))
    def take_step(self, seed: int, scale: float) -> None:
        """A step, for which every parameter has a gradient."""
        self.give_gradients(seed, scale)
        self.step()

    @rule(seed=SEEDS, index=INDEX, value=st.sampled_from([float("inf"), float("-inf"), float("nan")]))
    def overflow(self, seed: int, index: int, value: float) -> None:
        """A step that is skipped."""
        self.give_gradients(seed)

        def spoil(world: World) -> None:
            grad = world.params[index % len(world.params)].grad
            if grad is not None and grad.numel():
                grad.view(-1)[-1] = value

        self.do(f"{value} in {index}", spoil)
        self.step()

    @rule(seed=SEEDS, drop=st.booleans())
    def step_in_halves(self, seed: int, drop: bool) -> None:
        """As Megatron's training loops do, which may drop gradients in between."""
        self.give_gradients(seed)
        if self.call("prepare_grads", lambda world: world.optimizer.prepare_grads()):
            return
        if drop:
            self.do("drop gradients", lambda world: world.inner.zero_grad())
        self.call("step_with_ready_grads", lambda world: world.optimizer.step_with_ready_grads())

    @rule(seed=SEEDS, index=INDEX, kind=st.sampled_from(list(GRADIENTS)))
    def step_with_odd_gradient(self, seed: int, index: int, kind: str) -> None:
        """One gradient is none that backward usually leaves."""
        self.mischief(kind, GRADIENTS[kind], seed, index)

    # Rules: what users do to tensors

    @rule(seed=SEEDS, index=INDEX, kind=st.sampled_from(list(MISCHIEF)))
    def move_or_replace(self, seed: int, index: int, kind: str) -> None:
        """A parameter or a state lies elsewhere, or has become something else."""
        if kind not in FOR_KERNELS or not self.worlds[0].runs_own_step():
            self.mischief(kind, MISCHIEF[kind], seed, index)

    def mischief(self, kind: str, change: Callable[[Place], Undo | None], seed: int, index: int) -> None:
        """Change something, and take a step. Where that is an error, it can be mended, and training goes on."""
        self.give_gradients(seed)

        def changed(world: World) -> Undo | None:
            world.is_loose = world.is_loose or not world.is_exact
            return change(Place(world.params, world.inner, index % len(world.params), seed))

        undo = self.do(f"{kind} of {index}", changed)
        if undo is None or not self.step():
            return
        if undo[0] is not None:
            undos = dict(zip(self.worlds, undo, strict=True))
            self.do("undo", lambda world: undos[world]())
        self.give_gradients(seed + 1)
        self.step()

    @rule(index=INDEX, frozen=st.booleans(), keeps=st.booleans())
    def freeze(self, index: int, frozen: bool, keeps: bool) -> None:
        """Freeze a parameter, which may keep its gradient, or thaw it."""

        def change(world: World) -> None:
            param = world.params[index % len(world.params)]
            param.requires_grad_(not frozen)
            if not keeps:
                param.grad = None

        self.do(f"freeze {index}: {frozen}, keeps its gradient: {keeps}", change)

    # Rules: groups and options

    @rule(seed=SEEDS, dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    @precondition(lambda self: len(self.worlds[0].params) < 10)
    def add_group(self, seed: int, dtype: torch.dtype) -> None:
        """A group of one new parameter."""

        def add(world: World) -> None:
            param = nn.Parameter(torch.randn(11, generator=torch.Generator().manual_seed(seed)).to(dtype))
            world.params.append(param)
            world.optimizer.add_param_group({"params": [param], "lr": 0.1})

        self.call(f"add a group, {dtype}", add)

    @rule()
    @precondition(lambda self: len(self.worlds[0].inner.param_groups) > 2)
    def remove_group(self) -> None:
        """The last group goes; its parameters stay as they are."""
        self.do("remove the last group", lambda world: world.inner.param_groups.pop() and None)

    @rule(index=INDEX)
    def remove_param(self, index: int) -> None:
        """One parameter leaves its group."""

        def remove(world: World) -> None:
            for group in world.inner.param_groups:
                group["params"] = [param for param in group["params"] if param is not world.params[index % 7]]

        self.do(f"remove {index % 7}", remove)

    @rule(option=st.sampled_from([(name, value) for name, values in OPTIONS.items() for value in values]), group=INDEX)
    def set_option(self, option: tuple[str, Any], group: int) -> None:
        """An option of one group; the options of some are not those of others."""
        name, value = option
        if name not in self.worlds[0].inner.defaults:
            return

        def change(world: World) -> None:
            world.is_exact = world.is_exact and not isinstance(value, Tensor)
            groups = world.inner.param_groups
            groups[group % len(groups)][name] = deepcopy(value)

        before = [group[name] for group in self.worlds[0].inner.param_groups]
        self.do(f"{name}={value!r} in group {group}", change)
        self.give_gradients(group)
        if self.step():
            self.do(
                "undo",
                lambda world: [g.update({name: b}) for g, b in zip(world.inner.param_groups, before, strict=True)],
            )
            self.give_gradients(group + 1)
            self.step()

    # Rules: state dicts

    @rule()
    def save(self) -> None:
        """Save ours, and the inner optimizer's."""
        if not self.call("save", lambda world: world.saved.append({"ours": world.optimizer.state_dict()})):
            # torch cannot save state of a parameter that has left.
            self.do("save the inner", lambda world: world.saved[-1].update(inner=deepcopy(world.inner.state_dict())))

    @rule(index=INDEX)
    @precondition(lambda self: self.worlds[0].saved)
    def load(self, index: int) -> None:
        """Load what was saved; where groups have come or gone, it does not fit."""
        self.call(f"load {index}", lambda world: world.optimizer.load_state_dict(saved_by(world, index)["ours"]))

    @rule(index=INDEX, step=st.sampled_from([None, torch.float64, torch.int64, float, int]))
    @precondition(lambda self: self.worlds[0].saved)
    def load_inner(self, index: int, step: Any) -> None:
        """Load the inner optimizer's own state dict into it, with step counts as other versions of torch had them."""

        def change(world: World) -> None:
            saved = deepcopy(saved_by(world, index)["inner"])
            for state in saved["state"].values():
                if step is not None and "step" in state:
                    number = state["step"]
                    state["step"] = number.to(step) if isinstance(step, torch.dtype) else step(number)
            world.inner.load_state_dict(saved)

        if self.do(f"load {index} into the inner optimizer, step as {step}", change) is None:
            return
        self.give_gradients(index)
        if self.step():
            self.do("clear state", lambda world: world.inner.state.clear())

    @rule()
    def resume(self) -> None:
        """A new process: other parameters of the same values, and an optimizer that loads what the old one saves."""

        def restart(world: World) -> None:
            saved = world.optimizer.state_dict()
            old = world.params, world.inner, world.scaler, world.optimizer
            now = {id(param): nn.Parameter(param.detach().clone(), param.requires_grad) for param in world.params}
            groups = [[now[id(param)] for param in group["params"]] for group in world.inner.param_groups]
            world.params = [now[id(param)] for param in world.params]
            world.build(groups)
            try:
                world.optimizer.load_state_dict(saved)
            except MegascaleError:  # state that nobody has looked at, of a frozen parameter
                world.params, world.inner, world.scaler, world.optimizer = old
                raise

        if all(len(group["params"]) > 0 for group in self.worlds[0].inner.param_groups):
            self.call("resume", restart)

    @rule()
    def reload(self) -> None:
        """Main params become what the model holds."""
        self.loosen()
        self.call("reload_model_params", lambda world: world.optimizer.reload_model_params())

    def loosen(self) -> None:
        """What differs in the last bits of fp32 may differ by a rounding to 16 bits from now on."""
        for world in self.worlds:
            world.is_loose = world.is_loose or not world.is_exact


def main() -> None:
    """Run the machine on the backends named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--examples", type=int, default=25)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    BackendMachine.backends, BackendMachine.trace = given.backends, given.trace
    rules = settings(
        max_examples=given.examples,
        stateful_step_count=given.steps,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    run_state_machine_as_test(seed(given.seed)(BackendMachine), settings=rules)
    counts = {name: getattr(BackendMachine, name) for name in ("examples", "steps", "errors")}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
