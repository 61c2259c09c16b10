"""The decorator of attributes that are computed once."""

from megascale.utils.cached import cached


class _Base:
    def __init__(self) -> None:
        self.calls: list[str] = []

    @cached
    def answer(self) -> str:
        """The answer."""
        self.calls.append("base")
        return "base"


class _Other(_Base):
    @cached
    def answer(self) -> str:
        return f"other than {self.calls}"


def test_it_is_computed_once_for_each_object() -> None:
    """The first access computes it, later ones read it from the object's own dict; a subclass may override it."""
    one, two, other = _Base(), _Base(), _Other()
    assert "answer" not in vars(one)
    assert [one.answer, one.answer] == ["base", "base"]
    assert one.calls == ["base"]
    assert vars(one)["answer"] == "base"
    assert two.calls == []
    assert other.answer == "other than []"
    del one.answer
    assert one.answer == "base"
    assert one.calls == ["base", "base"]
