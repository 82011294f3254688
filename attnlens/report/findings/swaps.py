"""Findings of swaps: the cost of a kernel, and ranks chosen within a budget.

A cost has a 95 % interval (studentised bootstrap over windows or texts, Student's t for fewer than eight). The loss
counts as changed if the interval excludes 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from shlex import quote

from attnlens.choices import LENGTH, WINDOWS, ControlRole
from attnlens.records import Change, Control, Coverage, Finding, Healing, Pair, Plan, Report, Rise, Severity, Swap
from attnlens.records.plans import MARGIN
from attnlens.report.findings.heads import model_argument
from attnlens.report.sections.plans import BUDGETED, share
from attnlens.report.sections.swaps import UNITS, format_figures, format_rise, interval, loss_decimals
from attnlens.report.shapes import Names, Shapes, Written
from attnlens.wording import capitalise, clean, format_count, format_number, join_items, short

MOST_UNITS = 4  # Maximum number of heads or layers whose names are printed
EXHAUSTED = 0.1  # Share of head_dim: a plan whose mean rank is at most this share can hardly become smaller
FEW = 32  # Number of calibration windows below which the bounds of a search are wide
MEANINGS: dict[ControlRole, str] = {
    "same size": " (first and nearest keys)",
    "one key": " (only the top key)",
    "floor": " (all keys alike)",
}
"""Role of a simple alternative → the keys that it attends to, in brackets."""
NEGLIGIBLE = 0.01  # Share of the original loss below which a rise is negligible


def swap_findings(shapes: Shapes) -> Iterator[Finding]:
    """Yield findings on any plan of ranks, and on the cost of the only kernel or on the cheapest of several."""
    report, plan = shapes.report, shapes.report.plan
    if plan is not None:
        yield from _plan_findings(plan)
    method = report.settings.interval_method
    if len(report.swaps) > 1:
        yield _cheapest(report.swaps, method)
        return
    (swap,) = report.swaps
    answers = (
        None if plan is not None and plan.measured is not None and not swap.destroyed else _cost(swap, method),
        None if plan is not None else _cache(swap, report.settings.length, report.coverage),
        _recovery(swap, method),
        _where(swap, report.model.layer_name),
        _alternative(swap, report.settings.windows),
        _continuations(swap),
    )
    yield from filter(None, answers)


def _cost(swap: Swap, method: str) -> Finding:
    """State the change in the loss or, without a loss, the distance from the original predictions or hidden states."""
    if swap.diverged:
        answer = "The model diverges: its predictions with this kernel are not finite."
        return Finding(question="Cost?", answer=answer, severity="problem", measures=["swap.loss"])
    if (loss := swap.loss) is not None:
        decimals = loss_decimals([loss])
        before, after, delta = (format_number(number, decimals) for number in (loss.before, loss.after, loss.delta))
        unit = UNITS[swap.task]
        changed = is_change(loss)
        verdict = "Unclear, use more --windows" if _is_unclear(loss) else "None measurable"
        answer = f"{verdict}: loss {before} → {after} {unit}."
        if swap.destroyed:
            answer = f"Destroyed: loss {before} → {after} {unit}, worse than a uniform guess over the vocabulary."
        elif changed:
            risen = "" if swap.perplexity is None else f", perplexity {format_rise(loss, swap.perplexity)[0]}"
            answer = f"Loss {before} → {after} {unit}{risen}."
        evidence = f"Change {delta}{_format_ending(loss.ci95, decimals, method)}"
        return Finding(
            question="Cost?",
            answer=answer,
            evidence=evidence,
            severity="problem" if swap.destroyed else "notable" if changed else "none",
            measures=["swap.loss", "swap.perplexity"],
        )
    if swap.kl is not None:
        answer = f"KL of the predictions from the original's: {format_figures(swap.kl)} {UNITS[swap.task]}."
        ends = "" if swap.kl_ci95 is None else f"95 % interval {interval(swap.kl_ci95, 3)}."
        return Finding(question="Cost?", answer=answer, evidence=ends, measures=["swap.kl"])
    if swap.hidden_cosine is None:
        return Finding(question="Cost?", answer="Unknown: nothing could be compared.", severity="problem")
    bounds = swap.hidden_cosine_ci95
    evidence = "" if bounds is None else f"95 % interval {interval(bounds, 3)}."
    answer = f"The mean cosine between the last hidden states and the original's is {swap.hidden_cosine:.3f}."
    return Finding(question="Cost?", answer=answer, evidence=evidence, measures=["swap.hidden_cosine"])


def _format_ending(ci95: tuple[float, float] | None, decimals: int, method: str) -> str:
    """End a sentence with the 95 % interval, if known, and with its method unless that is the bootstrap."""
    if ci95 is None:
        return "."
    few = "" if method == "bootstrap" else f" ({method})"
    return f", 95 % interval {interval(ci95, decimals)}{few}."


def is_change(loss: Change) -> bool:
    """Return True if the interval of the change excludes 0 or, without an interval, if the change is not 0."""
    return loss.delta != 0 if loss.ci95 is None else not loss.ci95[0] <= 0 <= loss.ci95[1]


def _cheapest(swaps: list[Swap], method: str) -> Finding:
    """Name the kernel with the smallest rise in the loss, and the kernels that are not clearly more expensive."""
    measured = [(swap, swap.loss) for swap in swaps if swap.loss is not None and not swap.diverged]
    if not measured:
        return Finding(question="Cheapest?", answer="Unknown: no kernel has a loss.", severity="problem")
    best, cost = min(measured, key=lambda pair: pair[1].delta)
    end = math.inf if cost.ci95 is None else cost.ci95[1]
    close = [
        clean(swap.kernel) for swap, loss in measured if swap is not best and (loss.ci95 or (-math.inf,))[0] <= end
    ]
    alone = "the only kernel with a loss" if len(measured) == 1 else "its interval lies below all others"
    doubt = f"not clearly cheaper than {join_items(close, 3)}" if close else alone
    decimals = loss_decimals([cost])
    answer = f"{clean(best.kernel)}, {doubt}."
    evidence = f"Change in the loss {format_number(cost.delta, decimals)}{_format_ending(cost.ci95, decimals, method)}"
    return Finding(question="Cheapest?", answer=answer, evidence=evidence, measures=["swap.loss"])


def _cache(swap: Swap, length: int | None, coverage: Coverage) -> Finding | None:
    """State the change in the cache's bytes per token or, if unknown, any fall in its numbers per head."""
    swapped = f"the {coverage.heads} swapped heads of the model's {coverage.model_heads}"
    scope = "all heads of the model" if coverage.heads == coverage.model_heads else swapped
    if (cache := swap.cache_bytes_per_token) is not None:
        evidence = f"Keys and values of {scope}; values keep their size."
        return Finding(
            question="Cache?",
            answer=f"{_format_cache(cache)}.",
            evidence=evidence,
            measures=["swap.cache_bytes_per_token"],
        )
    full = next((control.state for control in swap.controls if control.role == "one key"), None)  # keeps every key
    if full is None or swap.state is None or swap.state >= full:
        return None
    answer = f"{full:,.0f} → {swap.state:,.0f} numbers per head and window ({share(swap.state / full - 1, 0)})."
    evidence = f"In {scope}; windows of {length} tokens."
    return Finding(question="Cache?", answer=answer, evidence=evidence, measures=["swap.state"])


