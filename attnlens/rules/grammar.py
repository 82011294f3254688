"""Parses conditions such as `min > 0.05`, `median in 0.4..0.9` and `share(> 0.9) < 0.1 @layers 0-3`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from attnlens.choices import Part
from attnlens.errors import UsageError
from attnlens.files import written

LONGEST = 200
"""Characters of a condition; none that a person writes comes near."""
HIGHEST = 9999
"""Largest number of a layer or head."""
NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
COMPARISON = re.compile(rf"(<=|>=|==|!=|<|>)\s*({NUMBER})|in\s+({NUMBER})\s*\.\.\s*({NUMBER})")
CONDITION = re.compile(r"(q[0-9]{1,3}(?:\.[0-9]+)?|[a-z]+)\b\s*(?:\(([^()]*)\))?\s*(\S.*)", re.DOTALL)
RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
WHOLE = ("min", "max", "mean", "median", "count", "value")
"""The aggregates that have no number of their own; `value` compares every head, or the one field, by itself."""
SPELLINGS = "min, max, mean, median, q05, share(> 0.9), count or value"
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"==": operator.eq, "!=": operator.ne},
}


@dataclass(frozen=True)
class Criterion:
    """What a number is held against: an operator and a bound, or a range with both ends in it."""

    operator: str
    """<, <=, >, >=, ==, != or in."""
    low: float
    """The bound, or the range's lower end."""
    high: float
    """The same bound, or the range's upper end."""

    def holds(self, number: float) -> bool:
        """Whether the number is as wanted."""
        if self.operator == "in":
            return self.low <= number <= self.high
        return OPERATORS[self.operator](number, self.low)

    def excess(self, number: float) -> float:
        """How far the number is from where it should be; the larger, the worse."""
        return max(self.low - number, number - self.high) if self.operator in ("in", "==") else abs(number - self.low)

    def __str__(self) -> str:
        return f"{self.operator} {self.low:g}" + (f"..{self.high:g}" if self.operator == "in" else "")


@dataclass(frozen=True)
class RuleCondition:
    """An aggregate over heads, what it must be, and which heads are looked at."""

    aggregate: str
    """One of WHOLE, `share`, or `q05` and the like."""
    comparison: Criterion
    """What it must be."""
    share: Criterion | None = None
    """What the heads that are counted must be, of a share."""
    layers: frozenset[int] | None = None
    """Only these layers; None: all."""
    heads: frozenset[int] | None = None
    """Only these heads; None: all."""
    part: str | None = None
    """Only this part; None: all."""

    @property
    def quantile(self) -> float | None:
        """Which quantile it takes, of `median` and `q05`; None for any other aggregate."""
        if self.aggregate == "median":
            return 0.5
        return float(self.aggregate[1:]) / 100 if self.aggregate[0] == "q" else None

    @property
    def measured(self) -> str:
        """What is compared: `share(> 0.9)`."""
        return self.aggregate if self.share is None else f"{self.aggregate}({self.share})"

    @property
    def filters(self) -> str:
        """Which heads, as it is written: ` @layers 0,1,2 @part decoder`; empty where it is all."""
        numbers = {"layers": self.layers, "heads": self.heads}
        said = [f" @{name} {','.join(map(str, sorted(found)))}" for name, found in numbers.items() if found is not None]
        return "".join([*said, f" @part {self.part}" if self.part else ""])


def condition(text: object) -> RuleCondition:
    """The condition that the text says. Raises UsageError for anything else; nothing in it is ever run."""
    if not isinstance(text, str) or len(text) > LONGEST:
        raise _unread(text, f"a condition is a text of at most {LONGEST} characters.")
    first, *filters = text.split("@")
    found = CONDITION.fullmatch(first.strip())
    if found is None:
        raise _unread(text, "an aggregate comes first, and what it must be behind it.")
    aggregate, inner, rest = found.groups()
    quantile = aggregate[1:2].isdecimal()
    if not (aggregate[0] == "q" and float(aggregate[1:]) <= 100 if quantile else aggregate in (*WHOLE, "share")):
        raise _unread(text, f"there is no aggregate {aggregate!r}: {SPELLINGS}.")
    if (aggregate == "share") != (inner is not None):
        raise _unread(text, "share, and nothing else, has a comparison in brackets, as in share(> 0.9) < 0.1.")
    share = None if inner is None else _comparison(text, inner)
    return RuleCondition(aggregate, _comparison(text, rest), share, *_filters(text, filters))


def _comparison(text: object, words: str) -> Criterion:
    found = COMPARISON.fullmatch(words.strip())
    if found is None:
        raise _unread(text, f"{written(words.strip())} is none of < <= > >= == != and a number, or in 0.4..0.9.")
    sign, bound, low, high = found.groups()
    ends = [float(number) for number in (bound, low, high) if number is not None]
    if not all(map(math.isfinite, ends)):
        raise _unread(text, "a number in it is beyond all numbers.")
    if ends[-1] < ends[0]:
        raise _unread(text, "its range runs backwards.")
    return Criterion(sign or "in", ends[0], ends[-1])


def _filters(text: object, words: list[str]) -> tuple[frozenset[int] | None, frozenset[int] | None, str | None]:
    """Layers, heads and part."""
    numbers: dict[str, frozenset[int]] = {}
    part: str | None = None
    for word in words:
        name, _, what = word.strip().partition(" ")
        if name in numbers or (name == "part" and part):
            raise _unread(text, f"@{name} stands in it twice.")
        if name in ("layers", "heads"):
            numbers[name] = _numbers(text, what.strip())
        elif name == "part" and what.strip() in get_args(Part):
            part = what.strip()
        else:
            raise _unread(text, "behind an @ stand layers 0-3, heads 0,5 or part decoder.")
    return numbers.get("layers"), numbers.get("heads"), part


def _numbers(text: object, words: str) -> frozenset[int]:
    """`0-3,7` as numbers."""
    found: set[int] = set()
    for word in words.split(","):
        ends = RANGE.fullmatch(word.strip())
        if ends is None:
            raise _unread(text, f"{written(words)} is no list of numbers up to {HIGHEST}, such as 0-3,7.")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first:
            raise _unread(text, f"{written(word.strip())} runs backwards.")
        found.update(range(first, last + 1))
    return frozenset(found)


def _unread(text: object, why: str) -> UsageError:
    return UsageError(f"The rule {written(text)} can't be read: {why}", 'Write it as in "min > 0.05 @layers 0-3".')
