"""The W&B sink in offline mode, with wandb itself: what was recorded is in the run's file, and nothing is uploaded."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from megascale.metrics import StepMetrics, WeightsAndBiases

wandb = pytest.importorskip("wandb", reason="needs wandb: pip install 'megascale[wandb]'")


BLOCK = 2**15
HEADER = 7
WHOLE, LAST = 1, 4
"""Kinds of a record's parts; those between are 2 and 3."""


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a run's file: LevelDB's log format, after a header of the file itself."""
    place, parts = HEADER, b""
    while place < len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        place += HEADER + size
        parts += data[place - size : place]
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


def _rows(folder: Path) -> list[dict[str, str]]:
    """Return what the one run below ``folder`` logged: values as JSON, by name."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or ".".join(item.nested_key): item.value_json for item in record.history.item})
    return rows


def test_an_offline_run_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps from a later start, the second of them skipped: norm, scale and loss under the step's own number."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    model = nn.Linear(2, 1).half()
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD(model.named_parameters(), lr=0.1), None, DynamicGradScaler(16.0, 1.0, hysteresis=1)
    )
    sink = WeightsAndBiases(project="megascale-tests", dir=str(tmp_path))
    with StepMetrics(optimizer, [sink], start=5) as metrics:
        for value in (1.0, math.inf, 1.0, 2.0):
            optimizer.zero_grad()
            optimizer.scale_loss(model(torch.full((1, 2), value).half()).float().sum()).backward()
            optimizer.step()
            metrics.record(loss=value)
    wandb.teardown()  # its process writes the rest of the file
    rows = _rows(tmp_path)
    assert [int(row["_step"]) for row in rows] == [5, 6, 7, 8]
    assert [float(row["scale"]) for row in rows] == [16.0, 16.0, 8.0, 8.0]
    assert [float(row["skipped"]) for row in rows] == [0.0, 1.0, 0.0, 0.0]
    assert [row["loss"] for row in rows][0::2] == ["1", "1"]
    assert [math.isfinite(float(row["grad_norm"].strip('"'))) for row in rows] == [True, False, True, True]
