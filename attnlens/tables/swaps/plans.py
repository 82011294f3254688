"""How is a plan of ranks told? What was promised, measured and saved, and the ranks layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

from attnlens.records import KeyRank, Pair, Plan, Rise
from attnlens.tables.sections import Rows
from attnlens.tables.terminal import Column
from attnlens.wording import clean

SAVED = {
    "parameters": "numbers that make queries and keys",
    "flops_per_token": "operations per token for queries, keys and scores",
    "cache_bytes_per_token": "bytes per token in the key-value cache",
}
"""What a plan saves, or adds, by field."""
RANK = "rank: of each key head, for all query heads that share it."
PROMISED = (
    "Promised: measured on calibration text kept apart from the fit, where the whole interval had to stay within the "
    "budget, and each text alone where there are several."
)


def plan_lines(plan: Plan) -> list[str]:
    """The mean rank, the promise and what came of it, and what is saved."""
    lines = [f"Mean rank {plan.mean_rank:.1f} of {plan.head_dim:g}; budget: a loss {100 * plan.budget:g} % higher"]
    if plan.promised is not None:
        lines += [f"Promised: {rise(plan.promised)} on {clean(plan.calibration)}", *_by_text(plan.promised)]
    if plan.measured is not None:
        lines.append(f"Measured: {rise(plan.measured)} on {clean(plan.text)}, {_verdict(plan, plan.measured)}")
    if plan.healed is not None:
        lines.append(f"Healed: {rise(plan.healed)} on {clean(plan.text)}")
    lines += _saved(plan)
    return [*lines, *(f"{clean(name.replace('_', ' '))}: {clean(reason)}" for name, reason in plan.reasons.items())]


def explained(plan: Plan) -> str:
    """What the words of the lines and rows mean; of a promise only where there is one."""
    return RANK if plan.promised is None else f"{RANK} {PROMISED}"


def _verdict(plan: Plan, measured: Rise) -> str:
    """Whether the rise keeps the budget, and whether its interval does."""
    if not plan.kept:
        return "beyond the budget" + (": the promise does not hold on this text" if plan.promised else "")
    if measured.ci95 is None:
        return "within the budget, without an interval"
    return "within the budget" + (", though its interval is not" if measured.ci95[1] > plan.budget else "")


def _by_text(promised: Rise) -> Iterator[str]:
    if promised.by_text:
        each = sorted(promised.by_text.items(), key=lambda item: item[1])
        yield f"Text by text: {', '.join(f'{share(rise)} ({clean(name)})' for name, rise in each)}"


def _saved(plan: Plan) -> Iterator[str]:
    for name, meaning in SAVED.items():
        pair: Pair = getattr(plan, name)
        if pair.before and pair.after is not None:
            change = share(pair.after / pair.before - 1, 0)
            length = f", at {plan.tokens} tokens" if name == "flops_per_token" else ""
            word = "Saving" if pair.after < pair.before else "More" if pair.after > pair.before else "As before"
            yield f"{word}: {pair.before:,.0f} → {pair.after:,.0f} {meaning}{length} ({change})"
    if plan.keys_to_gain is not None:
        yield (
            "Positions are rotated, or queries and keys normalised, before the maps apply: these cost operations "
            f"of their own, fewer than they save once a query sees {plan.keys_to_gain:,.0f} keys"
        )


def share(number: float, digits: int = 2) -> str:
    """`+0.62 %`."""
    sign = "−" if number < 0 else "+"
    return f"{sign}{abs(number) * 100:.{digits}f} %"


def rise(found: Rise) -> str:
    """`+0.62 % (95 % interval +0.28 % to +0.97 %, 32 sequences)`."""
    bounds = "" if found.ci95 is None else f"95 % interval {share(found.ci95[0])} to {share(found.ci95[1])}, "
    return f"{share(found.share)} ({bounds}{found.sequences} sequence{'s' * (found.sequences != 1)})"


def plan_rows(plan: Plan) -> Rows:
    """A row a layer: the mean of its ranks, the ranks key head by key head."""
    layers: dict[int, list[KeyRank]] = {}
    for key in plan.ranks:
        layers.setdefault(key.layer, []).append(key)
    rows = list(layers.values())
    means = (sum(k.rank * len(k.heads) for k in keys) / sum(len(k.heads) for k in keys) for keys in rows)
    names = (Column("", "layer", tuple(str(keys[0].layer) for keys in rows)),)
    columns = (
        Column("", "mean rank", tuple(f"{mean:.1f}" for mean in means)),
        Column("", "of", tuple(str(keys[0].head_dim) for keys in rows)),
        Column("", "rank by key head", tuple(" ".join(str(key.rank) for key in keys) for keys in rows), words=True),
    )
    return Rows(names, columns)
