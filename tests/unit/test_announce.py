"""The line at the start: what was built, on rank 0. It can be switched off."""

import io
import logging
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import ArgumentError
from megascale.utils import announce
from tests.pool import RankPool
from tests.terminal import terminal


@pytest.fixture(autouse=True)
def _nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is a process of its own; pytest's handlers of logging are not there."""
    monkeypatch.setattr(announce, "_told", set())
    monkeypatch.delenv(announce.QUIET_VARIABLE, raising=False)
    announce._logger.propagate = False
    yield
    announce._logger.propagate = True


def _build() -> MixedPrecisionOptimizer:
    inner = torch.optim.AdamW(nn.Linear(4, 4).half().parameters(), lr=0.01)
    return MixedPrecisionOptimizer(inner, None, DynamicGradScaler(), clip_grad=1.0)


def test_one_line_on_a_terminal() -> None:
    """It says what was built, once: a second optimizer that is alike has no second line."""
    with terminal() as shown:
        optimizer = _build()
        _build()
        text = shown()
    assert text.splitlines() == [
        "megascale: MixedPrecisionOptimizer(AdamW): 20 in float16; main params: float32; DynamicGradScaler; clips "
        f"gradients to norm 1.0; backend {optimizer._backend.name} on cpu; 1 rank decides; {_held(optimizer)}"
    ]


def test_an_optimizer_without_16_bit_parameters_is_remarked_on() -> None:
    """It is right under autocast, and wrong where the cast was forgotten: the line says what it means, and what to do.
    Without a scaler, too.
    """
    with terminal() as shown:
        MixedPrecisionOptimizer(torch.optim.AdamW(nn.Linear(4, 4).parameters()), None, DynamicGradScaler())
        MixedPrecisionOptimizer(torch.optim.AdamW(nn.Linear(4, 4).parameters()))
        text = shown()
    assert text.count("20 in float32; main params: none, as no parameter has 16 bits; ") == 2
    assert (
        text.count("No parameter has 16 bits: the model computes in fp32, or in autocast, and takes the memory of") == 2
    )
    assert text.count("call model = megascale.cast_model(model, torch.bfloat16), or torch.float16, before") == 2
    with terminal() as shown:
        _build()
        assert "No parameter" not in shown()


def _held(optimizer: MixedPrecisionOptimizer) -> str:
    found = re.search("held by this rank: (.*)", repr(optimizer))
    assert found is not None
    return found[1]


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """And another value is an error that names the variable."""
    monkeypatch.setenv(announce.QUIET_VARIABLE, "1")
    with terminal() as shown:
        _build()
        assert shown() == ""
    monkeypatch.setenv(announce.QUIET_VARIABLE, "yes")
    with pytest.raises(ArgumentError, match="MEGASCALE_QUIET must be one of '0', '1', got 'yes'"):
        _build()


def test_without_a_terminal_the_log_has_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch job's file gets nothing that it did not ask for; a program that logs INFO gets the line there alone."""
    _build()
    assert capsys.readouterr().err == ""
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", heard.append)
    announce._logger.addHandler(handler)
    announce._logger.setLevel(logging.INFO)
    try:
        with terminal() as shown:
            _build()
            _build()
            assert shown() == ""
    finally:
        announce._logger.removeHandler(handler)
        announce._logger.setLevel(logging.NOTSET)
    assert [record.getMessage()[:24] for record in heard] == ["MixedPrecisionOptimizer("]


@pytest.mark.parametrize("quiet", ["0", "1"])
@pytest.mark.parametrize("stderr", ["none", "a logger's", "closed"])
def test_an_odd_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch, stderr: str, quiet: str) -> None:
    """None under pythonw, without isatty() where a program sends it to its log; closed, isatty() raises. The
    constructor failed, on the first rank alone.
    """
    closed = io.StringIO()
    closed.close()
    streams = {"none": None, "a logger's": SimpleNamespace(write=print, flush=print), "closed": closed}
    monkeypatch.setattr(sys, "stderr", streams[stderr])
    monkeypatch.setenv(announce.QUIET_VARIABLE, quiet)
    _build()
    assert not announce._told


def _lines_of_ranks() -> str:
    announce._told.clear()
    announce._logger.propagate = False
    try:
        with terminal() as shown:
            model = nn.Linear(4, 4).half()
            inner = torch.optim.AdamW(model.parameters(), lr=0.01)
            # The reference needs no library, of whose absence a warning would say more.
            config = OptimizerConfig(fp16=True, use_distributed_optimizer=True, backend="reference")
            DistributedOptimizer(inner, config, DynamicGradScaler(), modules=model, broadcast_params=True)
            return shown()
    finally:
        announce._logger.propagate = True


def test_rank_0_alone_says_it(ranks: RankPool) -> None:
    """With how many ranks, and how many shards."""
    first, *others = ranks.run(3, _lines_of_ranks)
    assert others == ["", ""]
    assert first.startswith(
        "megascale: DistributedOptimizer(AdamW): 20 in float16; main params: float32, with the state in 3 shards"
    )
    assert "3 ranks decide, data parallel 3" in first
