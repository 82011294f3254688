"""Findings of changed models: the cost of a swap, the ranks within a budget, and the differences of two models.

A cost has a 95 % interval (studentised bootstrap over windows or texts, Student's t for fewer than eight); it counts
as a change if the interval excludes 0. A head of a comparison counts if its change is named at the report's
false-discovery rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Literal

from attnlens.analyzers.registry import FORMS, OWN_ROWS, ROWS
from attnlens.records import (
    Change,
    Comparison,
    Control,
    Coverage,
    DiagnosedCause,
    Finding,
    MeasureChange,
    Pair,
    Plan,
    Report,
    Rise,
    Swap,
)
from attnlens.records.comparison import DISTANCE, ON_FORMS, UNEXPLAINED
from attnlens.report.findings.heads import model_argument
from attnlens.report.sections.plans import share
from attnlens.report.sections.swaps import UNITS, figures, format_rise, interval, loss_decimals
from attnlens.report.shapes import Shapes
from attnlens.wording import clean, format_count, format_number, format_spans, join_items, short, shorten_line

Place = tuple[int, int]
"""Layer and head."""
Names = Callable[[int], str]  # Function that names a layer
NEGLIGIBLE = 0.01  # Share of the loss up to which a rise that may be 0 is called none
LARGE_KL, LEAST_AGREEMENT = 0.01, 0.99
"""Mean KL in nats, and share of equal top predictions, beyond which the effect of a difference is notable."""
MOST_HEADS = 4  # Number of changed heads that are named
READ_BY_DEFAULT = {"windows": 32, "length": 128}  # Values of --windows and --length that need not be repeated


def swap_findings(shapes: Shapes) -> Iterator[Finding]:
    """Yield the plan of ranks, and the cost of a kernel, or the cheapest of several."""
    swaps = shapes.report.swaps
    if (plan := shapes.report.plan) is not None:
        yield from _plan_findings(plan)
    if len(swaps) > 1:
        yield _cheapest(swaps)
        return
    (swap,) = swaps
    report = shapes.report
    cache = None if report.plan is not None else _cache(swap, report.settings.length, report.coverage)
    answers = (
        _cost(swap, shapes.report.settings.interval_method),
        cache,
        _healed(swap),
        _where(swap, shapes.report.model.layer_name),
        _alternative(swap, report.settings.windows),
        _continuations(swap),
    )
    yield from filter(None, answers)


def _cost(swap: Swap, method: str) -> Finding:
    """State the rise of the loss or, without a loss, the distance of predictions or hidden states."""
    if swap.diverged:
        answer = "The model diverges: its predictions with this kernel are not finite."
        return Finding(question="Cost?", answer=answer, severity="problem", measures=["swap.loss"])
    if (loss := swap.loss) is not None:
        decimals = loss_decimals([loss])
        before, after, delta = (format_number(number, decimals) for number in (loss.before, loss.after, loss.delta))
        unit = UNITS[swap.task]
        changed = _is_change(loss)
        unclear = loss.ci95 is not None and loss.ci95[1] > NEGLIGIBLE * loss.before
        answer = f"{'Unclear, read more --windows' if unclear else 'None measurable'}: loss {before} → {after} {unit}."
        if swap.destroyed:
            answer = f"Destroyed: loss {before} → {after} {unit}, worse than an even guess over the vocabulary."
        elif changed:
            risen = "" if swap.perplexity is None else f", perplexity {format_rise(loss, swap.perplexity)[0]}"
            answer = f"Loss {before} → {after} {unit}{risen}."
        few = "" if method == "bootstrap" else f" ({method})"
        ends = "" if loss.ci95 is None else f", 95 % interval {interval(loss.ci95, decimals)}{few}"
        evidence = f"Change {delta}{ends}."
        return Finding(
            question="Cost?",
            answer=answer,
            evidence=evidence,
            severity="problem" if swap.destroyed else "notable" if changed else "none",
            measures=["swap.loss", "swap.perplexity"],
        )
    if swap.kl is not None:
        answer = f"KL of the predictions from the original's: {figures(swap.kl)} {UNITS[swap.task]}."
        ends = "" if swap.kl_ci95 is None else f"95 % interval {interval(swap.kl_ci95, 3)}."
        return Finding(question="Cost?", answer=answer, evidence=ends, measures=["swap.kl"])
    if swap.hidden_cosine is None:
        return Finding(question="Cost?", answer="Unknown: nothing could be compared.", severity="problem")
    bounds = swap.hidden_cosine_ci95
    evidence = "" if bounds is None else f"95 % interval {interval(bounds, 3)}."
    answer = f"Last hidden states turn: mean cosine to the original's {swap.hidden_cosine:.3f}."
    return Finding(question="Cost?", answer=answer, evidence=evidence, measures=["swap.hidden_cosine"])


def _is_change(loss: Change) -> bool:
    """Return True if the interval of the change excludes 0; without an interval, if the change is not 0."""
    return loss.delta != 0 if loss.ci95 is None else not loss.ci95[0] <= 0 <= loss.ci95[1]


def _cheapest(swaps: list[Swap]) -> Finding:
    """Name the kernel with the smallest cost, and those whose intervals overlap with its interval."""
    measured = [(swap, swap.loss) for swap in swaps if swap.loss is not None and not swap.diverged]
    if not measured:
        return Finding(question="Cheapest?", answer="Unknown: no kernel has a loss.", severity="problem")
    best, cost = min(measured, key=lambda pair: pair[1].delta)
    end = math.inf if cost.ci95 is None else cost.ci95[1]
    close = [
        clean(swap.kernel) for swap, loss in measured if swap is not best and (loss.ci95 or (-math.inf,))[0] <= end
    ]
    doubt = f"not clearly cheaper than {join_items(close, 3)}" if close else "its interval lies below all others"
    decimals = loss_decimals([cost])
    answer = f"{clean(best.kernel)}, {doubt}."
    evidence = f"Change of the loss {format_number(cost.delta, decimals)}"
    evidence += "." if cost.ci95 is None else f", 95 % interval {interval(cost.ci95, decimals)}."
    return Finding(question="Cheapest?", answer=answer, evidence=evidence, measures=["swap.loss"])


def _cache(swap: Swap, length: int | None, coverage: Coverage) -> Finding | None:
    """State how many numbers a head caches for a window, if these are fewer than all keys and values."""
    full = next((control.state for control in swap.controls if control.role == "one key"), None)  # keeps every key
    if full is None or swap.state is None or swap.state >= full:
        return None
    answer = f"{full:,.0f} → {swap.state:,.0f} numbers per head and window ({share(swap.state / full - 1, 0)})."
    swapped = f"the {coverage.heads} swapped heads of the model's {coverage.model_heads}"
    scope = "all heads of the model" if coverage.heads == coverage.model_heads else swapped
    evidence = f"In {scope}; windows of {length} tokens."
    return Finding(question="Cache?", answer=answer, evidence=evidence, measures=["swap.state"])


def _healed(swap: Swap) -> Finding | None:
    """State the share of the cost that training recovers."""
    losses = [stage.loss for stage in swap.stages if stage.loss is not None]
    if swap.healing is None or len(losses) < 2:
        return None
    first, last = losses[0], losses[-1]
    decimals = loss_decimals([last])
    evidence = f"Change of the loss {format_number(first.delta, decimals)} → {format_number(last.delta, decimals)}"
    evidence += "." if last.ci95 is None else f", 95 % interval {interval(last.ci95, decimals)}."
    if first.delta <= max(0.0, last.delta):
        answer, severity = "Training recovered nothing.", "problem"
    else:
        recovered = min(1.0, 1 - last.delta / first.delta)
        answer, severity = f"Training recovered {100 * recovered:.0f} % of the rise.", "notable"
    return Finding(question="Healed?", answer=answer, evidence=evidence, severity=severity, measures=["swap.stages"])


def _where(swap: Swap, name: Names) -> Finding | None:
    """Name the heads or layers that cost most when they are swapped alone."""
    if not swap.sweep:
        return None
    costly = [effect for effect in swap.sweep if effect.significant and (effect.delta or 0.0) > 0]
    unit = "layer" if all(effect.head is None for effect in swap.sweep) else "head"
    total = format_count(len(swap.sweep), unit)
    names = [
        name(effect.layer) if effect.head is None else f"head {name(effect.layer)}.{effect.head}"
        for effect in costly[:MOST_HEADS]
    ]
    costs = [f"{unit_name} ({short(effect.delta or 0.0)})" for unit_name, effect in zip(names, costly, strict=False)]
    if not costly:
        answer = f"Nowhere alone: none of {total} costs significantly when swapped alone."
        return Finding(question="Where?", answer=answer, severity="none", measures=["swap.sweep"])
    prefix = "layer " if unit == "layer" else ""
    answer = f"{len(costly)} of {total} {'costs' if len(costly) == 1 else 'cost'} significantly when swapped alone."
    evidence = f"Most: {prefix}{', '.join(costs)}; false-discovery rate 5 %."
    return Finding(question="Where?", answer=answer, evidence=evidence, measures=["swap.sweep"])


def _alternative(swap: Swap, windows: int | None) -> Finding | None:
    """Compare the loss with that of the controls of the same size, and of uniform attention, in the same windows."""
    controls = [control for control in swap.controls if control.loss is not None]
    if swap.loss is None or swap.loss.ci95 is None or not controls:
        return None
    decimals = loss_decimals([swap.loss])
    cheaper, level, dearer = list[str](), list[str](), list[str]()
    for control in controls:
        name, (low, high) = clean(control.kernel or ""), _compare_control(swap.loss, control)
        if low > 0:
            cheaper.append(name)
        elif high < 0:
            dearer.append(name)
        elif control.difference is None:
            level.append(name)
        else:
            delta = format_number(control.difference.delta, decimals)
            level.append(f"{name} (difference {delta}, 95 % interval {interval((low, high), decimals)})")
    costs = "; ".join(
        f"{clean(control.kernel or '')} {format_number(control.loss.delta, decimals)}"
        for control in controls
        if control.loss is not None
    )
    parts = [f"more than {join_items(cheaper, 3)}"] if cheaper else []
    parts += [f"less than {join_items(dearer, 3)}"] if dearer else []
    clauses = [f"Costs {', '.join(parts)}"] if parts else []
    if level:
        read = "" if windows is None else f" with {format_count(windows, 'window')}"
        clauses.append(f"{'not' if clauses else 'Not'} distinguishable{read} from {join_items(level, 3)}")
    return Finding(
        question="Against simple kernels?",
        answer=f"{'; '.join(clauses)}.",
        evidence=f"Change of the loss: {costs}.",
        severity="problem" if cheaper else "none" if level else "notable",
        measures=["swap.controls"],
    )


def _compare_control(loss: Change, control: Control) -> tuple[float, float]:
    """Return the 95 % interval of the loss under the kernel minus that under a control.

    Reports of older versions lack paired differences: there, only intervals that do not overlap count as a difference.
    """
    if control.difference is not None and control.difference.ci95 is not None:
        return control.difference.ci95
    if control.loss is None or control.loss.ci95 is None or loss.ci95 is None:
        return -math.inf, math.inf
    return loss.ci95[0] - control.loss.ci95[1], loss.ci95[1] - control.loss.ci95[0]


def _continuations(swap: Swap) -> Finding | None:
    """State for how many tokens greedy continuations agree with the original's."""
    if (agreement := swap.agreement) is None:
        return None
    differing = agreement.prompts - agreement.never
    verb = "differs" if differing == 1 else "differ"
    answer = f"{differing or 'None'} of {format_count(agreement.prompts, 'greedy continuation')} {verb}."
    evidence = f"Median agreement: {min(agreement.median, agreement.tokens):.0f} of {agreement.tokens} tokens."
    return Finding(
        question="Same text?",
        answer=answer,
        evidence=evidence,
        measures=["swap.agreement"],
        severity="notable" if differing else "none",
    )


