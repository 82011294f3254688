"""What every command of a model shares: its name, progress while it works, and the end if a part is missing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from attnlens.cli.outputs import Outputs
from attnlens.cli.show import PARTLY, console, interruptible_at_once, progress, say
from attnlens.errors import IdentityError, UsageError
from attnlens.wording import clean, counted, listed

if TYPE_CHECKING:
    from attnlens.records import Report

REMEDY = "Trust none of its numbers there; `attnlens doctor {} --json FILE` keeps every site's errors for a bug report."
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
        from attnlens.models.building import unlogged

    with unlogged(), progress(shown=outputs.moving) as tell:
        yield tell


def begin_workers(settings: Mapping[str, Any]) -> None:
    """Begin what the processes of --jobs are forked from, which imports what this one imports meanwhile."""
    if settings.get("engine") == "local":
        from attnlens.runs.work import start_server

        start_server(settings["jobs"])


def end_strictly(report: Report) -> None:
    """End with PARTLY if something was not analysed, or the files hold tensors that the model has no place for."""
    from attnlens.sentences.reports import unexpected

    for sentence in unexpected(report):
        console(stderr=True).print(clean(sentence), soft_wrap=True, markup=False)
    partial = not report.coverage.complete
    if partial:
        say(report.coverage.sentence)
    if report.model.unexpected or partial:
        raise typer.Exit(PARTLY)


def failure(report: Report) -> IdentityError:
    """Return the error of a failed `doctor`: which sites failed, and how far the worst is off."""
    failed = [check for check in report.doctor if not check.passed]
    errors = [error for check in failed for error in (check.tokens_error, check.weights_error) if error is not None]
    if failed:
        worst = f"worst error {max(errors):.1e}" if errors else failed[0].reason or "without an error to show"
        sites = counted(len(report.doctor), "site")
        problem = f"{len(failed)} of {sites} failed, {worst}: {listed(check.site for check in failed)}."
    elif (error := report.summary.identity_error) is None:
        problem = "The model's outputs are not finite, or can't be compared, so that nothing is proven."
    else:
        problem = f"Attention recomputed by attnlens changes the model's outputs by {error:.1e}."
    return IdentityError(problem, REMEDY.format(quote(report.model.id)))
