"""Options of param groups that are no numbers: each that differs between ranks is named, each that is equal passes."""

import enum
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megascale.errors import UsageError
from tests.cells import FP32_STATE, Cell, integers
from tests.pool import RankPool


class _Word(str, enum.Enum):  # noqa: UP042 - its str() is another than a StrEnum's
    MEAN = "mean"


OTHERS: dict[str, tuple[Any, Any]] = {
    "dtypes": (torch.float32, torch.bfloat16),
    "a dtype and None": (torch.float32, None),
    "a word and None": ("mean", None),
    "dicts": ({"a": 1, "b": [1, {"c": torch.float16}]}, {"a": 1, "b": [1, {"c": torch.float32}]}),
    "dicts of other keys": ({"a": 1}, {"b": 1}),
    "lists in lists": ([1, [2, (3, torch.float16)]], [1, [2, (3, torch.bfloat16)]]),
    "a list and a shorter one": ([1, 2], [1]),
    "types of devices": (torch.device("cpu"), torch.device("cuda", 0)),
    "small tensors": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
    "large tensors": (torch.arange(100.0), torch.arange(1.0, 101.0)),
    "tensors of other shapes": (torch.ones(2, 50), torch.ones(50, 2)),
    "complex tensors": (torch.tensor([1j]), torch.tensor([2j])),
    "numbers of numpy": (np.float32(0.5), np.float32(0.25)),
}
"""What one rank has, and another."""
ALIKE: dict[str, tuple[Any, Any]] = {
    "a list and a tuple": ([1, [2, 3]], (1, (2, 3))),
    "a float, and numpy's": (0.5, np.float32(0.5)),
    "a bool, and numpy's": (True, np.bool_(True)),
    "numbers that are not": (float("nan"), float("nan")),
    "dicts in another order": ({"a": 1, "b": {2: 3.0}}, {"b": {2.0: 3}, "a": True}),
    "a word, and an enum that is one": ("mean", _Word.MEAN),
    "tensors of two dtypes": (torch.arange(100), torch.arange(100.0, dtype=torch.bfloat16)),
    "devices of one type": (torch.device("cuda", 0), torch.device("cuda", 1)),
}


def _set(kind: str, name: str) -> Any:
    return (OTHERS if kind == "others" else ALIKE)[name][dist.get_rank() > 0]


def _tell(cell: Cell) -> dict[str, str]:
    model = cell.model()
    optimizer = cell.optimizer(model)
    optimizer._inner.defaults["extra"] = None  # as an optimizer of the user's own may have
    told = {}
    for kind, names in (("others", OTHERS), ("alike", ALIKE)):
        for name in names:
            optimizer.param_groups[0]["extra"] = _set(kind, name)
            optimizer.zero_grad()
            cell.backward(optimizer, model, integers(cell.shapes, 1))
            if kind == "alike":
                assert optimizer.step().success, name
                continue
            with pytest.raises(UsageError) as caught:
                optimizer.step()
            told[name] = str(caught.value)
    return told


@pytest.mark.default("float16-zero1-fp32")
@pytest.mark.parametrize("cell", [cell for cell in FP32_STATE if cell.dtype == torch.float16], ids=str)
def test_options_of_any_type_are_compared(cell: Cell, ranks: RankPool) -> None:
    """Invariant 12. Each rank names the option and both values, and what is equal lands.

    These are the types that a state dict can hold: a first step refuses anything else.

    Two ranks also where parameters are replicated. How state is held makes no difference: there are no compact cells.
    """
    first, second = ranks.run(2, _tell, cell)
    assert first == second
    for name, message in first.items():
        assert "the same step: extra of param group 0 is " in message, (name, message)
    assert first.keys() == OTHERS.keys()