def _plan_findings(plan: Plan) -> Iterator[Finding]:
    """Yield the ranks that the budget allows, the cache that they save, and whether the promise holds."""
    what = {"loss": "loss", "ppl": "perplexity"}[plan.unit]
    limit = f"a {what} at most {100 * plan.budget:g} % higher"
    answer = f"{plan.mean_rank:.1f} of {plan.head_dim:g} numbers per key and head, for {limit}."
    promised = plan.promised
    evidence = (
        "" if promised is None else ", ".join((f"Expected rise {share(promised.share)}", *_bounds(promised))) + "."
    )
    yield Finding(question="How small?", answer=answer, evidence=evidence, measures=["swap.plan"])
    if cache := _format_cache(plan.model_cache_bytes_per_token):
        alone = plan.cache_bytes_per_token
        evidence = "Keys and values of the whole model; values keep their size."
        if alone.before != plan.model_cache_bytes_per_token.before:
            evidence += f" The swapped heads alone: {_format_cache(alone)}."
        yield _plan_cache(plan, f"{cache}.", evidence)
    elif cache := _format_cache(plan.cache_bytes_per_token):  # of an older version
        yield _plan_cache(plan, f"{cache}.", "Keys and values of the swapped heads alone; values keep their size.")
    if (measured := plan.measured) is not None:
        verdict = "Yes" if plan.within_budget else "No" if measured.share > plan.budget else "Here, but not guaranteed"
        answer = f"{verdict}: {share(measured.share)} on {clean(plan.text)}."
        yield Finding(
            question="Within budget?",
            answer=answer,
            evidence="".join(f"{bounds}." for bounds in _bounds(measured)),
            severity="none" if plan.within_budget else "problem",
            measures=["swap.plan"],
        )


