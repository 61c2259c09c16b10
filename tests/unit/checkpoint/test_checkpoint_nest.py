"""Any nest of what a checkpoint holds survives the way through JSON and a flat dict of tensors."""

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megascale.checkpoint.cached_flattener import CachedFlattener
from megascale.checkpoint.nest import flatten, leaves, unflatten
from megascale.errors import ArgumentError, ArgumentTypeError
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


def _forms(tensors: dict[str, torch.Tensor]) -> list[Any]:
    return [(key, tensor.shape, tensor.dtype) for key, tensor in tensors.items()]


@given(st.lists(NESTS, min_size=2, max_size=4), st.booleans())
def test_kept_nest_is_flattened_as_a_new_one(nests: list[Any], is_wrapped: bool) -> None:
    """Whatever was there before: the same tree, keys, tensors and checksum; and one revision means one plan."""
    kept = CachedFlattener("user")
    revisions: dict[int, Any] = {}
    before: list[tuple[Any, str]] = []
    for given_nest in [*nests, *nests[-1:]]:
        nest = {"step": len(before), "a": given_nest, "b": [given_nest, 0.0]} if is_wrapped else given_nest
        tree, tensors = kept.flatten(nest)
        expected, all_tensors = flatten(nest, "user")
        assert repr(tree) == repr(expected)
        assert list(tensors) == list(all_tensors)
        assert all(tensors[key].data_ptr() == tensor.data_ptr() for key, tensor in all_tensors.items())
        new = CachedFlattener("user")
        new.flatten(nest)
        assert kept.crc32() == new.crc32()
        assert revisions.setdefault(kept.revision, _forms(tensors)) == _forms(tensors)
        before.append((tree, repr(tree)))
    assert all(repr(tree) == text for tree, text in before), "a tree of an earlier call was changed"


CHANGES: dict[str, Any] = {
    "shape": torch.zeros(3),
    "dtype": torch.zeros(2).half(),
    "no tensor": 2,
    "a list of it": [torch.zeros(2)],
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_revision_changes_with_what_a_plan_depends_on(changed: Any) -> None:
    """With a shape, a dtype, or a tensor that comes or goes; not with values, plain or of tensors."""
    kept = CachedFlattener("user")
    nest = {"a": torch.zeros(2), "b": OrderedDict(c=nn.Parameter(torch.ones(2))), "lr": 0.1}
    tree, _ = kept.flatten(nest)
    crc32, revision = kept.crc32(), kept.revision
    same, tensors = kept.flatten({**nest, "a": torch.ones(2)})
    assert same is tree
    assert torch.equal(tensors["user/a"], torch.ones(2))
    assert not tensors["user/b/c"].requires_grad
    assert (kept.crc32(), kept.revision) == (crc32, revision)
    kept.flatten({**nest, "lr": 0.2})
    assert kept.crc32() != crc32
    assert kept.revision == revision
    kept.flatten({**nest, "a": changed})
    assert kept.revision != revision


def test_kept_nest_goes_on_after_an_error() -> None:
    """What cannot be saved is named, and has left nothing behind."""
    kept = CachedFlattener("user")
    kept.flatten({"a": [1], "b": 2})
    with pytest.raises(ArgumentTypeError, match=r"user/b is a builtins\.object"):
        kept.flatten({"a": [3], "b": object()})
    assert kept.flatten({"a": [1], "b": 2})[0] == flatten({"a": [1], "b": 2}, "user")[0]


def test_tensor_that_lost_its_data_is_found() -> None:
    """Of the same shape and dtype, on the meta device or sparse, it can no more be saved than at first."""
    for lost in (torch.empty(2, device="meta"), torch.zeros(2).to_sparse()):
        kept = CachedFlattener("user")
        kept.flatten([torch.zeros(2)])
        with pytest.raises(ArgumentError, match="user/#0 is a tensor that a checkpoint cannot hold"):
            kept.flatten([lost])
