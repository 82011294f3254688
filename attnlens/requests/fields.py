"""An option of a run: its help, its default, and which values make sense; read from the annotations of a request."""

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
"""Running numbers of layers or heads."""
DEVICES = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,4})?")


def words(what: str, given: Words) -> list[str]:
    """Return several names or paths as strings, a plain one alone; raises UsageError for other types and empty ones."""
    alone = isinstance(given, str | bytes | os.PathLike) or not isinstance(given, Iterable)
    found: list[Any] = [given] if alone else several(what, cast("Iterable[Any]", given))
    for one in found:
        if not isinstance(one, str | os.PathLike):
            raise UsageError(f"{what}={shown(given)} holds no string: {shown(one)}.", "Give strings or paths.")
    return [path(what, one) for one in found]


def whole(what: str, given: Any, least: int, most: int = LARGEST) -> int:
    """`given`, if it is a whole number from `least` to `most`; else UsageError."""
    number = _integer(given)
    bounds = f"at least {least}" if most == LARGEST else f"from {least} to {most}"
    if number is None or not least <= number <= most:
        raise UsageError(f"{what}={shown(given)} makes no sense.", f"Give a whole number, {bounds}.")
    return number


def numbers(what: str, given: Any) -> list[int] | None:
    """Return layer or head numbers, each once (None: all); raises UsageError for an empty list and non-integers."""
    if given is None:
        return None
    say = f"Give a list of whole numbers, such as {what}=[0, 1], or leave it out for all."
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"{what}={shown(given)} is no list of numbers.", say)
    items = several(what, given)
    found = [number for one in items if (number := _integer(one)) is not None]
    if len(found) < len(items) or min(found, default=0) < 0 or max(found, default=0) > LARGEST:
        raise UsageError(f"{what}={shown(items)} does not hold whole numbers from 0 on alone.", say)
    if not found:
        raise UsageError(f"{what}=[] asks for nothing.", say)
    return list(dict.fromkeys(found))


def head(given: Any) -> tuple[int, int]:
    """(layer, head), or `3.7`, as two whole numbers from 0 on; UsageError for anything else."""
    parts = given.strip().split(".") if isinstance(given, str) else given
    if isinstance(given, str) and all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        parts = [int(part) for part in parts]
    found = [_integer(part) for part in several("head", parts)] if isinstance(parts, Iterable) else []
    if len(found) != 2 or any(part is None or not 0 <= part <= LARGEST for part in found):
        raise UsageError(
            f"head={shown(given)} is no head.", "Write LAYER.HEAD, like 3.7; in Python (3, 7) will do too."
        )
    layer, number = (part for part in found if part is not None)
    return layer, number


def one_head(given: Any, layers: object, heads: object) -> dict[str, list[int]]:
    """Return the head as layers and heads, {} for None; raises UsageError if layers or heads are named beside it."""
    if given is None:
        return {}
    if layers is not None or heads is not None:
        raise UsageError("A head is named, and layers or heads beside it.", "Give --head, or --layers and --heads.")
    layer, number = head(given)
    return {"layers": [layer], "heads": [number]}


def _integer(given: Any) -> int | None:
    """The whole number that it is (numpy's too), or None; True is no number."""
    if isinstance(given, bool):
        return None
    try:
        return index(given)
    except TypeError:
        return None


def analyzers(name: str, given: Any) -> list[str]:
    """The names of analyzers; UsageError for one that there is not."""
    found = words(name, given)
    registry.analyzers(found)
    return found


def folder(name: str, given: Any) -> Any:
    """The path of a folder, as a string; UsageError for anything else."""
    found = path(name, file(name, given, "folder"))
    local_path(found, f"--{name}")
    return found


def file(name: str, given: Any, what: str = "file") -> Any:
    """A file, by its path or as it is; UsageError for a path that names none."""
    if isinstance(given, str) and (not given.strip() or "\0" in given):
        raise UsageError(f"--{name} names no {what}.", f"Give a path after --{name}, or leave it out.")
    return given


def rule(_name: str, given: Any) -> Any:
    """What counts as selected, argmax or top-p:0.9; UsageError for anything else."""
    arguments.selection_share(given)
    return given


def device(name: str, given: Any) -> Any:
    """The name of a device, whether or not this machine has it; UsageError for anything else."""
    if not DEVICES.fullmatch(word(name, given)):
        raise UsageError(f"There is no kind of device {shown(given)}.", "There are: auto, cpu, cuda, cuda:1, mps.")
    return given


def budget(_name: str, given: Any) -> Any:
    """A budget, as in loss:1% or ppl:2%; UsageError for anything else."""
    arguments.budget(given)
    return given


def rate(name: str, given: Any) -> float:
    """A share between 0 and 1; UsageError for anything else."""
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 < given < 1:
        return float(given)
    raise UsageError(f"{name}={shown(given)} is no share between 0 and 1.", "Give one, as in --fdr 0.05.")


CallOnly = Literal["", "dangerous", "read", "written"]


def unchecked(_name: str, given: Any) -> Any:
    """Return any value as it is."""
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
    """Return the options of a class by name, each with the names and the check that its annotation implies."""
    found: dict[str, Option] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        plain, option = get_args(hint)[:2]
        literal = next((part for part in alternatives(plain) if get_origin(part) is Literal), None)
        option = replace(option, type=plain, names=option.names or get_args(literal))
        found[name] = option if option.check is not unchecked else replace(option, check=_check_of(plain, option))
    return found


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
    """Return every option of `kind` with its value or default; raises UsageError for unknown names and wrong values."""
    known = options(kind)
    for name in given:
        checked_name("option", name, known)
    return {name: value_of(option, name, given.get(name, option.default)) for name, option in known.items()}


def value_of(option: Option, name: str, given: Any) -> Any:
    """A value as the run has it; None where that is the default. Raises UsageError where it makes no sense."""
    if given is None and option.default is None:
        return None
    return option.check(name, given)
