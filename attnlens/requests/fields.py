"""Options of runs: help, default and valid values, read from the annotations of a request."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import index
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from attnlens import arguments, registry
from attnlens.arguments import LARGEST, checked_name, path, several, shown, switch, word
from attnlens.errors import UsageError
from attnlens.files import local_path

Words = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One name or path, or several."""
Numbers = Iterable[int]
"""Numbers of layers or heads."""
DEVICES = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,4})?")


def words(what: str, given: Words) -> list[str]:
    """Return names or paths as strings, a single one too. Raise UsageError for other types and empty names."""
    alone = isinstance(given, str | bytes | os.PathLike) or not isinstance(given, Iterable)
    items: list[Any] = [given] if alone else several(what, cast("Iterable[Any]", given))
    for item in items:
        if not isinstance(item, str | os.PathLike):
            raise UsageError(f"{what}={shown(given)} holds no string: {shown(item)}.", "Give strings or paths.")
    return [path(what, item) for item in items]


def whole(what: str, given: Any, least: int, most: int = LARGEST) -> int:
    """Return `given` if it is an integer from `least` to `most`. Raise UsageError otherwise."""
    number = _integer(given)
    bounds = f"at least {least}" if most == LARGEST else f"from {least} to {most}"
    if number is None or not least <= number <= most:
        raise UsageError(f"{what}={shown(given)} makes no sense.", f"Give a whole number, {bounds}.")
    return number


def numbers(what: str, given: Any) -> list[int] | None:
    """Return layer or head numbers, each once (None: all). Raise UsageError for an empty list and non-integers."""
    if given is None:
        return None
    say = f"Give a list of whole numbers, such as {what}=[0, 1], or leave it out for all."
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"{what}={shown(given)} is no list of numbers.", say)
    items = several(what, given)
    integers = [number for item in items if (number := _integer(item)) is not None]
    if len(integers) < len(items) or min(integers, default=0) < 0 or max(integers, default=0) > LARGEST:
        raise UsageError(f"{what}={shown(items)} does not hold whole numbers from 0 on alone.", say)
    if not integers:
        raise UsageError(f"{what}=[] asks for nothing.", say)
    return list(dict.fromkeys(integers))


def head(given: Any) -> tuple[int, int]:
    """Parse (layer, head), or `3.7`, into two integers from 0 on. Raise UsageError for anything else."""
    parts = given.strip().split(".") if isinstance(given, str) else given
    if isinstance(given, str) and all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        parts = [int(part) for part in parts]
    integers = [_integer(part) for part in several("head", parts)] if isinstance(parts, Iterable) else []
    if len(integers) != 2 or any(part is None or not 0 <= part <= LARGEST for part in integers):
        raise UsageError(
            f"head={shown(given)} is no head.", "Write LAYER.HEAD, like 3.7; in Python (3, 7) will do too."
        )
    layer, number = (part for part in integers if part is not None)
    return layer, number


def one_head(given: Any, layers: object, heads: object) -> dict[str, list[int]]:
    """Return the head as layers and heads, {} for None. Raise UsageError if layers or heads are given too."""
    if given is None:
        return {}
    if layers is not None or heads is not None:
        raise UsageError("A head is named, and layers or heads beside it.", "Give --head, or --layers and --heads.")
    layer, number = head(given)
    return {"layers": [layer], "heads": [number]}


def _integer(given: Any) -> int | None:
    """Return the integer value (numpy's integers too), or None; a bool is not an integer here."""
    if isinstance(given, bool):
        return None
    try:
        return index(given)
    except TypeError:
        return None


def analyzers(name: str, given: Any) -> list[str]:
    """Return the names of analyzers. Raise UsageError for an unknown one."""
    names = words(name, given)
    registry.analyzers(names)
    return names


def folder(name: str, given: Any) -> Any:
    """Return the path of a folder as a string. Raise UsageError for anything else."""
    checked_path = path(name, file(name, given, "folder"))
    local_path(checked_path, f"--{name}")
    return checked_path


def file(name: str, given: Any, what: str = "file") -> Any:
    """Return a file, given by path or as an object. Raise UsageError for an empty path."""
    if isinstance(given, str) and (not given.strip() or "\0" in given):
        raise UsageError(f"--{name} names no {what}.", f"Give a path after --{name}, or leave it out.")
    return given


def rule(_name: str, given: Any) -> Any:
    """Return a selection rule, argmax or top-p:0.9. Raise UsageError for anything else."""
    arguments.selection_share(given)
    return given


def device(name: str, given: Any) -> Any:
    """Return the name of a device, whether or not it exists here. Raise UsageError for anything else."""
    if not DEVICES.fullmatch(word(name, given)):
        raise UsageError(f"There is no kind of device {shown(given)}.", "There are: auto, cpu, cuda, cuda:1, mps.")
    return given


def budget(_name: str, given: Any) -> Any:
    """Return a budget such as loss:1% or ppl:2%. Raise UsageError for anything else."""
    arguments.budget(given)
    return given


def rate(name: str, given: Any) -> float:
    """Return a share between 0 and 1 as a float. Raise UsageError for anything else."""
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 < given < 1:
        return float(given)
    raise UsageError(f"{name}={shown(given)} is no share between 0 and 1.", "Give one, as in --fdr 0.05.")


CallOnly = Literal["", "dangerous", "read", "written"]


def unchecked(_name: str, given: Any) -> Any:
    """Return any value unchanged."""
    return given


@dataclass(frozen=True)
class Option:
    """Help, default and valid values of one option."""

    help: str
    default: Any = None
    panel: str = "Options"
    metavar: str | None = None
    """Placeholder of its value in the help; None: from its type."""
    flag: str = ""
    """Flag, if it is not the name with dashes."""
    shown: str | None = None
    """Default as shown in the help, if it differs from the default itself."""
    least: int | None = None
    most: int | None = None
    """Bounds of an integer."""
    call_only: CallOnly = ""
    """Reason why no defaults file may set it, because such a file may belong to an untrusted model: it is dangerous,
    or names what is read or written; empty if a file may."""
    names: tuple[str, ...] = ()
    """Allowed words; empty: any."""
    noun: str = ""
    """Noun for these names in messages, if it is not the option's own name."""
    typed: Any = None
    """Type that typer parses, if it differs from `type`."""
    type: Any = str
    """Type of its values, from its annotation."""
    check: Callable[[str, Any], Any] = unchecked
    """(name, value) → the value for the run; raises UsageError. By default, it depends on the type."""


@cache
def options(kind: type) -> dict[str, Option]:
    """Return the options of a class by name, each with the names and the check that its annotation implies."""
    by_name: dict[str, Option] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        plain, option = get_args(hint)[:2]
        literal = next((part for part in alternatives(plain) if get_origin(part) is Literal), None)
        option = replace(option, type=plain, names=option.names or get_args(literal))
        by_name[name] = option if option.check is not unchecked else replace(option, check=_check_of(plain, option))
    return by_name


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type; a tuple of the type itself for any other."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _check_of(plain: Any, option: Option) -> Callable[[str, Any], Any]:
    """Return the function that checks values of that type."""
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
    """Return every option of `kind` with its value or default. Raise UsageError for unknown names and wrong values."""
    known = options(kind)
    for name in given:
        checked_name("option", name, known)
    return {name: value_of(option, name, given.get(name, option.default)) for name, option in known.items()}


def value_of(option: Option, name: str, given: Any) -> Any:
    """Return the checked value for the run; None if it is the default. Raise UsageError for an invalid value."""
    if given is None and option.default is None:
        return None
    return option.check(name, given)
