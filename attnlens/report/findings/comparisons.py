"""Findings of comparisons: differences between two models, their causes, changed heads, and changed predictions.

A change is `named` if it is significant at the report's false-discovery rate and large enough to matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from shlex import quote

from attnlens.analyzers.registry import FORMS, OWN_ROWS, ROWS
from attnlens.records import Comparison, DiagnosedCause, Finding, MeasureChange, Severity
from attnlens.records.comparison import DISTANCE, ON_FORMS, UNEXPLAINED
from attnlens.report.findings.heads import model_argument, with_error
from attnlens.report.findings.swaps import is_change
from attnlens.report.sections.swaps import interval, loss_decimals
from attnlens.report.shapes import Names, Shapes
from attnlens.wording import (
    capitalise,
    clean,
    decimals_for,
    format_count,
    format_number,
    format_spans,
    join_items,
    short,
    shorten_line,
)

Place = tuple[int, int]  # Sequential number of a layer, and number of a head in this layer
LARGE_KL, LEAST_AGREEMENT = 0.01, 0.99
"""Changed predictions are notable from this mean KL (in nats) up, or below this share of equal top predictions."""
MOST_HEADS = 4  # Maximum number of changed heads whose names are printed


def comparison_findings(shapes: Shapes) -> Iterator[Finding]:
    """Yield findings on how two models differ, the causes, the changed heads, and the changed predictions."""
    comparison = shapes.report.comparison
    assert comparison is not None  # noqa: S101  # a report of this kind has one
    name = shapes.report.model.layer_name
    yield from _first_lines(comparison)
    yield from _diagnosis(comparison, name)
    if comparison.shifts:
        answer = "Heads do not correspond, so only distributions are compared."
        shifts = [
            f"{shift.measure} {short(shift.before.quartiles[1])} → {short(shift.after.quartiles[1])}"
            for shift in comparison.shifts[:4]
        ]
        yield Finding(question="Changed?", answer=answer, evidence=f"Medians: {'; '.join(shifts)}.")
        return
    blocks = [block for block in comparison.blocks if block.named]
    rate = f"false-discovery rate {comparison.fdr:g}"
    evidence = f"{comparison.named:,} of {comparison.tests:,} changes are significant ({rate})."
    if small := sum(row.negligible and row.q is not None and row.q <= comparison.fdr for row in comparison.rows):
        evidence += f" {small:,} more {'is' if small == 1 else 'are'} significant but too small to matter."
    if blocks:
        evidence = f"Blocks that compute differently: {join_items([block.path for block in blocks], 3)}. {evidence}"
    changes = Changes.of(comparison)
    count = len(changes.own)
    answer = _count_changed(comparison, changes)
    more = " more" if count else ""
    if changes.inherited:
        verb, whose = ("attends", "its") if len(changes.inherited) == 1 else ("attend", "their")
        answer += f"; {len(changes.inherited)}{more} {verb} differently only because {whose} inputs changed"
        more = " more"
    if others := changes.others:
        answer += f"; {len(others)}{more} {'differs' if len(others) == 1 else 'differ'} in other measures"
    severity = "notable" if count or blocks or changes.inherited or others else "none"
    if comparison.outcome is not None and comparison.outcome.diverged:
        answer += "; numbers that are not finite cannot be compared"
        severity = "notable"
    distances = [row for row in comparison.rows if row.measure == FORMS and row.delta is not None]
    if distances and not comparison.tests:
        largest = max(distances, key=lambda row: row.delta or 0.0)
        head = f"{name(largest.layer)}.{largest.head}"
        answer = f"The form M changed by at most {short(largest.delta or 0.0)} (‖ΔM‖/‖M‖ of {head})"
        evidence = "Changes are not tested."
    yield Finding(
        question="Changed?", answer=f"{answer}.", evidence=evidence, severity=severity, measures=[OWN_ROWS, FORMS, ROWS]
    )
    if forms := [*_forms(comparison, changes, name)]:
        yield Finding(
            question="Form M?", answer=forms[0], evidence=" ".join(forms[1:]), severity=severity, measures=[FORMS]
        )
    if notes := [*_notes(comparison, name)]:
        yield Finding(question="Note", answer=notes[0], evidence=" ".join(notes[1:]), severity=severity)
    if changes.own or others:
        yield _changed_heads(comparison, changes, name)
    yield from _predictions(comparison)


def _count_changed(comparison: Comparison, changes: Changes) -> str:
    """Begin the answer to "Changed?" with the number of heads that changed by themselves, as far as it is known."""
    heads, measures = format_count(len(comparison.heads), "head"), {row.measure for row in comparison.rows}
    if changes.own:
        return f"{len(changes.own)} of {heads} changed"
    if OWN_ROWS in measures:
        return f"None of {heads} changed {'by itself' if changes.inherited or changes.others else 'measurably'}"
    if FORMS in measures:
        return f"The form M changed in none of {heads}"
    return f"The form M of {heads} is not compared, because reports do not contain the weights"


@dataclass(frozen=True)
class Changes:
    """Changed heads of a comparison, grouped by the kind of change."""

    forms: set[Place]  # heads whose M changed
    local: set[Place]  # heads with an unchanged M that attend differently to equal inputs
    inherited: set[Place]  # heads that attend differently only because their inputs changed
    others: set[Place]  # heads with significant changes of other measures only

    @property
    def own(self) -> set[Place]:
        """Heads whose form M changed, or that attend differently given equal inputs."""
        return self.forms | self.local

    @classmethod
    def of(cls, comparison: Comparison) -> Changes:
        """Group the changed heads by the distances between the two models' forms M and between their attention rows."""
        rows = {name: [row for row in comparison.rows if row.measure == name] for name in (OWN_ROWS, FORMS, ROWS)}
        own = _places(row for row in rows[OWN_ROWS] if row.named or (row.beyond_rounding and not row.negligible))
        changed = {(head.layer, head.head) for head in comparison.heads if head.relation == "changed"}
        forms = _places(row for row in rows[FORMS] if row.named) | (own & changed)
        alike = _places(row for row in rows[OWN_ROWS] if row.beyond_rounding is False)
        inherited = (_places(row for row in comparison.rows if row.named) & alike) - own - forms
        others = _places(row for row in comparison.rows if row.named) - own - forms - inherited
        return cls(forms, own - forms, inherited, others)


