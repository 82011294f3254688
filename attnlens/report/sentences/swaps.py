"""Sentences on a swap: its effect (in loss, perplexity, by text and position), controls, checks and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from attnlens.kernels import HYBRIDS, TIES
from attnlens.records import Agreement, Change, Outcome, Pair, Report, Stage, Swap
from attnlens.wording import NO_VALUE, clean, decimals_for, format_count, format_number, group_pairs, join_items

LEGEND = {
    "same size": "a sink-window with a state of equal size (64 tokens and the first 4 if the kernel keeps all)",
    "one key": "one key (hard)",
    "floor": "equal weights (uniform)",
}
"""Explanation of the controls that any kernel can have, by role."""


def _rise(loss: Change) -> tuple[float, tuple[float, ...], int]:
    """Compute the rise of the perplexity, e^Δ − 1, in per cent, the ends of its interval, and the decimals to show."""
    rise = 100 * math.expm1(loss.delta)
    ends = tuple(100 * math.expm1(end) for end in loss.ci95 or ())
    size = (ends[1] - ends[0]) / 2 if ends else abs(rise)
    return rise, ends, 0 if size >= 1e6 else min(2, max(0, decimals_for([size], 2)))


def rise_words(loss: Change) -> str:
    """Format the rise of the perplexity, `+5.6 %`, with at most two decimals, as many as its interval justifies."""
    rise, _, decimals = _rise(loss)
    number = format_number(rise, decimals)
    return f"{'' if number.startswith('-') else '+'}{number} %"


def rise_interval(loss: Change) -> str:
    """Format the interval of the rise of the perplexity, `4.9 to 6.4 %`; empty without an interval."""
    _, ends, decimals = _rise(loss)
    return " to ".join(format_number(end, decimals) for end in ends) + " %" * bool(ends)


def better_controls(swap: Swap) -> str:
    """Name the controls with a lower loss than the kernel and disjoint intervals; empty if there are none."""
    start = swap.loss.ci95[0] if swap.loss is not None and swap.loss.ci95 else -math.inf
    costs = [(clean(control.kernel or ""), control.loss) for control in swap.controls if control.loss is not None]
    cheaper = [name for name, cost in costs if cost.ci95 is not None and cost.ci95[1] < start]
    return f"Lower loss than {clean(swap.kernel)}, with disjoint intervals: {', '.join(cheaper)}." if cheaper else ""


def is_hybrid(swap: Swap) -> bool:
    """Return True if the kernel is a hybrid: the model's own kernel for near keys, feature maps beyond them."""
    return any(part.partition(":")[0] in HYBRIDS for part in swap.kernel.split("+"))


def legend(swaps: Sequence[Swap]) -> str:
    """Explain the controls of these swaps; empty if there are none."""
    pairs = [(swap, control.role) for swap in swaps for control in swap.controls if control.kernel is not None]
    roles = {role for _, role in pairs}
    texts = [words for role, words in LEGEND.items() if role in roles]
    parted = {is_hybrid(swap) for swap, role in pairs if role == "filter alone"}
    texts += ["a filter and its kernel alone"] * (False in parted)
    texts += ["a hybrid's window and far part alone"] * (True in parted)
    texts += ["its far part alone after healing"] * ("far part, healed" in roles)
    return f"vs: controls in the same heads, untrained: {join_items(texts)}." if texts else ""


def beyond(swap: Swap) -> str:
    """State the change in loss on tokens whose evidence lies beyond a window; empty if it was not measured."""
    if (record := swap.beyond_window) is None:
        return ""
    change, decimals = record.change, loss_decimals([record.change])
    ends = "" if change.ci95 is None else f" ({interval(change.ci95, decimals)})"
    return (
        f"Long-range copying: on the {format_count(record.tokens, 'token')} that repeat a bigram last seen more than "
        f"{format_count(record.window, 'token')} back, the loss changes by "
        f"{format_number(change.delta, decimals)}{ends}."
    )


