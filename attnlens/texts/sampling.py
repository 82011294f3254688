"""Which windows of a text are fed: spread evenly over it, the first ones, or a random choice."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from attnlens.choices import Placement


def shares(available: Sequence[int], wanted: int) -> list[int]:
    """How many windows each text gives: as equal as the texts allow, `wanted` in all, or all there are."""
    given = [0] * len(available)
    left = min(wanted, sum(available))
    while left:
        open_ = [text for text, most in enumerate(available) if given[text] < most]
        for text in open_[: left if left < len(open_) else None]:
            given[text] += 1
            left -= 1
    return given


def chosen(available: int, wanted: int, placement: Placement, seed: int, taken: Collection[int] = ()) -> list[int]:
    """The numbers of the windows that are fed, ascending, of `available` ones without those `taken`.

    `spread` is systematic sampling: the window numbers ⌊(i + u)·n/k⌋ for i = 0 … k − 1, u in [0, 1) drawn from `seed`
    (Cochran 1977, chapter 8); `random` draws k of n without replacement; `first` are the first k.
    """
    free = [number for number in range(available) if number not in taken]
    count = min(wanted, len(free))
    draws = Random(seed)  # noqa: S311  # no secret
    if placement == "first":
        return free[:count]
    if placement == "random":
        return sorted(draws.sample(free, count))
    start = draws.random()
    return [free[int((index + start) * len(free) / count)] for index in range(count)]
