"""The functions of tensor_reader.cpp check what they are given; when they are asked, and what their answers lead to."""

from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.kernels.compiler import find_compiler, run_compiler
from megascale.kernels.tensors import tensor_reader

TENSORS = [torch.zeros(2) for _ in range(5)]
WRONG: list[tuple[str, tuple[Any, ...], type[Exception]]] = [
    ("read_facts", (TENSORS, np.zeros((6, 5), np.int64), True), ValueError),
    ("read_facts", (TENSORS, np.zeros((10, 4), np.int64), True), ValueError),
    ("read_facts", (tuple(TENSORS), np.zeros((6, 5), np.int64), False), TypeError),
    ("read_facts", (TENSORS,), TypeError),
    ("expect_memory", (tuple(TENSORS),), TypeError),
    ("holds_memory", (TENSORS,), ValueError),
    ("read_versions", (TENSORS, np.zeros(4, np.int64)), ValueError),
    ("increment_versions", (TENSORS, np.zeros(6, np.int64)), ValueError),
    ("increment_versions", (TENSORS, np.broadcast_to(np.int64(0), 5)), ValueError),
    ("same_objects", (TENSORS, tuple(TENSORS)), TypeError),
    ("same_values", ({0: 0}, [0], np.zeros(2, np.int64)), ValueError),
    ("same_values", ([0], [0], np.zeros(1, np.int64)), TypeError),
    ("hold_objects", ([{}] * 5, ["a"], [tuple(TENSORS)], np.zeros(5, np.int64)), TypeError),
    ("hold_objects", ([{}] * 5, ["a"], [TENSORS], np.zeros(4, np.int64)), ValueError),
]


@pytest.mark.slow
@pytest.mark.usefixtures("native_reader")
@pytest.mark.parametrize(("name", "given", "error"), WRONG)
def test_wrong_arguments_are_refused(name: str, given: tuple[Any, ...], error: type[Exception]) -> None:
    """Arrays of another length, or read-only, other types, too few arguments: no version has changed."""
    before = [tensor._version for tensor in TENSORS]
    with pytest.raises(error):
        getattr(tensor_reader._library(), name)(*given)
    assert [tensor._version for tensor in TENSORS] == before


def test_another_header_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was built with an older header is not taken for this one."""
    for name in (tensor_reader.SOURCE.name, tensor_reader.HEADER):
        (tmp_path / name).write_text(tensor_reader.SOURCE.with_name(name).read_text())
    monkeypatch.setattr(tensor_reader, "SOURCE", tmp_path / tensor_reader.SOURCE.name)
    before = tensor_reader._recipe(("c++",), ()).stem()
    header = tmp_path / tensor_reader.HEADER
    header.write_text(header.read_text() + "\n")
    assert tensor_reader._recipe(("c++",), ()).stem() != before


def test_few_tensors_do_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is built for MANY tensors, and used for SOME if it is there. Asked for by name it is always built,
    and never with `python`.
    """
    asked: list[str] = []
    monkeypatch.setattr(tensor_reader, "_library", lambda: asked.append("build"))
    monkeypatch.setattr(tensor_reader, "_kept_library", lambda: asked.append("use"))

    def asked_for(count: int) -> list[str]:
        asked.clear()
        assert tensor_reader.read([torch.zeros(1)] * count) is None
        return list(asked)

    some, many = tensor_reader.SOME, tensor_reader.MANY
    for wanted, expected in (
        ("auto", [[], [], ["use"], ["use"], ["build"]]),
        ("native", [["build"]] * 5),
        ("python", [[]] * 5),
    ):
        monkeypatch.setenv(tensor_reader.ENVIRONMENT_VARIABLE, wanted)
        assert [asked_for(count) for count in (1, some - 1, some, many - 1, many)] == expected
    monkeypatch.setenv(tensor_reader.ENVIRONMENT_VARIABLE, "auto")
    asked.clear()
    assert tensor_reader.read(TENSORS, among=many) is None
    assert tensor_reader.read(TENSORS * many, among=1) is None
    assert asked == ["build"]


class _Library:
    """Answers as tensor_reader.cpp does, without a look at any tensor. ``answer``: its next one."""

    def __init__(self) -> None:
        self.answer: Any = None

    def read_facts(self, tensors: list[Tensor], rows: Any, grads: bool) -> Any:
        """Fill each row with its number."""
        assert rows.shape == (10 if grads else 6, len(tensors))
        rows[...] = np.arange(len(rows))[:, None]
        return self.answer

    def read_versions(self, tensors: list[Tensor], versions: Any) -> Any:
        """Write 7 everywhere."""
        versions[...] = 7
        return self.answer

    increment_versions = read_versions

    def expect_memory(self, tensors: list[Tensor]) -> Any:
        """Return what is asked about later."""
        return self.answer

    def holds_memory(self, expected: Any) -> Any:
        """Return what expect_memory() did."""
        return expected

    def same_objects(self, *given: Any) -> Any:
        """Compare nothing."""
        return self.answer

    same_values = hold_objects = same_objects


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> _Library:
    """A library that says what it is told to."""
    made = _Library()
    monkeypatch.setattr(tensor_reader, "_library", lambda: made)
    monkeypatch.setenv(tensor_reader.ENVIRONMENT_VARIABLE, "native")
    return made