def _recovery(swap: Swap, method: str) -> Finding | None:
    """State the share of the rise in the loss that healing recovers; return None without healing or a loss."""
    losses = [stage.loss for stage in swap.stages if stage.loss is not None]
    if swap.healing is None or len(losses) < 2:
        return None
    first, last = losses[0], losses[-1]
    decimals = loss_decimals([last])
    evidence = f"Change in the loss {format_number(first.delta, decimals)} → {format_number(last.delta, decimals)}"
    evidence += _format_ending(last.ci95, decimals, method)
    if first.delta <= max(0.0, last.delta):
        answer, severity = "Training recovered nothing.", "problem"
    else:
        recovered = min(1.0, 1 - last.delta / first.delta)
        answer, severity = f"Training recovered {100 * recovered:.0f} % of the rise.", "notable"
    return Finding(question="Healed?", answer=answer, evidence=evidence, severity=severity, measures=["swap.stages"])


def _where(swap: Swap, name: Names) -> Finding | None:
    """Name the heads or layers that raise the loss most when swapped alone; return None without a sweep."""
    if not swap.sweep:
        return None
    costly = [effect for effect in swap.sweep if effect.significant and (effect.delta or 0.0) > 0]
    unit = "layer" if all(effect.head is None for effect in swap.sweep) else "head"
    total = format_count(len(swap.sweep), unit)
    if not costly:
        answer = f"Nowhere: the loss rises significantly for none of {total}, each swapped alone."
        return Finding(question="Where?", answer=answer, severity="none", measures=["swap.sweep"])
    costs = [
        f"{name(effect.layer) if effect.head is None else f'head {name(effect.layer)}.{effect.head}'} "
        f"({short(effect.delta or 0.0)})"
        for effect in costly[:MOST_UNITS]
    ]
    answer = f"The loss rises significantly for {len(costly)} of {total}, each swapped alone."
    evidence = f"Largest rises: {'layer ' * (unit == 'layer')}{', '.join(costs)}; false-discovery rate 5 %."
    return Finding(question="Where?", answer=answer, evidence=evidence, measures=["swap.sweep"])


