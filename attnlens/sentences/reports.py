"""Sentences of a report: its subject, what is missing, the most extreme heads."""

from __future__ import annotations

from collections.abc import Iterable

from attnlens.records import Extreme, Report, Skipped
from attnlens.shapes import Shapes
from attnlens.wording import big, clean, counted, listed, model_name


def title(report: Report) -> str:
    """The model's name, and those of the others that experiments ran on: `one-layer attention (synthetic) + demo`."""
    others = dict.fromkeys(experiment.model for experiment in report.experiments if experiment.model)
    return " + ".join([report.model.title, *map(clean, others)])


def ran_on(report: Report) -> str:
    """Which experiments ran on which model; empty where all ran on the report's own."""
    found: dict[str | None, list[str]] = {}
    for experiment in report.experiments:
        found.setdefault(experiment.model, []).append(clean(experiment.name))
    rest = found.pop(None, [])
    said = [f"{listed(names, 5)}: {clean(model or '')}" for model, names in found.items()]
    return "; ".join([*said, f"all others: {model_name(report.model.id)}"] if said and rest else said)


def header(report: Report) -> str:
    """Model, architecture, parameters, revision and settings on one line."""
    model, settings = report.model, report.settings
    facts = [model.architecture, f"{big(model.parameters)} parameters"]
    if model.quantised:
        facts.append(f"decoded from {model.quantised}")
    if model.adapter:
        facts.append(f"with a {model.adapter.kind} adapter")
    if model.revision:
        facts.append(f"revision {model.revision[:12]}")
    facts += [settings.fed, f"{settings.dtype} on {settings.device}"]
    return " · ".join(clean(fact) for fact in facts if fact)


def standing(report: Report) -> tuple[str, bool]:
    """How much of the model was read, and whether that is all of it."""
    return clean(report.coverage.sentence), report.coverage.complete


def conventions(report: Report) -> str:
    """How the model's attention is put together, where that changes what the numbers mean; empty where unknown."""
    found = report.model.conventions
    if found is None:
        return ""
    facts = [f"positions: {found.position}"]
    if found.qk_norm:
        facts.append("queries and keys are normalised per token")
    if found.bias == "excluded":
        facts.append("biases are left out of weights.*")
    return "; ".join(facts)


def notes(report: Report) -> list[str]:
    """What else a reader of the numbers must know, a sentence each."""
    of_model = [] if report.model.conventions is None else report.model.conventions.notes
    return [clean(note) for note in (*report.settings.notes, *of_model, *other_base(report), *unexpected(report))]


def adapter(report: Report) -> str:
    """What was merged into which model; empty where nothing was."""
    found = report.model.adapter
    if found is None:
        return ""
    whole = f"; {counted(len(found.replaced), 'parameter')} replaced whole" if found.replaced else ""
    return clean(
        f"{found.kind} adapter {found.id} (r {found.rank}, α {found.alpha:g}) was merged into "
        f"{counted(found.modules, 'module')} of {report.model.id}{whole}."
    )


def other_base(report: Report) -> list[str]:
    """The sentence on an adapter that names another base than the model; an id and a folder's name are compared."""
    found = report.model.adapter
    if found is None or found.base is None or _last(found.base) == _last(report.model.id):
        return []
    own = report.model.id
    return [clean(f"The adapter says that its base is {found.base}; it was merged into {own}, whose shapes it fits.")]


def _last(name: str) -> str:
    """The last part of an id or path, without a revision."""
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].partition("@")[0].lower()


def unexpected(report: Report) -> list[str]:
    """The sentence on tensors that the model has no place for, where there are any."""
    names = report.model.unexpected
    if not names:
        return []
    return [f"{counted(len(names), 'tensor')} of the files not used by {report.model.architecture}: {listed(names)}."]


def identity(report: Report) -> str:
    """How well recomputed attention agrees with the model's own; empty where that was not measured."""
    error = report.summary.identity_error
    return "" if error is None else f"attention recomputed by attnlens agrees with the model to {error:.1e} (relative)"


def extreme(found: Extreme) -> tuple[str, str]:
    """`layer 3 head 7`, and what it does, with its value and rank."""
    return f"layer {found.layer} head {found.head}", clean(found.text)


def skipped(entries: Iterable[Skipped]) -> list[str]:
    """What was skipped, one line a reason, with the sites and heads."""
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        heads = f" {'head' if len(entry.heads) == 1 else 'heads'} {listed(entry.heads, 12)}" if entry.heads else ""
        what = f" ({entry.measure})" if entry.measure else ""
        reasons.setdefault(entry.reason, []).append(f"{entry.site}{heads}{what}")
    return [f"{clean(reason)}: {listed(places, 4)}" for reason, places in reasons.items()]


def without_value(shapes: Shapes) -> list[str]:
    """Which measures have no value for which number of heads, one line a reason."""
    groups: dict[tuple[str, int], list[str]] = {}
    for reading in shapes.readings.values():
        for reason, count in reading.reasons.items():
            groups.setdefault((reason, count), []).append(reading.name)
    lines = [
        f"{listed(names, 5)}: {counted(count, 'head')}, because {clean(reason)}"
        for (reason, count), names in groups.items()
    ]
    reasons: dict[str, list[str]] = {}
    for name in (name for name in shapes.report.measure_names() if name not in shapes.readings):  # no head has it
        first = next(head.measures[name] for head in shapes.report.heads if name in head.measures)
        reasons.setdefault(first.reason or "", []).append(name)
    nowhere = (f"{listed(found, 5)}: all heads, because {clean(reason)}" for reason, found in reasons.items())
    return [*lines, *nowhere]