def test_a_walks_columns_are_told_by_name(library: _Library) -> None:
    """Addresses, lengths, kinds, layouts, versions, what requires grad, then the gradients' memory if it is wanted."""
    library.answer = True
    read = tensor_reader.read(TENSORS)
    assert read is not None
    assert [column[0] for column in (*read.memory, read.versions, read.requires_grad)] == [0, 1, 2, 3, 4, 5]
    assert read.grads is None
    read = tensor_reader.read(TENSORS, grads=True)
    assert read is not None
    assert read.grads is not None
    assert [column.tolist() for column in read.grads] == [[6] * 5, [7] * 5, [8] * 5, [9] * 5]


def test_findings_are_kept_while_a_walk_finds_no_change(library: _Library) -> None:
    """False: nothing has changed. None: a tensor could not be read, and what was known of them is forgotten."""
    room, owner = tensor_reader.Room(), _Owner()

    def found() -> dict[str, Any] | None:
        read = tensor_reader.read(TENSORS, room=room)
        return None if read is None or read.findings is None else read.findings.setdefault(owner, {})

    for answer, expected in ((True, {}), (False, {"answer": 42}), (True, {}), (False, {"answer": 42}), (None, None)):
        library.answer = answer
        assert found() == expected
        library.answer = False
        known = found()
        assert known is not None
        known["answer"] = 42
    library.answer = None
    assert found() is None
    library.answer = False
    assert found() == {}


class _Owner:
    """Who finds out something."""


def test_what_the_library_cannot_read_python_does(library: _Library) -> None:
    """It says so, before it has changed anything."""
    tensors = [torch.zeros(2) for _ in range(3)]
    for library.answer in (False, True):
        versions = [tensor._version for tensor in tensors]
        assert tensor_reader.read_versions(tensors).tolist() == ([7] * 3 if library.answer else versions)
        now = tensor_reader.increment_versions(tensors)
        assert (now is not None and now.tolist()) == (library.answer and [7] * 3)
        assert [tensor._version for tensor in tensors] == [1, 1, 1]
    for library.answer, expected in ((1, [1, 1]), (0, [0, 0]), (None, [True, False])):
        holds = tensor_reader.expect_memory(tensors)
        found = [holds()]
        tensors[1].data = torch.zeros(2)
        assert [*found, holds()] == expected


def test_new_tags_are_those_of_dicts_that_nobody_has_read() -> None:
    """One for each."""
    assert tensor_reader.new_tags(3).tolist() == [0, 0, 0]


@pytest.mark.c_compiler
def test_the_librarys_functions_are_what_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object of Python's, whatever kind; from the cache or compiled."""
    compiler = find_compiler("CC", ("cc", "gcc", "clang"))
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, made = tmp_path / "answer.c", str(tmp_path / "answer.so")
    source.write_text(
        'extern void *Py_BuildValue(const char *, ...);\nvoid *functions(void) { return Py_BuildValue("i", 42); }\n'
    )
    run_compiler([*compiler, "-shared", "-fPIC", str(source), "-o", made])
    monkeypatch.setattr(tensor_reader, "find_compiler", lambda *_: compiler)
    asks: list[tuple[str, Any]] = [("load", tensor_reader._library), ("load_kept", tensor_reader._kept_library)]
    for name, ask in asks:
        monkeypatch.setattr(tensor_reader, name, lambda _, open_library: open_library(made))
        assert ask.__wrapped__() == 42


@pytest.mark.parametrize("answer", [0, 1])
def test_the_librarys_comparisons_are_told_as_they_are(answer: int, library: _Library) -> None:
    """But for a mapping that is no dict, which it cannot read."""
    library.answer = answer
    tag = tensor_reader.new_tags(1)
    assert tensor_reader.same_objects([1], [2]) is bool(answer)
    assert tensor_reader.same_values({1: 1}, [2], tag) is bool(answer)
    assert tensor_reader.hold_objects([{"a": 1}], ["a"], [[2]], tag) is bool(answer)
    assert tensor_reader.same_values(UserDict({1: 1}), [1], tag)
    assert not tensor_reader.same_values(UserDict({1: 1}), [2], tag)


def test_a_room_is_reused_once_nothing_of_it_is_held() -> None:
    """With what it holds and what was found about it; a piece of another shape, or in use, is left alone."""
    room = tensor_reader.Room()
    first, findings = room.take(2, 3)
    assert first.tolist() == [[0, 0, 0], [0, 0, 0]]
    first[...] = 7
    row, address = first[1], first.ctypes.data
    del first
    second, others = room.take(2, 3)
    assert second.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert others is not findings
    del row
    third, again = room.take(2, 3)
    assert third.ctypes.data == address
    assert third.tolist() == [[7, 7, 7], [7, 7, 7]]
    assert again is findings
    del third
    wide, anew = room.take(3, 2)
    assert wide.tolist() == [[0, 0], [0, 0], [0, 0]]
    assert anew is not findings


def test_the_log_tells_how_long_the_compiler_took(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In seconds, of a library that is there; else the reason was logged, and nothing more is."""
    made: Any = SimpleNamespace()
    with caplog.at_level("INFO", logger="megascale"):
        for loaded in (None, made):
            assert caplog.messages == []
            monkeypatch.setattr(tensor_reader, "_loaded", lambda _, loaded=loaded: loaded)
            assert tensor_reader._library.__wrapped__() is loaded
    [message] = caplog.messages
    assert message in ("tensor_reader.cpp is ready after 0.0 s", "tensor_reader.cpp is ready after 0.1 s")
