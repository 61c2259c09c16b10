"""Any nest of what a checkpoint holds survives the way through JSON and a flat dict of tensors."""

import json
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.checkpoint.nest import flatten, leaves, unflatten
from tests.checkpoint_cases import differences

KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab/#%0", max_size=4)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from([torch.float16, torch.bfloat16, torch.int64, torch.bool]).map(lambda d: torch.ones(2, dtype=d))
)
NESTS = st.recursive(
    LEAVES,
    lambda nest: (
        st.lists(nest, max_size=4) | st.lists(nest, max_size=3).map(tuple) | st.dictionaries(KEYS, nest, max_size=4)
    ),
    max_leaves=20,
)


@given(NESTS)
def test_round_trip(nest: Any) -> None:
    """Types, order, values and tensors are the same, and no two tensors share a key."""
    tree, tensors = flatten(nest, "user")
    through_json = json.loads(json.dumps(tree))
    assert [key for key, _, _ in leaves(through_json)] == list(tensors)
    assert differences(unflatten(through_json, tensors), nest) == []
