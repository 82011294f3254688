"""Cuts what stands in an order into training, validation and test parts by contiguous blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

STRETCHES = 10
"""Stretches into which a long text is cut, each with a block of every part: the end of a book is no sample of it."""
SHARES = (0.05, 0.05)
"""Shares of validation and test."""
PARTS = ("training", "validation", "test")


def blocks(count: int, *, stretches: int = STRETCHES, shares: Sequence[float] = SHARES) -> Mapping[str, list[range]]:
    """The numbers below `count` as blocks of each part: every stretch begins with training and ends with test.

    Neighbours are kept together since they tell of each other: a verse goes on where the one before stopped, and
    windows that were drawn at random would put the two halves of a sentence into training and test. Only the two ends
    of a held-out block have neighbours in other parts. A part is empty only where `count` is below 3.
    """
    found: dict[str, list[range]] = {part: [] for part in PARTS}
    for number in range(stretches):
        start, stop = number * count // stretches, (number + 1) * count // stretches
        test = stop - max(1, round((stop - start) * shares[1]))
        validation = test - max(1, round((stop - start) * shares[0]))
        for part, block in zip(
            PARTS, (range(start, validation), range(validation, test), range(test, stop)), strict=True
        ):
            found[part].append(range(max(block.start, start), max(block.stop, start)))
    return {part: [block for block in each if block] for part, each in found.items()}


def numbers(parts: Mapping[str, list[range]]) -> dict[str, list[int]]:
    """The numbers in the blocks of each part."""
    return {part: [number for block in each for number in block] for part, each in parts.items()}
