"""Which options do the commands share? One spelling, one environment variable and one line of help each."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from attnlens.calls import selection_share
from attnlens.errors import TextError, UsageError
from attnlens.registry import analyzers, checked_name

EXPERIMENT, TRAINED = "Synthetic experiments", "Checkpoints and heads"
SOURCES = ("weights", "tokens", "both")
NAMED = {
    "windows": ("placement of windows", ("spread", "first", "random")),
    "intervals": ("unit of intervals", ("windows", "texts")),
}
"""What each of these options names, and the names that there are."""
LARGEST = 9999
"""Largest number of a layer or head that can be asked for; no model comes near it."""
INPUT, OUTPUT, DANGEROUS = "Input", "Output", "Dangerous options"


def option(*names: str, panel: str = "Options", **more: Any) -> Any:
    """A typer option that also reads ATTNLENS_<OPTION>."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    envvar = "ATTNLENS_" + long.removeprefix("--").replace("-", "_").upper()
    return typer.Option(*names, envvar=envvar, rich_help_panel=panel, **more)


Model = Annotated[
    str | None,
    typer.Argument(
        help="Hub id (`org/name@revision`), folder, `.gguf` or `.safetensors` file, or `demo`.", show_default="demo"
    ),
]
Listed = Annotated[
    str | None,
    typer.Argument(help="`kernels`, `analyzers`, `measures` or `schema`.", show_default="all but the schema"),
]
Source = Annotated[str, option("--source", help="What to read: `weights`, `tokens` or `both`.", metavar="SOURCE")]
Analyzers = Annotated[
    list[str] | None,
    option(
        "--analyzer",
        help="Only this analyzer; repeatable. `attnlens list` names them, and says which run without being named.",
        metavar="NAME",
    ),
]
Layers = Annotated[str | None, option("--layers", help="Only these layers, as in `0-3,7`.", metavar="NUMBERS")]
Heads = Annotated[str | None, option("--heads", help="Only these heads, as in `0,5`.", metavar="NUMBERS")]
Head = Annotated[
    str | None, option("--head", help="Only this head, as in `3.7`: layer 3, head 7.", metavar="LAYER.HEAD")
]
Select = Annotated[
    str,
    option(
        "--select",
        help="What a query selects, for the analyzer `selection`: its largest score (`argmax`), or the fewest tokens "
        "that hold a share of the weight (`top-p:0.9`).",
        metavar="RULE",
    ),
]
Show = Annotated[
    str | None,
    option(
        "--show",
        help="With --head: the tokens that the head selects and those that hold its SVM up (`selection`), posed on the "
        "module's inputs where M lives on them, else on queries and keys.",
        metavar="WHAT",
    ),
]
Text = Annotated[
    list[Path] | None,  # as paths, so that typer cuts ATTNLENS_TEXT as PATH is cut, and not at blanks
    option(
        "--text",
        panel=INPUT,
        help="Text file, or `-` for stdin; repeatable (ATTNLENS_TEXT joins several with "
        f"`{os.pathsep}`). Default: built-in texts of three kinds; for `demo` King James passages.",
        metavar="FILE",
    ),
]
Tokens = Annotated[
    int | None,
    option("--tokens", panel=INPUT, min=2, help="Window length in tokens.", show_default="128, or the model's limit"),
]
Sequences = Annotated[
    int, option("--sequences", panel=INPUT, min=1, help="How many windows or lines to feed, over all texts.")
]
BatchSize = Annotated[
    int, option("--batch-size", panel=INPUT, min=1, help="How many sequences go through the model at once.")
]
Pack = Annotated[
    bool, option("--pack/--no-pack", panel=INPUT, help="Cut running text into windows, or feed it line by line.")
]
Windows = Annotated[
    str,
    option(
        "--windows",
        panel=INPUT,
        help="Where windows lie in each text: `spread` evenly over it, the `first` ones, or `random`.",
        metavar="PLACE",
    ),
]
Intervals = Annotated[
    str | None,
    option(
        "--intervals",
        panel=INPUT,
        help="Errors and intervals over `windows` of these texts, or over `texts` like them.",
        metavar="UNITS",
        show_default="texts from five on, else windows",
    ),
]
AllowForeignText = Annotated[
    bool, option("--allow-foreign-text", panel=INPUT, help="Go on where the tokenizer does not know half of the text.")
]
WindowsCsv = Annotated[
    str | None,
    option(
        "--windows-csv",
        panel=OUTPUT,
        help="Write what every window read, one row a window and head (swap-kernel: and kernel), as CSV.",
        metavar="FILE",
    ),
]
Device = Annotated[str, option("--device", help="`auto`, `cpu`, `cuda`, `cuda:1`, `mps`.", metavar="DEVICE")]
Dtype = Annotated[
    str,
    option(
        "--dtype",
        help="Type of the model's weights: `auto`, `float32`, `bfloat16`, …; measures are float64.",
        metavar="TYPE",
    ),
]
Seed = Annotated[int, option("--seed", min=0, max=2**63 - 1, help="Seed of everything random.")]
Json = Annotated[
    str | None, option("--json", panel=OUTPUT, help="Write the report as JSON (`-`: to stdout).", metavar="FILE")
]
Csv = Annotated[str | None, option("--csv", panel=OUTPUT, help="Write one row a head as CSV.", metavar="FILE")]
Png = Annotated[
    str | None,
    option(
        "--png",
        panel=OUTPUT,
        help="Write the overview (a `.png`, `.svg` or `.pdf` file) or every picture (a folder).",
        metavar="FILE|DIR",
    ),
]
Html = Annotated[str | None, option("--html", panel=OUTPUT, help="Write a self-contained page.", metavar="FILE")]
Markdown = Annotated[
    str | None, option("--markdown", panel=OUTPUT, help="Write the summary as markdown.", metavar="FILE")
]
AllHeads = Annotated[bool, option("--all-heads", panel=OUTPUT, help="Show every head, not a summary by layer.")]
Strict = Annotated[bool, option("--strict", help="Exit with 3 where a part could not be analysed.")]
Offline = Annotated[bool, option("--offline", panel=INPUT, help="Use local files only.")]
Revision = Annotated[
    str | None, option("--revision", panel=INPUT, help="Commit, tag or branch of a hub model.", metavar="REVISION")
]
Quiet = Annotated[bool, option("-q", "--quiet", panel=OUTPUT, help="Show no table and no progress.")]
Verbose = Annotated[bool, option("-v", "--verbose", panel=OUTPUT, help="Show conventions and timings too.")]
NoProgress = Annotated[bool, option("--no-progress", panel=OUTPUT, help="Show no progress.")]
Debug = Annotated[bool, option("--debug", panel=OUTPUT, help="Show a traceback with an error.")]
TrustRemoteCode = Annotated[
    bool, option("--trust-remote-code", panel=DANGEROUS, help="Run Python code that comes with the model.")
]
AllowPickle = Annotated[
    bool, option("--allow-pickle", panel=DANGEROUS, help="Load `.bin` weights (pickles, tensors only).")
]