def _alternative(swap: Swap, windows: int | None) -> Finding | None:
    """Compare the kernel's rise in the loss with that of each control; return None without an interval or controls."""
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
    costs = [f"here {format_number(swap.loss.delta, decimals)}"]
    costs += [
        f"{clean(control.kernel or '')}{MEANINGS.get(control.role, '')} {format_number(control.loss.delta, decimals)}"
        for control in controls
        if control.loss is not None
    ]
    read = "" if windows is None else f" with {format_count(windows, 'window')}"
    clauses = [f"costs more than {_join_words(cheaper)}"] if cheaper else []
    clauses += [f"not distinguishable{read} from {join_items(level, 3)}"] if level else []
    clauses += [f"costs less than {_join_words(dearer)}"] if dearer else []
    return Finding(
        question="Against simple kernels?",
        answer=f"{capitalise('; '.join(clauses))}.",
        evidence=f"Change in the loss in {UNITS[swap.task]}: {'; '.join(costs)}.",
        severity="problem" if cheaper else "none" if level else "notable",
        measures=["swap.controls"],
    )


def _compare_control(loss: Change, control: Control) -> tuple[float, float]:
    """Return the 95 % interval of the difference in loss, kernel minus control; (−∞, ∞) if unknown.

    Without a paired difference (reports of older versions), combine the ends of the two intervals.
    """
    if control.difference is not None and control.difference.ci95 is not None:
        return control.difference.ci95
    if control.loss is None or control.loss.ci95 is None or loss.ci95 is None:
        return -math.inf, math.inf
    return loss.ci95[0] - control.loss.ci95[1], loss.ci95[1] - control.loss.ci95[0]


def _continuations(swap: Swap) -> Finding | None:
    """State how many greedy continuations differ from the original model's, and after how many tokens (median)."""
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


def _is_within_budget(plan: Plan) -> bool:
    """Return True if `plan.within_budget` holds and, without a prediction, the budget covers the measured interval."""
    if (measured := plan.measured) is None:
        return False
    is_sure = plan.promised is not None or measured.ci95 is None or measured.ci95[1] <= plan.budget
    return plan.within_budget and is_sure


