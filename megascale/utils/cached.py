"""functools.cached_property without its lock, which Python 3.11 takes at every first access."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class cached(Generic[T]):
    """Decorate a method without arguments to be an attribute: computed at the first access, then kept in ``vars()``.

    Threads that ask for the first time together may compute it more than once.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self._name = function.__name__
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value = instance.__dict__[self._name] = self._function(instance)
        return value
