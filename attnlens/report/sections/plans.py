"""Sections on plans of ranks, on healing, and on sweeps (harm done by swapping single heads or layers)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from attnlens.records import Effect, Healing, HealingTraining, Pair, Plan, Rise, Swap
from attnlens.report.sections.section import TEXTS, Section, Table, View, build_table, section
from attnlens.report.sections.swaps import DIVERGED, LARGE, effect_name, format_figures, interval
from attnlens.report.shapes import Shapes
from attnlens.wording import clean, decimals_for, format_count, format_number, format_p, group_pairs, join_items

STAGES = {"transfer": "Attention transfer", "whole": "Whole model"}  # Name of each stage of healing
SAVED = {  # Field of a plan with a cost that the plan changes → description
    "parameters": "parameters for queries and keys",
    "flops_per_token": "operations per token for queries, keys and scores",
    "cache_bytes_per_token": "bytes per token in the key-value cache",
}
RANK = "rank: one per key head, shared by all query heads that use the key head."
LATENT = "Latents: numbers cached per token instead of a site's keys."
ESTIMATED = "Estimated: on the calibration text used to choose the ranks, so the estimate is biased."
PROMISED = (
    "Predicted: on calibration text used neither to fit nor to choose ranks. The rise over {population} lies within "
    "the interval in 95 % of such runs, and above the interval in 2.5 %."
)
MEASURED = "Measured: on the evaluation text."
HELD_OUT = "Each text's estimate and prediction use maps fitted to the other texts, so both cover unseen kinds of text."
LONE = "All calibration windows come from one text, so the prediction does not cover other kinds of text."
MOST_LAYERS = 12  # Number of layers up to which the screen shows the ranks by layer
BUDGETED = {"loss": "loss", "ppl": "perplexity"}  # Unit of a budget → quantity that it limits
POPULATIONS = {"windows": "all windows of these texts", "texts": "texts like these"}
"""Unit over which an interval is computed → population that the interval covers."""


@section(20, "swap", ("screen", *TEXTS, "page"))
def rank_section(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield the ranks by layer and, except on the screen, rises in the loss and savings."""
    plan = shapes.report.plan
    if plan is None:
        return
    if view == "screen":
        if len({key.layer for key in plan.ranks}) <= MOST_LAYERS:
            yield Section(table=plan_rows(plan))
        return
    terms = [LATENT if any(key.kv_heads for key in plan.ranks) else RANK]
    if plan.held_out or plan.promised is not None:
        terms.append(HELD_OUT if plan.held_out else LONE)
    terms += [ESTIMATED] * (plan.estimated is not None)
    if plan.promised is not None:
        terms.append(PROMISED.format(population=POPULATIONS[plan.promised.over]))
    terms += [MEASURED] * (plan.measured is not None)
    yield Section("Ranks", items=plan_lines(plan), table=plan_rows(plan), notes=[" ".join(terms)])


def plan_lines(plan: Plan) -> list[str]:
    """Describe a plan in sentences: mean rank, latents, rises in the loss, savings, and reasons for missing values."""
    what, calibration, text = BUDGETED[plan.unit], clean(plan.calibration), clean(plan.text)
    lines = [f"Mean rank {plan.mean_rank:.1f} of {plan.head_dim:g}; budget: a {what} {100 * plan.budget:g} % higher"]
    lines += _describe_latents(plan)
    if plan.estimated is not None:
        lines.append(f"Estimated: {_rise(plan.estimated)} of {calibration}, used to choose the ranks")
    if (promised := plan.promised) is not None:
        lines.append(f"Predicted: {_rise(promised)} of {calibration}, {_place_in_budget(plan, promised)}")
        ranked = sorted(promised.by_text.items(), key=lambda item: item[1])
        ends = {name: f" [{share(low)} to {share(high)}]" for name, (low, high) in promised.ci95_by_text.items()}
        texts = (f"{share(alone)}{ends.get(name, '')} ({clean(name)})" for name, alone in ranked)
        lines += [f"Text by text: {', '.join(texts)}"] if ranked else []
        if (further := promised.further) is not None:
            verdict = "within the budget" if further <= plan.budget else "beyond the budget"
            lines.append(f"New text of this kind: at most {share(further)} (95 % prediction bound), {verdict}")
    if (measured := plan.measured) is not None:
        broken = promised is not None and promised.bound(1) <= plan.budget < measured.share
        failure = ": the prediction fails on this text" if broken else ""
        lines.append(f"Measured: {_rise(measured)} on {text}, {_place_in_budget(plan, measured)}{failure}")
    if plan.healed is not None:
        lines.append(f"Healed: {_rise(plan.healed)} on {text}")
    lines += _format_savings(plan)
    return [*lines, *(f"{clean(name.replace('_', ' '))}: {clean(reason)}" for name, reason in plan.reasons.items())]


