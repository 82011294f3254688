"""Sentences of a report: subject, findings, missing values, whether experiments meet the published figures."""

from __future__ import annotations

import math
from collections.abc import Iterable

from attnlens.analyzers.registry import NULLS, MeasureInfo, find_measure
from attnlens.records import Experiment, Extreme, Report, Skipped, Text
from attnlens.report.shapes import Shapes, by_turns
from attnlens.wording import (
    NO_VALUE,
    big,
    clean,
    decimals_for,
    format_count,
    format_number,
    group_pairs,
    join_items,
    model_name,
    source_of,
)


def format_label(experiment: Experiment, name: str) -> str:
    """Return the label of a figure, setting or curve, else its name; identifiers get blanks for underscores."""
    return clean(experiment.labels.get(name) or (name.replace("_", " ") if name.isidentifier() else name))


def setting(experiment: Experiment, name: str) -> str:
    """Format a setting: `lr 0.1`, `d 2 4 10`, `accepted, d = 4: 0.2`."""
    label = format_label(experiment, name)
    return f"{label}{':' * (' = ' in label)} {_value(experiment.settings[name])}"


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_value, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def outcome(report: Report) -> tuple[str, bool]:
    """Return the verdict on the experiments, or, if they read a model, how much of it was read.

    The flag is True if nothing is missing, or no experiment misses its published figures.
    """
    if report.coverage.heads:
        return standing(report)
    judged = [experiment for experiment in report.experiments if experiment.passed is not None]
    failed = [clean(experiment.name) for experiment in judged if not experiment.passed]
    total = format_count(len(report.experiments), "experiment")
    if not judged:
        return f"{total}; nothing published to compare with.", True
    some = f"{len(judged)} of {total} compared with published figures"
    return f"{some}; {f'missed by {join_items(failed)}' if failed else 'all agree'}.", not failed


def judgement(experiment: Experiment, figure: str) -> str:
    """Return `pass`, `FAIL`, or `–` if nothing was published."""
    met = experiment.meets(figure)
    return NO_VALUE if met is None else "pass" if met else "FAIL"


def heads_of(experiment: Experiment) -> int:
    """Count the heads whose values the experiment tracks over its steps."""
    return len({(trajectory.layer, trajectory.head) for trajectory in experiment.trajectories})


def is_main_measure(name: str) -> bool:
    """Return True if a measure is one of the main measures of a series of checkpoints."""
    return _place(name) < math.inf


def measures_of(experiment: Experiment) -> list[str]:
    """List the measures of a series in display order: main measures first, then the others, sources taking turns."""
    names = [name for name, curve in experiment.curves.items() if curve.null_of is None]
    main = sorted(filter(is_main_measure, names), key=_place)
    return [*main, *by_turns(name for name in names if name not in main)]


def changed_measures(experiment: Experiment) -> list[str]:
    """List the measures of a series whose median changes between checkpoints."""
    return [name for name in measures_of(experiment) if len(set(experiment.curves[name].median)) > 1]


def _place(name: str) -> float:
    """Return the position of a main measure of a series, 0 for the loss (not a measure of heads), ∞ for others."""
    return 0 if name == "loss" else find_measure(name).series or math.inf


def null_words(measures: Iterable[MeasureInfo]) -> str:
    """Describe the nulls of these measures; if the kinds differ, name the sources whose nulls rotate the head's M."""
    kinds = {source_of(info.name): info.null for info in measures}
    if len(set(kinds.values())) < 2:
        return NULLS[next(iter(kinds.values()), "factors")]
    rotated = join_items(f"{source}.*" for source, kind in kinds.items() if kind == "rotations")
    return f"{NULLS['factors']}, for {rotated} {NULLS['rotations']}"


def null_cell(mean: float, sd: float) -> str:
    """Format mean ± sd of a null, with two significant digits of the sd."""
    decimals = decimals_for([sd or mean], figures=2)
    return f"{format_number(mean, decimals)} ± {format_number(sd, decimals)}"


def no_errors(report: Report) -> str:
    """State that there are no errors and intervals if only one window was read; else empty."""
    return f"no errors: only one {_unit(report)} was read" if report.settings.windows == 1 else ""


def population(report: Report, counted: str = "") -> str:
    """State the population that the errors refer to: windows of the named texts, or similar texts; empty without text.

    Consecutive windows from the beginning do not represent the rest of their text. Several texts are weighted by their
    windows, or by the unit in `counted`.
    """
    settings, texts, unit = report.settings, _texts_in_windows(report), _unit(report)
    if not texts:
        return f"errors are over the {len(settings.texts)} files and apply to similar files" if settings.texts else ""
    first, names = settings.placement == "first", join_items([text.name for text in texts], 4)
    counts = [len(text.windows) for text in texts]
    if settings.intervals == "texts":
        scope = f"over {len(texts)} texts and apply to {'beginnings of ' * first}similar texts"
    elif first:
        scope = f"over the first {sum(counts)} {unit}s and apply to similar {unit}s, not to all of {names}"
    else:
        scope = f"over {unit}s and apply to the {sum(text.available or 0 for text in texts)} {unit}s of {names}"
    if len(texts) > 1:
        scope += f"; every {counted or unit} has equal weight; the texts have {join_items(counts)} {unit}s"
    if len(texts) < len(settings.texts) and settings.noise is None:
        scope += "; errors of heads that do not read the text reflect the other input only"
    return f"errors are {scope}"


