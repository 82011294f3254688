"""A Rule: a subject, what must hold of it, and where it was written; rules from tables, texts and files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlens.errors import UsageError
from attnlens.files import read_bytes, written
from attnlens.rules.grammar import RuleCondition, condition
from attnlens.wording import clean

MOST = 1000
"""Rules beyond which no table goes."""
DEEPEST = 50
"""How deep tables of rules may be nested: a path into a report has six parts."""
LARGEST = 2**20
"""Bytes of the largest file of rules."""
TABLES = (("check",), ("tool", "attnlens", "check"))
"""Where rules stand in attnlens.toml, and in pyproject.toml."""
EXAMPLE = '"tokens.entropy" = ["min > 0.05"]'


@dataclass(frozen=True)
class Rule:
    """One condition on one subject."""

    subject: str
    """`tokens.entropy`, `tokens.entropy.se`, `|weights.symmetry.z|`, `swap.loss.delta`."""
    condition: RuleCondition
    """What must hold."""
    wanted: str
    """The condition as it is written."""
    file: str | None = None
    """The file in which it stands."""

    @property
    def spelling(self) -> str:
        """The rule on one line."""
        return f"{self.named}: {self.wanted}"

    @property
    def named(self) -> str:
        """The subject, on one line."""
        return clean(self.subject)

    @property
    def place(self) -> str:
        """The prefix of a sentence about it, `attnlens.toml: `; empty if the rule was passed in the call."""
        return _place(self.file)

    @property
    def id(self) -> str:
        """What stays when its numbers are changed: `tokens.entropy: min > @layers 0,1`."""
        kept = self.condition
        return f"{self.named}: {kept.measured} {kept.comparison.operator}{kept.filters}"


def rule(subject: str, text: object, file: str | None = None) -> Rule:
    """The rule; UsageError, which names its place, where it makes no sense."""
    if not subject.strip("| "):
        raise UsageError(
            f"{_place(file)}the rule {written(text)} is about nothing.", f"Name a measure, as in {EXAMPLE}."
        )
    try:
        return Rule(subject.strip(), condition(text), clean(str(text)), file)
    except UsageError as error:
        raise UsageError(f"{_place(file)}{error.problem}", error.remedy) from None


def _place(file: str | None) -> str:
    return "" if file is None else f"{clean(file)}: "


def spelled(text: str) -> Rule:
    """The rule of `--rule`, as in `tokens.entropy: min > 0.05`. Raises UsageError for anything else."""
    subject, colon, wanted = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not colon:
        raise UsageError(
            f"The rule {written(text)} has no colon.", "Write it as in --rule 'tokens.entropy: min > 0.05'."
        )
    return rule(subject, wanted.strip())


def tabled(table: Mapping[str, Any], file: str | None = None) -> list[Rule]:
    """The rules of a table subject → condition or conditions; a table in it continues the subject behind a dot."""
    found: list[Rule] = []
    for subject, texts in _flat(table, ""):
        if not isinstance(texts, str | list | tuple) or not texts:
            raise UsageError(
                f"{_place(file)}{clean(subject)} has no condition: {written(texts)}.", f"Write it as in {EXAMPLE}."
            )
        found += [rule(subject, text, file) for text in ([texts] if isinstance(texts, str) else texts)]
    if len(found) > MOST:
        raise UsageError(f"There are {len(found)} rules.", f"Give at most {MOST}.")
    return found


def _flat(table: Mapping[str, Any], before: str) -> Iterable[tuple[str, Any]]:
    if before.count(".") > DEEPEST:
        raise UsageError(f"A table of rules is nested more than {DEEPEST} deep.", f"Write it as in {EXAMPLE}.")
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def read_rules(path: Path, *, named: bool = True) -> list[Rule]:
    """The rules of a TOML file, from [check] or [tool.attnlens.check].

    `named`: it was asked for, so that a file without rules is an error. Raises UsageError for a file that can't be
    read, is no TOML, or holds a rule that makes no sense.
    """
    import tomllib

    remedy = f"Give a TOML file with a table [check], as in {EXAMPLE}."
    content = read_bytes(path, UsageError, remedy, most=LARGEST)
    try:
        told = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.", remedy) from None
    for names in TABLES:
        table: Any = told
        for name in names:
            table = table.get(name, {}) if isinstance(table, Mapping) else {}
        if not isinstance(table, Mapping):
            raise UsageError(f"{path}: {'.'.join(names)} must be a table.", f"Write it as [{'.'.join(names)}].")
        if table:
            return tabled(table, str(path))
    if named:
        raise UsageError(f"{path} has no rule.", remedy)
    return []


def rules_of(given: object) -> list[Rule]:
    """Rules as a caller in Python gives them: a table, a path of a TOML file, a text or several.

    Raises UsageError for anything else, and where there is no rule.
    """
    found: list[Rule] = []
    if isinstance(given, Mapping):
        found = tabled(given)
    elif isinstance(given, Path) or (isinstance(given, str) and given.endswith(".toml")):
        found = read_rules(Path(given))
    elif isinstance(given, str):
        found = [spelled(given)]
    elif isinstance(given, Iterable):
        found = [one if isinstance(one, Rule) else spelled(one) for one in given]
    if not found:
        raise UsageError(f"rules={written(given)} holds no rule.", 'Write {"tokens.entropy": ["min > 0.05"]}.')
    return found
