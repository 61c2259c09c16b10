"""Names in messages: the first of them, and how many others there are."""

from megascale.errors import listed


def test_eight_names_are_shown_and_others_counted() -> None:
    """Eight are shown whole; of nine one is counted."""
    names = list("abcdefgh")
    shown = "'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'"
    assert listed(names) == shown
    assert listed([*names, "i"]) == f"{shown} and 1 more"
