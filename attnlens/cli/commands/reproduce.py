"""The command `reproduce`."""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING

import typer

from attnlens.choices import CLAIMS, STUDIES
from attnlens.cli import FAILED
from attnlens.cli import parameters as opt
from attnlens.cli.commands.converge import refuse_other
from attnlens.cli.outputs import run_command, start_workers
from attnlens.cli.show import ReportProgress, complain, guard, say
from attnlens.requests.experiments import StudyRequest, checked_table
from attnlens.wording import join_items

if TYPE_CHECKING:
    from attnlens.records import Report

CLAIMS_RUN, TABLE_RUN = "claims", "a table"
KINDS = {CLAIMS_RUN: {"table", "quick"}, TABLE_RUN: {"table", *StudyRequest.model_fields}}
"""Options of each kind of run, in addition to the common ones."""
TABLE = opt.argument(
    "table",
    f"`{CLAIMS}` (small experiments with published values), {', '.join(f'`{name}`' for name in STUDIES)} or `all`.",
    default=CLAIMS,
    metavar="TABLE",
)
QUICK = opt.option("--quick", bool, "Run fewer trials with wider tolerances (under half a minute).")


@guard
@opt.with_options(TABLE | QUICK, opt.parameters(StudyRequest), opt.OUTPUT_OPTIONS)
def reproduce(context: typer.Context) -> None:
    """Reproduce the papers' small experiments (exit 1 if a claim fails), or train the models of one of their tables."""
    params = context.params
    request, table = opt.build(StudyRequest, params), checked_table(params["table"])
    if table == CLAIMS:
        refuse_other(CLAIMS_RUN, context, KINDS)
    else:
        start_workers(request.engine, request.jobs or os.cpu_count() or 1)

    def work(analyses: ModuleType, tell: ReportProgress) -> Report:
        try:
            report: Report = analyses.reproduce(table, quick=params["quick"], progress=tell, request=request)
        except KeyboardInterrupt:
            if table != CLAIMS:
                say("Finished runs are kept: repeat the command to resume.")
            raise
        return report

    report = run_command(params, (), request, work)
    failed = [experiment.name for experiment in report.experiments if experiment.passed is False]
    if failed:
        complain(
            f"Results that differ from the published ones: {join_items(failed, 12)}.",
            "The table shows the measured values; --json contains all of them.",
        )
        raise typer.Exit(FAILED)
