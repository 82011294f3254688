"""Sentences of a swap in perplexity, beside its controls, by place, text by text, and in generated tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attnlens.kernels import HYBRIDS
from attnlens.records import Agreement, Change, Outcome, Swap
from attnlens.wording import clean, counted, decimals_for, listed, written

LEGEND = {
    "same size": "a sink-window that keeps as much as the kernel (64 tokens and the first 4 where it keeps all)",
    "one key": "one key (hard)",
    "floor": "all keys alike (uniform)",
}
"""What the controls of any kernel are."""


def rise(loss: Change) -> float:
    """By which share the perplexity is larger: e^Δ − 1, Δ being that of the loss."""
    return math.expm1(loss.delta)


def rise_ends(loss: Change) -> tuple[float, float] | None:
    """Its 95 % interval, from the ends of that of Δ."""
    return None if loss.ci95 is None else (math.expm1(loss.ci95[0]), math.expm1(loss.ci95[1]))


def rise_words(loss: Change) -> str:
    """`+5.6 %`, with as many decimals as its interval bears, two at most."""
    number = written(100 * rise(loss), _decimals(loss))
    return f"{'' if number.startswith('-') else '+'}{number} %"


def rise_interval(loss: Change) -> str:
    """`4.9 to 6.4 %`; empty where there is none."""
    ends, decimals = rise_ends(loss), _decimals(loss)
    return "" if ends is None else f"{written(100 * ends[0], decimals)} to {written(100 * ends[1], decimals)} %"


def _decimals(loss: Change) -> int:
    ends = rise_ends(loss)
    size = 100 * ((ends[1] - ends[0]) / 2 if ends else abs(rise(loss)))
    return 0 if size >= 1e6 else min(2, max(0, decimals_for([size], 2)))


def perplexity(found: Outcome) -> str:
    """`Perplexity 14.3 → 15.1 (+5.6 %, 95 % interval 4.9 to 6.4 %).`; empty where there is none."""
    if found.perplexity is None or found.loss is None:
        return ""
    both = " → ".join(_figures(number) for number in (found.perplexity.before, found.perplexity.after))
    ends = rise_interval(found.loss)
    return f"Perplexity {both} ({rise_words(found.loss)}{f', 95 % interval {ends}' if ends else ''})."


def beside(swap: Swap) -> str:
    """What the sink-window and the kernel's branches cost beside it, and the floor; empty without controls."""
    if swap.loss is None or swap.diverged:
        return ""
    hybrid = is_hybrid(swap)
    what = {
        "floor": " (the floor)",
        "filter alone": " (the window alone)" if hybrid else " (the filter alone)",
        "without filter": " (the far part alone)" if hybrid else " (without the filter)",
        "far part, healed": " (the far part alone, healed)",
    }
    every = [(one, one.loss) for one in swap.controls if one.loss is not None and one.perplexity is not None]
    costs = ", ".join(f"{clean(one.kernel or '')}{what.get(one.role, '')} {rise_words(loss)}" for one, loss in every)
    if not costs:
        return ""
    better = [clean(one.kernel or "") for one, loss in every if _less(loss, swap.loss)]
    verb = "costs" if len(better) == 1 else "cost"
    judged = f" Less than the kernel {verb}, intervals apart: {', '.join(better)}." if better else ""
    return f"Controls, in perplexity: {costs}; the kernel {rise_words(swap.loss)}.{judged}"


def beside_size(swap: Swap) -> str:
    """`elu (+139 %): sink-window:4,4, of its size, costs less (+50 %).`; empty without that control."""
    control = next((one for one in swap.controls if one.role == "same size" and one.perplexity is not None), None)
    if control is None or control.loss is None or swap.loss is None or swap.perplexity is None:
        return ""
    less, more = _less(control.loss, swap.loss), _less(swap.loss, control.loss)
    verdict = "costs less" if less else "costs more" if more else "costs neither less nor more beyond the intervals"
    return (
        f"{clean(swap.kernel)} ({rise_words(swap.loss)}): {clean(control.kernel or '')}, of its size, {verdict} "
        f"({rise_words(control.loss)})."
    )


def _less(one: Change, other: Change) -> bool:
    """Whether its interval ends below the other's."""
    return one.ci95 is not None and other.ci95 is not None and one.ci95[1] < other.ci95[0]


def is_hybrid(swap: Swap) -> bool:
    """Whether its kernel has the model's own among near keys, and features beyond them."""
    return any(part.partition(":")[0] in HYBRIDS for part in swap.kernel.split("+"))


