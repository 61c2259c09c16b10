from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megascale
from megascale import MixedPrecisionOptimizer, OptimizerConfig
from megascale.kernels import Operands, ReferenceBackend, TorchBackend
from megascale.rules import BY_NAME, CONFIGURABLE, RULES, Rule
from megascale.state.schema import IMPLEMENTATION_OPTIONS


@pytest.fixture(params=RULES, ids=lambda rule: rule.name)
def rule(request: pytest.FixtureRequest) -> Rule:
    """Each rule."""
    found: Rule = request.param
    return found


def _built(rule: Rule, kind: type[torch.optim.Optimizer]) -> Any:
    made: Any = kind
    return made([nn.Parameter(torch.ones(4, 4))], lr=0.5)


def test_a_rule_names_every_option_of_its_optimizers(rule: Rule) -> None:
    """An option that no rule reads would be ignored in silence, unless it says only how torch runs its own step."""
    for kind in rule.kinds:
        known = {"lr", *rule.numbers, *rule.flags, *rule.may_read, *IMPLEMENTATION_OPTIONS}
        assert set(_built(rule, kind).defaults) <= known
        assert {"lr", *rule.numbers, *rule.flags} <= set(_built(rule, kind).defaults)


def test_state_is_of_declared_moments(rule: Rule) -> None:
    """The dtype of each state that an update reads follows from the config, by the moment's field."""
    names = {moment.name for moment in rule.moments}
    used = set[str]()
    for variant in rule.variants.values():
        used |= set(rule.state_names(_built(rule, variant.kind).defaults | variant.options))
    assert used == names
    assert set(rule.optional_state) <= {*names, "step"}


def test_the_reference_has_every_kernel(rule: Rule) -> None:
    """The reference specifies all other backends, and runs a rule that a backend has no kernel of."""
    assert rule.kernel is None or callable(getattr(ReferenceBackend(), rule.kernel))


def test_every_configured_rule_builds_an_optimizer_of_its_own() -> None:
    """What a config's ``optimizer`` takes is built by the rule of that name."""
    for name in CONFIGURABLE:
        rule = BY_NAME[name]
        config = OptimizerConfig(optimizer=name, lr=0.5)
        made = rule.build(config, [{"params": [nn.Parameter(torch.ones(4, 4))]}], 0.5)
        assert type(made) in rule.kinds
        assert isinstance(rule.hyper(made.param_groups[0], 0.5, type(made)).lr, float)


def test_a_backend_s_own_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is looked up by the name that its rule has: the reference's is not run in its place."""
    called = list[str]()

    def lion_(self: TorchBackend, operands: Operands, hyper: Any, decision: Any) -> Tensor:
        called.append("torch")
        return torch.zeros(len(operands.main), dtype=torch.bool)

    monkeypatch.setattr(TorchBackend, "lion_", lion_)
    param = nn.Parameter(torch.ones(4))
    optimizer = MixedPrecisionOptimizer(megascale.Lion([param], lr=0.5), OptimizerConfig(backend="torch"))
    param.grad = torch.ones(4)
    optimizer.step()
    assert called == ["torch"]