def _places(rows: Iterable[MeasureChange]) -> set[Place]:
    return {(row.layer, row.head) for row in rows}


def _first_lines(comparison: Comparison) -> Iterator[Finding]:
    """Yield findings on whether both models have the same tensors, and on the config fields that differ."""
    if (tensors := comparison.tensors) is not None:
        total, differ = format_count(tensors.total, "tensor"), len(tensors.differ)
        if tensors.identical:
            answer = f"Yes: {total}, all identical."
        elif differ:
            answer = f"No: {differ} of {total} {'differs' if differ == 1 else 'differ'}."
        elif tensors.total:
            answer = f"No: {total} in both models, all identical, but at least one model has further tensors."
        else:
            answer = "No: the models have no tensor name in common."
        evidence = [f"Differ: {join_items(tensors.differ, 3)}."] if differ else []
        for names, which in ((tensors.missing, "first"), (tensors.extra, "second")):
            evidence += [f"Only in the {which} model: {join_items(names, 3)}."] if names else []
        if tensors.types is not None:
            sides = [_storage(which, kind) for which, kind in zip(("first", "second"), tensors.types, strict=True)]
            evidence.append(f"The {'; the '.join(sides)}.")
        yield Finding(
            question="Same weights?",
            answer=answer,
            evidence=" ".join(evidence),
            severity="none" if tensors.identical else "notable",
            measures=["comparison.tensors"],
        )
    if fields := comparison.config:
        shown = [f"{clean(each.field)} {_value(each.first)} → {_value(each.second)}" for each in fields]
        yield Finding(question="Same config?", answer=f"No: {join_items(shown, 4)}.", measures=["comparison.config"])


def _storage(which: str, kind: str) -> str:
    """State how the weights of the `first` or `second` model (`which`) are stored: number type or quantisation."""
    return (
        f"{which} model's values are exact in {kind}"
        if "float" in kind
        else f"{which} model is stored as {clean(kind)}"
    )


LONGEST = 32  # Maximum number of characters printed of a config field's value


