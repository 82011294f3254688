"""Sentences on a swap: its effect (in loss, perplexity, by text and position), controls, checks and cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from attnlens.kernels import HYBRIDS, TIES
from attnlens.records import Agreement, Change, Outcome, Pair, Report, Stage, Swap, Text
from attnlens.wording import NO_VALUE, clean, decimals_for, format_count, format_number, group_pairs, join_items

LEGEND = {
    "same size": "a sink-window that keeps as much as the kernel (64 tokens and the first 4 where it keeps all)",
    "one key": "one key (hard)",
    "floor": "all keys alike (uniform)",
}
"""Explanation of the controls that any kernel can have, by role."""


def rise(loss: Change) -> float:
    """Compute the relative rise of the perplexity, e^Δ − 1, where Δ is the change in loss."""
    return math.expm1(loss.delta)


def rise_ends(loss: Change) -> tuple[float, float] | None:
    """Compute the 95 % interval of the relative rise from the ends of the interval of Δ; None without an interval."""
    return None if loss.ci95 is None else (math.expm1(loss.ci95[0]), math.expm1(loss.ci95[1]))


def rise_words(loss: Change) -> str:
    """Format the rise of the perplexity, `+5.6 %`, with at most two decimals, as many as its interval justifies."""
    number = format_number(100 * rise(loss), _rise_decimals(loss))
    return f"{'' if number.startswith('-') else '+'}{number} %"


def rise_interval(loss: Change) -> str:
    """Format the interval of the rise of the perplexity, `4.9 to 6.4 %`; empty without an interval."""
    ends, decimals = rise_ends(loss), _rise_decimals(loss)
    return (
        ""
        if ends is None
        else f"{format_number(100 * ends[0], decimals)} to {format_number(100 * ends[1], decimals)} %"
    )


def _rise_decimals(loss: Change) -> int:
    ends = rise_ends(loss)
    size = 100 * ((ends[1] - ends[0]) / 2 if ends else abs(rise(loss)))
    return 0 if size >= 1e6 else min(2, max(0, decimals_for([size], 2)))


def perplexity(outcome: Outcome) -> str:
    """Return `Perplexity 14.3 → 15.1 (+5.6 %, 95 % interval 4.9 to 6.4 %).`; empty without a perplexity."""
    if outcome.perplexity is None or outcome.loss is None:
        return ""
    both = " → ".join(figures(number) for number in (outcome.perplexity.before, outcome.perplexity.after))
    ends = rise_interval(outcome.loss)
    return f"Perplexity {both} ({rise_words(outcome.loss)}{f', 95 % interval {ends}' if ends else ''})."


def control_costs(swap: Swap) -> str:
    """State the rise in perplexity under each control and the kernel, and which controls cost less; empty if none."""
    if swap.loss is None or swap.diverged:
        return ""
    hybrid = is_hybrid(swap)
    what = {
        "floor": " (the floor)",
        "filter alone": " (the window alone)" if hybrid else " (the filter alone)",
        "without filter": " (the far part alone)" if hybrid else " (without the filter)",
        "far part, healed": " (the far part alone, healed)",
    }
    pairs = [
        (control, control.loss)
        for control in swap.controls
        if control.loss is not None and control.perplexity is not None
    ]
    costs = ", ".join(
        f"{clean(control.kernel or '')}{what.get(control.role, '')} {rise_words(loss)}" for control, loss in pairs
    )
    if not costs:
        return ""
    better = [clean(control.kernel or "") for control, loss in pairs if _is_less(loss, swap.loss)]
    verb = "costs" if len(better) == 1 else "cost"
    ending = f" Less than the kernel {verb}, intervals apart: {', '.join(better)}." if better else ""
    return f"Controls, in perplexity: {costs}; the kernel {rise_words(swap.loss)}.{ending}"


def beside_size(swap: Swap) -> str:
    """Return `elu (+139 %): sink-window:4,4, of its size, costs less (+50 %).`; empty without that control."""
    control = next((each for each in swap.controls if each.role == "same size" and each.perplexity is not None), None)
    if control is None or control.loss is None or swap.loss is None or swap.perplexity is None:
        return ""
    less, more = _is_less(control.loss, swap.loss), _is_less(swap.loss, control.loss)
    verdict = "costs less" if less else "costs more" if more else "costs neither less nor more beyond the intervals"
    return (
        f"{clean(swap.kernel)} ({rise_words(swap.loss)}): {clean(control.kernel or '')}, of its size, {verdict} "
        f"({rise_words(control.loss)})."
    )


def _is_less(first: Change, second: Change) -> bool:
    """Return True if the interval of the first change ends below the start of the second's."""
    return first.ci95 is not None and second.ci95 is not None and first.ci95[1] < second.ci95[0]


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
    texts += ["its far part alone as it was healed"] * ("far part, healed" in roles)
    return f"controls, the same heads without training: {join_items(texts)}." if texts else ""


