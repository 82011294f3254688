"""What `check` can be asked for, beside what `inspect` is where it is given a model."""

from __future__ import annotations

from typing import Annotated, TypedDict

from attnlens.requests.fields import Option
from attnlens.rules.rule import FDR, RELATIVE

PANEL = "Baseline"


class JudgingRequest(TypedDict, total=False):
    """What a report is held against, and how strictly."""

    allow_partial: Annotated[bool, Option("Check a report of which a part could not be analysed.", False)]
    relative: Annotated[
        float, Option("How far a head may be from the baseline, as a share of it.", RELATIVE, PANEL, "NUMBER")
    ]
    absolute: Annotated[
        float | None,
        Option(
            "The same in the measure's own unit; the larger of both counts.",
            panel=PANEL,
            metavar="NUMBER",
            shown="that share of the measure's range",
        ),
    ]
    fdr: Annotated[
        float,
        Option("Of the heads named by p-values, the share that may be named by chance.", FDR, PANEL, "SHARE"),
    ]
