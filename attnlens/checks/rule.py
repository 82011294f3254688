"""Parse rules such as `tokens.entropy: min > 0.05 @layers 0-3` from tables, strings and files; define tolerances."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from attnlens.analyzers.registry import MeasureInfo
from attnlens.arguments import listed_layers, listed_numbers
from attnlens.choices import FDR, RELATIVE, Part
from attnlens.errors import UsageError
from attnlens.files import format_value, read_toml
from attnlens.wording import clean

if TYPE_CHECKING:
    from attnlens.records import Head, ModelInfo

DEEPEST = 50  # maximum nesting depth of tables of rules; a path into a report has six parts
LONGEST = 200  # maximum length of a condition in characters, far above that of real conditions
TABLES = (("check",), ("tool", "attnlens", "check"))  # names of the tables of rules in attnlens.toml and pyproject.toml
EXAMPLE = '"tokens.entropy" = ["min > 0.05"]'
NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
COMPARISON = re.compile(rf"(<=|>=|==|!=|<|>)\s*({NUMBER})|in\s+({NUMBER})\s*\.\.\s*({NUMBER})")
CONDITION = re.compile(r"(q[0-9]{1,3}(?:\.[0-9]+)?|[a-z]+)\b\s*(?:\(([^()]*)\))?\s*(\S.*)", re.DOTALL)
WHOLE = ("min", "max", "mean", "median", "count", "value")  # aggregates; `value` compares each head, or a single field
SPELLINGS = "min, max, mean, median, q05, share(> 0.9), count or value"
FILTERS = ("layers", "heads", "part")  # words that can follow @
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"==": operator.eq, "!=": operator.ne, "in": operator.ge},
}


@dataclass(frozen=True)
class Criterion:
    """Comparison of a number with a bound, or with a closed range."""

    operator: str  # <, <=, >, >=, ==, != or in
    low: float  # bound, or lower end of the range
    high: float  # bound, or upper end of the range

    def holds(self, number: float) -> bool:
        """Return True if the number satisfies the comparison."""
        return OPERATORS[self.operator](number, self.low) and (self.operator != "in" or number <= self.high)

    def excess(self, number: float) -> float:
        """Compute the number's distance from the bound, or from the nearer end of the range (negative inside)."""
        return max(self.low - number, number - self.high) if self.operator in ("in", "==") else abs(number - self.low)

    def __str__(self) -> str:
        return f"{self.operator} {self.low:g}" + (f"..{self.high:g}" if self.operator == "in" else "")


@dataclass(frozen=True)
class Rule:
    """Rule that selects heads, aggregates their values of one subject, and compares the aggregate with a bound."""

    aggregate: str  # a member of WHOLE, `share`, or a quantile such as `q05`
    comparison: Criterion  # comparison of the aggregate with a bound
    share: Criterion | None = None  # for the aggregate `share`: the comparison that counted heads satisfy
    selection: Mapping[str, frozenset[int | str]] = field(default_factory=dict)  # allowed values, by member of FILTERS
    subject: str = ""  # `tokens.entropy`, `tokens.entropy.se`, `|weights.symmetry.z|`, `swap.loss.delta`
    wanted: str = ""  # condition as written
    file: str | None = None  # file that contains the rule

    @property
    def spelling(self) -> str:
        """The rule as written, on one line: `tokens.entropy: min > 0.05`."""
        return f"{self.named}: {self.wanted}"

    @property
    def named(self) -> str:
        """Subject without line breaks and control characters, which a malicious subject can contain."""
        return clean(self.subject)

    @property
    def absolute(self) -> bool:
        """True if absolute values are compared: `|weights.symmetry.z|`."""
        return len(self.subject) > 2 and self.subject[0] == self.subject[-1] == "|"

    @property
    def stem(self) -> str:
        """Subject without the bars for absolute values."""
        return self.subject[1:-1].strip() if self.absolute else self.subject

    @property
    def place(self) -> str:
        """Prefix of messages about the rule, such as `attnlens.toml: `; empty if the rule is not from a file."""
        return "" if self.file is None else f"{clean(self.file)}: "

    @property
    def id(self) -> str:
        """Identifier, which stays the same if the bound changes: `tokens.entropy: min > @layers 0,1`."""
        return f"{self.named}: {self.measured} {self.comparison.operator}{self.filters}"

    @property
    def measured(self) -> str:
        """Name of the aggregate, such as `min` or `share(> 0.9)`."""
        return self.aggregate if self.share is None else f"{self.aggregate}({self.share})"

    @property
    def filters(self) -> str:
        """Selection of heads in a standard form: ` @layers 0,1,2 @part decoder`; empty for all heads."""
        chosen = [(name, self.selection[name]) for name in FILTERS if name in self.selection]
        ordered = {name: sorted(values, key=lambda value: (isinstance(value, str), value)) for name, values in chosen}
        return "".join(f" @{name} {','.join(map(str, values))}" for name, values in ordered.items())

    def covers(self, head: Head, model: ModelInfo) -> bool:
        """Return True if the selection contains this head of the model."""
        layers = model.layer_choices(head.layer, head.part)
        choices: dict[str, set[int | str]] = {"layers": layers, "heads": {head.head}, "part": {head.part}}
        return all(choices[name] & values for name, values in self.selection.items())