def _plan_findings(plan: Plan) -> Iterator[Finding]:
    """Yield findings on the ranks, the size of the cache, and whether the measured rise is within the budget."""
    smaller = round(100 * (1 - plan.mean_rank / plan.head_dim))
    size = f": these heads' keys are {smaller} % smaller" if smaller > 0 else ""
    answer = f"{plan.mean_rank:.1f} of {plan.head_dim:g} numbers per key and head{size}."
    evidence = f"Allowed: a {BUDGETED[plan.unit]} at most {100 * plan.budget:g} % higher."
    if plan.estimated is not None:
        evidence += f" Upper bound on the windows that chose the ranks: {share(plan.estimated.bound(MARGIN))}"
        steps = [step for step in plan.steps if step.mean_rank < plan.mean_rank]
        if steps:
            rejected = max(steps, key=lambda step: step.mean_rank)
            bound = share(rejected.rise.bound(MARGIN))
            evidence += f"; of the next smaller ranks tried ({rejected.mean_rank:.1f} on average): {bound}"
        evidence += "."
    if (promised := plan.promised) is not None:
        rise = f"{share(promised.share)}{_format_interval(promised, ', ')}"
        evidence += f" Predicted from held-out calibration windows: {rise}."
    if plan.estimated is not None and plan.estimated.sequences < FEW:
        evidence += f" Chosen from only {plan.estimated.sequences} windows: more --windows can allow smaller ranks."
    yield Finding(question="How small?", answer=answer, evidence=evidence, measures=["swap.plan"])
    alone, cache = plan.cache_bytes_per_token, _format_cache(plan.model_cache_bytes_per_token)
    evidence = f"Keys and values of the {'whole model' if cache else 'swapped heads alone'}; values keep their size."
    if cache and alone.before != plan.model_cache_bytes_per_token.before:
        evidence += f" The swapped heads alone: {_format_cache(alone)}."
    if answer := cache or _format_cache(alone):  # plans of older versions lack the cache of the whole model
        shrinks = alone.before is not None and alone.after is not None and alone.after < alone.before
        severity: Severity = "notable" if shrinks else "problem"
        yield Finding(
            question="Cache?", answer=f"{answer}.", evidence=evidence, severity=severity, measures=["swap.plan"]
        )
    if (measured := plan.measured) is not None:
        holds = _is_within_budget(plan)
        verdict = "Yes" if holds else "No" if measured.share > plan.budget else "On these windows, but not guaranteed"
        answer = f"{verdict}: measured {share(measured.share)} on {clean(plan.text)}; allowed {share(plan.budget, 0)}."
        evidence = "" if measured.ci95 is None else f"{_format_interval(measured)}."
        if plan.promised is not None and plan.promised.bound(1) > plan.budget >= measured.share:
            evidence += f" Other windows of these texts could cost up to {share(plan.promised.bound(1))}."
        yield Finding(
            question="Within budget?",
            answer=answer,
            evidence=evidence.strip(),
            severity="none" if holds else "problem",
            measures=["swap.plan"],
        )


def _format_cache(cache: Pair) -> str:
    """Format a change in cache size: `4,096 → 2,560 bytes per token, 38 % smaller`; "" if unknown."""
    if not cache.before or cache.after is None:
        return ""
    smaller = 1 - cache.after / cache.before
    size = f"{100 * abs(smaller):.0f} % {'smaller' if smaller >= 0 else 'larger'}" if smaller else "unchanged"
    return f"{cache.before:,.0f} → {cache.after:,.0f} bytes per token, {size}"


def _format_interval(rise: Rise, before: str = "") -> str:
    return "" if rise.ci95 is None else f"{before}95 % interval {share(rise.ci95[0])} to {share(rise.ci95[1])}"


def _is_unclear(loss: Change) -> bool:
    """Return True if the interval of the change includes both 0 and a rise that is not negligible."""
    return not is_change(loss) and loss.ci95 is not None and loss.ci95[1] > NEGLIGIBLE * loss.before


def after_swap(shapes: Shapes) -> Iterator[str]:
    """Yield commands that locate, reduce or remeasure the cheapest kernel's cost, save the model, or use a plan."""
    report = shapes.report
    written = Written() if shapes.written is None else shapes.written
    # the kernel whose loss rises least; without a loss, the first
    swap = min(report.swaps, key=lambda swap: math.inf if swap.loss is None or swap.diverged else swap.loss.delta)
    model, scope, windows = model_argument(report), _scope(report), _windows(report, written)
    if written.model is not None and report.model.adapter is None:
        yield f"attnlens compare {model} {quote(written.model)}"
    cheaper = _cheaper_window(swap)
    if report.plan is not None:
        if cheaper and _is_exhausted(report.plan):
            yield f"attnlens swap-kernel {model} --kernel {cheaper}{scope}{windows}"
        yield from _after_plan(report, report.plan, written)
        return
    kernel = f"{model} --kernel {quote(swap.kernel)}{scope}"
    kernel += " --fit" * any(stage.name == "fitted" for stage in swap.stages)
    verb, training, longer = "swap-kernel", "", ""
    if swap.healing is not None:
        verb, longer = "heal", _format_training(swap.healing, times=4) + written.options("calibration")
        training = _format_training(swap.healing) + written.options("calibration")
    loss = None if swap.diverged else swap.loss
    if loss is not None and _is_unclear(loss):
        yield f"attnlens {verb} {kernel}{_windows(report, written, times=2)}{training}"
    elif loss is not None and loss.delta < NEGLIGIBLE * loss.before and written.model is None:
        yield f"attnlens {verb} {kernel}{windows}{training} --save changed"
    if cheaper:
        yield f"attnlens swap-kernel {model} --kernel {cheaper}{scope}{windows}"
    if not swap.sweep and swap.healing is None:
        yield f"attnlens swap-kernel {kernel}{windows} --sweep layers"
    if swap.healing is None:
        yield f"attnlens heal {kernel}{windows} --train 500ktok"
    elif loss is not None and is_change(loss) and loss.delta > 0:
        yield f"attnlens heal {kernel}{windows}{longer}"
    if loss is not None:
        yield f"attnlens ranks {model} --budget loss:1%{scope}{windows}"


