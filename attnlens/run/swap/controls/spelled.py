"""Spells the kernels of all sites as one: where sites differ, with the range of each number."""

from __future__ import annotations

from collections.abc import Iterable

from attnlens.hooks import OWN
from attnlens.kernels import Kernel

WHOLE = "all"
"""What stands for the width of a window at a site that keeps all keys."""


def spelled(kernels: Iterable[Kernel]) -> str:
    """`sink-window:4,68`, or where sites differ `sink-window:4,68–80 by layer`; where some keep all keys, `4,68–all`.

    Windows of different names stand beside each other, `window:2/sink-window:1,2 by layer`.
    """
    found = list(dict.fromkeys(kernel.spelling for kernel in kernels))
    if len(found) < 2:
        return "".join(found)
    by_name: dict[str, list[list[int]]] = {}
    for spelling in found:
        name, _, numbers = spelling.partition(":")
        if spelling != OWN.spelling:
            by_name.setdefault(name, []).append([int(number) for number in numbers.split(",")])
    whole = OWN.spelling in found
    return "/".join(f"{name}:{_ranges(rows, whole=whole)}" for name, rows in by_name.items()) + " by layer"


def _ranges(rows: list[list[int]], *, whole: bool) -> str:
    """Of each place the least and the largest number; the last is that of the window."""
    *firsts, last = [(min(numbers), max(numbers)) for numbers in zip(*rows, strict=True)]
    least, most = last
    told = [f"{low}" if low == high else f"{low}–{high}" for low, high in firsts]
    end = f"{least}–{WHOLE}" if whole else f"{least}" if least == most else f"{least}–{most}"
    return ",".join([*told, end])