def worst_text(swap: Swap) -> str:
    """Return `Worst on a.txt: perplexity +8.1 % (95 % interval …); least on b.txt: +1 %.`; empty with one text."""
    texts = [text for text in swap.loss_by_text if text.perplexity is not None]
    if len(texts) < 2:
        return ""
    texts = sorted(texts, key=lambda text: text.change.delta)
    (least, worst), ends = (texts[0], texts[-1]), rise_interval(texts[-1].change)
    bounds = f" (95 % interval {ends})" if ends else ""
    return (
        f"Worst on {clean(worst.name)}: perplexity {rise_words(worst.change)}{bounds}; least on {clean(least.name)}: "
        f"{rise_words(least.change)}."
    )


def one_text(swap: Swap, texts: Sequence[Text]) -> str:
    """Warn that the figures hold for a single text; empty without a loss or with several texts."""
    if swap.loss is None or len(texts) != 1:
        return ""
    return f"These figures hold for windows of {clean(texts[0].name)} only; another --text, unlike it, may cost more."


def beyond(swap: Swap) -> str:
    """State the change in loss on tokens whose evidence lies beyond a window; empty if it was not measured."""
    if (record := swap.beyond_window) is None:
        return ""
    change = record.change
    size = abs(change.delta) if change.ci95 is None else (change.ci95[1] - change.ci95[0]) / 2
    decimals = min(4, max(2, decimals_for([size or 0.02], 2)))
    ends = "" if change.ci95 is None else f" ({interval(change.ci95, decimals)})"
    return (
        f"On the {format_count(record.tokens, 'token')} whose pair with the token before stood last more than "
        f"{format_count(record.window, 'token')} back the loss changes by "
        f"{format_number(change.delta, decimals)}{ends}."
    )


def beyond_legend(rows: Sequence[Outcome]) -> str:
    """Explain which tokens the loss beyond a window covers; empty if no row has such a loss."""
    windows = sorted({row.beyond_window.window for row in rows if row.beyond_window is not None})
    if not windows:
        return ""
    if len(windows) > 1:
        return "Δ beyond: of the tokens whose evidence lies further back than the keys in brackets."
    return f"Δ beyond: of the tokens whose evidence lies more than {format_count(windows[0], 'token')} back."


