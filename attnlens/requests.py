"""Do the words of a call make sense? They are checked before a model is loaded."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any, cast

from attnlens import models, registry, texts
from attnlens.calls import LARGEST, path, selection_share, several, shown, switch
from attnlens.errors import ModelError, UsageError
from attnlens.hooks import Reached
from attnlens.records import Intervals, Settings, Text
from attnlens.registry import Analyzer, Gathering, checked_name
from attnlens.statistics import Design
from attnlens.statistics.design import FEWEST_TEXTS

SOURCES = ("weights", "tokens", "both")
INTERVALS = ("windows", "texts")
NOTHING_FED = {"sequences": None, "pack": None, "windows": None, "intervals": None}
"""What the settings of a run without any input say."""

Words = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One name or path, or several."""


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


class Feeding(models.Loading, total=False):
    """The options of every run that feeds a model, beside those of `load`."""

    text: Words
    """Text files (`-` is stdin); none: the built-in texts."""
    tokens: int | None
    """Length of a window; None: 128, or the model's limit."""
    sequences: int
    """How many windows or lines over all texts; 32."""
    batch_size: int
    """How many go through the model at once; 8."""
    pack: bool
    """Windows of the running text (True), or its lines."""
    windows: texts.Placement
    """Where they lie in each text: "spread" evenly over it, the "first" ones, or "random"."""
    intervals: Intervals | None
    """Errors and intervals over "windows" of these texts, or over "texts" like them; None: texts from five on."""
    allow_foreign_text: bool
    """Go on where the tokenizer does not know half of the tokens."""
    seed: int
    """Of everything random; 0."""


def loading_of(given: Feeding, model: object) -> models.Loading:
    """Those of the options that say how a model is loaded.

    Raises UsageError for an option that does not exist (did you mean), and for one of loading beside a model that is
    already loaded, which it can't change.
    """
    for option in given:
        checked_name("option", option, Feeding.__annotations__)
    found = {name: value for name, value in given.items() if name in models.Loading.__annotations__}
    if isinstance(model, models.Loaded) and any(weight.is_meta for weight in model.model.parameters()):
        raise ModelError("The model is on the meta device, where weights have no values.", "Load it onto another one.")
    if isinstance(model, models.Loaded) and found:
        raise UsageError(
            f"The model is already loaded, so that {', '.join(found)} would be ignored.",
            "Give the options to attnlens.load.",
        )
    return cast("models.Loading", found)


