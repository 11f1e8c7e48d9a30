from __future__ import annotations

import random
import zlib

import pytest

from sluice.checksum import combine


@pytest.mark.parametrize("cut", [0, 1, 7, 100, 4095, 4096, 9_999, 10_000])
def test_the_sum_of_two_pieces_is_that_of_the_whole(cut: int) -> None:
    data = random.Random(cut).randbytes(10_000)
    assert combine(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), len(data) - cut) == zlib.crc32(data)


def test_many_pieces_and_a_flipped_bit() -> None:
    data = bytearray(random.Random(1).randbytes(1 << 20))
    cuts = sorted(random.Random(2).sample(range(len(data)), 50))
    total = 0
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        total = combine(total, zlib.crc32(data[begin:end]), end - begin)
    assert total == zlib.crc32(data)
    data[777] ^= 4
    assert total != zlib.crc32(data)