def beyond_legend(rows: Sequence[Outcome]) -> str:
    """Explain which tokens the loss beyond a window covers; empty if no row has such a loss."""
    windows = {row.beyond_window.window for row in rows if row.beyond_window is not None}
    if not windows:
        return ""
    far = "further back than the number in brackets"
    far = far if len(windows) > 1 else f"more than {format_count(windows.pop(), 'token')} back"
    return f"Δ beyond: on tokens that repeat a bigram last seen {far}."


def greedy(swap: Swap) -> str:
    """State how many generated tokens agree with the original model's; empty if nothing was generated."""
    if (agreement := swap.agreement) is None:
        return ""
    quartiles = " to ".join(_tokens(number, agreement) for number in agreement.quartiles)
    what = "first halves of windows" if agreement.source == "windows" else f"lines of {clean(agreement.source)}"
    return (
        f"Greedy continuations of {format_count(agreement.prompts, 'prompt')} ({what}) match the original for "
        f"{_tokens(agreement.median, agreement)} of {agreement.tokens} tokens (median; quartiles {quartiles}); "
        f"{agreement.never} of {agreement.prompts} never differ."
    )


def median_agreement(agreement: Agreement | None) -> str:
    """Format the median agreement, `12`, or `≥ 64` if half of the prompts never differ; empty if none was generated."""
    return "" if agreement is None else _tokens(agreement.median, agreement)


def _tokens(number: float, agreement: Agreement) -> str:
    return f"≥ {agreement.tokens}" if number >= agreement.tokens else f"{number:.0f}"


UNITS = {
    "causal": "nats per token",
    "masked": "nats per masked token",
    "seq2seq": "nats per token",
    "classification": "nats per prediction",
    "hidden": "nats",
}
"""Unit of loss and KL, by task."""
EFFECTS = {"loss": "loss", "kl": "KL to the original", "hidden": "1 − cosine of hidden states"}
"""Short name of the quantity that a swap is judged by, for axes."""


def effect_name(swap: Swap) -> str:
    """Name the quantity a swap is judged by, with its unit: `loss in nats per token`."""
    return EFFECTS[swap.judged_by] + ("" if swap.judged_by == "hidden" else f" in {UNITS[swap.task]}")


def distance(swap: Swap, outcome: Outcome) -> float | None:
    """Return the effect of a swap without a loss: KL(original ‖ changed) or 1 − hidden cosine; None if it diverged."""
    if swap.judged_by == "kl":
        return outcome.kl
    return None if outcome.hidden_cosine is None else 1 - outcome.hidden_cosine


def distance_ci95(swap: Swap, outcome: Outcome) -> tuple[float, float] | None:
    """Return the 95 % interval of `distance`; None without an interval."""
    if swap.judged_by == "kl":
        return outcome.kl_ci95
    ends = outcome.hidden_cosine_ci95
    return None if ends is None else (1 - ends[1], 1 - ends[0])


WORDS = {
    "kl": "KL",
    "loss.ci95": "interval of the loss",
    "perplexity.ci95": "interval of the perplexity",
    "kl_ci95": "interval of KL",
    "hidden_cosine_ci95": "interval of the hidden cosine",
    "top1_agreement": "top-1",
    "hidden_cka": "CKA",
    "off_simplex": "off-simplex share",
    "beyond_window": "loss beyond a window",
    "agreement": "greedy agreement",
}
"""Name in words of each field of a Swap, if it differs from the field's name."""

PARAMETERS = {
    "near_log_weight": "γ",
    "query_weight": "map of queries",
    "key_weight": "map of keys",
    "centre": "mean ū",
    "factor": "form N",
    "signs": "form N",
    "gate": "gates",
}
"""Name in words of each fitted parameter, if it differs from the parameter's name."""


