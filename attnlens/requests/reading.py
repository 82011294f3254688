"""Derive settings and analyzers from options, and check them before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnlens import registry
from attnlens.choices import ATTENTION, SHOWN
from attnlens.errors import UsageError
from attnlens.records import Settings
from attnlens.registry import Analyzer, Gathering


def settings(asked: Mapping[str, Any]) -> Settings:
    """Return the settings of a report that have the same names as options."""
    later = ("text", "calibration", "analyzers", "select", "device", "dtype")  # known once the model is loaded
    names = [name for name in Settings.model_fields if name in asked and name not in later]
    recorded = Settings(**{name: asked[name] for name in names})
    return recorded if asked.get("pairs") is None else recorded.model_copy(update={"pack": False})


def chosen(
    asked: Settings, named: Sequence[str], select: str, show: str | None, *, adapted: bool = False
) -> tuple[list[Analyzer | Gathering], Settings]:
    """Return the analyzers to run, and the settings with their names and the selection rule.

    `adapted`: the model has an adapter, so that the analyzers that compare it with the model without it run too.
    Raise UsageError for unknown names, analyzers that read nothing from the requested source, a `select` that would be
    ignored, and a `show` that can't be satisfied.
    """
    posed = show == SHOWN
    if show == ATTENTION and asked.source == "weights":
        raise UsageError("source weights reads no text to attend to.", "Leave out --source, or --show attention.")
    selected = registry.analyzers(named or [SHOWN] * posed, asked.source)
    if not selected:
        raise UsageError(
            f"{', '.join(named) or show} reads nothing from {asked.source}.",
            "Leave out --source, or name another analyzer.",
        )
    selected += registry.comparing(asked.source) if adapted else []
    selected = list({id(analyzer): analyzer for analyzer in selected}.values())
    names = list(dict.fromkeys(analyzer.name for analyzer in selected))
    looked = SHOWN in names
    if not looked and (select != "argmax" or posed):
        word = f"--show {show}" if posed else f"--select {select}"
        raise UsageError(f"{word} needs the analyzer {SHOWN}, which was not named.", f"Add --analyzer {SHOWN}.")
    return selected, asked.model_copy(update={"analyzers": names, "select": select if looked else None})


def files(asked: Mapping[str, Any]) -> list[str]:
    """Return the named text files. Raise UsageError for texts and pairs of texts at once."""
    if asked["pairs"] is None:
        return list(asked["text"])
    if asked["text"]:
        raise UsageError("--text and --pairs are both given, and a run reads one of them.", "Leave out one of them.")
    return [str(asked["pairs"])]


def refuse_unread(asked: Mapping[str, Any], source: str) -> None:
    """Raise UsageError for inputs if only weights are read, and for --from-files unless only weights are read."""
    if asked.get("from_files") and source != "weights":
        raise UsageError(
            "A model that is read from its files can't run on a text.",
            "Add --source weights, or leave --from-files out.",
        )
    named = next((name for name in ("text", "pairs", "image", "audio") if asked[name]), None)
    if named is not None and source == "weights":
        raise UsageError(
            f"source weights reads no {named}, so that {named} would be ignored.", f"Leave out --{named} or --source."
        )