def _format_cache(cache: Pair) -> str:
    """Format a change of bytes per token: `4,096 → 2,560 bytes per token (-38 %)`; empty if it is unknown."""
    if not cache.before or cache.after is None:
        return ""
    return f"{cache.before:,.0f} → {cache.after:,.0f} bytes per token ({share(cache.after / cache.before - 1, 0)})"


def _plan_cache(plan: Plan, answer: str, evidence: str) -> Finding:
    cache = plan.cache_bytes_per_token
    smaller = cache.before is not None and cache.after is not None and cache.after < cache.before
    severity: Literal["notable", "problem"] = "notable" if smaller else "problem"
    return Finding(question="Cache?", answer=answer, evidence=evidence, severity=severity, measures=["swap.plan"])


def _bounds(rise: Rise) -> Iterator[str]:
    """Yield the 95 % interval of a rise of the loss or perplexity, if there is one."""
    if rise.ci95 is not None:
        yield f"95 % interval {share(rise.ci95[0])} to {share(rise.ci95[1])}"


def after_swap(shapes: Shapes) -> Iterator[str]:
    """Yield commands that locate the cost of the cheapest kernel, train it away, or compare kernels."""
    report, swap = shapes.report, _find_cheapest(shapes.report.swaps)
    model, scope, windows = model_argument(report), _scope(report), _windows(report)
    if report.plan is not None:
        budget = f"--budget {report.plan.unit}:{100 * report.plan.budget:g}%{scope}{windows}"
        yield f"attnlens ranks {model} {budget} --plan plan.json"
        yield f"attnlens ranks {model} --ranks plan.json{windows} --save smaller"
        return
    kernel = f"{quote(swap.kernel)}{scope}{windows}"
    if not swap.sweep:
        yield f"attnlens swap-kernel {model} --kernel {kernel} --sweep layers"
    if swap.healing is None:
        yield f"attnlens heal {model} --kernel {kernel} --train 500k"
    yield f"attnlens swap-kernel {model} --kernel sink-window:4,64{windows}"


