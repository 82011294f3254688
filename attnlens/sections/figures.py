"""Experiments as tables: ours beside the published."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from attnlens.records import Experiment, Report
from attnlens.sections.checkpoints import told
from attnlens.sections.section import Column, Row, Section, Table
from attnlens.sentences.verdicts import judgement, setting, worded
from attnlens.wording import NO_VALUE, SCIENTIFIC, clean, decimals_for, listed, short, written

SIGNS = {"within": "", "at least": "≥ ", "at most": "≤ "}


def experiment_sections(report: Report, *, whole: bool) -> Iterator[Section]:
    """All that a summary of `converge` and `verify` says below the model; `whole`, with every measure of a series."""
    plain = [experiment for experiment in report.experiments if not experiment.trajectories]
    if plain:
        yield Section(table=figure_rows(plain), notes=tuple(_figure_help(plain)))
        yield Section("What was asked", items=tuple(_asked(experiment, report) for experiment in plain))
    for experiment in report.experiments:
        if experiment.trajectories:
            yield from told(experiment, whole=whole)
    missing = [line for experiment in report.experiments for line in _missing(experiment)]
    if missing:
        yield Section("No value", items=tuple(missing))


def figure_rows(experiments: Sequence[Experiment]) -> Table:
    """A row a figure: ours ± error, published, tolerance, verdict."""
    every = [(experiment, figure) for experiment in experiments for figure in experiment.final]
    first = [figure == next(iter(experiment.final)) for experiment, figure in every]
    names = (
        Column(
            "",
            "experiment",
            tuple(clean(e.name) if head else "" for (e, _), head in zip(every, first, strict=True)),
            words=True,
        ),
        Column("", "figure", tuple(worded(*row) for row in every), words=True),
    )
    columns = [Column("", "ours", tuple(_ours(*row) for row in every))]
    if any(experiment.published for experiment in experiments):
        columns += [
            Column("", "published", tuple(_published(*row) for row in every)),
            Column("", "tolerance", tuple(_tolerance(*row) for row in every)),
            Column("", "verdict", tuple(judgement(*row) for row in every), words=True),
        ]
    return Table(names, tuple(columns))


def _decimals(experiment: Experiment, figure: str) -> int:
    """What the tolerance's second figure takes, or the error's; else four figures."""
    value = experiment.final.get(figure)
    slack = (experiment.tolerance or {}).get(figure) or experiment.errors.get(figure)
    if value is not None and value != 0 and abs(value) < 1e-4:
        return SCIENTIFIC
    if slack and math.isfinite(slack) and slack < 1:
        return min(9, 1 - math.floor(math.log10(slack)))
    return decimals_for([value or 0.0], figures=4)


def _ours(experiment: Experiment, figure: str) -> str:
    value, error = experiment.final[figure], experiment.errors.get(figure)
    if value is None or error is None:
        return written(value, _decimals(experiment, figure))
    return f"{written(value, _decimals(experiment, figure))} ± {short(error)}"


def _published(experiment: Experiment, figure: str) -> str:
    value = (experiment.published or {}).get(figure)
    if value is None:
        return NO_VALUE
    decimals = max(_decimals(experiment, figure), decimals_for([value], figures=2))
    small = abs(value) < 1e-4 and value != 0
    return SIGNS[experiment.bounds.get(figure, "within")] + written(value, SCIENTIFIC if small else decimals)


def _tolerance(experiment: Experiment, figure: str) -> str:
    if (experiment.published or {}).get(figure) is None:
        return NO_VALUE
    slack = (experiment.tolerance or {}).get(figure, 0.0)
    return "exact" if not slack else short(slack)


def _figure_help(experiments: Sequence[Experiment]) -> Iterator[str]:
    if any(experiment.errors for experiment in experiments):
        yield (
            "±: standard error over trials, or over what the experiment's question names; figures without it are "
            "extremes, medians, counts or single solutions."
        )
    if any(experiment.published for experiment in experiments):
        yield (
            "published: what the paper, or a reimplementation of it with many seeds, reads; ≥ and ≤ are bounds; "
            "tolerance: how far ours may be from it."
        )
    for source in dict.fromkeys(e.source for e in experiments if e.source):
        yield f"source: {clean(source)}"


def _asked(experiment: Experiment, report: Report) -> str:
    """Name, question, model where it is not the report's, settings, and how long it took."""
    facts = [f"on {experiment.model}"] if experiment.model else []
    facts += [setting(experiment, name) for name, value in experiment.settings.items() if value is not None]
    seconds = report.timings.get(experiment.name)
    facts += [] if seconds is None else [f"{seconds:.1f} s"]
    return clean(f"{experiment.name}: {experiment.question}" + (f" ({', '.join(facts)})" if facts else ""))


def _missing(experiment: Experiment) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for figure, reason in experiment.reasons.items():
        reasons.setdefault(reason, []).append(worded(experiment, figure))
    for reason, figures in reasons.items():
        yield f"{clean(experiment.name)}: {listed(figures, 5)}, because {clean(reason)}"


def figure_cells(experiment: Experiment) -> Iterator[Row]:
    """A row a figure, for a spreadsheet."""
    for figure, value in experiment.final.items():
        met, known = experiment.meets(figure), figure in (experiment.published or {})
        yield {
            "experiment": experiment.name,
            "figure": figure,
            "ours": value,
            "error": experiment.errors.get(figure),
            "published": (experiment.published or {}).get(figure),
            "bound": experiment.bounds.get(figure, "within") if known else None,
            "tolerance": (experiment.tolerance or {}).get(figure),
            "verdict": None if met is None else "pass" if met else "fail",
        }