def verdict(swap: Swap) -> str:
    """State the effect of a swap after its last stage: change in loss, else KL, else cosine of hidden states."""
    if swap.diverged:
        return "The model diverges: its predictions with this kernel are not finite."
    loss, unit = swap.loss, UNITS[swap.task]
    if loss is not None:
        decimals = loss_decimals([loss])
        before, after, delta = (format_number(number, decimals) for number in (loss.before, loss.after, loss.delta))
        bounds = "" if loss.ci95 is None else f", 95 % interval {interval(loss.ci95, decimals)}"
        verb = "rises" if loss.delta > 0 else "falls"
        if loss.delta == 0 or (loss.ci95 is not None and loss.ci95[0] <= 0 <= loss.ci95[1]):
            verb = "does not change measurably:"
        ends = rise_interval(loss)
        risen = f" Perplexity {rise_words(loss)}{f', 95 % interval {ends}' if ends else ''}."
        return (
            f"The loss {verb} from {before} to {after} {unit} (Δ {delta}{bounds})."
            f"{risen if swap.perplexity is not None else ''}"
        )
    if swap.kl is not None:
        return f"KL divergence of the predictions from the original's: {figures(swap.kl)} {unit}."
    if swap.hidden_cosine is None:
        return "Nothing could be compared; the reasons are listed below."
    return f"Mean cosine between the last hidden states and the original's: {swap.hidden_cosine:.3f}."


def cautions(swaps: Sequence[Swap]) -> list[str]:
    """List the cautions of the ties in these kernels, without repetitions."""
    ties = (TIES[name] for swap in swaps for name in swap.kernel.split("+") if name in TIES)
    return list(dict.fromkeys(tie.caution for tie in ties if tie.caution))


def recovery(swap: Swap) -> str:
    """State which share of the rise in loss the later stages recover; empty if they recover nothing."""
    losses = [stage.loss for stage in swap.stages if stage.loss is not None]
    if len(losses) < len(swap.stages) or not losses or losses[0].delta <= 0 or losses[-1].delta >= losses[0].delta:
        return ""
    share = percent(min(1.0, 1 - losses[-1].delta / losses[0].delta))
    return f"Once {swap.stages[-1].name}, {share} of the swap's rise is recovered."


def reach(report: Report) -> str:
    """State the coverage, `4 of 4 sites, 32 of 32 heads` (minimum over kernels), and the computation paths."""
    coverage, swaps = report.coverage, report.swaps
    sites = min(len(swap.sites) for swap in swaps)
    heads = min(sum(len(site.heads) for site in swap.sites) for swap in swaps)
    paths = dict.fromkeys(site.path for swap in swaps for site in swap.sites)
    return (
        f"{sites} of {format_count(coverage.sites, 'site')}, {heads} of {format_count(coverage.heads, 'head')} "
        f"· path: {join_items(paths)}"
    )


def formula(swap: Swap) -> str:
    """Format the formula of the kernel, `log k = …`, and its fitted parameters."""
    names = dict.fromkeys(PARAMETERS.get(name, name.replace("_", " ")) for name in swap.fitted)
    fitted = f"; fitted per head: {join_items(names)}" if names else ""
    left = "" if swap.formula_of == "output" else "log k = "
    return f"{left}{clean(swap.formula)}{fitted}"


def proof(swaps: Sequence[Swap]) -> str:
    """Format the identity, causality and mask errors, the worst over the kernels."""
    texts = []
    for name in ("identity", "causality", "mask"):
        errors: list[float] = [error for swap in swaps if (error := getattr(swap, f"{name}_error")) is not None]
        texts.append(f"{name} error {f'{max(errors):.1e}' if any(errors) else '0' if errors else NO_VALUE}")
    return f"Verification: {', '.join(texts)}{' (worst of all kernels)' if len(swaps) > 1 else ''}"