def _value(value: str | None) -> str:
    return "none" if value in (None, "null") else shorten_line(clean(value), LONGEST)


MOST_CAUSES = 4  # Maximum number of causes that are printed


def _diagnosis(comparison: Comparison, name: Names) -> Iterator[Finding]:
    """Yield a finding for each cause of differences (at most MOST_CAUSES), harmless causes last."""
    causes = sorted(comparison.diagnosis, key=lambda cause: (cause.harmless, cause.hypothesis == UNEXPLAINED))
    for number, cause in enumerate(causes[:MOST_CAUSES]):
        more = len(causes) - MOST_CAUSES
        evidence = [f"Repair: {cause.repair}."] if cause.repair else []
        if cause.head_errors:
            low, high = min(cause.head_errors), max(cause.head_errors)
            evidence.append(f"Relative error of W_Q and W_K by head: {short(low)} to {short(high)}.")
        if more > 0 and number == MOST_CAUSES - 1:
            verb = "is" if more == 1 else "are"
            evidence.append(f"{format_count(more, 'more cause')} {verb} in the JSON report (--json FILE).")
        severity: Severity = "none" if cause.harmless else "problem" if cause.repair else "notable"
        if "rounded to " in cause.hypothesis:  # the weights of one model were rounded to a coarser number type
            severity = "notable"
        yield Finding(
            question="Cause?",
            answer=clean(_describe_cause(cause, name)),
            evidence=clean(" ".join(evidence)),
            severity=severity,
            measures=["comparison.diagnosis"],
        )


def _describe_cause(cause: DiagnosedCause, name: Names) -> str:
    names = [name(layer) for layer in cause.layers]
    numbered = names == [str(layer) for layer in cause.layers]
    where = "outside the layers" if cause.tensors else ""
    if names:
        where = f"layer{'s' * (len(names) > 1)} {format_spans(cause.layers) if numbered else join_items(names)}"
    if cause.heads:
        where += f" {'head' if len(cause.heads) == 1 else 'heads'} {format_spans(cause.heads)}"
    return capitalise(f"{where}: {cause.text}." if where else f"{cause.text}.")


def _forms(comparison: Comparison, changes: Changes, name: Names) -> Iterator[str]:
    """Yield sentences on heads whose form M changed, heads that changed although M did not, and notes on forms."""
    if changes.forms:
        heads = format_count(len(changes.forms), "head")
        yield f"The query/key form M changed in {heads} ({_join_heads(changes.forms, name)})."
    if changes.local:
        heads = format_count(len(changes.local), "head")
        verb = "attends" if len(changes.local) == 1 else "attend"
        yield f"{heads} {verb} differently to equal inputs although M is unchanged: {_join_heads(changes.local, name)}."
    yield from (clean(note) for note in comparison.notes if note.startswith(ON_FORMS))


def _notes(comparison: Comparison, name: Names) -> Iterator[str]:
    """Yield the notes that do not concern forms M, and a sentence on measures with a value in only one model."""
    yield from (clean(note) for note in comparison.notes if not note.startswith(ON_FORMS))
    lone = [row for row in comparison.rows if (row.before is None) != (row.after is None)]
    lone = [row for row in lone if not row.measure.startswith(DISTANCE)]
    if lone:
        which = join_items(f"{row.measure} of {name(row.layer)}.{row.head}" for row in lone)
        yield f"Only one of the models has a value of {format_count(len(lone), 'measure')}: {which}."


def _join_heads(heads: set[Place], name: Names) -> str:
    return join_items(f"{name(layer)}.{head}" for layer, head in sorted(heads))


DISTANCES = {
    OWN_ROWS: ("Attention", "KL {} nats", "KL of the attention rows if both blocks get the same hidden states."),
    FORMS: ("M", "‖ΔM‖/‖M‖ {}", ""),
    ROWS: ("Attention", "KL {} nats", "KL of the attention rows, including the effect of earlier blocks."),
}
"""Distance by which heads are sorted, most preferred first → what differs, format of a value, and explanation."""


