"""InertRecord: stands for a pickled object of an unknown class, with its arguments and attributes."""

from collections.abc import Iterable, Mapping
from typing import Any


class InertRecord:
    """A pickle's description of one object, whose class is not imported.

    Attributes:
        kind: module and name of the class (or function) that the pickle names.
        arguments: of the call.
        attributes: the object's attributes.
        items: values to append or to set by key.
    """

    kind = ""
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]
    items: list[Any]

    def __new__(cls, *arguments: Any, **options: Any) -> "InertRecord":
        """Record any arguments."""
        record = super().__new__(cls)
        record.arguments = (*arguments, *options.values())
        record.attributes = {}
        record.items = []
        return record

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, Mapping):
                self.attributes.update({str(key): value for key, value in part.items()})

    def append(self, item: Any) -> None:
        """Record an item."""
        self.items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        """Record items."""
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __call__(self, *arguments: Any) -> "InertRecord":
        """Return a record of the call, as a record may stand for a function."""
        return record_class(self.kind, "()")(*arguments)

    def __repr__(self) -> str:
        return f"<record of {self.kind}>"


def record_class(module: str, name: str) -> type[InertRecord]:
    """Return a new record class for ``module.name``, without importing it."""
    return type(name, (InertRecord,), {"kind": f"{module}.{name}"})


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of a record or of a live object; a mapping itself."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, InertRecord):
        return value.attributes
    return dict(getattr(value, "__dict__", {}))


def kind_of(value: Any) -> str:
    """Return module and name of the class that a record stands for, or of a live object's."""
    return value.kind if isinstance(value, InertRecord) else f"{type(value).__module__}.{type(value).__qualname__}"


def number_of(value: Any) -> Any:
    """Return a pickled enum member's value (its only argument), or ``value`` itself."""
    if isinstance(value, InertRecord) and len(value.arguments) == 1:
        return value.arguments[0]
    return value
