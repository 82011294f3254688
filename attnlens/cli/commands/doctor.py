"""The command `doctor`."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

import typer

from attnlens.cli import PARTLY
from attnlens.cli import parameters as opt
from attnlens.cli.outputs import named_model, run_command
from attnlens.cli.show import guard
from attnlens.errors import IdentityError
from attnlens.requests import DoctorRequest
from attnlens.wording import format_count, join_items

if TYPE_CHECKING:
    from attnlens.records import Report

UNUSED = ("batch_size", "placement", "intervals", "allow_foreign_text")
"""Options without effect on `doctor`, which compares two sequences of any content in one pass."""


@guard
@opt.with_options(opt.MODEL | opt.STRICT, opt.parameters(DoctorRequest, without=UNUSED), opt.REPORT_OPTIONS)
def doctor(context: typer.Context) -> None:
    """Verify that attnlens computes attention exactly as this model does; exit 2 if it does not."""
    params = context.params
    request, name = opt.build(DoctorRequest, params), named_model(params)
    report = run_command(
        params, [name], request, lambda analyses, tell: analyses.doctor(name, progress=tell, request=request)
    )
    if report.summary.verdict == "differs":
        raise failure(report)
    if params["strict"] and report.summary.verdict != "agrees":
        raise typer.Exit(PARTLY)


def failure(report: Report) -> IdentityError:
    """Return the error of a failed `doctor`: the sites that failed, and the largest error."""
    failed = [check for check in report.doctor if not check.passed]
    errors = [error for check in failed for error in (check.tokens_error, check.weights_error) if error is not None]
    if failed:
        worst = f"worst error {max(errors):.1e}" if errors else failed[0].reason or "without a reported error"
        sites = format_count(len(report.doctor), "site")
        problem = f"{len(failed)} of {sites} failed, {worst}: {join_items(check.site for check in failed)}."
    elif (error := report.summary.identity_error) is None:
        problem = "The model's outputs are not finite or cannot be compared, so nothing could be verified."
    else:
        problem = f"Attention recomputed by attnlens changes the model's outputs by {error:.1e}."
    return IdentityError(
        problem,
        f"Do not trust numbers from these sites; `attnlens doctor {quote(report.model.id)} --json FILE` saves all "
        "errors for a bug report.",
    )