def _format_training(healing: Healing, times: int = 1) -> str:
    """Format the option for `times` the requested amount of training, such as ` --train 200` or ` --train 500ktok`."""
    amount, unit = (healing.amount or f"{healing.steps} steps").replace(",", "").split()
    number, suffix = times * float(amount), "s" if unit.startswith("second") else ""
    if unit.startswith("token"):
        number, suffix = (number / 1000, "ktok") if number % 1000 == 0 else (number, "tok")
    return f" --train {int(number) if number == int(number) else number}{suffix}"


def _join_words(names: list[str]) -> str:
    """Join names as `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _cheaper_window(swap: Swap) -> str | None:
    """Return the sink-window control of equal size if it costs significantly less than the kernel, otherwise None."""
    for control in swap.controls:
        if control.role == "same size" and control.kernel and swap.loss and _compare_control(swap.loss, control)[0] > 0:
            # if the numbers differ between sites, `sink-window:4,64–68 by layer`, take the smallest
            return re.split("[–/ ]", control.kernel)[0]
    return None


def _is_exhausted(plan: Plan) -> bool:
    """Return True if a plan is within its budget and its ranks are so small that they can hardly shrink further."""
    return _is_within_budget(plan) and plan.mean_rank <= EXHAUSTED * plan.head_dim


def plan_file(written: Written) -> str | None:
    """Return the plan file or, without one, the report file to which a command wrote the ranks; None without files."""
    return written.plan or written.report


def _after_plan(report: Report, plan: Plan, written: Written) -> Iterator[str]:
    """Yield commands that apply a plan, heal or remeasure the model, or search with twice the budget."""
    model, scope, file = model_argument(report), _scope(report), plan_file(written)
    fitted_on = written.options("calibration")
    exceeded = plan.measured is None or plan.measured.share > plan.budget
    if file is not None:
        use = f"{model} --ranks {quote(file)}"
        if exceeded:
            yield f"attnlens heal {use}{_windows(report, written)}{fitted_on} --train 500ktok"
        elif not _is_within_budget(plan):
            yield f"attnlens ranks {use}{_windows(report, written, times=2)}{fitted_on}"
        elif written.model is None:
            yield f"attnlens ranks {use}{_windows(report, written)}{fitted_on} --save smaller"
    if not _is_exhausted(plan):
        twice = f"{plan.unit}:{200 * plan.budget:g}%"
        yield f"attnlens ranks {model} --budget {twice}{scope}{_windows(report, written)}{fitted_on}"


def _windows(report: Report, written: Written, times: int = 1) -> str:
    """Format options for `times` the report's number of windows, with the report's window length and texts."""
    count = None if report.settings.windows is None else times * report.settings.windows
    parts = ("windows", count, WINDOWS), ("length", report.settings.length, LENGTH)
    windows = "".join(f" --{name} {part}" for name, part, usual in parts if part not in (None, usual))
    return windows + written.options("text")


def _scope(report: Report) -> str:
    parts = {"layers": report.settings.layers, "heads": report.settings.heads}
    return "".join(f" --{name} {','.join(map(str, part))}" for name, part in parts.items() if part is not None)
