"""CRC-32 (IEEE) of pieces, combined: what several connections bring is summed as it comes, in any order."""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0xEDB88320


def combine(first: int, second: int, length: int) -> int:
    """The crc32 of two pieces in a row, from the crc32 of each and the ``length`` of the second in bytes."""
    k = 0
    while length:
        if length & 1:
            first = _times(_zeros(k), first)
        length >>= 1
        k += 1
    return first ^ second


def _times(matrix: tuple[int, ...], vector: int) -> int:
    total = i = 0
    while vector:
        if vector & 1:
            total ^= matrix[i]
        vector >>= 1
        i += 1
    return total


def _square(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_times(matrix, row) for row in matrix)


@cache
def _zeros(k: int) -> tuple[int, ...]:
    """What 2^k zero bytes do to a crc, as a matrix over GF(2)."""
    if k:
        return _square(_zeros(k - 1))
    one_bit = (_POLYNOMIAL, *(1 << i for i in range(31)))
    return _square(_square(_square(one_bit)))
