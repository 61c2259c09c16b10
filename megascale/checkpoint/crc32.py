"""CRC-32 of joined bytes from the CRC-32 of the parts, as zlib's ``crc32_combine``, which Python does not offer.

A CRC is a polynomial over GF(2) modulo ``x^32 + x^26 + ... + 1``, its bits in reverse: bit 31 is the coefficient of
x^0. To append n bytes is to multiply by x^(8n). See Mark Adler's `crc32.c` in zlib 1.3.
"""

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of A + B from that of A, that of B, and the ``length`` of B in bytes."""
    return _product(_appended(length), first) ^ second


@lru_cache(maxsize=4096)
def _appended(length: int) -> int:
    """Return x^(8 * ``length``)."""
    power, square, result = length, 1 << 23, _ONE  # x^8
    while power:
        if power & 1:
            result = _product(square, result)
        square = _product(square, square)
        power >>= 1
    return result


def _product(left: int, right: int) -> int:
    result = 0
    while left:
        if left & _ONE:
            result ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return result