def parse_condition(text: object) -> Rule:
    """Parse a condition (a rule without a subject) from untrusted text. Raise UsageError if it is invalid."""
    if not isinstance(text, str) or len(text) > LONGEST:
        raise _parse_error(text, f"a condition must be a string of at most {LONGEST} characters.")
    first, *filters = text.split("@")
    match = CONDITION.fullmatch(first.strip())
    if match is None:
        raise _parse_error(text, "write the aggregate first, then the comparison.")
    aggregate, inner, comparison = match.groups()
    if not (float(aggregate[1:]) <= 100 if aggregate[1:2].isdecimal() else aggregate in (*WHOLE, "share")):
        raise _parse_error(text, f"unknown aggregate {aggregate!r}; choose {SPELLINGS}.")
    if (aggregate == "share") != (inner is not None):
        raise _parse_error(
            text, "`share`, and no other aggregate, needs a comparison in brackets, as in share(> 0.9) < 0.1."
        )
    share = None if inner is None else _parse_comparison(text, inner)
    return Rule(aggregate, _parse_comparison(text, comparison), share, _parse_filters(text, filters))


def _parse_comparison(text: str, words: str) -> Criterion:
    match = COMPARISON.fullmatch(words.strip())
    if match is None:
        known = "write <, <=, >, >=, == or != and a number, or a range: in 0.4..0.9."
        raise _parse_error(text, f"{format_value(words.strip())} is not a comparison; {known}")
    ends = [float(number) for number in match.groups()[1:] if number is not None]
    if not all(map(math.isfinite, ends)):
        raise _parse_error(text, "numbers must be finite.")
    if ends[-1] < ends[0]:
        raise _parse_error(text, "the range is reversed: its start exceeds its end.")
    return Criterion(match[1] or "in", ends[0], ends[-1])


def _parse_filters(text: str, words: Iterable[str]) -> dict[str, frozenset[int | str]]:
    filters: dict[str, frozenset[int | str]] = {}
    for word in words:
        name, _, what = word.strip().partition(" ")
        if name in filters:
            raise _parse_error(text, f"@{name} occurs twice.")
        if name in ("layers", "heads"):
            parse = listed_layers if name == "layers" else listed_numbers
            try:
                filters[name] = frozenset(parse(f"@{name}", what))
            except UsageError as error:
                raise _parse_error(text, error.problem) from None
        elif name == "part" and what.strip() in get_args(Part):
            filters[name] = frozenset([what.strip()])
        else:
            raise _parse_error(text, "write @layers or @heads with numbers, or @part with a part, as in @part decoder.")
    return filters


def _parse_error(text: object, why: str) -> UsageError:
    remedy = 'Write a condition such as "min > 0.05 @layers 0-3".'
    return UsageError(f"Cannot parse the condition {format_value(text)}: {why}", remedy)


def _build_rule(subject: str, text: object) -> Rule:
    if not subject.strip("| "):
        raise UsageError(f"The rule {format_value(text)} does not name a measure.", f"Write, e.g., {EXAMPLE}.")
    return replace(parse_condition(text), subject=subject.strip(), wanted=clean(str(text)))


