"""A swap as rows for a spreadsheet."""

from __future__ import annotations

from attnlens.records import Change, Effect, Stage, Swap
from attnlens.sections.section import Cell


def swap_rows(swaps: list[Swap]) -> list[dict[str, Cell]]:
    """One row per kernel and stage; where units were swapped alone, one row per kernel and unit."""
    if any(swap.sweep for swap in swaps):
        return [_effect(swap, effect, place) for swap in swaps for place, effect in enumerate(swap.sweep)]
    return [_stage(swap, stage) for swap in swaps for stage in swap.stages]


def _stage(swap: Swap, stage: Stage) -> dict[str, Cell]:
    return {
        "kernel": swap.kernel,
        "stage": stage.name,
        **_change("loss", stage.loss),
        **_change("perplexity", stage.perplexity),
        "kl": stage.kl,
        **_bounds("kl", stage.kl_ci95),
        "top1_agreement": stage.top1_agreement,
        "hidden_cosine": stage.hidden_cosine,
        **_bounds("hidden_cosine", stage.hidden_cosine_ci95),
        "hidden_cka": stage.hidden_cka,
        "off_simplex": swap.off_simplex,
        "tokens_per_second.before": swap.tokens_per_second.before,
        "tokens_per_second.after": swap.tokens_per_second.after,
        "peak_memory_bytes.before": swap.peak_memory_bytes.before,
        "peak_memory_bytes.after": swap.peak_memory_bytes.after,
    }


def _effect(swap: Swap, effect: Effect, place: int) -> dict[str, Cell]:
    """What a unit alone does, and what is measured of it, where that was read."""
    where = {name: getattr(effect, name) for name in ("layer", "head", "part", "delta")}
    judged = {name: getattr(effect, name) for name in ("p_value", "significant")}
    read = {one.measure: one.values[place] for one in sorted(swap.predictors, key=lambda one: one.measure)}
    return {"kernel": swap.kernel, **where, **_bounds("delta", effect.ci95), **judged, **read}


def _change(name: str, change: Change | None) -> dict[str, Cell]:
    found: dict[str, Cell] = {f"{name}.{part}": getattr(change, part, None) for part in ("before", "after", "delta")}
    if name == "loss":
        found |= _bounds(f"{name}.delta", change.ci95 if change else None)
    return found


def _bounds(name: str, ci95: tuple[float, float] | None) -> dict[str, Cell]:
    low, high = ci95 or (None, None)
    return {f"{name}.low": low, f"{name}.high": high}
