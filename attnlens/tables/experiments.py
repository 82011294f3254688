"""Tables of experiments: ours beside the published, and measures by training step."""

from __future__ import annotations

import csv as standard
import io
import math
from collections.abc import Callable, Iterator, Sequence

from attnlens.records import Experiment, Report
from attnlens.tables.figures import setting, worded
from attnlens.tables.sections import Rows, Section
from attnlens.tables.series import step_cells, told
from attnlens.tables.terminal import Column
from attnlens.wording import NO_VALUE, SCIENTIFIC, clean, counted, decimals_for, listed, short, written

Cell = str | int | float | None
PASS, FAIL = "pass", "FAIL"
SIGNS = {"within": "", "at least": "≥ ", "at most": "≤ "}


def experiment_sections(report: Report, *, whole: bool = False) -> Iterator[Section]:
    """All that a summary of `converge` and `verify` says below the model; `whole`, with every measure of a series."""
    plain = [experiment for experiment in report.experiments if not experiment.trajectories]
    if plain:
        yield Section("", rows=figure_rows(plain), below=tuple(_figure_help(plain)))
        yield Section("What was asked", tuple(_asked(experiment, report) for experiment in plain), items=True)
    for experiment in report.experiments:
        if experiment.trajectories:
            yield from told(experiment, whole=whole)
    missing = [line for experiment in report.experiments for line in _missing(experiment)]
    if missing:
        yield Section("No value", tuple(missing), items=True)


def verdict(report: Report) -> str:
    """`All 5 experiments meet what was published.`, or which miss it, and how many have nothing to meet."""
    judged = [experiment for experiment in report.experiments if experiment.passed is not None]
    failed = [clean(experiment.name) for experiment in judged if not experiment.passed]
    every = counted(len(report.experiments), "experiment")
    if not judged:
        return f"{every}; nothing published to compare with."
    some = f"{len(judged)} of {every} {'has' if len(judged) == 1 else 'have'} published figures to meet"
    partly = len(judged) < len(report.experiments)
    if failed:
        verb = "misses" if len(failed) == 1 else "miss"
        if partly:
            return f"{some}, and {len(failed)} of these {verb} them: {listed(failed)}."
        return f"{len(failed)} of {every} {verb} what was published: {listed(failed)}."
    if partly:
        return f"{some}, and {'meets' if len(judged) == 1 else 'meet'} them."
    if len(judged) == 1:
        return "The experiment meets what was published."
    return f"All {counted(len(judged), 'experiment')} meet what was published."


def passed(report: Report) -> bool:
    """Whether no experiment misses what was published."""
    return all(experiment.passed is not False for experiment in report.experiments)


def figure_rows(experiments: Sequence[Experiment]) -> Rows:
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
    return Rows(names, tuple(columns))


def judgement(experiment: Experiment, figure: str) -> str:
    """`pass`, `FAIL`, or – where nothing was published."""
    met = experiment.meets(figure)
    return NO_VALUE if met is None else PASS if met else FAIL


def experiment_csv(report: Report, harmless: Callable[[str], str]) -> str:
    """One row per head, measure and step where heads are followed; else one row per experiment and figure.

    A missing value is an empty cell, numbers carry nine significant digits; `harmless` makes text of any string.
    """
    followed = [experiment for experiment in report.experiments if experiment.trajectories]
    rows = [row for e in followed for row in step_cells(e)] or [row for e in report.experiments for row in _figures(e)]
    buffer = io.StringIO()
    writer = standard.writer(buffer, lineterminator="\n")
    writer.writerow(rows[0] if rows else [])
    writer.writerows([_plain(cell, harmless) for cell in row.values()] for row in rows)
    return buffer.getvalue()


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


def _figures(experiment: Experiment) -> Iterator[dict[str, Cell]]:
    for figure, value in experiment.final.items():
        yield {
            "experiment": experiment.name,
            "figure": figure,
            "ours": value,
            "error": experiment.errors.get(figure),
            "published": (experiment.published or {}).get(figure),
            "bound": experiment.bounds.get(figure, "within") if figure in (experiment.published or {}) else None,
            "tolerance": (experiment.tolerance or {}).get(figure),
            "verdict": {PASS: "pass", FAIL: "fail"}.get(judgement(experiment, figure)),
        }


def _plain(cell: Cell, harmless: Callable[[str], str]) -> str:
    if cell is None:
        return ""
    return f"{cell:.9g}" if isinstance(cell, float) else harmless(str(cell))