def _most_changed(comparison: Comparison, changes: Changes) -> list[MeasureChange]:
    """Return the changed heads' rows for the first of DISTANCES that is not 0 for all of them, largest first."""
    for measure in DISTANCES:
        rows = [row for row in comparison.rows if row.measure == measure and row.delta]
        named = _places(row for row in rows if row.named)
        shown = changes.own | (changes.others & named)
        if changed_rows := [row for row in rows if (row.layer, row.head) in shown]:
            return sorted(changed_rows, key=lambda row: -(row.delta or 0.0))
    return []


def _changed_heads(comparison: Comparison, changes: Changes, name: Names) -> Finding:
    """Name the heads that changed most, with their distances if known."""
    rows = _most_changed(comparison, changes)
    if not rows:
        answer = f"{_join_heads(changes.own or changes.others, name)}."
        return Finding(question="Which heads?", answer=answer, evidence="Heads are written LAYER.HEAD.")
    measure = rows[0].measure
    subject, value, evidence = DISTANCES[measure]
    shown = [
        f"layer {name(row.layer)} head {row.head} ({value.format(short(row.delta or 0.0))})"
        for row in rows[:MOST_HEADS]
    ]
    more = f" and {len(rows) - MOST_HEADS} more" if len(rows) > MOST_HEADS else ""
    answer = f"{subject} differs most in {', '.join(shown)}{more}."
    return Finding(question="Which heads?", answer=answer, evidence=evidence, measures=[measure])


def _predictions(comparison: Comparison) -> Iterator[Finding]:
    """Yield a finding on the change in the loss, predictions or hidden states, if any of these is known."""
    if (outcome := comparison.outcome) is None:
        return
    if outcome.diverged:
        answer = "The second model's predictions are not finite."
        yield Finding(question="Effect?", answer=answer, severity="problem", measures=["comparison.outcome"])
        return
    parts, severity = [], "none"
    if (loss := outcome.loss) is not None:
        decimals = loss_decimals([loss])
        before, after, delta = (format_number(number, decimals) for number in (loss.before, loss.after, loss.delta))
        ends = "" if loss.ci95 is None else f", 95 % interval {interval(loss.ci95, decimals)}"
        parts.append(f"Loss {before} → {after} nats per token. Change {delta}{ends}.")
        parts += ["A uniform guess over the vocabulary is better."] * outcome.destroyed
    if (change := outcome.predictions) is not None:
        mean = short(change.mean) if not change.mean_se else with_error(change.mean, change.mean_se)
        parts.append(
            f"KL {mean} nats per token (99.9th percentile {short(change.q999)}); "
            f"same top prediction for {100 * change.same_top:.1f} %."
        )
        large = change.mean >= LARGE_KL or change.same_top < LEAST_AGREEMENT
        sure = change.mean > 0 if outcome.kl_ci95 is None else outcome.kl_ci95[0] > 0
        severity = "notable" if large and sure else "none"
    elif outcome.hidden_cosine is not None:
        decimals = max(3, min(6, decimals_for([1 - outcome.hidden_cosine], 2)))  # digits of the distance from 1
        parts.append(f"Cosine of the last hidden states {format_number(outcome.hidden_cosine, decimals)}.")
    if loss is not None and is_change(loss) and loss.delta > 0:
        severity = "problem"
    if parts:
        yield Finding(
            question="Effect?",
            answer=parts[0],
            evidence=" ".join(parts[1:]),
            severity=severity,
            measures=["comparison.outcome"],
        )


def after_comparison(shapes: Shapes) -> Iterator[str]:
    """Yield commands that show the most changed head, search for smaller changes, and check the second model."""
    report = shapes.report
    comparison = report.comparison
    assert comparison is not None  # noqa: S101  # a report of this kind has one
    changes, model = Changes.of(comparison), model_argument(report)
    most_changed = _most_changed(comparison, changes)
    if changes.own and most_changed:
        head = most_changed[0]
        name = f"{report.model.layer_name(head.layer)}.{head.head}"
        yield f"attnlens inspect {model} --head {name} --show attention --html head.html"
    identical = comparison.tensors is not None and comparison.tensors.identical and not comparison.config
    if comparison.tests and not comparison.named and not identical and report.settings.windows is not None:
        yield f"attnlens compare {quote(comparison.base.id)} {model} --windows {2 * report.settings.windows}"
    if not identical:
        yield f"attnlens doctor {model}"