def head(word: str | None) -> tuple[int, int] | None:
    """`3.7` as (3, 7), layer and head; None stays None. Raises UsageError for anything else."""
    if word is None:
        return None
    layer, dot, number = word.strip().partition(".")
    if not (dot and layer.isdecimal() and number.isdecimal()) or max(len(layer), len(number)) > len(str(LARGEST)):
        raise UsageError(f"--head {word!r} is no head.", "Write it as LAYER.HEAD, like 3.7.")
    return int(layer), int(number)


FED: dict[str, tuple[Any, Any]] = {
    "layers": (Layers, None),
    "heads": (Heads, None),
    "text": (Text, None),
    "tokens": (Tokens, None),
    "sequences": (Sequences, 32),
    "batch_size": (BatchSize, 8),
    "pack": (Pack, True),
    "windows": (Windows, "spread"),
    "intervals": (Intervals, None),
    "allow_foreign_text": (AllowForeignText, False),
    "windows_csv": (WindowsCsv, None),
}
"""What is looked at: option → (its type and help, its default)."""
LOADED: dict[str, tuple[Any, Any]] = {
    "device": (Device, "auto"),
    "dtype": (Dtype, "auto"),
    "offline": (Offline, False),
    "revision": (Revision, None),
    "trust_remote_code": (TrustRemoteCode, False),
    "allow_pickle": (AllowPickle, False),
}
"""How a model is loaded."""
SHOWN: dict[str, tuple[Any, Any]] = {
    "json": (Json, None),
    "csv": (Csv, None),
    "png": (Png, None),
    "html": (Html, None),
    "markdown": (Markdown, None),
    "quiet": (Quiet, False),
    "verbose": (Verbose, False),
    "no_progress": (NoProgress, False),
    "debug": (Debug, False),
}
"""Where the report goes, and what is said meanwhile."""


