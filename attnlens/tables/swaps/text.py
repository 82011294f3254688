"""A swap as markdown, and as rows for a spreadsheet."""

from __future__ import annotations

import csv as standard
import io
from collections.abc import Callable, Iterator

from attnlens.records import Change, Effect, Report, Stage, Swap
from attnlens.tables.sections import in_markdown
from attnlens.tables.swaps.sections import sections

Cell = str | int | float | bool | None


def swap_markdown(report: Report, escaped: Callable[[str], str]) -> Iterator[str]:
    """The sections as lines of GitHub markdown; `escaped` makes text of any string."""
    return in_markdown(sections(report), escaped)


def swap_csv(report: Report, harmless: Callable[[str], str]) -> str:
    """One row per kernel and stage; where units were swapped alone, one row per kernel and unit.

    A missing value is an empty cell, numbers carry nine significant digits; `harmless` makes text of any string.
    """
    if any(swap.sweep for swap in report.swaps):
        rows = [_effect(swap, effect) for swap in report.swaps for effect in swap.sweep]
    else:
        rows = [_stage(swap, stage) for swap in report.swaps for stage in swap.stages]
    buffer = io.StringIO()
    writer = standard.writer(buffer, lineterminator="\n")
    writer.writerow(rows[0] if rows else [])
    writer.writerows([_written(cell, harmless) for cell in row.values()] for row in rows)
    return buffer.getvalue()


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


def _effect(swap: Swap, effect: Effect) -> dict[str, Cell]:
    return {
        "kernel": swap.kernel,
        "layer": effect.layer,
        "head": effect.head,
        "part": effect.part,
        "delta": effect.delta,
        **_bounds("delta", effect.ci95),
        "p_value": effect.p_value,
        "significant": effect.significant,
    }


def _change(name: str, change: Change | None) -> dict[str, Cell]:
    found: dict[str, Cell] = {f"{name}.{part}": getattr(change, part, None) for part in ("before", "after", "delta")}
    if name == "loss":
        found |= _bounds(f"{name}.delta", change.ci95 if change else None)
    return found


def _bounds(name: str, ci95: tuple[float, float] | None) -> dict[str, Cell]:
    low, high = ci95 or (None, None)
    return {f"{name}.low": low, f"{name}.high": high}


def _written(cell: Cell, harmless: Callable[[str], str]) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.9g}"
    return harmless(str(cell)) if isinstance(cell, str) else str(cell).lower()
