"""Check the arguments of calls from Python, serialise calls from several threads, and load plug-ins."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, wraps
from importlib import metadata
from inspect import Parameter, signature
from itertools import islice
from threading import RLock
from typing import NamedTuple, ParamSpec, TypeVar

from attnlens.choices import PARTS, Unit
from attnlens.errors import UsageError
from attnlens.files import OPEN_FILES

P = ParamSpec("P")
R = TypeVar("R")

MOST = 10_000  # Maximum number of layers, heads, names or texts in one argument (an iterable can be infinite)
MODEL_FILES = (".gguf", ".safetensors")  # File name extensions of models
LARGEST = 2**63 - 1  # Largest integer accepted as an argument

DATASETS = "datasets:"  # Prefix of the name of a text that consists of rows of a dataset
SAY_DATASETS = f"Write {DATASETS}OWNER/NAME,config=C,split=S,column=T; config, split and column are optional."

RENAMED = {"tokens": "length", "sequences": "windows", "png": "figure", "all_heads": "table"}  # Old name → new name
OTHER_NAMES = RENAMED | {"gaussian": "rbf", "gauss": "rbf", "softmax": "exponential", "local": "window"}
"""Unknown name → name to suggest, for renamed options and for kernels with different names in other tools."""
_ONE_AT_A_TIME = RLock()  # Calls must not overlap: they replace the model's attention, and torch can't nest forward AD


def checked_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is in `known`.

    Otherwise raise a UsageError that lists the known names and suggests a similar name, if there is one.
    """
    options = list(known)
    if name in options:
        return name
    import difflib

    written = name[:60] if isinstance(name, str) else ""
    shown = repr(written) if isinstance(name, str) else f"of type {type(name).__name__}"
    others = {other: name for other, name in OTHER_NAMES.items() if name in options}
    near = difflib.get_close_matches(written, [*others, *options], n=1)
    hint = f"Did you mean {others.get(near[0], near[0])!r}? " if near else ""
    raise UsageError(f"Unknown {what} {shown}.", f"{hint}Choose from: {', '.join(options)}.")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a public function: refuse unknown or missing arguments; run one call at a time under torch's defaults."""
    expected = signature(function)
    request = getattr(function, "options", ())
    names = [name for name, parameter in expected.parameters.items() if parameter.kind is not Parameter.VAR_KEYWORD]
    open_ended = len(names) < len(expected.parameters)

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        options = {name: value for name, value in keywords.items() if not isinstance(value, request)}
        for name in () if open_ended else options:
            checked_name("option", name, names)
        try:
            expected.bind(*args, **options)
        except TypeError as error:
            positional = [name for name in names if expected.parameters[name].kind is Parameter.POSITIONAL_OR_KEYWORD]
            remedy = f"Positional arguments: {', '.join(positional) or 'none'}. Pass all other arguments by name."
            raise UsageError(f"{function.__name__}(): {error}.", remedy) from None
        if not callable(keywords.get("progress", print)):
            raise UsageError("`progress` is not a function.", "Pass a function of (stage, steps done, total steps).")
        with _ONE_AT_A_TIME, _plain_torch():
            return function(*args, **keywords)

    return call


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Use torch's default device, dtype and modes inside the block, whatever the caller has set."""
    torch = sys.modules.get("torch")
    if torch is None:  # torch is not imported yet, so the caller changed no setting
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        for kind in ("cpu", "cuda", "mps"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":  # only then, because this context slows down every torch call
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        yield


def word(what: str, value: object) -> str:
    """Return `value` if it is a non-blank string without NUL characters. Raise UsageError otherwise."""
    if isinstance(value, str) and "\0" not in value and value.strip():
        return value
    kind = "a valid name" if isinstance(value, str) else "a string"
    raise UsageError(
        f"{what}={format_argument(value)} is not {kind}.", "Give a non-blank string without NUL characters."
    )


def path(what: str, value: object) -> str:
    """Return a string or path object as a string. Raise UsageError for other types, blank strings and NULs."""
    try:
        return word(what, os.fspath(value) if isinstance(value, os.PathLike) else value)
    except TypeError:  # its __fspath__ returns neither str nor bytes
        raise UsageError(f"{what}={format_argument(value)} is not a path.", "Give a string or a path object.") from None


def names_report(name: str) -> bool:
    """Return True if `name` is a `.json` path, an open file (/dev/stdin), or any existing file except a model file."""
    is_file = os.path.isfile(name) and not name.endswith(MODEL_FILES)  # noqa: PTH113  # never raises
    return is_file or name.endswith(".json") or name.startswith(OPEN_FILES)


def switch(what: str, value: object) -> bool:
    """Return `value` if it is True or False. Raise UsageError otherwise."""
    if not isinstance(value, bool):
        raise UsageError(f"{what}={format_argument(value)} is neither True nor False.", "Give True or False.")
    return value


def selection_share(select: object) -> float | None:
    """Parse the share p of the selection rule `top-p:p`; return None for `argmax`. Raise UsageError otherwise."""
    if select == "argmax":
        return None
    match = re.fullmatch(r"top-p:(\s*[0-9.e+-]{1,40}\s*)", select) if isinstance(select, str) else None
    with suppress(ValueError):  # several decimal points, or no digit
        if match and 0 < float(match[1]) < 1:
            return float(match[1])
    raise UsageError(f"select: cannot parse {format_argument(select)}.", "Give `argmax`, or `top-p:P` with 0 < P < 1.")


def listed_numbers(name: str, words: str) -> set[int]:
    """Parse a list of numbers such as `0-3,7`, given for the option `name`. Raise UsageError for anything else."""
    numbers: set[int] = set()
    for word in words.split(","):
        ends = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", word.strip())
        if ends is None:
            raise UsageError(f"{name}: {words!r} is not a list of numbers up to 9999.", "Write, e.g., 0-3,7.")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first:
            raise UsageError(f"{name}: {words!r} contains a reversed range: {word.strip()}.", f"Write {last}-{first}.")
        numbers.update(range(first, last + 1))
    return numbers


def listed_layers(name: str, words: str) -> list[int | str]:
    """Parse a list of layers such as `0-3,7` or `decoder.0-3,cross.1`, given for the option `name`.

    Layers with a part are returned as strings (`decoder.0`). Raise UsageError for anything else.
    """
    if "." not in words:
        return sorted(listed_numbers(name, words))
    layers: list[int | str] = []
    for word in words.split(","):
        part, dot, numbers = word.strip().rpartition(".")
        if dot:
            checked_name("part", part, PARTS)
        layers += [f"{part}.{number}" if dot else number for number in sorted(listed_numbers(name, numbers))]
    return list(dict.fromkeys(layers))


class Budget(NamedTuple):
    """Largest allowed rise in the loss or perplexity of a changed model."""

    unit: Unit  # Quantity that may rise
    share: float  # Allowed relative rise; 0.01 is 1 %


def budget(words: str) -> Budget:
    """Parse `loss:1%` or `ppl:2%`. Raise UsageError for anything else, or if the budget is not positive and finite."""
    plain = words.replace(" ", "") if isinstance(words, str) else ""
    match = re.fullmatch(r"(loss|ppl):([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)%", plain)
    if match is None:
        raise UsageError(f"Cannot parse the budget {words!r}.", "Write, e.g., --budget loss:1% or --budget ppl:2%.")
    share = float(match[2]) / 100
    if not 0 < share < math.inf:
        raise UsageError(f"The budget {words!r} is not positive and finite.", "Write, e.g., --budget loss:1%.")
    return Budget("ppl" if match[1] == "ppl" else "loss", share)


class DatasetRows(NamedTuple):
    """Source of a text in a dataset: the dataset's name, configuration, split and column."""

    name: str  # Name on the hub, or a folder of data files
    config: str | None = None
    split: str | None = None  # Split to read; if None, `test`
    column: str = "text"


def dataset_rows(words: str) -> DatasetRows | None:
    """Parse a name that begins with `datasets:`; return None for other names. Raise UsageError for invalid options."""
    if not words.startswith(DATASETS):
        return None
    name, *options = words.removeprefix(DATASETS).split(",")
    fields = dict(option.partition("=")[::2] for option in options)
    unknown = fields.keys() - {*DatasetRows._fields[1:]}
    if not name.strip() or len(fields) < len(options) or "" in fields.values() or unknown:
        raise UsageError(f"Cannot parse the dataset {format_argument(words)}.", SAY_DATASETS)
    return DatasetRows(name, **fields)


def several(what: str, values: Iterable[object]) -> list[object]:
    """Return the items of an iterable as a list. Raise UsageError if there are more than MOST."""
    items = list(islice(values, MOST + 1))
    if len(items) > MOST:
        raise UsageError(f"{what} has more than {MOST} items.", f"Give at most {MOST} items.")
    return items


def format_argument(value: object) -> str:
    """Format a value for a message as its `repr`, on one line of at most 60 characters."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to format very large integers
    try:
        line = " ".join(repr(value[:60] if isinstance(value, str | bytes | list | tuple) else value).split())
    except ValueError:  # the value contains a very large integer
        line = f"a {type(value).__name__}"
    return line if len(line) <= 60 else f"{line[:57]}..."


@cache
def load_plugins(group: str) -> None:
    """Import the plug-ins that installed packages register under an entry-point group, once per process."""
    for entry in metadata.entry_points(group=group):
        entry.load()


def refuse_replacing(
    what: str,
    name: str,
    function: Callable[..., object],
    present: Callable[..., object],
    remedy: str = "Choose another name, or pass replace=True to the decorator.",
) -> None:
    """Raise UsageError if `function` would replace `present`, unless attnlens, or one module or file, defines both."""
    new, old = (re.sub(r"^attnlens\..*", "attnlens", each.__module__) for each in (function, present))
    files = [getattr(getattr(each, "__code__", None), "co_filename", each) for each in (function, present)]
    if new != old and files[0] != files[1]:
        owner = "built in" if old == "attnlens" else f"defined by {old}"
        raise UsageError(f"{function.__module__} defines the {what} {name!r}, which is already {owner}.", remedy)