def settings(
    given: Feeding,
    *,
    source: Any = "both",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Settings:
    """What was asked for, if it makes sense; UsageError where it does not."""
    intervals, tokens = given.get("intervals"), given.get("tokens")
    switch("allow_foreign_text", given.get("allow_foreign_text", False))
    whole("batch_size", given.get("batch_size", 8), 1)
    return Settings(
        seed=whole("seed", given.get("seed", 0), 0),
        source=checked_name("source", source, SOURCES),
        sequences=whole("sequences", given.get("sequences", 32), 1),
        tokens=None if tokens is None else whole("tokens", tokens, 2),
        pack=switch("pack", given.get("pack", True)),
        windows=_one_of("windows", given.get("windows", "spread"), texts.PLACEMENTS),
        intervals=None if intervals is None else _one_of("intervals", intervals, INTERVALS),
        layers=numbers("layers", layers),
        heads=numbers("heads", heads),
    )


def of_model(asked: Settings, loaded: models.Loaded) -> Settings:
    """What was asked for, with the model's device and dtype and the length of a window on it.

    Raises UsageError for more tokens than the model has positions.
    """
    return asked.model_copy(
        update={
            "device": str(loaded.model.device),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "tokens": texts.window_length(loaded.model, asked.tokens),
        }
    )


def cut_of(asked: Settings, given: Feeding) -> texts.Cut:
    """How the texts are cut, by what was asked for."""
    return texts.Cut(
        tokens=asked.tokens,
        sequences=asked.sequences or 1,
        batch_size=given.get("batch_size", 8),
        pack=asked.pack is not False,
        placement=asked.windows or "spread",
        seed=asked.seed,
        allow_foreign=given.get("allow_foreign_text", False),
    )


def contents(found: Sequence[texts.Content], loaded: models.Loaded) -> Sequence[texts.Content]:
    """The texts that were named, or the built-in ones for this model."""
    return found or texts.sample(loaded.info.id)


def design_of(asked: Settings, found: texts.Batches) -> Design:
    """How the sequences were sampled. Raises UsageError where too few texts are to stand for texts like them."""
    names = found.parts or ("",) * found.sequences
    count = len(set(names))
    if asked.intervals == "texts" and count < FEWEST_TEXTS:
        enough = count + len(found.left_out) >= FEWEST_TEXTS
        there = (
            f"{found.sequences} sequences are of {count}"
            if enough
            else f"there {'is' if count == 1 else 'are'} {count}"
        )
        raise UsageError(
            f"Intervals over texts need {FEWEST_TEXTS} texts, and {there}.",
            f"Give more {'--sequences' if enough else '--text'}, or leave out --intervals texts.",
        )
    return Design.of(names, asked.intervals)


def fed(asked: Settings, found: texts.Batches, loaded: models.Loaded) -> Settings:
    """The settings that say what was fed: texts in windows or lines, or noise alone."""
    if not found.tokens:
        nothing = {"pack": None, "windows": None, "intervals": None}
        return asked.model_copy(update={"noise": Text.of(found.texts), "sequences": found.sequences, **nothing})
    short = found.sequences < (asked.sequences or 0)
    update = {
        "text": Text.of(found.texts),
        "texts": list(found.texts),
        "sequences": found.sequences,
        "sequences_asked": asked.sequences if short else None,
        "intervals": design_of(asked, found).over,
        "notes": [*asked.notes, *_told_of(asked, found, loaded)],
    }
    return asked.model_copy(update=update)


def _told_of(asked: Settings, found: texts.Batches, loaded: models.Loaded) -> Iterator[str]:
    """What a reader must know of the windows, a sentence each."""
    yield from texts.foreign_notes(found.unknown)
    if found.left_out:
        yield (
            f"Left out: {', '.join(found.left_out)}, since {found.sequences} sequences are fewer than the "
            f"{len(found.texts) + len(found.left_out)} texts."
        )
    what = "lines" if asked.pack is False else "windows"
    if found.sequences < (asked.sequences or 0):
        yield f"The text has {found.sequences} {what} of the {asked.sequences} asked for."
    if asked.windows == "first":
        yield f"The {what} are the first of each text: errors hold for these {what}, not for the texts."
    repeated = texts.repeated_share(loaded.tokenizer, found.ids)
    if repeated > texts.MOST_SHARED:
        yield (
            f"{repeated:.0%} of the tokens stand in runs of {texts.RUN} that another of the {what} has too: "
            "errors over them are too small."
        )


def seen(settings: Settings, loaded: models.Loaded, reached: Sequence[Reached]) -> Settings:
    """The settings of a model that reads no text with the tokens that its attention makes of an input, at most."""
    if texts.reads_text(loaded):
        return settings
    return settings.model_copy(update={"tokens": max(found.call.query.shape[2] for found in reached)})


def chosen(
    asked: Settings, analyzers: Words, select: str, show: str | None
) -> tuple[list[Analyzer | Gathering], Settings]:
    """The analyzers that run, and the settings with them and with what counts as selected.

    Raises UsageError for unknown names, analyzers that read nothing of the source asked for, a `select` that can't be
    read or would be ignored, and where nothing can be shown.
    """
    selection_share(select)
    if show is not None:
        checked_name("show", show, ("selection",))
    named = words("analyzers", analyzers)
    found = registry.analyzers(named or ["selection"] * (show is not None), asked.source)
    if not found:
        raise UsageError(
            f"{', '.join(named) or show} reads nothing from {asked.source}.",
            "Leave out --source, or name another analyzer.",
        )
    names = list(dict.fromkeys(analyzer.name for analyzer in found))
    looked = "selection" in names
    if not looked and (select != "argmax" or show is not None):
        word = f"--select {select}" if show is None else f"--show {show}"
        raise UsageError(f"{word} needs the analyzer selection, which was not named.", "Add --analyzer selection.")
    return found, asked.model_copy(update={"analyzers": names, "select": select if looked else None})


def named_texts(files: Sequence[str], source: str = "both") -> Sequence[texts.Content]:
    """The texts of these files. Raises UsageError where the weights alone are read, which need none; TextError."""
    if files and source == "weights":
        raise UsageError(
            "source weights reads no text, so that text would be ignored.", "Leave out --text or --source."
        )
    return texts.read_each(files)


def refuse_text(loaded: models.Loaded, text: Sequence[str], tokens: int | None) -> None:
    """Raise UsageError where a text or its length is given for a model that reads none."""
    if texts.reads_text(loaded) or (not text and tokens is None):
        return
    read = {"pixels": "pixels", "audio": "sound"}.get(loaded.kind, " and ".join(texts.wanted(loaded.model)))
    raise UsageError(
        f"{loaded.info.id} reads {read} and no text, so that text and tokens would be ignored.",
        "Leave out --text and --tokens.",
    )


def _one_of(option: str, word: Any, known: Sequence[str]) -> Any:
    """`word`, if it is one of those known; else UsageError."""
    if word in known:
        return word
    near = difflib.get_close_matches(str(word), known, n=1)
    raise UsageError(
        f"--{option} {word} is none of {', '.join(known)}.",
        f"Did you mean {near[0]}?" if near else "Choose one of them.",
    )


def _integer(given: Any) -> int | None:
    """The whole number that it is (numpy's too), or None; True is no number."""
    if isinstance(given, bool):
        return None
    try:
        return index(given)
    except TypeError:
        return None
