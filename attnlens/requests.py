"""What a run can be asked for: each option once, with its help, its bounds and its default.

The fields of these typed dictionaries are the keywords of the Python functions and the options of the commands:
`attnlens.cli.options` makes typer's parameters of them, and `checked` judges the values of both. Nothing heavy is
imported here, so that a mistake is answered at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import index
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypedDict, Union, cast, get_args, get_origin, get_type_hints

from attnlens import calls, registry
from attnlens.calls import LARGEST, path, several, shown, switch, word
from attnlens.errors import UsageError
from attnlens.registry import checked_name

Words = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One name or path, or several."""
Numbers = Iterable[int]
"""Running numbers of layers or heads."""
Source = Literal["weights", "tokens", "both"]
Placement = Literal["spread", "first", "random"]
Intervals = Literal["windows", "texts"]
Part = Literal["encoder", "decoder", "cross"]
Sweep = Literal["heads", "layers"]
Route = Literal["auto", "eager", "fused"]
Convention = Literal["paper", "code"]
INPUT, OUTPUT, DANGEROUS = "Input", "Output", "Dangerous options"
"""Panels of the help, beside that without a name."""
DEVICES = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,4})?")
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")


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
    names: tuple[str, ...] = ()
    """The words that there are; none: any."""
    noun: str = ""
    """What these are names of, where that is not the option's own name."""
    typed: Any = None
    """What typer makes of its word, where its type does not say it."""
    check: Callable[[str, Any], Any] = unchecked
    """(name, value) → the value as the run has it; raises UsageError. Where none is named, by its type."""


# --- what makes sense ---


def words(what: str, given: Words) -> list[str]:
    """Several names or paths as strings; a plain one means itself and not its letters.

    Raises UsageError where one of them is neither a string nor a path, or an empty one.
    """
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
    """Numbers of layers or heads, each once; None means all.

    Raises UsageError for a string, an empty list, and whatever is no whole number from 0 on.
    """
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
        raise UsageError(f"head={shown(given)} is no head.", "Give layer and head, such as (3, 7) or '3.7'.")
    layer, number = (part for part in found if part is not None)
    return layer, number


def _integer(given: Any) -> int | None:
    """The whole number that it is (numpy's too), or None; True is no number."""
    if isinstance(given, bool):
        return None
    try:
        return index(given)
    except TypeError:
        return None


def _analyzers(name: str, given: Any) -> list[str]:
    found = words(name, given)
    registry.analyzers(found)
    return found


def _folder(name: str, given: Any) -> Any:
    if isinstance(given, str) and (not given.strip() or "\0" in given):
        raise UsageError(f"--{name} names no folder.", f"Give a path after --{name}, or leave it out.")
    return path(name, given)


def _file(name: str, given: Any) -> Any:
    if isinstance(given, str) and (not given.strip() or "\0" in given):
        raise UsageError(f"--{name} names no file.", f"Give a path after --{name}, or leave it out.")
    return given


def _rule(_name: str, given: Any) -> Any:
    calls.selection_share(given)
    return given


def _device(name: str, given: Any) -> Any:
    if not DEVICES.fullmatch(word(name, given)):
        raise UsageError(f"There is no kind of device {shown(given)}.", "There are: auto, cpu, cuda, cuda:1, mps.")
    return given


def _budget(_name: str, given: Any) -> Any:
    calls.budget_share(given)
    return given


# --- what can be asked for ---


class Loading(TypedDict, total=False):
    """How a model is loaded."""

    device: Annotated[str, Option("`auto`, `cpu`, `cuda`, `cuda:1`, `mps`.", "auto", metavar="DEVICE", check=_device)]
    dtype: Annotated[
        str,
        Option(
            "Type of the model's weights: `auto`, `float32`, `bfloat16`, …; measures are float64.",
            "auto",
            metavar="TYPE",
            names=DTYPES,
        ),
    ]
    offline: Annotated[bool, Option("Use local files only.", False, panel=INPUT)]
    revision: Annotated[
        str | None, Option("Commit, tag or branch of a hub model.", panel=INPUT, metavar="REVISION", check=word)
    ]
    trust_remote_code: Annotated[bool, Option("Run Python code that comes with the model.", False, panel=DANGEROUS)]
    allow_pickle: Annotated[bool, Option("Load `.bin` weights (pickles, tensors only).", False, panel=DANGEROUS)]


