"""What every command of a model shares: the model's name, and progress while it works."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attnlens.cli.outputs import Outputs
from attnlens.cli.show import interruptible_at_once, progress, say
from attnlens.errors import UsageError

NO_MODEL = "No model named: using demo, the small model that ships with attnlens."


def named_model(name: str | None, *, quiet: bool) -> str:
    """The model asked for, or demo, which is said. Raises UsageError for what can be no name."""
    if name is None and not quiet:
        say(NO_MODEL)
    return "demo" if name is None else checked_model(name)


def checked_model(name: str) -> str:
    """The name; UsageError where it is empty, or stands for stdin."""
    if not name.strip() or "\0" in name:
        raise UsageError("The model's name is empty.", "Name a folder, a file, a hub id, or `demo`.")
    if name == "-":
        raise UsageError("A model can't be read from stdin.", "Name a folder, a file, a hub id, or `demo`.")
    return name


def check_reading(settings: Mapping[str, Any]) -> None:
    """Raise UsageError for what the source that was asked for does not give."""
    from attnlens.requests import reading  # late, because it loads the records

    reading.chosen(reading.settings(settings), settings["analyzers"], settings["select"], settings["show"])
    reading.refuse_unread(settings, settings["source"])


@contextmanager
def working(outputs: Outputs) -> Iterator[Callable[[str, int, int], None]]:
    """Around the one call of a command: progress is shown, and transformers logs nothing."""
    gc.freeze()  # what was imported stays: no collection need go through it
    gc.enable()
    with interruptible_at_once():
        from attnlens.models.quiet import unlogged

    with unlogged(), progress(shown=outputs.moving) as tell:
        yield tell


def begin_workers(settings: Mapping[str, Any]) -> None:
    """Begin what the processes of --jobs are forked from, which imports what this one imports meanwhile."""
    if settings.get("engine") == "local":
        from attnlens.runs.work import start_server

        start_server(settings["jobs"])
