"""Tables of a swap as columns of finished text (sites, sweep, plan), and as rows of a sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from attnlens.records import Change, Effect, KeyRank, Outcome, Plan, Swap
from attnlens.sections.section import Cell, Column, Table
from attnlens.sections.swaps.outcomes import DIVERGED, number, share
from attnlens.sentences.swaps.effects import interval
from attnlens.wording import NO_VALUE, clean, decimals_for, written

GAP = "…"
"""What stands in a row for units that are left out."""
MARK = "*"
"""What stands beside a significant effect."""


def site_rows(swap: Swap) -> Table:
    """Every exchanged site: where it is, how it was computed, how far its output moves."""
    sites = swap.sites
    columns = [
        Column("", "heads", tuple(spans(site.heads) for site in sites)),
        Column("", "output error", tuple(number(site.output_error) for site in sites)),
        Column("", "path", tuple(clean(site.path) for site in sites), words=True),
        Column("", "site", tuple(clean(site.site) for site in sites), words=True),
    ]
    if any(site.off_simplex for site in sites):
        columns.insert(2, Column("", "off simplex", tuple(share(site.off_simplex) for site in sites)))
    names = [
        Column("", "layer", tuple(str(site.layer) for site in sites)),
        Column("", "part", tuple(site.part for site in sites), words=True),
    ]
    return Table(tuple(names), tuple(columns))


def sweep_rows(swap: Swap, most: int) -> Table:
    """The `most` most and least harmful units, all where there are no more than both."""
    effects = swap.sweep
    shown: list[Effect | None] = list(effects)
    if len(effects) > 2 * most:
        shown = [*effects[:most], None, *effects[-most:]]
    decimals = _decimals(effects)
    names = [_units("layer", shown, lambda effect: str(effect.layer))]
    if any(effect.head is not None for effect in effects):
        names.append(_units("head", shown, lambda effect: "all" if effect.head is None else str(effect.head)))
    if len({effect.part for effect in effects}) > 1:
        names.append(_units("part", shown, lambda effect: effect.part, words=True))
    columns = [
        _units("Δ", shown, lambda effect: DIVERGED if effect.delta is None else written(effect.delta, decimals)),
        _units("95 % interval", shown, lambda effect: interval(effect.ci95, decimals)),
    ]
    if tested(swap):
        columns.append(_units("p", shown, lambda effect: _p_value(effect.p_value)))
        columns.append(_units("FDR 5 %", shown, lambda effect: MARK if effect.significant else "", words=True))
    return Table(tuple(names), tuple(columns))


def tested(swap: Swap) -> bool:
    """Whether its effects are differences, which can be tested; without a loss they are distances, never negative."""
    return swap.judged_by == "loss"


def sweeps_rows(swaps: Sequence[Swap]) -> Table:
    """A row a kernel: how many units matter, which harm most and least."""
    decimals = _decimals([effect for swap in swaps for effect in swap.sweep])
    columns = []
    if any(map(tested, swaps)):
        counts = [sum(effect.significant for effect in swap.sweep) for swap in swaps]
        cells = tuple(f"{n} of {len(swap.sweep)}" for n, swap in zip(counts, swaps, strict=True))
        columns.append(Column("", "FDR 5 %", cells))
    for group, index in (("most harmful", 0), ("least harmful", -1)):
        found = [swap.sweep[index] for swap in swaps]
        deltas = (DIVERGED if effect.delta is None else written(effect.delta, decimals) for effect in found)
        columns += [
            Column(group, "where", tuple(map(place, found)), words=True),
            Column(group, "Δ", tuple(deltas)),
        ]
        if index == 0:
            columns.append(Column(group, "95 % interval", tuple(interval(e.ci95, decimals) for e in found)))
    return Table((Column("", "kernel", tuple(clean(swap.kernel) for swap in swaps), words=True),), tuple(columns))


def plan_rows(plan: Plan) -> Table:
    """A row a layer: the mean of its ranks, the ranks key head by key head."""
    layers: dict[int, list[KeyRank]] = {}
    for key in plan.ranks:
        layers.setdefault(key.layer, []).append(key)
    rows, shared = list(layers.values()), any(key.kv_heads for key in plan.ranks)
    means = (sum(k.rank / k.keys * len(k.heads) for k in keys) / sum(len(k.heads) for k in keys) for keys in rows)
    names = (Column("", "layer", tuple(str(keys[0].layer) for keys in rows)),)
    columns = (
        Column("", "mean rank", tuple(f"{mean:.1f}" for mean in means)),
        Column("", "of", tuple(str(keys[0].head_dim // keys[0].keys) for keys in rows)),
        Column(
            "",
            "numbers kept" if shared else "rank by key head",
            tuple(numbers_kept(keys) if shared else " ".join(str(key.rank) for key in keys) for keys in rows),
            words=True,
        ),
    )
    return Table(names, columns)


def numbers_kept(keys: Sequence[KeyRank]) -> str:
    """`40 of 128`, `20 18 of 32 each`, `20 of 48, 12 of 32`: latent by latent, with how many numbers its keys have."""
    totals = {key.head_dim for key in keys}
    if len(totals) > 1:
        return ", ".join(f"{key.rank} of {key.head_dim}" for key in keys)
    each = " each" * (len(keys) > 1)
    return f"{' '.join(str(key.rank) for key in keys)} of {totals.pop()}{each}"


def place(effect: Effect) -> str:
    """`layer 3 head 7`."""
    return f"layer {effect.layer}" + ("" if effect.head is None else f" head {effect.head}")


def spans(numbers: Sequence[int]) -> str:
    """`0–7`, `0, 3–5`: neighbours as a range."""
    found: list[list[int]] = []
    for one in sorted(set(numbers)):
        if found and one == found[-1][-1] + 1:
            found[-1].append(one)
        else:
            found.append([one])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)


def _units(title: str, shown: Sequence[Effect | None], tell: Callable[[Effect], str], *, words: bool = False) -> Column:
    return Column("", title, tuple(GAP if effect is None else tell(effect) for effect in shown), words=words)


def _decimals(effects: Sequence[Effect]) -> int:
    """What two figures of the middle effect take, two to six."""
    sizes = [abs(effect.delta) for effect in effects if effect.delta]
    middle = median(sizes) if sizes else 1.0
    return 6 if middle < 1e-4 else min(6, max(2, decimals_for([middle], 2)))


def _p_value(number: float | None) -> str:
    return NO_VALUE if number is None else "<0.0001" if number < 1e-4 else f"{number:.2g}"


COSTS = (
    "off_simplex",
    "tokens_per_second.before",
    "tokens_per_second.after",
    "peak_memory_bytes.before",
    "peak_memory_bytes.after",
)
"""Columns of what a kernel costs beside the loss."""


def swap_rows(swaps: list[Swap]) -> list[dict[str, Cell]]:
    """One row per kernel and stage, or control; where units were swapped alone, one row per kernel and unit."""
    if any(swap.sweep for swap in swaps):
        return [_effect(swap, effect, place) for swap in swaps for place, effect in enumerate(swap.sweep)]
    rows = []
    for swap in swaps:
        rows += [_outcome(swap, stage.name, "", swap.state, stage) for stage in swap.stages]
        rows += [_outcome(swap, "", one.kernel or one.role, one.state, one) for one in swap.controls]
    return rows


def _outcome(swap: Swap, stage: str, control: str, state: float | None, found: Outcome) -> dict[str, Cell]:
    """A stage of a kernel, or one of its controls, which has neither speed nor memory of its own."""
    costs: dict[str, Cell] = dict.fromkeys(COSTS)
    if not control:
        speed, memory = swap.tokens_per_second, swap.peak_memory_bytes
        values = (swap.off_simplex, speed.before, speed.after, memory.before, memory.after)
        costs = dict(zip(COSTS, values, strict=True))
    beyond, agreement = found.beyond_window, found.agreement
    return {
        "kernel": swap.kernel,
        "stage": stage,
        "control": control,
        "state": state,
        **_change("loss", found.loss),
        **_change("perplexity", found.perplexity),
        "kl": found.kl,
        **_bounds("kl", found.kl_ci95),
        "top1_agreement": found.top1_agreement,
        "hidden_cosine": found.hidden_cosine,
        **_bounds("hidden_cosine", found.hidden_cosine_ci95),
        "hidden_cka": found.hidden_cka,
        **_change("beyond_window", beyond.change if beyond else None),
        "beyond_window.tokens": beyond.tokens if beyond else None,
        "greedy.median": agreement.median if agreement else None,
        "greedy.tokens": agreement.tokens if agreement else None,
        **costs,
    }


def _effect(swap: Swap, effect: Effect, place: int) -> dict[str, Cell]:
    """What a unit alone does, and what is measured of it, where that was read."""
    where = {name: getattr(effect, name) for name in ("layer", "head", "part", "delta")}
    judged = {name: getattr(effect, name) for name in ("p_value", "significant")}
    read = {one.measure: one.values[place] for one in sorted(swap.predictors, key=lambda one: one.measure)}
    return {"kernel": swap.kernel, **where, **_bounds("delta", effect.ci95), **judged, **read}


def _change(name: str, change: Change | None) -> dict[str, Cell]:
    found: dict[str, Cell] = {f"{name}.{part}": getattr(change, part, None) for part in ("before", "after", "delta")}
    return found | _bounds(f"{name}.delta", change.ci95 if change else None)


def _bounds(name: str, ci95: tuple[float, float] | None) -> dict[str, Cell]:
    low, high = ci95 or (None, None)
    return {f"{name}.low": low, f"{name}.high": high}