def also(*groups: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these groups too, but for those that it has itself.

    They reach it as keywords; `context.params` holds all of them.
    """

    def extended(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [given for given in signature.parameters.values() if given.kind is not given.VAR_KEYWORD]
        named = {given.name for given in own}
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in {name: pair for group in groups for name, pair in group.items()}.items()
            if name not in named
        ]

        @functools.wraps(command)
        def run(*args: Any, **given: Any) -> None:
            command(*args, **given)

        run.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        run.__annotations__ = {given.name: given.annotation for given in (*own, *more)} | {"return": None}
        return run

    return extended


def numbers(what: str, words: str | None) -> list[int] | None:
    """`0-3,7` as [0, 1, 2, 3, 7]; None stays None.

    Raises UsageError where the words are no such list, a number is beyond all models, or a range runs backwards.
    """
    if words is None:
        return None
    found: set[int] = set()
    for word in words.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--{what} {words!r} is no list of numbers.", "Write it like 0-3,7.")
        if max(len(first), len(last)) > len(str(LARGEST)):
            raise UsageError(f"--{what} {words!r} goes beyond {LARGEST}.", "Name numbers that the model has.")
        if dash and int(last) < int(first):
            raise UsageError(
                f"--{what} {words!r} has a range that runs backwards: {word.strip()}.", f"Write {last}-{first}."
            )
        found.update(range(int(first), int(last if dash else first) + 1))
    return sorted(found)


def asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those among a command's parameters that say what is looked at, checked.

    Raises UsageError for an unknown source, analyzer, place of windows or unit of intervals, and for layers and heads
    that are no numbers; TextError for `--text -` without a stdin.
    """
    plain = ("tokens", "sequences", "batch_size", "pack", "seed", "windows", "intervals", "allow_foreign_text")
    settings = {name: given[name] for name in plain if name in given} | {
        "layers": numbers("layers", given["layers"]),
        "heads": numbers("heads", given["heads"]),
        "text": texts("text", given["text"] or ()),
    }
    if "source" in given:
        settings["source"] = checked_name("source", given["source"], SOURCES)
        settings["analyzers"] = given["analyzer"] or ()
        if given["analyzer"]:
            analyzers(given["analyzer"])  # an unknown one is refused before torch is imported
    for name, (what, known) in NAMED.items():
        if given.get(name) is not None:
            checked_name(what, given[name], known)
    return settings


def shown(given: Mapping[str, Any]) -> dict[str, Any]:
    """What of one head is looked at and shown, as far as that is asked for; the head in the place of layers and heads.

    Raises UsageError for a head beside other layers or heads, and for something to show without a head.
    """
    found, show = head(given["head"]), given["show"]
    selection_share(given["select"])
    if show is not None:
        checked_name("show", show, ("selection",))
        if found is None:
            raise UsageError(f"--show {show} shows one head, and none is named.", "Name it, as in --head 3.7.")
    chosen = {"select": given["select"], "show": show}
    if found is None:
        return chosen
    beside = [name for name in ("layers", "heads") if given[name] is not None]
    if beside:
        raise UsageError(f"--head names one head, and --{beside[0]} others.", f"Leave out --{beside[0]}.")
    return chosen | {"layers": [found[0]], "heads": [found[1]]}


def texts(what: str, paths: Sequence[Path]) -> list[str]:
    """The text files of an option. Raises UsageError for an empty path, TextError for `-` without a stdin."""
    names = [str(path) for path in paths]
    if "." in names:
        raise UsageError(
            f"--{what} names no file: it is empty, or a folder.", "Give the path of a text file, or - for stdin."
        )
    if "-" in names and sys.stdin is None:
        raise TextError(
            f"stdin is closed, so that --{what} - has nothing to read.", "Pipe a text into it, or name a file."
        )
    return names


def loading(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those among a command's parameters that say how a model is loaded.

    Raises UsageError for an unknown device or type.
    """
    from attnlens.models.placement import check_named

    if "device" in given:
        check_named(given["device"], given["dtype"])
    names = ("device", "dtype", "offline", "revision", "trust_remote_code", "allow_pickle")
    return {name: given[name] for name in names if name in given}