def _describe_latents(plan: Plan) -> Iterator[str]:
    """Yield sentences on the form of the latents, and on the rise in loss or perplexity with each form compared."""
    form = dict(part.split("=") for part in plan.form.split(",")) if plan.form else {}
    group = form.get("group", "1")
    keys = "each key head has its own latent" if group == "1" else f"{group} key heads share a latent"
    turned = "before" if form.get("rotation") == "before" else "after"
    weights = "half by attention, half evenly"
    if form.get("metric") == "output":
        weights = "half by the effect on the predictions, a quarter by attention, a quarter evenly"
    yield f"Latents: {keys}, fitted to keys {turned} the rotation, with pairs weighted {weights}"
    if plan.forms:
        ranked = sorted(plan.forms, key=lambda form: math.inf if form.rise is None else form.rise.share)
        texts = (f"{clean(form.form)} {'diverged' if form.rise is None else share(form.rise.share)}" for form in ranked)
        yield f"Forms compared at half of the full rank: {'; '.join(texts)}"


def _place_in_budget(plan: Plan, record: Rise) -> str:
    """State whether a rise, its interval, and the rise on each text are within the budget."""
    if record.share > plan.budget:
        return "beyond the budget"
    if record.high > plan.budget:
        return "within the budget, though its interval is not: the budget is not guaranteed"
    if beyond := [clean(name) for name, alone in record.by_text.items() if alone > plan.budget]:
        return f"within the budget over all texts, but above it on {' and '.join(beyond)}: the budget is not guaranteed"
    return f"within the budget{', without an interval' * (record.ci95 is None)}"


def _format_savings(plan: Plan) -> Iterator[str]:
    for name, meaning in SAVED.items():
        pair: Pair = getattr(plan, name)
        if pair.before and pair.after is not None:
            change = share(pair.after / pair.before - 1, 0)
            length = f", at {plan.tokens} tokens" if name == "flops_per_token" else ""
            word = "Saving" if pair.after < pair.before else "Added" if pair.after > pair.before else "Unchanged"
            yield f"{word}: {pair.before:,.0f} → {pair.after:,.0f} {meaning}{length} ({change})"
    if flops := plan.rebuilding_flops:
        cost = f"{flops:,.0f} operations per cached token and new token"
        yield f"Rebuilding keys from latents costs {cost}, unless the keys are cached too"
    if (keys := plan.keys_to_gain) is not None:
        yield f"Maps not merged into W_Q and W_K save compute only if a query sees more than {keys:,.0f} keys"


def share(number: float, digits: int = 2) -> str:
    """Format a relative change as a signed percentage, `+0.62 %`, or from +1,000 % up as a factor, `× 12`."""
    if number >= LARGE - 1:
        return f"× {format_number(1 + number, decimals_for([1 + number], 2))}"
    sign = "−" if number < 0 else "+"
    return f"{sign}{abs(number) * 100:.{digits}f} %"


def _rise(record: Rise) -> str:
    """Format a rise with its interval: `+0.62 % (95 % interval +0.28 % to +0.97 %, 32 sequences)`."""
    over = " over texts" if record.over == "texts" else ""
    bounds = "" if record.ci95 is None else f"95 % interval{over} {share(record.ci95[0])} to {share(record.ci95[1])}, "
    return f"{share(record.share)} ({bounds}{_count(record.sequences, 'sequence')})"


