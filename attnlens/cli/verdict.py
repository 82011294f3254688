"""Messages where `doctor` finds a difference, or --strict finds that something was left out."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

import typer

from attnlens.cli.show import PARTLY, console, say
from attnlens.errors import IdentityError
from attnlens.wording import clean, counted, listed

if TYPE_CHECKING:
    from attnlens.records import Report, SiteCheck

REMEDY = "Trust none of its numbers there; `attnlens doctor {} --json FILE` keeps every site's errors for a bug report."


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
    """Which sites failed and how far the worst is off, as the error that ends the command."""
    return IdentityError(_problem(report), REMEDY.format(quote(report.model.id)))


def _problem(report: Report) -> str:
    failed = [check for check in report.doctor if not check.passed]
    if failed:
        sites = counted(len(report.doctor), "site")
        return f"{len(failed)} of {sites} failed, {_worst(failed)}: {listed(check.site for check in failed)}."
    error = report.summary.identity_error
    if error is None:
        return "The model's outputs are not finite, or can't be compared, so that nothing is proven."
    return f"Attention recomputed by attnlens changes the model's outputs by {error:.1e}."


def _worst(failed: list[SiteCheck]) -> str:
    """`worst error 1.2e-02`, or the first reason where there is no error."""
    errors = [error for check in failed for error in (check.tokens_error, check.weights_error) if error is not None]
    if errors:
        return f"worst error {max(errors):.1e}"
    return failed[0].reason or "without an error to show"