def _find_cheapest(swaps: Sequence[Swap]) -> Swap:
    """Return the kernel whose loss rises least; without a loss, the first."""
    return min(swaps, key=lambda swap: math.inf if swap.loss is None or swap.diverged else swap.loss.delta)


def _windows(report: Report) -> str:
    """Return the options that make a command read as many windows, of the same length, as this report."""
    parts = {name: getattr(report.settings, name) for name in ("windows", "length")}
    return "".join(f" --{name} {part}" for name, part in parts.items() if part not in (None, READ_BY_DEFAULT[name]))


def _scope(report: Report) -> str:
    """Return the options that restrict a command to the layers and heads of this report."""
    parts = {"layers": report.settings.layers, "heads": report.settings.heads}
    return "".join(f" --{name} {','.join(map(str, part))}" for name, part in parts.items() if part is not None)


def comparison_findings(shapes: Shapes) -> Iterator[Finding]:
    """Yield what changed between two models, why, in which heads, and the effect on predictions."""
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
    heads = format_count(len(comparison.heads), "head")
    blocks = [block for block in comparison.blocks if block.named]
    rate = f"false-discovery rate {comparison.fdr:g}"
    evidence = f"{comparison.named:,} of {comparison.tests:,} changes are significant ({rate})."
    if small := sum(row.negligible and row.q is not None and row.q <= comparison.fdr for row in comparison.rows):
        evidence += f" {small:,} more {'is' if small == 1 else 'are'} significant but too small to matter."
    if blocks:
        evidence = f"Blocks that compute differently: {join_items([block.path for block in blocks], 3)}. {evidence}"
    changes = Changes.of(comparison)
    count = len(changes.own)
    answer = f"{count} of {heads} changed" if count else f"None of {heads} changed by itself"
    if not count and all(row.measure != OWN_ROWS for row in comparison.rows):
        answer = f"The form M changed in none of {heads}"
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
    if not comparison.tests and (largest := _largest_form(comparison)) is not None:
        answer = (
            f"The form M changed by at most {short(largest.delta or 0.0)} (‖ΔM‖/‖M‖ of {largest.layer}.{largest.head})"
        )
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