def cost(swap: Swap) -> str:
    """Format tokens per second and peak memory of the original and of the changed model."""
    texts = []
    for pair, size, unit in (
        (swap.tokens_per_second, 1.0, "tokens per second"),
        (swap.peak_memory_bytes, 2.0**20, "MiB peak"),
    ):
        before, after = (
            NO_VALUE if number is None else f"{number / size:,.0f}" for number in (pair.before, pair.after)
        )
        times = ratio(pair)
        texts.append(f"{before} → {after} {unit}{'' if times is None else f' (× {format_number(times, 2)})'}")
    return f"Cost: {'; '.join(texts)}"


def ratio(pair: Pair) -> float | None:
    """Compute after / before; None if one is missing or before is 0."""
    return pair.after / pair.before if pair.before and pair.after is not None else None


def off_simplex(swap: Swap) -> str:
    """State the share of the attention's mass that is negative; empty if there is none."""
    share = swap.off_simplex
    if not share:
        return ""
    text = percent(share, 1) if share >= 5e-4 else "Less than 0.1 %"
    return f"{text} of the attention weight is negative, outside the simplex."


def notes(swaps: Sequence[Swap]) -> list[str]:
    """List the notes of all swaps without repetitions, preceded by the kernels they apply to unless that is all."""
    several = len(swaps) > 1
    pairs = ((note, swap.kernel) for swap in swaps for note in (*swap.notes, off_simplex(swap) * several))
    about = group_pairs((clean(note), kernel) for note, kernel in pairs if note)
    return [
        note if len(kernels) == len(swaps) else f"{join_items(kernels, 8)}: {note}" for note, kernels in about.items()
    ]


def without_value(swaps: Sequence[Swap]) -> list[str]:
    """List the fields without a value, one line per reason, with kernels and stages if there are several."""
    labels: dict[tuple[str, str], dict[str, None]] = {}  # (fields, reason) → kernels and stages, in order
    for swap in swaps:
        # the fields that only the swap has come after those of its stages
        of_stages = Stage.model_fields if swap.stages else {}
        swap_reasons = {
            name: reason for name, reason in swap.reasons.items() if name.partition(".")[0] not in of_stages
        }
        stages = [(stage.name * (len(swap.stages) > 1), stage.reasons) for stage in swap.stages]
        for place, reasons in (*stages, ("", swap_reasons)):
            by_reason = group_pairs(
                (reason, WORDS.get(name, name.replace("_", " ")))
                for name, reason in reasons.items()  # without a number, its missing interval needs no mention
                if not (name.endswith("_ci95") and reasons.get(name.removesuffix("_ci95")) == reason)
            )
            label = " ".join(filter(None, (swap.kernel * (len(swaps) > 1), place)))
            for reason, names in by_reason.items():
                labels.setdefault((join_items(names, 8), clean(reason)), {})[label] = None
    lines = []
    for (fields, reason), places in labels.items():
        where = join_items(filter(None, places), 8)
        lines.append(f"{fields}{f' ({where})' if where else ''}: {reason}")
    return lines


def figures(number: float | None, count: int = 3) -> str:
    """Format a number with `count` significant digits, or `–` for None."""
    return NO_VALUE if number is None else format_number(number, decimals_for([number], count))


def percent(share: float | None, decimals: int = 0) -> str:
    """Format a share in per cent, `27.6 %`, or `–` for None."""
    return NO_VALUE if share is None else f"{format_number(100 * share, decimals)} %"


def loss_decimals(changes: Sequence[Change]) -> int:
    """Return the decimals for losses and differences, from two to four, by the median half-width of the intervals."""
    halves = [(change.ci95[1] - change.ci95[0]) / 2 for change in changes if change.ci95 is not None]
    middle = median([half for half in halves if half > 0] or [0.02])
    return min(4, max(2, decimals_for([middle], 2)))


def interval(bounds: tuple[float, float] | None, decimals: int) -> str:
    """Format an interval, `0.49 to 0.65`, or `–` for None."""
    return " to ".join(format_number(end, decimals) for end in bounds or ()) or NO_VALUE
