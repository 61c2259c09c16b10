"""How threads share chunks, chunks.h alone: each chunk once, and nobody idle while there are some left."""

import ctypes
import random
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale.kernels.native import levels
from tests.needs import compiler

pytestmark = pytest.mark.c_compiler

WRAPPED = """
#include "chunks.h"
int size_of_share(void) { return sizeof(Share); }
void begin(int64_t num_chunks, Share *shares, int parts) { share_out(num_chunks, shares, parts); }
int next(Share *shares, int part, int parts, int64_t num_chunks, int backwards, int64_t *first, int64_t *last) {
    return take_next(shares, part, parts, num_chunks, backwards, first, last);
}
"""

Sharing = Callable[[int, int, bool], Callable[[int], range]]


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Sharing:
    """chunks.h, compiled: given chunks and threads, a function of the thread that asks, which returns its chunks."""
    source, built = (tmp_path_factory.mktemp("chunks") / name for name in ("wrapped.c", "wrapped.so"))
    source.write_text(WRAPPED)
    flags = (*levels.FLAGS, "-w", "-shared", f"-I{levels.SOURCE.parent}")
    subprocess.run([*compiler("CC"), *flags, str(source), "-o", str(built)], check=True)
    library = ctypes.CDLL(str(built))

    def begin(num_chunks: int, parts: int, backwards: bool) -> Callable[[int], range]:
        shares = ctypes.create_string_buffer(library.size_of_share() * (parts + 1))
        start = -(-ctypes.addressof(shares) // 64) * 64
        library.begin(ctypes.c_int64(num_chunks), ctypes.c_void_p(start), parts)
        first, last = ctypes.c_int64(), ctypes.c_int64()

        def take(part: int, held: object = shares) -> range:
            place = ctypes.c_void_p(start)
            found = library.next(
                place, part, parts, ctypes.c_int64(num_chunks), backwards, ctypes.byref(first), ctypes.byref(last)
            )
            return range(first.value, last.value) if found else range(0)

        return take

    return begin


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 5000), st.integers(1, 9), st.booleans(), st.randoms(use_true_random=False))
def test_each_chunk_goes_to_one_thread(
    sharing: Sharing, num_chunks: int, parts: int, backwards: bool, chance: random.Random
) -> None:
    """Whoever asks when: its own chunks come first, from the front; then another's, from the back, where its owner is
    not yet; a thread gets none only when none are left. Backwards: the other way round.
    """
    take = sharing(num_chunks, parts, backwards)
    left = [list(range(num_chunks * part // parts, num_chunks * (part + 1) // parts)) for part in range(parts)]
    while any(left):
        part = chance.randrange(parts)
        whose = next(other % parts for other in range(part, part + parts) if left[other % parts])
        chunks = list(take(part))
        assert chunks
        kept = len(left[whose]) - len(chunks)
        here, rest = (left[whose][: len(chunks)], left[whose][len(chunks) :])
        if (whose != part) != backwards:
            rest, here = (left[whose][:kept], left[whose][kept:])
        assert chunks == here
        left[whose] = rest
    assert not any(take(part) for part in range(parts))


def test_one_thread_does_the_work_of_threads_that_never_come(sharing: Sharing) -> None:
    """A thread whose core is taken away holds up no chunk but those that it has in hand."""
    take = sharing(1000, 4, False)
    in_hand = take(2)
    done: list[int] = []
    while chunks := take(0):
        done += chunks
    assert len(in_hand) < 10
    assert sorted([*done, *in_hand]) == list(range(1000))