def _largest_form(comparison: Comparison) -> MeasureChange | None:
    rows = [row for row in comparison.rows if row.measure == FORMS and row.delta is not None]
    return max(rows, key=lambda row: row.delta or 0.0, default=None)


@dataclass(frozen=True)
class Changes:
    """Heads of a comparison by what changed in them."""

    forms: set[Place]  # other M: the weights changed
    local: set[Place]  # the same M, but other attention to the same inputs
    inherited: set[Place]  # other attention only because their inputs changed
    others: set[Place]  # named changes of other measures alone

    @property
    def own(self) -> set[Place]:
        """Heads that changed by themselves."""
        return self.forms | self.local

    @classmethod
    def of(cls, comparison: Comparison) -> Changes:
        """Classify the heads by the distances between their forms and between their attention rows."""
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
    """Yield whether both models have the same tensors, and the config fields that affect attention and differ."""
    if (tensors := comparison.tensors) is not None:
        total, differ = format_count(tensors.total, "tensor"), len(tensors.differ)
        same = not (differ or tensors.missing or tensors.extra)
        answer = (
            f"Yes: all {total} are identical (nothing was merged)."
            if same
            else f"No: {differ} of {total} {'differs' if differ == 1 else 'differ'}."
        )
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
            severity="none" if same else "notable",
            measures=["comparison.tensors"],
        )
    if fields := comparison.config:
        shown = [f"{clean(each.field)} {_value(each.first)} → {_value(each.second)}" for each in fields]
        answer = f"No: {join_items(shown, 4)}."
        yield Finding(question="Same config?", answer=answer, severity="notable", measures=["comparison.config"])


def _storage(which: str, kind: str) -> str:
    """Say which number type represents one model's values, or how they are quantised."""
    return f"{which} model's values fit {kind}" if "float" in kind else f"{which} model is stored as {clean(kind)}"


LONGEST = 32  # Characters of a config field's value that are printed


def _value(value: str | None) -> str:
    return "none" if value in (None, "null") else shorten_line(clean(value), LONGEST)


MOST_CAUSES = 4  # Number of causes that are printed


def _diagnosis(comparison: Comparison, name: Names) -> Iterator[Finding]:
    """Yield one finding per cause of the difference, damage first, with the repair."""
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
        yield Finding(
            question="Cause?",
            answer=clean(describe_cause(cause, name)),
            evidence=clean(" ".join(evidence)),
            severity=_severity(cause),
            measures=["comparison.diagnosis"],
        )


def _severity(cause: DiagnosedCause) -> Literal["none", "notable", "problem"]:
    """Rate a cause; rounding to a coarser type is notable in either direction."""
    if "rounded to " in cause.hypothesis:
        return "notable"
    return "none" if cause.harmless else "problem" if cause.repair else "notable"


def describe_cause(cause: DiagnosedCause, name: Names) -> str:
    """Return a cause with its layers and heads as a sentence; `name` returns the name of a layer."""
    names = [name(layer) for layer in cause.layers]
    numbered = names == [str(layer) for layer in cause.layers]
    where = "outside the layers" if cause.tensors else ""
    if names:
        where = f"layer{'s' * (len(names) > 1)} {format_spans(cause.layers) if numbered else join_items(names)}"
    if cause.heads:
        where += f" {'head' if len(cause.heads) == 1 else 'heads'} {format_spans(cause.heads)}"
    sentence = f"{where}: {cause.text}." if where else f"{cause.text}."
    return sentence[0].upper() + sentence[1:]


def _forms(comparison: Comparison, changes: Changes, name: Names) -> Iterator[str]:
    """Yield sentences on the changed weights, and on heads that changed without them."""
    if changes.forms:
        heads = format_count(len(changes.forms), "head")
        yield f"The query/key form M of {heads} changed: {_list(changes.forms, name)}."
    if changes.local:
        heads = format_count(len(changes.local), "head")
        verb = "attends" if len(changes.local) == 1 else "attend"
        yield f"{heads} {verb} differently to the same inputs although M is unchanged: {_list(changes.local, name)}."
    yield from (clean(note) for note in comparison.notes if note.startswith(ON_FORMS))