def _unit(report: Report) -> str:
    """Name the unit that was fed: `window`, `line`, or `input` if no text was fed."""
    return "input" if not _texts_in_windows(report) else "line" if report.settings.pack is False else "window"


def _texts_in_windows(report: Report) -> list[Text]:
    """Return the texts that were cut into windows or lines, without images and sounds from files or noise."""
    return [text for text in report.settings.texts if text.available is not None]


def title(report: Report) -> str:
    """Join the names of the model and of others that experiments ran on: `one-layer attention (synthetic) + demo`."""
    others = dict.fromkeys(experiment.model for experiment in report.experiments if experiment.model)
    return " + ".join([report.model.title, *map(clean, others)])


def ran_on(report: Report) -> str:
    """State which experiments ran on which model; empty if all ran on the report's model."""
    by_model = group_pairs((experiment.model, clean(experiment.name)) for experiment in report.experiments)
    default = by_model.pop(None, [])
    texts = [f"{join_items(names, 5)}: {clean(model or '')}" for model, names in by_model.items()]
    return "; ".join([*texts, f"all others: {model_name(report.model.id)}"] if texts and default else texts)


def header(report: Report) -> str:
    """Format architecture, number of parameters, quantisation, adapter, revision and settings on one line."""
    model, settings = report.model, report.settings
    facts = [
        model.architecture,
        f"{big(model.parameters)} parameters",
        f"decoded from {model.quantised}" if model.quantised else "",
        f"with a {model.adapter.kind} adapter" if model.adapter else "",
        f"revision {model.revision[:12]}" if model.revision else "",
        settings.fed,
        f"{settings.dtype} on {settings.device}",
    ]
    return " · ".join(clean(fact) for fact in facts if fact)


def standing(report: Report) -> tuple[str, bool]:
    """Return how much of the model was read, and whether that is all of it."""
    return clean(report.coverage.sentence), report.coverage.complete


def conventions(report: Report) -> str:
    """Describe positions, QK-norm and biases of the model's attention, which affect the measures; empty if unknown."""
    if (record := report.model.conventions) is None:
        return ""
    facts = [f"positions: {record.position}"]
    facts += ["queries and keys are normalised per token"] if record.qk_norm else []
    facts += ["biases are left out of weights.*"] if record.bias == "excluded" else []
    return "; ".join(facts)


def notes(report: Report) -> list[str]:
    """List the caveats of a report, one sentence each."""
    of_model = [] if report.model.conventions is None else report.model.conventions.notes
    return [clean(note) for note in (*report.settings.notes, *of_model, *other_base(report), *state_unexpected(report))]


def adapter(report: Report) -> str:
    """Describe the adapter and the model it was merged into; empty without an adapter."""
    record = report.model.adapter
    if record is None:
        return ""
    replaced = f"; {format_count(len(record.replaced), 'parameter')} replaced whole" if record.replaced else ""
    return clean(
        f"{record.kind} adapter {record.id} (r {record.rank}, α {record.alpha:g}) was merged into "
        f"{format_count(record.modules, 'module')} of {report.model.id}{replaced}."
    )


def other_base(report: Report) -> list[str]:
    """Return a warning if the adapter names another base than the model; compares only the last parts of the ids."""

    def last(name: str) -> str:
        return name.replace("\\", "/").rstrip("/").rpartition("/")[2].partition("@")[0].lower()

    record, model = report.model.adapter, report.model.id
    if record is None or record.base is None or last(record.base) == last(model):
        return []
    return [clean(f"The adapter's base is {record.base}; it was merged into {model}, which has matching shapes.")]


def state_unexpected(report: Report) -> list[str]:
    """Return the sentence on tensors of the files that the model does not use; empty if there are none."""
    names = report.model.unexpected
    unused = f"{format_count(len(names), 'tensor')} in the files not used by {report.model.architecture}"
    return [f"{unused}: {join_items(names)}."] if names else []


def identity(report: Report) -> str:
    """State how closely recomputed attention agrees with the model's; empty if that was not measured."""
    error = report.summary.identity_error
    return "" if error is None else f"attention recomputed by attnlens agrees with the model to {error:.1e} (relative)"


def extreme(head: Extreme) -> tuple[str, str]:
    """Return the name of an extreme head (`layer 3 head 7`) and its text with rank, value and median."""
    return f"layer {head.layer} head {head.head}", clean(head.text)


def list_skipped(entries: Iterable[Skipped]) -> list[str]:
    """List what was skipped, one line per reason with the sites and heads."""
    places = []
    for entry in entries:
        heads = f" {'head' if len(entry.heads) == 1 else 'heads'} {join_items(entry.heads, 12)}" if entry.heads else ""
        places.append((entry.reason, f"{entry.site}{heads}{f' ({entry.measure})' if entry.measure else ''}"))
    return [f"{clean(reason)}: {join_items(sites, 4)}" for reason, sites in group_pairs(places).items()]


def without_value(shapes: Shapes) -> list[str]:
    """List the measures without values, one line per reason and number of heads."""
    pairs = []
    for name in shapes.report.measure_names():
        if name in shapes.readings:
            counts = shapes.readings[name].reasons
            pairs += [((reason, format_count(count, "head")), name) for reason, count in counts.items()]
        else:  # missing in all heads
            first = next(head.measures[name] for head in shapes.report.heads if name in head.measures)
            pairs.append(((first.reason or "", "all heads"), name))
    groups = group_pairs(pairs).items()
    return [f"{join_items(names, 5)}: {heads}, because {clean(reason)}" for (reason, heads), names in groups]
