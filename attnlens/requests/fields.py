"""Base class and field types of requests: one pydantic field per option with help, default, bounds and valid values."""

from __future__ import annotations

import functools
import os
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from inspect import Parameter, signature
from operator import index
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypedDict, TypeVar, Union, Unpack, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic.functional_validators import ModelWrapValidatorHandler

from attnlens import arguments
from attnlens.arguments import (
    LARGEST,
    checked_name,
    format_argument,
    listed_layers,
    listed_numbers,
    path,
    several,
    word,
)
from attnlens.choices import PARTS
from attnlens.errors import UsageError
from attnlens.files import local_path

R = TypeVar("R")
INDENT = " " * 8  # Indentation of an option's help in a docstring
CallOnly = Literal["", "dangerous", "read", "written"]


class Request(BaseModel):
    """Options of a command. The constructor raises UsageError for unknown names and invalid values."""

    # schemas are built at the first use of a class, since `--help` needs none
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True, arbitrary_types_allowed=True)

    @model_validator(mode="wrap")
    @classmethod
    def _translate_errors(cls, options: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(options)
        except ValidationError as error:
            invalid = error
        raise _usage_error(cls, invalid)

    def with_options(self, **options: object) -> Self:
        """Return a copy of the request with these options changed and checked."""
        return type(self)(**self.explicit() | options)

    def explicit(self) -> dict[str, Any]:  # passed as keywords of any type
        """Return the options that were set explicitly, with their values."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}


def _usage_error(kind: type[Request], error: ValidationError) -> UsageError:
    """Return the UsageError for the first invalid option; an unknown option or word raises its UsageError directly."""
    first = error.errors(include_url=False, include_context=False)[0]
    name, value = str(first["loc"][0]), first["input"]
    checked_name("option", name, kind.model_fields)
    field = kind.model_fields[name]
    types = alternatives(field.annotation)
    for words in (get_args(part) for part in types if get_origin(part) is Literal):
        checked_name(details(field).get("noun", name), value, words)
    if bool in types:
        return UsageError(f"{name}={format_argument(value)} is neither True nor False.", "Give True or False.")
    least, most = details(field).get("least"), details(field).get("most")
    what = "a whole number" if int in types else "a number" if float in types else "a string"
    if least is not None:
        what += f" of at least {least}" if most is None else f" from {least} to {most}"
    return UsageError(f"{name}={format_argument(value)} is not {what}.", f"Give {what}.")


class Details(TypedDict, total=False):
    """Properties of an option besides its name, type, default and help; each can be omitted."""

    panel: str
    metavar: str  # Placeholder of the value; by default its type
    flag: str  # Flag, if it is not the name with dashes; for a switch, both flags: `--pack/--no-pack`
    shown: str  # Default shown in the help, if it differs from the field's default
    least: int  # Smallest allowed number
    most: int  # Largest allowed number
    call_only: CallOnly
    """Reason why a defaults file, which may belong to an untrusted model, must not set the option: the option is
    `dangerous`, or names a file or folder that is `read` or `written`."""
    noun: str  # Noun for the option's allowed words in messages; by default the option's name
    typed: object  # Type that typer parses, if the annotation does not imply it
    python_only: bool  # True for a keyword of the Python function that no command offers


def option(help: str, default: object = None, **about: Unpack[Details]) -> Any:  # noqa: A002  # typer's name
    """Create the field of an option; the result is Any because it is assigned to fields of any type."""
    least = about.get("least")
    most = about.get("most", None if least is None else LARGEST)
    return Field(default, description=help, ge=least, le=most, json_schema_extra=cast("JsonDict", about))


keyword = partial(option, python_only=True)  # Create the field of a keyword that only the Python function offers
switch = partial(option, default=False)  # Create the field of an option that is off by default


def details(field: FieldInfo) -> Details:
    """Return the details that `option` recorded in a field."""
    return cast("Details", field.json_schema_extra or {})


def alternatives(hint: object) -> tuple[type, ...]:
    """Return the members of a union type, or a non-union type as the only member, without validators."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(part.__origin__ if get_origin(part) is Annotated else part for part in parts)


def takes(kind: type[Request]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate a function with a parameter `request`: callers can pass the options of the request as keywords instead.

    The options are added to the function's signature and docstring.
    """

    def extend(function: Callable[..., R]) -> Callable[..., R]:
        parameters = [each for each in signature(function).parameters.values() if each.name != "request"]
        lines = [f"{function.__doc__}\n    Options\n    -------"]
        for name, field in kind.model_fields.items():
            accepted, default = _accepted_type(field), field.default
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=accepted))
            lines.append(f"    {name} : {accepted}, default {default!r}")
            lines.append(textwrap.fill(field.description or "", 116, initial_indent=INDENT, subsequent_indent=INDENT))

        @functools.wraps(function)
        def call(*args: object, **keywords: object) -> R:
            if not isinstance(keywords.get("request"), kind):
                options = {name: keywords.pop(name) for name in kind.model_fields if name in keywords}
                keywords["request"] = kind(**options)
            return function(*args, **keywords)

        call.__dict__["options"] = kind  # for the stub file of the package
        call.__signature__ = signature(function).replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__doc__ = "\n".join([*lines, "    "])
        return call

    return extend


def _accepted_type(field: FieldInfo) -> str:
    """Return the type of an option's values for a signature, without validators."""
    names = []
    for part in alternatives(field.annotation):
        if part == tuple[str, ...]:
            names += ["str", "Sequence[str]"]
        elif get_origin(part) is Literal:
            names += [" | ".join(map(repr, get_args(part)))]
        else:
            names += ["None" if part is type(None) else str(part) if get_origin(part) else part.__name__]
    return " | ".join(names)


def checks(check: Callable[[str, object], object]) -> BeforeValidator:
    """Create a validator from a function (name, value) → value; None is not checked."""
    return BeforeValidator(
        lambda value, info: value if value is None else check(cast("ValidationInfo", info).field_name or "", value)
    )


def words(what: str, value: object) -> tuple[str, ...]:
    """Convert one or several names or paths to strings. Raise UsageError for other types and empty names."""
    alone = isinstance(value, str | bytes | os.PathLike) or not isinstance(value, Iterable)
    items = [value] if alone else several(what, cast("Iterable[object]", value))
    for item in items:
        if not isinstance(item, str | os.PathLike):
            problem = f"{what}={format_argument(value)} contains {format_argument(item)}, which is not a name or path."
            raise UsageError(problem, "Give strings or path objects.")
    return tuple(path(what, item) for item in items)


def numbers(what: str, value: object) -> list[int] | None:
    """Return distinct numbers from a list or a string such as `0-3,7`; None means all. Raise UsageError otherwise."""
    if value is None:
        return None
    if isinstance(value, str):
        return sorted(listed_numbers(f"--{what}", value))
    integers = _integers(what, value)
    if not integers:
        problem = f"{what}={format_argument(value)} is not a list of whole numbers."
        raise UsageError(problem, f"Give a list such as {what}=[0, 1], or omit it to select all.")
    return list(dict.fromkeys(integers))


def layer_list(what: str, value: object) -> list[int | str] | None:
    """Return distinct layers from a list or a string such as `0-3,7` or `decoder.0-3`; None means all.

    Layers of a named part are strings such as `decoder.2`. Raise UsageError for anything else.
    """
    if isinstance(value, str):
        return listed_layers(f"--{what}", value)
    if isinstance(value, list | tuple) and any(isinstance(item, str) for item in value):
        lists = [layer_list(what, item if isinstance(item, str) else [item]) for item in several(what, value)]
        return list(dict.fromkeys(layer for layers in lists for layer in layers or ()))
    integers = numbers(what, value)
    return None if integers is None else [*integers]


def head(value: object) -> tuple[int | str, int]:
    """Parse (3, 7), `3.7` or `decoder.3.7` as (layer, head), with layer 3 or "decoder.3"; else raise UsageError."""
    named = isinstance(value, tuple) and isinstance(value[0], str) and not value[0].isdecimal()
    written = ".".join(map(str, value)) if named and isinstance(value, tuple) else value
    match = (
        re.fullmatch(r"\s*(?:([a-z]+)\.)?([0-9]{1,9})\.([0-9]{1,9})\s*", written) if isinstance(written, str) else None
    )
    if match is not None and match[1] is not None:
        return f"{checked_name('part', match[1], PARTS)}.{int(match[2])}", int(match[3])
    integers = [int(part) for part in match.groups()[1:]] if match else _integers("head", value)
    if len(integers) != 2:
        problem = f"{format_argument(value)} does not name a head."
        raise UsageError(problem, "Write LAYER.HEAD, e.g. 3.7 or decoder.3.7; in Python also (3, 7).")
    return integers[0], integers[1]


def one_head(value: object, layers: object, heads: object) -> dict[str, list[int | str] | list[int]]:
    """Return the options that select the head `value`; {} for None. Raise UsageError if layers or heads are set too."""
    if value is None:
        return {}
    if layers is not None or heads is not None:
        raise UsageError("--head cannot be combined with --layers or --heads.", "Give --head, or --layers and --heads.")
    layer, number = head(value)
    return {"layers": [layer], "heads": [number]}


def _integers(what: str, value: object) -> list[int]:
    """Return the items of an iterable as integers, or [] if an item is not an integer from 0 to LARGEST."""
    items = several(what, value) if isinstance(value, Iterable) else []
    integers = [number for item in items if (number := _integer(item)) is not None and 0 <= number <= LARGEST]
    return integers if len(integers) == len(items) else []


def _integer(value: object) -> int | None:
    """Return a Python or numpy integer as an int; return None for anything else, including a bool."""
    if isinstance(value, bool):
        return None
    try:
        return index(cast("int", value))
    except TypeError:
        return None


def _analyzers(name: str, value: object) -> tuple[str, ...]:
    from attnlens.analyzers import registry  # late, because `--help` needs none

    names = words(name, value)
    registry.select_analyzers(names)
    return names


def folder(name: str, value: object) -> str:
    """Return the path of a folder as a string. Raise UsageError if the value is not a local path."""
    place = _place(name, value, "folder")
    local_path(place, f"--{name}")
    return place


def _place(name: str, value: object, what: str = "file") -> str:
    """Return the path of a file or folder as a string. Raise UsageError if the value is not a path."""
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        raise UsageError(f"--{name} does not name a {what}.", f"Give a path after --{name}, or leave out --{name}.")
    return path(name, value)


def _valid(check: Callable[..., object]) -> BeforeValidator:
    """Create a validator that returns a value unchanged if `check` does not raise."""

    def validate(_name: str, value: object) -> object:
        check(value)
        return value

    return checks(validate)


def spelled(pattern: str, problem: str, remedy: str) -> BeforeValidator:
    """Create a validator for strings that must match a pattern; the value replaces {} in `problem`."""

    def check(value: object) -> None:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise UsageError(problem.format(format_argument(value)), remedy)

    return _valid(check)


def positive(name: str, value: object, below: float = LARGEST) -> float:
    """Return the value as a float if it is positive and less than `below`. Raise UsageError otherwise."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < below:
        return float(value)
    limit = "" if below == LARGEST else f" below {below}"
    raise UsageError(f"{name}={format_argument(value)} is not a positive number{limit}.", "Give a number such as 0.05.")


Words = Annotated[tuple[str, ...], checks(words)]  # Names or paths; a single name or path is accepted too
AnalyzerNames = Annotated[tuple[str, ...], checks(_analyzers)]
Numbers = Annotated[list[int], checks(numbers)]  # Head numbers, within a layer
Layers = Annotated[list[int | str], checks(layer_list)]  # Layers as numbers, or with their part: `decoder.2`
Whole = Annotated[int, BeforeValidator(lambda value: value if (number := _integer(value)) is None else number)]
"""Whole number (a Python or numpy integer)."""
Place = Annotated[str, checks(path)] | None  # Path, or another name of a location
FilePlace = Annotated[str, checks(_place)] | None
FolderPlace = Annotated[str, checks(folder)] | None
Word = Annotated[str, checks(word)]
Device = Annotated[
    str, spelled("auto|cpu|mps|cuda(:[0-9]{1,4})?", "Unknown device {}.", "Choose auto, cpu, cuda, cuda:1 or mps.")
]
SelectionRule = Annotated[str, _valid(arguments.selection_share)]
BudgetText = Annotated[str, _valid(arguments.budget)]
Rate = Annotated[float, checks(positive)]
Share = Annotated[float, checks(partial(positive, below=1))]
