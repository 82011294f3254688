"""Writes names, numbers and other people's strings as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
NO_VALUE = "–"
"""What stands where there is no value."""

SCIENTIFIC = -1
"""The number of decimals that asks for the form 1.2e-05."""


def model_name(identity: str) -> str:
    """A model's id as a title: a path below other folders is cut to its last two parts, all else stays."""
    parts = identity.replace("\\", "/").rstrip("/").split("/")
    return clean(identity if len(parts) <= 2 else "…/" + "/".join(parts[-2:]))


def clean(text: str) -> str:
    """`text` on one line, with every character that steers a terminal or hides itself made visible as �.

    Reports come from strangers: an escape sequence in a model's name must not reach the screen.
    """
    return visible(" ".join(text.split()))


def visible(text: str) -> str:
    """`text` with its blanks and line ends, and every other character that steers a terminal made visible as �."""
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)


def shortened(line: str, most: int) -> str:
    """The line, or where it has more characters than that its beginning and end, with … between them."""
    half = most // 2
    return line if len(line) <= most else f"{line[:half]} … {line[-half:]}"


def source_of(name: str) -> str:
    """The source of a qualified name: `weights` of `weights.symmetry`; empty where there is none."""
    return clean(name.rpartition(".")[0])


def title_of(name: str) -> str:
    """The name without its source, as words: `effective rank` of `weights.effective_rank`."""
    return clean(name.rpartition(".")[2]).replace("_", " ")


def decimals_for(values: Iterable[float], figures: int = 3) -> int:
    """Decimals that show so many figures of the largest of the numbers; SCIENTIFIC for extreme ones."""
    numbers = list(values)
    largest = max((abs(number) for number in numbers), default=0.0)
    if largest == 0 or (largest < 1e6 and all(number == round(number) for number in numbers)):
        return 0
    if largest < 1e-4 or largest >= 1e6:
        return SCIENTIFIC
    # a measure within [−1, 1] keeps its decimals at 1 as well: its null is near 0.001
    before = 0 if largest == 1 else math.floor(math.log10(largest)) + 1
    return max(0, figures - before)


def decimals_with_error(values: Iterable[float], error: float | None) -> int:
    """Decimals for numbers with that standard error: no more than its second figure, and its first where three do."""
    decimals = decimals_for(values)
    if not error or SCIENTIFIC in (decimals, decimals_for([error], 2)):
        return decimals
    first, second = decimals_for([error], 1), decimals_for([error], 2)
    return max(min(decimals, second, max(3, first)), min(3, first))


def written(number: float | None, decimals: int) -> str:
    """The number with that many decimals, never −0; `–` where there is none."""
    if number is None or math.isnan(number):
        return NO_VALUE
    if decimals == SCIENTIFIC:
        return f"{number:.1e}"
    rounded = round(number, decimals)
    return f"{rounded if rounded else 0.0:.{decimals}f}"


def spread(number: float, decimals: int) -> str:
    """An error with that many decimals; `<0.0005` where these would say 0 of one that is not, 0 of one that is."""
    shown = written(number, decimals)
    if decimals == SCIENTIFIC or math.isnan(number) or float(shown) != 0:
        return shown
    return f"<{0.5 * 10**-decimals:.{decimals + 1}f}" if number > 0 else "0"


def short(number: float) -> str:
    """One number by itself, with two figures, as an error is given."""
    return written(number, decimals_for([number], figures=2))


def counted(number: int, noun: str) -> str:
    """`1 head`, `2 heads`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(items: Iterable[object], limit: int = 6, between: str = ", ") -> str:
    """`a, b, c`, and how many more where there are more than `limit`."""
    names = [clean(str(item)) for item in items]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return between.join(names[:limit]) + more


def big(number: int) -> str:
    """A count of parameters: 912, 1.3 M, 22.7 M, 7.24 B."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


def gathered(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Each first of the pairs with all its seconds, in the order in which they come."""
    found: dict[K, list[V]] = {}
    for first, second in pairs:
        found.setdefault(first, []).append(second)
    return found
