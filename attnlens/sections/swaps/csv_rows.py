"""A swap as rows for a spreadsheet."""

from __future__ import annotations

from attnlens.records import Change, Effect, Outcome, Swap
from attnlens.sections.section import Cell

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
    costs = dict.fromkeys(COSTS) if control else _costs(swap)
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


def _costs(swap: Swap) -> dict[str, Cell]:
    """What the kernel costs beside the loss."""
    speed, memory = swap.tokens_per_second, swap.peak_memory_bytes
    values = (swap.off_simplex, speed.before, speed.after, memory.before, memory.after)
    return dict(zip(COSTS, values, strict=True))


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