def legend(swaps: Sequence[Swap]) -> str:
    """What the controls beside these kernels are; empty where there are none."""
    every = [(swap, one.role) for swap in swaps for one in swap.controls if one.kernel is not None]
    roles = {role for _, role in every}
    told = [words for role, words in LEGEND.items() if role in roles]
    parted = {is_hybrid(swap) for swap, role in every if role == "filter alone"}
    told += ["a filter and its kernel alone"] * (False in parted)
    told += ["a hybrid's window and far part alone"] * (True in parted)
    told += ["its far part alone as it was healed"] * ("far part, healed" in roles)
    return f"controls, the same heads without training: {listed(told)}." if told else ""


def worst_text(swap: Swap) -> str:
    """`Worst on a.txt: perplexity +8.1 % (95 % interval …), least on b.txt: +1 %.`; empty with one text."""
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


def one_text(swap: Swap, names: Sequence[str]) -> str:
    """That the figures are of one text alone, where they are."""
    if swap.loss is None or len(names) != 1:
        return ""
    return f"These figures hold for windows of {clean(names[0])} only; another --text, unlike it, may cost more."


def beyond(swap: Swap) -> str:
    """What the swap costs where the evidence is out of a window's reach, and from the first to the last place."""
    told = []
    if (found := swap.beyond_window) is not None:
        told.append(
            f"On the {counted(found.tokens, 'token')} whose pair with the token before stood last more than "
            f"{counted(found.window, 'token')} back the loss changes by {_bounded(found.change)}."
        )
    if len(swap.loss_by_position) > 1:
        first, last = swap.loss_by_position[0], swap.loss_by_position[-1]
        told.append(
            f"By place: {_bounded(first.change)} on tokens {first.first} to {first.last} of a sequence, "
            f"{_bounded(last.change)} on {last.first} to {last.last}."
        )
    return " ".join(told)


def _bounded(change: Change) -> str:
    size = abs(change.delta) if change.ci95 is None else (change.ci95[1] - change.ci95[0]) / 2
    decimals = min(4, max(2, decimals_for([size or 0.02], 2)))
    if change.ci95 is None:
        return written(change.delta, decimals)
    delta, low, high = (written(number, decimals) for number in (change.delta, *change.ci95))
    return f"{delta} ({low} to {high})"


def beyond_legend(rows: Sequence[Outcome]) -> str:
    """Of which tokens the losses beyond a window are; empty where there are none."""
    windows = sorted({row.beyond_window.window for row in rows if row.beyond_window is not None})
    if not windows:
        return ""
    if len(windows) > 1:
        return "Δ beyond: of the tokens whose evidence lies further back than the keys in brackets."
    return f"Δ beyond: of the tokens whose evidence lies more than {counted(windows[0], 'token')} back."


def greedy(swap: Swap) -> str:
    """For how long the generated texts are the original's, in a sentence; empty where nothing was generated."""
    found = swap.agreement
    if found is None:
        return ""
    quartiles = " to ".join(_tokens(number, found) for number in found.quartiles)
    what = "first halves of windows" if found.source == "windows" else f"lines of {clean(found.source)}"
    return (
        f"Greedy continuations of {counted(found.prompts, 'prompt')} ({what}) are the original's for "
        f"{_tokens(found.median, found)} of {found.tokens} tokens in the median (quartiles {quartiles}); "
        f"{found.never} of {found.prompts} never differ."
    )


def agreed(found: Agreement | None) -> str:
    """`12`, or `≥ 64` where half of the prompts never differ; empty where nothing was generated."""
    return "" if found is None else _tokens(found.median, found)


def _tokens(number: float, found: Agreement) -> str:
    return f"≥ {found.tokens}" if number >= found.tokens else f"{number:.0f}"


def _figures(number: float) -> str:
    return written(number, decimals_for([number], 3))


UNITS = {
    "causal": "nats per token",
    "masked": "nats per masked token",
    "seq2seq": "nats per token",
    "classification": "nats per prediction",
    "hidden": "nats",
}
"""What loss and KL count in, by task."""
EFFECTS = {"loss": "loss", "kl": "KL to the original", "hidden": "1 − cosine of hidden states"}
"""What a swap is judged by, in the few words of an axis."""


def effect_name(swap: Swap) -> str:
    """`loss in nats per token`."""
    return EFFECTS[swap.judged_by] + ("" if swap.judged_by == "hidden" else f" in {UNITS[swap.task]}")


def distance(swap: Swap, outcome: Outcome) -> float | None:
    """Where there is no loss: KL(original ‖ changed), or 1 − cosine of hidden states; None where it diverged."""
    if swap.judged_by == "kl":
        return outcome.kl
    return None if outcome.hidden_cosine is None else 1 - outcome.hidden_cosine


def distance_ci95(swap: Swap, outcome: Outcome) -> tuple[float, float] | None:
    """The 95 % interval of that distance; None where there is none."""
    if swap.judged_by == "kl":
        return outcome.kl_ci95
    ends = outcome.hidden_cosine_ci95
    return None if ends is None else (1 - ends[1], 1 - ends[0])