def _notes(comparison: Comparison, name: Names) -> Iterator[str]:
    """Yield sentences on the models as a whole, and on measures with a value in only one of them."""
    yield from (clean(note) for note in comparison.notes if not note.startswith(ON_FORMS))
    lone = [row for row in comparison.rows if (row.before is None) != (row.after is None)]
    lone = [row for row in lone if not row.measure.startswith(DISTANCE)]
    if lone:
        which = join_items(f"{row.measure} of {name(row.layer)}.{row.head}" for row in lone)
        yield f"{format_count(len(lone), 'measure')} with a value in only one of the models: {which}."


def _list(heads: set[Place], name: Names) -> str:
    return join_items(f"{name(layer)}.{head}" for layer, head in sorted(heads))


DISTANCES = {OWN_ROWS: "own KL {} nats", FORMS: "‖ΔM‖/‖M‖ {}", ROWS: "KL as run {} nats"}
"""Measures by which changed heads are ordered, the first that is known, and how their values are printed."""


def _most_changed(comparison: Comparison, changes: Changes) -> list[MeasureChange]:
    """Return changes of practical size of one of DISTANCES, largest first, without inherited ones."""
    for measure in DISTANCES:
        rows = [row for row in comparison.rows if row.measure == measure and row.delta]
        named = _places(row for row in rows if row.named)
        shown = changes.own | (changes.others & named)
        if found := [row for row in rows if (row.layer, row.head) in shown]:
            return sorted(found, key=lambda row: -(row.delta or 0.0))
    return []


def _changed_heads(comparison: Comparison, changes: Changes, name: Names) -> Finding:
    """Name the heads that changed most, by the divergence of their own attention or the change of their forms."""
    rows = _most_changed(comparison, changes)
    if not rows:
        answer = f"{_list(changes.own or changes.others, name)}."
        return Finding(question="Which heads?", answer=answer, evidence="Layer.head.")
    measure = rows[0].measure
    shown = [
        f"layer {name(row.layer)} head {row.head} ({DISTANCES[measure].format(short(row.delta or 0.0))})"
        for row in rows[:MOST_HEADS]
    ]
    more = f" and {len(rows) - MOST_HEADS} more" if len(rows) > MOST_HEADS else ""
    answer = f"{', '.join(shown)}{more}."
    return Finding(question="Which heads?", answer=f"{answer[0].upper()}{answer[1:]}", measures=[measure])


def _predictions(comparison: Comparison) -> Iterator[Finding]:
    """Yield the effect on the loss, the predictions and the hidden states, as far as they are known."""
    if (outcome := comparison.outcome) is None:
        return
    if outcome.diverged:
        answer = "The second model's predictions are not finite."
        yield Finding(question="Effect?", answer=answer, severity="problem", measures=["comparison.outcome"])
        return
    parts, severity = [], "none"
    if (loss := outcome.loss) is not None:
        ends = "" if loss.ci95 is None else f" (95 % interval {loss.ci95[0]:+.4f} to {loss.ci95[1]:+.4f})"
        parts.append(f"Loss {loss.before:.4f} → {loss.after:.4f} nats per token: {loss.delta:+.4f}{ends}.")
        parts += ["An even guess over the vocabulary is better."] * outcome.destroyed
    if (change := outcome.predictions) is not None:
        error = "" if change.mean_se is None else f" ± {short(change.mean_se)}"
        parts.append(
            f"KL {short(change.mean)}{error} nats per token (99.9 %: {short(change.q999)}); "
            f"same top prediction for {change.same_top:.1%}."
        )
        large = change.mean >= LARGE_KL or change.same_top < LEAST_AGREEMENT
        sure = change.mean > 0 if outcome.kl_ci95 is None else outcome.kl_ci95[0] > 0
        severity = "notable" if large and sure else "none"
    elif outcome.hidden_cosine is not None:
        parts.append(f"Cosine of the last hidden states {outcome.hidden_cosine:.6f}.")
    if loss is not None and _is_change(loss) and loss.delta > 0:
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
    """Yield commands that draw the changes, and that turn the comparison into a gate."""
    report = shapes.report
    comparison = report.comparison
    assert comparison is not None  # noqa: S101  # a report of this kind has one
    changes, model = Changes.of(comparison), model_argument(report)
    most_changed = _most_changed(comparison, changes)
    if changes.own and most_changed:
        head = most_changed[0]
        name = f"{report.model.layer_name(head.layer)}.{head.head}"
        yield f"attnlens inspect {model} --head {name} --show attention --html head.html"
    yield f"attnlens compare {quote(comparison.base.id)} {model} --html changes.html"
    yield f"attnlens doctor {model}"
