"""Sections and rows on experiments (our values and published values) and on series of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from attnlens.analyzers.registry import find_measure
from attnlens.records import Curve, Experiment, Report
from attnlens.report.sections.facts import null_cell
from attnlens.report.sections.reference import null_words
from attnlens.report.sections.section import TEXTS, Column, Row, Section, Table, View, build_table, section
from attnlens.report.shapes import Shapes, alternate_sources
from attnlens.wording import NO_VALUE, clean, decimals_for, format_count, format_number, group_pairs, join_items, short


def format_label(experiment: Experiment, name: str) -> str:
    """Return the label of a value, setting or curve; without a label, return the name with spaces for underscores."""
    return clean(experiment.labels.get(name) or (name.replace("_", " ") if name.isidentifier() else name))


def setting(experiment: Experiment, name: str) -> str:
    """Format a setting with its label: `lr 0.1`, `d 2 4 10`, `accepted, d = 4: 0.2`."""

    def format_value(value: object) -> str:
        if isinstance(value, list):
            return " ".join(map(format_value, value))
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    label = format_label(experiment, name)
    return f"{label}{':' * (' = ' in label)} {format_value(experiment.settings[name])}"


def judgement(experiment: Experiment, figure: str) -> str:
    """Return the verdict on a value: `pass`, `FAIL`, `not tested` (tolerance too wide), or `–` (no reference)."""
    met = experiment.meets(figure)
    if met is None:
        return NO_VALUE if figure not in (experiment.published or {}) else "not tested"
    return "pass" if met else "FAIL"


def heads_of(experiment: Experiment) -> int:
    """Count the heads whose values the experiment tracks over its steps."""
    return len({(trajectory.layer, trajectory.head) for trajectory in experiment.trajectories})


def measures_of(experiment: Experiment) -> list[str]:
    """List the measures of a series in display order: main measures first, then others, alternating between sources."""
    names = [name for name, curve in experiment.curves.items() if curve.null_of is None]
    main = sorted((name for name in names if _place(name) < math.inf), key=_place)
    return [*main, *alternate_sources(name for name in names if name not in main)]


def changed_measures(experiment: Experiment) -> list[str]:
    """List the measures of a series whose median changes between checkpoints."""
    return [name for name in measures_of(experiment) if len(set(experiment.curves[name].median)) > 1]


def _place(name: str) -> float:
    """Return a measure's position among the main measures of a series: 0 for the loss, ∞ if it is not among them."""
    return 0 if name == "loss" else find_measure(name).series or math.inf


MOST_STEPS = 8  # Maximum number of checkpoints shown as columns; a longer series shows evenly spaced checkpoints


def _series_section(experiment: Experiment, *, whole: bool) -> Section:
    """Build the section of a series of checkpoints, with all changed measures if `whole`, else only the main ones.

    If no main measure changed, show all changed measures.
    """
    heads, measures = heads_of(experiment), changed_measures(experiment)
    count = max((len(curve.steps) for curve in experiment.curves.values()), default=0)
    lines = [f"{format_count(count, 'checkpoint')}, {format_count(heads, 'head')}."]
    shown = measures if whole else [name for name in measures if _place(name) < math.inf] or measures
    help_ = "Medians over heads; quartiles over heads at the last checkpoint" if heads > 1 else "One head's values"
    help_ += f"; {MOST_STEPS} of {count} checkpoints are shown" if count > MOST_STEPS else ""
    nulls = [find_measure(name) for name in shown if experiment.null(name) is not None]
    help_ += f"; null: {null_words(nulls)}, mean ± sd." if nulls else "."
    more = [] if len(shown) == len(measures) else [f"{len(shown)} of {len(measures)} measures; --verbose shows all."]
    return Section(experiment.question, lines=lines, table=_series_table(experiment, shown), notes=(help_, *more))


def _series_table(experiment: Experiment, measures: Sequence[str]) -> Table:
    """Build a table with one row per measure: medians at up to MOST_STEPS checkpoints, final quartiles, and null."""
    curves = [experiment.curves[name] for name in measures]
    decimals = [decimals_for([value for value in curve.median if value is not None]) for curve in curves]
    steps = curves[0].steps if curves else []
    columns = [
        Column(
            format_number(steps[at], decimals_for(steps)),
            [format_number(curve.median[at], places) for curve, places in zip(curves, decimals, strict=True)],
            group=clean(experiment.axis),
        )
        for at in np.linspace(0, len(steps) - 1, min(len(steps), MOST_STEPS)).round().astype(int).tolist()
    ]
    if heads_of(experiment) > 1:
        columns.append(Column("quartiles", [*map(_quartiles, curves, decimals)], "last"))
    nulls = [experiment.null(name) for name in measures]
    if any(nulls):
        ends = [(null.median[-1], null.high[-1]) if null and null.high else (None, None) for null in nulls]
        cells = ["" if mean is None or high is None else null_cell(mean, high - mean) for mean, high in ends]
        columns.append(Column("null", cells, "chance"))
    return Table([Column("measure", [*map(clean, measures)], words=True)], columns)


def _quartiles(curve: Curve, decimals: int) -> str:
    if curve.low is None or curve.high is None or curve.low[-1] is None:
        return NO_VALUE
    return f"{format_number(curve.low[-1], decimals)} … {format_number(curve.high[-1], decimals)}"


