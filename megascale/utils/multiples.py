"""Where things of different sizes begin side by side: at multiples of an alignment."""


def rounded_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
