"""What tests on an accelerator share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tests.gpu import device


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One rank of the device's own communication."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    backend = "nccl" if device().type == "cuda" else "gloo"
    dist.init_process_group(backend, store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
