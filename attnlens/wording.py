"""Format names, numbers and untrusted strings for readers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
NO_VALUE = "–"  # Printed for a missing value

SCIENTIFIC = -1  # Number of decimals that stands for scientific notation, as in 1.2e-05


GENERAL_NAMES = {"best", "checkpoint", "final", "hf", "last", "model", "output", "weights"}
"""First words of folder names that do not identify a model."""


def model_name(identity: str) -> str:
    """Format a model's id as a title: the whole id, or the last part of a path of three or more parts.

    If the last part does not identify the model, as in `runs/bert/checkpoint-500`, the last two parts are used.
    """
    parts = identity.replace("\\", "/").rstrip("/").split("/")
    if len(parts) <= 2:
        return clean(identity)
    general = parts[-1].partition("-")[0].lower() in GENERAL_NAMES
    return clean("/".join(parts[-2:] if general else parts[-1:]))


def clean(text: str) -> str:
    """Return `text`, which may be untrusted, on one line, with � in place of invisible and control characters."""
    return visible(" ".join(text.split()))


def visible(text: str) -> str:
    """Replace every character of `text` that is neither printable nor a line end with �."""
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)


def shorten_line(line: str, most: int) -> str:
    """Shorten a line of more than `most` characters by replacing its middle with an ellipsis (…)."""
    half = most // 2
    return line if len(line) <= most else f"{line[:half]} … {line[-half:]}"


def capitalise(text: str) -> str:
    """Return a text with its first letter in upper case and all others unchanged."""
    return text[:1].upper() + text[1:]


def source_of(name: str) -> str:
    """Return the source of a qualified name: `weights` for `weights.symmetry`; an empty string if there is none."""
    return clean(name.rpartition(".")[0])


def title_of(name: str) -> str:
    """Return a qualified name without its source, in words: `effective rank` for `weights.effective_rank`."""
    return clean(name.rpartition(".")[2]).replace("_", " ")


def decimals_for(values: Iterable[float], figures: int = 3) -> int:
    """Return the number of decimals that show `figures` significant digits of the largest absolute value.

    Return 0 if all numbers are integers below 1e6, and SCIENTIFIC if the largest is below 1e-4 or at least 1e6.
    """
    numbers = list(values)
    largest = max((abs(number) for number in numbers), default=0.0)
    if largest == 0 or (largest < 1e6 and all(number == round(number) for number in numbers)):
        return 0
    if largest < 1e-4 or largest >= 1e6:
        return SCIENTIFIC
    # as many decimals for 1 as for 0.99: a measure within [−1, 1] can have a null near 0.001
    before = 0 if largest == 1 else math.floor(math.log10(largest)) + 1
    return max(0, figures - before)


def decimals_with_error(values: Iterable[float], error: float | None) -> int:
    """Return the number of decimals to print for numbers with a standard error.

    The decimals show at most two digits of the error, or one if two would need more than three decimals.
    """
    decimals = decimals_for(values)
    if not error or SCIENTIFIC in (decimals, decimals_for([error], 2)):
        return decimals
    first, second = decimals_for([error], 1), decimals_for([error], 2)
    return max(min(decimals, second, max(3, first)), min(3, first))


def format_number(number: float | None, decimals: int) -> str:
    """Format a number with fixed decimals and a true minus sign; −0 becomes 0, and a missing number becomes `–`."""
    if number is None or math.isnan(number):
        return NO_VALUE
    if decimals == SCIENTIFIC:
        mantissa, _, exponent = f"{number:.1e}".partition("e")
        return f"{mantissa.replace('-', '−')}e{exponent}"  # the exponent keeps its hyphen, as in code
    rounded = round(number, decimals)
    return f"{rounded if rounded else 0.0:.{decimals}f}".replace("-", "−")


def format_error(number: float, decimals: int) -> str:
    """Format an error with a fixed number of decimals; a positive error that rounds to 0 becomes, e.g., `<0.0005`."""
    shown = format_number(number, decimals)
    if decimals == SCIENTIFIC or math.isnan(number) or round(number, decimals) != 0:
        return shown
    return f"<{0.5 * 10**-decimals:.{decimals + 1}f}" if number > 0 else "0"


def short(number: float) -> str:
    """Format a single number with two significant digits."""
    return format_number(number, decimals_for([number], figures=2))


LEAST_P = 1e-4  # Smallest p-value that is printed; the tails of null distributions are not known exactly


def format_p(number: float | None) -> str:
    """Format a p-value with two significant digits; `< 1e-4` below LEAST_P, and `–` for None."""
    if number is None:
        return NO_VALUE
    return f"{number:.2g}" if number >= LEAST_P else "< 1e-4"


def format_count(number: int, noun: str) -> str:
    """Format a count with its noun: `1 head`, `2 heads`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def join_items(items: Iterable[object], limit: int = 6, between: str = ", ") -> str:
    """Join items as `a, b, c`; if there are more than `limit`, join the first `limit` and append `and N more`."""
    names = [clean(str(item)) for item in items]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return between.join(names[:limit]) + more


def format_spans(numbers: Iterable[int], limit: int = 6) -> str:
    """Format ascending numbers as spans, `0–3, 7`; after the first `limit` spans, append `and N more`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return join_items((str(low) if low == high else f"{low}–{high}" for low, high in spans), limit)


def big(number: int) -> str:
    """Format a count, e.g. of parameters or tokens, with three significant digits: 912, 1.3 M, 22.7 M, 7.24 B."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


def group_pairs(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the second elements of the pairs, grouped by the first element, in the order of the pairs."""
    groups: dict[K, list[V]] = {}
    for first, second in pairs:
        groups.setdefault(first, []).append(second)
    return groups
