"""An option of a run: its help, its default, and which values make sense; read from the annotations of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from attnlens.arguments import LARGEST, switch
from attnlens.registry import checked_name
from attnlens.requests.values import Numbers, Words, numbers, whole, words

CallOnly = Literal["", "dangerous", "read", "written"]


def unchecked(_name: str, given: Any) -> Any:
    """Any value, as it is."""
    return given


@dataclass(frozen=True)
class Option:
    """One option: what its help says, what it is where it is not given, and which values make sense."""

    help: str
    default: Any = None
    panel: str = "Options"
    metavar: str | None = None
    """What stands for its value in the help; None where its type says it."""
    flag: str = ""
    """How it is typed, where that is not its name with dashes."""
    shown: str | None = None
    """What the help says of its default, where that is not the default itself."""
    least: int | None = None
    most: int | None = None
    """Bounds of a whole number."""
    call_only: CallOnly = ""
    """Why no file of defaults may set it, for a file may lie beside a stranger's model: it is dangerous, or names what
    is read or written; empty where one may."""
    names: tuple[str, ...] = ()
    """The words that there are; none: any."""
    noun: str = ""
    """What these are names of, where that is not the option's own name."""
    typed: Any = None
    """What typer makes of its word, where its type does not say it."""
    type: Any = str
    """The type of its values, by its annotation."""
    check: Callable[[str, Any], Any] = unchecked
    """(name, value) → the value as the run has it; raises UsageError. Where none is named, by its type."""


@cache
def options(kind: type) -> dict[str, Option]:
    """The options of a class whose annotations hold them, by name."""
    return {name: _completed(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _completed(hint: Any) -> Option:
    """The option of an annotation, with the names and the check that its type implies."""
    plain: Any
    option: Option
    plain, option = get_args(hint)[:2]
    literal = next((part for part in alternatives(plain) if get_origin(part) is Literal), None)
    option = replace(option, type=plain, names=option.names or get_args(literal))
    return option if option.check is not unchecked else replace(option, check=_check_of(plain, option))


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types that a union has; of any other type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _check_of(plain: Any, option: Option) -> Callable[[str, Any], Any]:
    """How a value of that type is checked."""
    if option.names:
        return lambda name, given: checked_name(option.noun or name, given, option.names)
    if plain is Words:
        return words
    if plain in (Numbers, Numbers | None):
        return numbers
    if bool in alternatives(plain):
        return switch
    if int in alternatives(plain):
        return lambda name, given: whole(name, given, option.least or 0, option.most or LARGEST)
    return unchecked


def checked(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for of a kind of run, every option with its value or its default.

    Raises UsageError for an option that does not exist (did you mean), and for values that make no sense.
    """
    known = options(kind)
    for name in given:
        checked_name("option", name, known)
    return {name: value_of(option, name, given.get(name, option.default)) for name, option in known.items()}


def value_of(option: Option, name: str, given: Any) -> Any:
    """A value as the run has it; None where that is the default. Raises UsageError where it makes no sense."""
    if given is None and option.default is None:
        return None
    return option.check(name, given)