def parse_rule(text: object) -> Rule:
    """Parse the value of `--rule`, such as `tokens.entropy: min > 0.05`. Raise UsageError if it is invalid."""
    subject, colon, wanted = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not colon:
        remedy = "Write, e.g., --rule 'tokens.entropy: min > 0.1'."
        raise UsageError(f"The rule {format_value(text)} lacks a colon after the name of its measure.", remedy)
    return _build_rule(subject, wanted.strip())


def parse_table(table: Mapping[str, object], file: str | None = None) -> list[Rule]:
    """Parse a table of conditions, keyed by subject; the keys of nested tables, joined by dots, form the subject.

    Raise UsageError if a condition is invalid; the error names `file`.
    """
    try:
        return [replace(rule, file=file) for rule in _parse_entries(table)]
    except UsageError as error:
        raise UsageError(f"{'' if file is None else clean(file) + ': '}{error.problem}", error.remedy) from None


def _parse_entries(table: Mapping[str, object], before: str = "") -> Iterator[Rule]:
    if before.count(".") > DEEPEST:
        raise UsageError(f"A table of rules is nested more than {DEEPEST} levels deep.", f"Write, e.g., {EXAMPLE}.")
    for name, value in table.items():
        subject, texts = f"{before}{name}", [value] if isinstance(value, str) else value
        if isinstance(value, Mapping) and value:
            yield from _parse_entries(value, f"{subject}.")
        elif isinstance(texts, list | tuple) and texts:
            yield from (_build_rule(subject, text) for text in texts)
        else:
            problem = f"{clean(subject)} must be a condition or a list of conditions, but is {format_value(value)}."
            raise UsageError(problem, f"Write, e.g., {EXAMPLE}.")


def read_rules(path: Path, *, named: bool = True) -> list[Rule]:
    """Read the rules in the table [check] or [tool.attnlens.check] of a TOML file.

    Raise UsageError if a rule is invalid or, if `named` (by the user), if the file contains no rules.
    """
    remedy = f"Give a TOML file with a table [check] that contains, e.g., {EXAMPLE}."
    table = read_toml(path, TABLES, remedy)
    if named and not table:
        raise UsageError(f"{path} contains no rules.", remedy)
    return parse_table(table, str(path))


def parse_rules(source: object) -> list[Rule]:
    """Parse rules given in Python: a table, the path of a TOML file, a string, or a list of strings and Rules.

    Raise UsageError if there are no rules or if a rule is invalid.
    """
    rules: list[Rule] = []
    if isinstance(source, Mapping):
        rules = parse_table(source)
    elif isinstance(source, Path) or (isinstance(source, str) and source.endswith(".toml")):
        rules = read_rules(Path(source))
    elif isinstance(source, Iterable):
        texts = [source] if isinstance(source, str) else source
        rules = [item if isinstance(item, Rule) else parse_rule(item) for item in texts]
    if not rules:
        problem = f"rules={format_value(source)} contains no rules."
        raise UsageError(problem, 'Pass, e.g., {"tokens.entropy": ["min > 0.05"]}.')
    return rules


@dataclass(frozen=True)
class Tolerance:
    """Tolerance for changes: a head fails if its change exceeds both bounds and, if tested, is significant."""

    relative: float = RELATIVE  # allowed change as a share of the baseline's value
    absolute: float | None = None  # allowed change in the measure's unit; None: `relative` times the measure's range
    fdr: float = FDR  # maximum expected share of false alarms among significant changes (Benjamini–Hochberg)

    def __str__(self) -> str:
        return f"±{100 * self.relative:g} %" + (f", ±{self.absolute:g}" if self.absolute else "")

    def of(self, info: MeasureInfo) -> Tolerance:
        """Return the tolerance for a measure; `absolute` defaults to `relative` times the range (0 if unbounded)."""
        width = 0.0 if info.low is None or info.high is None else info.high - info.low
        return self if self.absolute is not None else replace(self, absolute=self.relative * width)

    def __post_init__(self) -> None:
        """Raise UsageError for invalid bounds."""
        for name, number in vars(self).items():
            most = 1.0 if name == "fdr" else math.inf
            valid = isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < most
            if not valid and not (name == "absolute" and number is None):
                limits = "of at least 0 and below 1" if name == "fdr" else "of at least 0"
                problem = f"{name} must be a number {limits}, not {format_value(number)}."
                raise UsageError(problem, f"Pass, e.g., {name}=0.05.")
