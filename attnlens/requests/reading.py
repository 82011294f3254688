"""Derive settings and analyzers from options, and check the options before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

from attnlens.analyzers import registry
from attnlens.analyzers.registry import Analyzer, Gathering
from attnlens.choices import ATTENTION, SHOWN
from attnlens.errors import UsageError
from attnlens.records import Settings
from attnlens.requests.run_options import Feeding, is_recorded


def settings(request: Feeding) -> Settings:
    """Return the settings that reports record; changed options without a field in `Settings` are added to `options`."""
    later = ("text", "calibration", "analyzers", "select", "device", "dtype")  # set after the model is loaded
    fields = type(request).model_fields
    known = {name: getattr(request, name) for name in Settings.model_fields if name in fields and name not in later}
    others = {
        name: value if isinstance(value, bool | int | float) else str(value)
        for name, value in request.explicit().items()
        if name not in Settings.model_fields and value != fields[name].default and is_recorded(fields[name])
    }
    return Settings(**known | ({} if request.pairs is None else {"pack": False}), options=others)


def choose_analyzers(
    requested: Settings, named: Sequence[str], select: str, show: str | None, *, adapted: bool = False
) -> tuple[list[Analyzer | Gathering], Settings]:
    """Return the analyzers to run, and the settings with the analyzers' names and the selection rule.

    If `adapted`, add the analyzers that compare an adapted model with its base model. Raise UsageError for unknown
    names, and for a source, `select` or `show` that the analyzers do not support.
    """
    if show == ATTENTION and requested.source == "weights":
        problem = "With source=weights no text is read, so there is no attention to show."
        raise UsageError(problem, "Leave out --source, or --show attention.")
    selected = registry.select_analyzers(named or [SHOWN] * (show == SHOWN), requested.source)
    if not selected:
        problem = f"{', '.join(named) or show} cannot be computed from source={requested.source}."
        raise UsageError(problem, "Omit --source, or choose another analyzer.")
    selected += registry.select_adapter_analyzers(requested.source) if adapted else []
    selected = list({id(analyzer): analyzer for analyzer in selected}.values())
    names = list(dict.fromkeys(analyzer.name for analyzer in selected))
    if SHOWN in names:
        return selected, requested.model_copy(update={"analyzers": names, "select": select})
    if select != "argmax" or show == SHOWN:
        option = f"--show {show}" if show == SHOWN else f"select={select}"
        problem = f"{option} requires the analyzer `{SHOWN}`, which is not selected."
        raise UsageError(problem, f"Add --analyzer {SHOWN}.")
    return selected, requested.model_copy(update={"analyzers": names, "select": None})


def files(request: Feeding) -> list[str]:
    """Return the names of the text files, or [pairs] if `pairs` is set. Raise UsageError if `text` is set, too."""
    if request.pairs is None:
        return list(request.text)
    if request.text:
        raise UsageError("`text` and `pairs` cannot be combined.", "Give only one of them.")
    return [request.pairs]


def refuse_unread(request: Feeding, source: str) -> None:
    """Raise UsageError for inputs that `source` ignores, and for from_files if `source` is not `weights`."""
    if getattr(request, "from_files", False) and source != "weights":
        problem = "With --device files the weights are read from disk, so the model cannot run on a text."
        raise UsageError(problem, "Add --source weights, or leave out --device files.")
    named = next((name for name in ("text", "pairs", "image", "audio") if getattr(request, name)), None)
    if named is not None and source == "weights":
        raise UsageError(
            f"With source=weights, `{named}` would be ignored.", f"Leave out `{named}`, or --source weights."
        )