def greedy(swap: Swap) -> str:
    """State how many generated tokens agree with the original model's; empty if nothing was generated."""
    agreement = swap.agreement
    if agreement is None:
        return ""
    quartiles = " to ".join(_tokens(number, agreement) for number in agreement.quartiles)
    what = "first halves of windows" if agreement.source == "windows" else f"lines of {clean(agreement.source)}"
    return (
        f"Greedy continuations of {format_count(agreement.prompts, 'prompt')} ({what}) are the original's for "
        f"{_tokens(agreement.median, agreement)} of {agreement.tokens} tokens in the median (quartiles {quartiles}); "
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
    if swap.loss is not None:
        return " ".join(filter(None, (_loss_sentence(swap.loss, UNITS[swap.task]), perplexity(swap))))
    if swap.kl is not None and swap.top1_agreement is not None:
        decimals = decimals_for([swap.kl], 3)
        bounds = "" if swap.kl_ci95 is None else f", 95 % interval {interval(swap.kl_ci95, decimals)}"
        return (
            f"The predictions are {figures(swap.kl)} {UNITS[swap.task]} (KL{bounds}) from the original's, and "
            f"{percent(swap.top1_agreement, 1)} of the first choices are the same."
        )
    if swap.hidden_cosine is None:
        return "Nothing could be compared; the reasons stand below."
    cka = "" if swap.hidden_cka is None else f", their linear CKA is {swap.hidden_cka:.3f}"
    bounds = "" if swap.hidden_cosine_ci95 is None else f" (95 % interval {interval(swap.hidden_cosine_ci95, 3)})"
    return f"The last hidden states keep a mean cosine of {swap.hidden_cosine:.3f}{bounds} to the original's{cka}."


def cautions(swaps: Sequence[Swap]) -> list[str]:
    """List the cautions of the ties in these kernels, without repetitions."""
    ties = (TIES[name] for swap in swaps for name in swap.kernel.split("+") if name in TIES)
    return list(dict.fromkeys(tie.caution for tie in ties if tie.caution))


def ranking(swaps: Sequence[Swap]) -> str:
    """State which kernels harm least and most, which not measurably, and which diverge; empty if none has a value."""
    losses = [(swap.loss, clean(swap.kernel)) for swap in swaps if swap.loss is not None]
    powers = {clean(swap.kernel): perplexity(swap).rstrip(".") for swap in swaps}
    ranked = sorted(losses, key=lambda pair: pair[0].delta)
    sentences = []
    if ranked:
        decimals = loss_decimals([loss for loss, _ in ranked])
        ends = ranked[0], ranked[-1]
        least, most = (f"{name} (Δ {format_number(loss.delta, decimals)})" for loss, name in ends)
        sentences.append(f"The loss is lowest under {least}, highest under {most}.")
        sentences += [f"{powers[name]} under {name}." for _, name in ends if powers[name]]
    else:
        distances = [(far, clean(swap.kernel)) for swap in swaps if (far := distance(swap, swap)) is not None]
        if distances:
            least, most = (f"{name} ({figures(far)})" for far, name in (min(distances), max(distances)))
            sentences.append(f"The {EFFECTS[swaps[0].judged_by]} is least under {least}, largest under {most}.")
    same = [name for loss, name in losses if _is_unchanged(loss)]
    diverged = [swap.kernel for swap in swaps if swap.diverged]
    sentences += [f"No measurable change: {join_items(same, 8)}."] if same else []
    sentences += [f"Diverged: {join_items(diverged, 8)}."] if diverged else []
    return " ".join(sentences)


def stages_sentence(swap: Swap) -> str:
    """State the loss by stage and how much of its rise is taken back; empty with one stage or if one lacks a loss."""
    losses = [(stage.name, stage.loss) for stage in swap.stages if stage.loss is not None]
    if len(losses) < 2 or len(losses) < len(swap.stages):
        return ""
    worst = losses[0][1].delta
    decimals = loss_decimals([loss for _, loss in losses])
    steps = ", ".join(f"{format_number(loss.after, decimals)} {name}" for name, loss in losses)
    sentence = f"From stage to stage: {format_number(losses[0][1].before, decimals)} original, {steps}"
    last, loss = losses[-1]
    if worst <= 0 or not loss.delta < worst:
        return f"{sentence}."
    return f"{sentence}; once {last}, {percent(min(1.0, 1 - loss.delta / worst))} of the swap's rise is taken back."


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


def kernel(swap: Swap) -> str:
    """Format the kernel, its formula and its fitted parameters: `rbf:gamma=0.5: log k = …`."""
    return f"{clean(swap.kernel)}: {formula(swap)}"


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
        errors = (getattr(swap, f"{name}_error") for swap in swaps)
        worst: float | None = max((error for error in errors if error is not None), default=None)
        texts.append(f"{name} error {NO_VALUE if worst is None else f'{worst:.1e}' if worst else '0'}")
    return f"Proof: {', '.join(texts)}{' (worst of all kernels)' if len(swaps) > 1 else ''}"


def cost(swap: Swap) -> str:
    """Format tokens per second and peak memory of the original and of the changed model."""
    speed = _pair(swap.tokens_per_second, 1.0, "tokens per second")
    memory = _pair(swap.peak_memory_bytes, 2.0**20, "MiB at most")
    return f"Cost: {speed}; {memory}"


def ratio(pair: Pair) -> float | None:
    """Compute after / before; None if one is missing or before is 0."""
    return pair.after / pair.before if pair.before and pair.after is not None else None


def off_simplex(swap: Swap) -> str:
    """State the share of the attention's mass that is negative; empty if there is none."""
    if not swap.off_simplex:
        return ""
    share = percent(swap.off_simplex, 1) if swap.off_simplex >= 5e-4 else "Less than 0.1 %"
    return f"{share} of the attention's mass is negative, outside the simplex."


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
    groups: dict[tuple[str, str], list[str]] = {}
    for swap in swaps:
        for place, reasons in _reasons(swap):
            by_reason = group_pairs(
                (reason, WORDS.get(name, name.replace("_", " ")))
                for name, reason in reasons.items()  # without a number, its missing interval needs no mention
                if not (name.endswith("_ci95") and reasons.get(name.removesuffix("_ci95")) == reason)
            )
            label = " ".join([swap.kernel] * (len(swaps) > 1) + [place] * bool(place))
            for reason, names in by_reason.items():
                groups.setdefault((join_items(names, 8), reason), []).append(label)
    lines = []
    for (fields, reason), labels in groups.items():
        where = join_items([label for label in dict.fromkeys(labels) if label], 8)
        lines.append(f"{fields}{f' ({where})' if where else ''}: {clean(reason)}")
    return lines


def figures(number: float, count: int = 3) -> str:
    """Format a number with `count` significant digits."""
    return format_number(number, decimals_for([number], count))


def percent(share: float, decimals: int = 0) -> str:
    """Format a share in per cent: `27.6 %`."""
    return f"{format_number(100 * share, decimals)} %"


def loss_decimals(changes: Sequence[Change]) -> int:
    """Return the decimals for losses and differences, from two to four, by the median half-width of the intervals."""
    halves = [(change.ci95[1] - change.ci95[0]) / 2 for change in changes if change.ci95 is not None]
    middle = median([half for half in halves if half > 0] or [0.02])
    return min(4, max(2, decimals_for([middle], 2)))


def interval(bounds: tuple[float, float] | None, decimals: int) -> str:
    """Format an interval, `0.49 to 0.65`, or `–` for None."""
    return (
        NO_VALUE if bounds is None else f"{format_number(bounds[0], decimals)} to {format_number(bounds[1], decimals)}"
    )


def _loss_sentence(loss: Change, unit: str) -> str:
    decimals = loss_decimals([loss])
    before, after, delta = (format_number(number, decimals) for number in (loss.before, loss.after, loss.delta))
    bounds = "" if loss.ci95 is None else f", 95 % interval {interval(loss.ci95, decimals)}"
    if _is_unchanged(loss):
        return f"The loss does not change measurably: {before} {unit} before, {after} after (Δ {delta}{bounds})."
    verb = "rises" if loss.delta > 0 else "falls"
    return f"The loss {verb} from {before} to {after} {unit} (Δ {delta}{bounds})."


def _is_unchanged(loss: Change) -> bool:
    """Return True if the change is 0 or its interval contains 0."""
    return loss.delta == 0 or (loss.ci95 is not None and loss.ci95[0] <= 0 <= loss.ci95[1])


def _pair(pair: Pair, size: float, unit: str) -> str:
    both = [NO_VALUE if number is None else f"{number / size:,.0f}" for number in (pair.before, pair.after)]
    times = ratio(pair)
    return f"{both[0]} → {both[1]} {unit}" + ("" if times is None else f" (× {format_number(times, 2)})")


def _reasons(swap: Swap) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (stage, reasons for missing values) of each stage, then of the fields that only the swap has."""
    for stage in swap.stages:
        yield stage.name if len(swap.stages) > 1 else "", stage.reasons
    of_stages = Stage.model_fields if swap.stages else {}
    yield "", {name: reason for name, reason in swap.reasons.items() if name.partition(".")[0] not in of_stages}
