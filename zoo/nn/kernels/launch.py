"""How a kernel is launched: its tile, warps and how far it reads ahead.

A small step is bound by the host, which launches some thousand kernels: settings are made once, and `cdiv` and `power_of_2` stand in
the place of Triton's, which take ten times as long outside of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Settings of one kernel for one width; no result depends on them but for rounding.

    Those of the kernels beside this file are within 3 % of the fastest of 15 to 90 tried on an H200, at the lengths of 16
    receipts and the widths of Qwen3.5-VL 2B (the convolution: all of its channels at once), carried over to other widths.
    """

    rows: int  # that a program works on at once; of the convolution: one after the other
    columns: int = 0  # that a program owns, where it doesn't take whole rows
    warps: int = 4
    stages: int = 1  # of the loop over rows: 1 doesn't read ahead
    programs: int = 1056  # most of a kernel that sums over rows: each writes its part of the sum


def cdiv(number: int, size: int) -> int:
    """How many of `size` hold `number`."""
    return -(-number // size)


def power_of_2(number: int) -> int:
    """The least power of two that is not below `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()


def steps(tiles: int, programs: int) -> int:
    """Tiles for each of about `programs` programs: at least enough, and few values, as each is compiled.

    1, 2, 3, 4, 6, 8, 12, 16, 24...: at most half more than enough.
    """
    wanted = max(1, cdiv(tiles, programs))
    power = power_of_2(wanted)
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= wanted else power


def tile_rows(width: int, elements: int) -> int:
    """Rows of this width that make about so many elements: 1 to 32."""
    return max(1, min(32, elements // power_of_2(width)))