def plan_rows(plan: Plan) -> Table | None:
    """Build a table with one row per layer: its mean rank per head, and the rank of each key head or latent."""
    shared = any(key.kv_heads for key in plan.ranks)
    title = "numbers kept" if shared else "rank by key head"
    rows = []
    for keys in group_pairs((key.layer, key) for key in plan.ranks).values():
        mean = sum(key.rank / key.keys * len(key.heads) for key in keys) / sum(len(key.heads) for key in keys)
        latents = ", ".join(f"{key.rank} of {key.head_dim}" for key in keys)
        ranks = latents if shared else " ".join(str(key.rank) for key in keys)
        size = str(keys[0].head_dim // keys[0].keys)
        rows.append(
            {"layer": plan.model.layer_name(keys[0].layer), "mean rank": f"{mean:.1f}", "of": size, title: ranks}
        )
    return build_table(rows, {"layer"}, {title})


@section(40, "swap")
def healing_section(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield the section on healing, if the report has only one kernel and it was healed."""
    swap, *others = shapes.report.swaps
    if swap.healing is not None and not others:
        yield Section("Healing", items=healing_lines(swap.healing))


def healing_lines(record: Healing) -> list[str]:
    """Describe a healing run in sentences: amount, stages, validation distance, control."""
    distances = {step.step: step.validation for step in record.curve if step.validation is not None}
    of_rank = f" as updates of rank {record.rank}" if record.rank else ""
    steps = max(record.curve[-1].step if record.curve else 0, sum(stage.steps for stage in record.stages))
    done = f"{_count(steps, 'step')} done{', interrupted' * record.interrupted}"
    lines = [
        f"Healing: {record.amount or _count(record.steps, 'step')} requested, {done}, best step {record.best}; "
        f"{record.parameters:,} parameters trained{of_rank}, learning rate {_rate(record.learning_rate)}"
    ]
    if record.tokens is not None and record.seconds is not None:
        goal = "the tokens of the text" if record.goal == "text" else "the original model"
        peak = f"; peak {record.peak_memory_bytes / 2**20:,.0f} MiB" if record.peak_memory_bytes else ""
        many = f"{_count(record.tokens, 'token')}, {_count(record.batch or 0, 'sequence')} per step"
        lines.append(f"Target: {goal}; {many}, {record.seconds:,.0f} s{peak}")
    if record.eta is not None:
        loss = f"the distance + {record.eta:g} · the KSVD regulariser, as in the {record.ksvd_convention}"
        lines.append(f"Training loss: {loss}")
    lines += map(_stage, record.stages)
    if record.best in distances:
        name = "Loss on held-out text" if record.goal == "text" else "Validation distance to the original"
        first, best = format_figures(distances[min(distances)]), format_figures(distances[record.best])
        lines.append(f"{name}: {first} at first, {best} at the best step")
    if (control := record.control) is not None:
        ends = f" (95 % interval {interval(control.ratio_ci95, 3)})" if control.ratio_ci95 else ""
        before, after = format_figures(control.perplexity.before), format_figures(control.perplexity.after)
        lines.append(
            f"Control: the original trained on the same text for {_count(control.tokens, 'token')}; perplexity "
            f"{before} before, {after} after; the healed model's perplexity is {control.ratio:.3f} times that of the "
            f"trained original{ends}"
        )
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _stage(stage: HealingTraining) -> str:
    rates = sorted(trial.rate for trial in stage.rates)
    tried = f" (of {', '.join(map(_rate, rates))})" if rates else ""
    name = STAGES[stage.stage]
    if not stage.steps:
        return f"{name}: skipped because no learning rate{tried} reduced the distance"
    speed = f", {stage.tokens_per_second:,.0f} tokens per second" if stage.tokens_per_second else ""
    ended = "; stopped early after no significant gain" if stage.stopped else ""
    lowered = "" if stage.lowered_from is None else f", lowered from {_rate(stage.lowered_from)}"
    chosen = f"learning rate {_rate(stage.learning_rate)}{lowered}{tried}"
    return f"{name}: {_count(stage.steps, 'step')}, {_count(stage.tokens, 'token')}{speed}, {chosen}{ended}"


def _rate(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


MOST, FEW = 10, 3  # Number of most (and of least) harmful units shown: for a single kernel, and for each of several
MOST_PREDICTORS = 8  # Number of measures shown for a single kernel; FEW are shown for each of several


@section(44, "swap")
def sweep_section(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield the section on sweeps: number of significant effects, and the most and least harmful heads or layers."""
    swaps = [swap for swap in shapes.report.swaps if swap.sweep]
    effects = [effect for swap in swaps for effect in swap.sweep]
    if not effects:
        return
    model = shapes.report.model
    tested, several = swaps[0].judged_by == "loss", len(swaps) > 1  # a distance is never negative, so nothing is tested
    heads, parts = any(effect.head is not None for effect in effects), len({effect.part for effect in effects}) > 1
    sizes = [abs(effect.delta) for effect in effects if effect.delta]
    middle = median(sizes) if sizes else 1.0
    # two significant digits of the median size, from two to six decimals
    decimals = 6 if middle < 1e-4 else min(6, max(2, decimals_for([middle], 2)))
    most = FEW if several else MOST
    rows: list[dict[str, str | None]] = []
    for swap in swaps:
        cells: list[dict[str, str | None]] = [
            {
                "kernel": clean(swap.kernel) if several else None,
                "layer": model.layer_number(effect.layer),
                "head": ("all" if effect.head is None else str(effect.head)) if heads else None,
                "part": effect.part if parts else None,
                "Δ": DIVERGED if effect.delta is None else format_number(effect.delta, decimals),
                "95 % interval": interval(effect.ci95, decimals),
                "p": format_p(effect.p_value) if tested else None,
                "FDR 5 %": "*" * effect.significant if tested else None,
            }
            for effect in swap.sweep
        ]
        if len(cells) > 2 * most:
            cells[most:-most] = [{title: None if cell is None else "…" for title, cell in cells[0].items()}]
        rows += cells
    noun, windows = "head" if heads else "layer", shapes.report.settings.windows or 0
    untested = ", a distance, which is never negative and therefore not tested."
    test = "; * significant at a false discovery rate of 5 %." if tested else untested
    note = f"Δ of the {effect_name(swaps[0])}{test}"
    note += f" … omits all but the {most} most and {most} least harmful." * (len(rows) < len(effects))
    kernels = [f"{clean(swap.kernel)}: " * several for swap in swaps]
    lines = [name + _significant(swap.sweep, noun, windows) for name, swap in zip(kernels, swaps, strict=True)]
    table = build_table(rows, {"kernel", "layer", "head", "part"}, {"kernel", "part", "FDR 5 %"})
    yield Section(f"Each {noun} alone", lines=lines * tested, table=table, notes=[note])


def _significant(effects: Sequence[Effect], noun: str, windows: int) -> str:
    """State how many heads or layers, each swapped alone, raise or lower the loss significantly or diverge."""
    if all(effect.ci95 is None for effect in effects if effect.delta is not None):
        return "With a single window, nothing is tested."
    significant = [effect.delta for effect in effects if effect.significant and effect.delta is not None]
    harm, diverged = sum(delta > 0 for delta in significant), sum(effect.delta is None for effect in effects)
    signs = f": {harm} raise the loss, {len(significant) - harm} lower it" * bool(significant)
    text = f"Effects over {format_count(windows, 'window')} are significant for {len(significant)} of "
    text += f"{format_count(len(effects), noun)} (false discovery rate 5 %){signs}."
    return text + f" {diverged} diverged." * (diverged > 0)


@section(46, "swap")
def prediction_section(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield the section on the measures that best predict the harm done by each kernel."""
    swaps = [swap for swap in shapes.report.swaps if swap.sweep and swap.prediction is not None]
    if not swaps:
        return
    several = len(swaps) > 1
    most = FEW if several else MOST_PREDICTORS
    rows = [
        {
            "kernel": clean(swap.kernel) if several else None,
            "measure": clean(each.measure),
            "ρ": format_number(each.rho, 2),
            "over heads": interval(each.heads_ci95, 2),
            "over layers": interval(each.layers_ci95, 2),
            "over windows": interval(each.sequences_ci95, 2),
            "p": format_p(each.p_corrected),
            "holds": "*" * each.holds,
            "heads": str(each.heads),
        }
        for swap in swaps
        for each in sorted(swap.predictors, key=lambda each: -abs(each.rho))[:most]
    ]
    table = build_table(rows, {"kernel", "measure"}, {"kernel", "measure", "holds"})
    without = [clean(swap.kernel) for swap in swaps if not swap.predictors]
    lines = [f"{join_items(without, 8)}: no measure differs between heads, or the harm has no value."] * bool(without)
    notes = [_prediction_help(swaps)]
    first = swaps[0].prediction
    if first and first.left_out:
        by_reason = group_pairs((reason, name) for name, reason in first.left_out.items())
        groups = (f"{join_items(names, 8)} ({clean(reason)})" for reason, names in by_reason.items())
        notes.append(f"Not compared: {'; '.join(groups)}.")
    yield Section("What predicts harm", lines=lines, table=table, notes=notes)


def _prediction_help(swaps: Sequence[Swap]) -> str:
    predictions = [swap.prediction for swap in swaps if swap.prediction is not None]
    measures = " or ".join(dict.fromkeys(str(prediction.measures) for prediction in predictions))
    text = (
        "ρ: Spearman correlation over heads between Δ and a measure of the original model on the same windows. 95 % "
        "intervals: bootstrap of heads, of whole layers, and of windows (or texts). p: permutations of heads, "
        f"corrected for all {measures} measures (maxT). *: p < 0.05, and the interval over layers excludes 0. "
        "Correlation is not causation"
    )
    ceilings = [format_number(prediction.ceiling, 2) for prediction in predictions if prediction.ceiling is not None]
    if ceilings:
        limits = " and ".join(dict.fromkeys(ceilings))
        text += f"; noise in the windows limits a perfect measure to ρ ≈ {limits} (split halves)"
    diverged = sum(prediction.diverged for prediction in predictions)
    return text + (f"; {format_count(diverged, 'diverged head')} left out." if diverged else ".")