@section(10, "experiments", ("screen",))
def series_sections(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield one section per series of checkpoints, with its main measures."""
    yield from (_series_section(each, whole=False) for each in shapes.report.experiments if each.trajectories)


@section(10, "experiments", ("page",))
@section(50, "experiments", (*TEXTS, "verbose"))
def experiment_sections(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield the values, questions and missing values of experiments, and the changed measures of each series."""
    report, verbose = shapes.report, view == "verbose"
    plain = [experiment for experiment in report.experiments if not experiment.trajectories]
    if plain and not verbose:
        rows = [
            {
                "experiment": "" if place else clean(experiment.name),
                "figure": format_label(experiment, figure),
                **_figure_cells(experiment, figure, any(each.published for each in plain)),
            }
            for experiment in plain
            for place, figure in enumerate(experiment.final)
        ]
        table = build_table(rows, {"experiment", "figure"}, {"experiment", "figure", "verdict"})
        yield Section(table=table, notes=tuple(_figure_help(plain)))
        yield Section("Questions", items=tuple(_describe(experiment, report) for experiment in plain))
    missing = []
    for experiment in report.experiments:
        if experiment.trajectories and view != "terminal":  # there, the screen shows the main measures
            yield _series_section(experiment, whole=True)
        pairs = ((clean(reason), format_label(experiment, name)) for name, reason in experiment.reasons.items())
        for reason, names in group_pairs(pairs).items():
            missing.append(f"{clean(experiment.name)}: {join_items(names, 5)}, because {reason}")
    if missing and not verbose:
        yield Section("No value", items=missing)


def _figure_cells(experiment: Experiment, figure: str, compared: bool) -> dict[str, str]:
    """Format the cells of a value; if `compared`, add the reference, its origin, the accepted range and the verdict."""
    value, error = experiment.final[figure], experiment.errors.get(figure)
    decimals = _decimals(experiment, figure)
    known = value is not None and error is not None
    ours = format_number(value, decimals) + (f" ± {short(error or 0.0)}" if known else "")
    if not compared:
        return {"ours": ours}
    published, shown, origin, accepted = (experiment.published or {}).get(figure), NO_VALUE, NO_VALUE, NO_VALUE
    if published is not None:
        least = max(decimals, decimals_for([published], figures=2))
        small = abs(published) < 1e-4 and published != 0
        places = decimals_for([published]) if small else least
        bound, slack = experiment.bounds.get(figure, "within"), (experiment.tolerance or {}).get(figure, 0.0)
        shown, origin = format_number(published, places), experiment.origins.get(figure, "published")
        low, high = (
            short(end) if published == 0 else format_number(end, places)
            for end in (published - slack, published + slack)
        )
        accepted = f"≥ {low}" if bound == "at least" else f"≤ {high}" if bound == "at most" else f"{low} to {high}"
        accepted = "exact" if bound == "within" and not slack else accepted
    verdict = judgement(experiment, figure)
    return {"ours": ours, "reference": shown, "origin": origin, "accepted": accepted, "verdict": verdict}


def _decimals(experiment: Experiment, figure: str) -> int:
    """Choose a value's decimals: two significant digits of its tolerance or error, or else four of the value."""
    value = experiment.final.get(figure)
    slack = (experiment.tolerance or {}).get(figure) or experiment.errors.get(figure)
    if value is not None and value != 0 and abs(value) < 1e-4:
        return decimals_for([value])
    if slack and math.isfinite(slack) and slack < 1:
        return min(9, 1 - math.floor(math.log10(slack)))
    return decimals_for([value or 0.0], figures=4)


def _figure_help(experiments: Sequence[Experiment]) -> Iterator[str]:
    if any(experiment.errors for experiment in experiments):
        yield (
            "±: standard error over trials, or over the units named in the experiment's question; extremes, medians, "
            "counts and single solutions have none."
        )
    if any(experiment.published for experiment in experiments):
        yield (
            "origin: the reference is published in the paper, computed by a reimplementation, or the bound of a "
            "control; accepted: reference ± tolerance; not tested: the tolerance exceeds a third of the reference."
        )
    yield from (f"source: {source}" for source in dict.fromkeys(clean(e.source) for e in experiments if e.source))


def _describe(experiment: Experiment, report: Report) -> str:
    """Describe an experiment: name, question, model (if not the report's), settings, and run time."""
    facts = [f"on {experiment.model}"] if experiment.model else []
    facts += [setting(experiment, name) for name, value in experiment.settings.items() if value is not None]
    if (seconds := report.timings.get(experiment.name)) is not None:
        facts.append(f"{seconds:.1f} s")
    return clean(f"{experiment.name}: {experiment.question}" + (f" ({', '.join(facts)})" if facts else ""))


def experiment_rows(report: Report) -> list[Row]:
    """Build one spreadsheet row per head, measure and step or, if no head was tracked, one row per value."""
    rows: list[Row] = []
    for experiment in report.experiments:
        for trajectory in experiment.trajectories:
            steps = experiment.curves[trajectory.measure].steps if trajectory.measure in experiment.curves else []
            errors = trajectory.se or [None] * len(trajectory.values)
            where: Row = {"layer": trajectory.layer, "head": trajectory.head, "measure": trajectory.measure}
            points = zip(steps, trajectory.values, errors, strict=False)
            rows += [{**where, experiment.axis: step, "value": value, "se": error} for step, value, error in points]
    figures = [(each, figure) for each in report.experiments for figure in each.final]
    return rows or [
        {
            "experiment": experiment.name,
            "figure": figure,
            "ours": experiment.final[figure],
            "error": experiment.errors.get(figure),
            "published": (experiment.published or {}).get(figure),
            "origin": experiment.origins.get(figure, "published") if figure in (experiment.published or {}) else None,
            "bound": experiment.bounds.get(figure, "within") if figure in (experiment.published or {}) else None,
            "tolerance": (experiment.tolerance or {}).get(figure),
            "verdict": None if figure not in (experiment.published or {}) else judgement(experiment, figure).lower(),
        }
        for experiment, figure in figures
    ]