class Feeding(Loading, total=False):
    """What a model is fed with, and how it is loaded."""

    text: Annotated[
        Words,
        Option(
            f"Text file, or `-` for stdin; repeatable (ATTNLENS_TEXT joins several with `{os.pathsep}`). Default: "
            "built-in texts of three kinds; for `demo` King James passages.",
            (),
            panel=INPUT,
            metavar="FILE",
            typed=list[Path] | None,  # as paths, so that typer cuts ATTNLENS_TEXT as PATH is cut, and not at blanks
        ),
    ]
    tokens: Annotated[
        int | None,
        Option("Window length in tokens.", panel=INPUT, least=2, shown="128, or the model's limit"),
    ]
    sequences: Annotated[int, Option("How many windows or lines to feed, over all texts.", 32, panel=INPUT, least=1)]
    batch_size: Annotated[int, Option("How many sequences go through the model at once.", 8, panel=INPUT, least=1)]
    pack: Annotated[
        bool,
        Option("Cut running text into windows, or feed it line by line.", True, panel=INPUT, flag="--pack/--no-pack"),
    ]
    windows: Annotated[
        Placement,
        Option(
            "Where windows lie in each text: `spread` evenly over it, the `first` ones, or `random`.",
            "spread",
            panel=INPUT,
            metavar="PLACE",
            noun="placement of windows",
        ),
    ]
    intervals: Annotated[
        Intervals | None,
        Option(
            "Errors and intervals over `windows` of these texts, or over `texts` like them.",
            panel=INPUT,
            metavar="UNITS",
            shown="texts from five on, else windows",
            noun="unit of intervals",
        ),
    ]
    allow_foreign_text: Annotated[
        bool, Option("Go on where the tokenizer does not know half of the text.", False, panel=INPUT)
    ]
    seed: Annotated[int, Option("Seed of everything random.", 0, least=0)]


class ModelRequest(Feeding, total=False):
    """Which part of a model is looked at, too."""

    layers: Annotated[Numbers | None, Option("Only these layers, as in `0-3,7`.", metavar="NUMBERS")]
    heads: Annotated[Numbers | None, Option("Only these heads, as in `0,5`.", metavar="NUMBERS")]


class InspectRequest(ModelRequest, total=False):
    """What `inspect` can be asked for."""

    source: Annotated[Source, Option("What to read: `weights`, `tokens` or `both`.", "both", metavar="SOURCE")]
    analyzers: Annotated[
        Words,
        Option(
            "Only this analyzer; repeatable. `attnlens list` names them, and says which run without being named.",
            (),
            flag="--analyzer",
            metavar="NAME",
            check=_analyzers,
        ),
    ]
    select: Annotated[
        str,
        Option(
            "What a query selects, for the analyzer `selection`: its largest score (`argmax`), or the fewest tokens "
            "that hold a share of the weight (`top-p:0.9`).",
            "argmax",
            metavar="RULE",
            check=_rule,
        ),
    ]
    show: Annotated[
        Literal["selection"] | None,
        Option(
            "With --head: the tokens that the head selects and those that hold its SVM up (`selection`), posed on the "
            "module's inputs where M lives on them, else on queries and keys.",
            metavar="WHAT",
        ),
    ]


class SwapRequest(ModelRequest, total=False):
    """What `swap_kernel` can be asked for, beside the kernels."""

    part: Annotated[Part | None, Option("Only this part: `encoder`, `decoder` or `cross`.", metavar="PART")]
    sweep: Annotated[
        Sweep | None,
        Option("Swap each of the `heads` or `layers` alone too, and rank them.", metavar="WHAT"),
    ]
    fit: Annotated[
        bool, Option("Choose each head's free kernel parameters from calibration text, in closed form.", False)
    ]
    budget: Annotated[
        str | None,
        Option(
            "With `--kernel rank`: choose each key head's rank, the smallest within this rise, as in `loss:1%`, and "
            "promise what they cost from windows that chose nothing.",
            metavar="BUDGET",
            check=_budget,
        ),
    ]
    ranks: Annotated[
        Any,
        Option(
            "With `--kernel rank`: take each key head's rank from a plan of --plan, and search for none.",
            panel=INPUT,
            metavar="FILE",
            typed=str | None,
            check=_file,
        ),
    ]
    heal: Annotated[
        int,
        Option(
            "Train W_Q and W_K (primal: its own maps too) towards the original model for so many steps.", 0, least=0
        ),
    ]
    eta: Annotated[
        float | None,
        Option("Weight of the KSVD regulariser when `primal` is healed.", metavar="NUMBER", shown="0.1"),
    ]
    ksvd_convention: Annotated[
        Convention,
        Option("How its objective is counted: as in the `paper` or in its `code`.", "paper", metavar="NAME"),
    ]
    path: Annotated[
        Route, Option("How attention is computed: `auto` (the fastest), `eager` or `fused`.", "auto", metavar="PATH")
    ]
    allow_signed: Annotated[bool, Option("Allow odd powers, under which attention can be negative.", False)]
    calibration: Annotated[
        Words,
        Option(
            "Text file for --fit, --heal, --budget and --ranks; repeatable: each gives its share. Default: windows of "
            "the evaluated text that are not evaluated.",
            (),
            panel=INPUT,
            metavar="FILE",
            typed=list[Path] | None,
        ),
    ]
    save: Annotated[
        str | os.PathLike[str] | None,
        Option("Write the changed model to this folder.", panel=OUTPUT, metavar="DIR", check=_folder),
    ]


# --- what was asked for ---


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
    option = replace(option, names=option.names or get_args(literal))
    return option if option.check is not unchecked else replace(option, check=_check_of(plain, option))


def type_of(kind: type, name: str) -> Any:
    """The type of an option's values."""
    return get_args(get_type_hints(kind, include_extras=True)[name])[0]


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
