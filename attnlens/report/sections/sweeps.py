"""Heads or layers swapped alone: the harm of each, and the measures that predict it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from attnlens.records import Effect, Swap
from attnlens.report.sections.section import Section, View, build_table, section
from attnlens.report.sections.swaps import DIVERGED, effect_name, interval
from attnlens.report.shapes import Shapes
from attnlens.wording import NO_VALUE, clean, decimals_for, format_count, format_number, group_pairs, join_items

MOST, FEW = 10, 3
"""Number of most harmful units, and of least harmful ones, shown for a single kernel, and for each of several."""
MOST_PREDICTORS, FEW_PREDICTORS = 8, 3  # Number of measures shown for a single kernel, and for each of several kernels


@section(44, "swap")
def sweep_section(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield the section on units swapped alone: the most and the least harmful of each kernel, and how many matter."""
    swaps = [swap for swap in shapes.report.swaps if swap.sweep]
    effects = [effect for swap in swaps for effect in swap.sweep]
    if not effects:
        return
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
                "layer": str(effect.layer),
                "head": ("all" if effect.head is None else str(effect.head)) if heads else None,
                "part": effect.part if parts else None,
                "Δ": DIVERGED if effect.delta is None else format_number(effect.delta, decimals),
                "95 % interval": interval(effect.ci95, decimals),
                "p": _format_p(effect.p_value) if tested else None,
                "FDR 5 %": "*" * effect.significant if tested else None,
            }
            for effect in swap.sweep
        ]
        if len(cells) > 2 * most:
            cells[most:-most] = [{title: None if cell is None else "…" for title, cell in cells[0].items()}]
        rows += cells
    noun, windows = "head" if heads else "layer", shapes.report.settings.windows or 0
    untested = ", a distance: never negative, and not tested."
    test = "; * significant at a false discovery rate of 5 %." if tested else untested
    note = f"Δ of the {effect_name(swaps[0])}{test}"
    note += f" … omits all but the {most} most and {most} least harmful." * (len(rows) < len(effects))
    kernels = [f"{clean(swap.kernel)}: " * several for swap in swaps]
    lines = [name + _significant(swap.sweep, noun, windows) for name, swap in zip(kernels, swaps, strict=True)]
    table = build_table(rows, {"kernel", "layer", "head", "part"}, {"kernel", "part", "FDR 5 %"})
    yield Section(f"Each {noun} alone", lines=lines * tested, table=table, notes=[note])


def _significant(effects: Sequence[Effect], noun: str, windows: int) -> str:
    """State how many units have a significant effect and in which direction, and which diverge."""
    if all(effect.ci95 is None for effect in effects if effect.delta is not None):
        return "With a single window nothing is tested."
    significant = [effect.delta for effect in effects if effect.significant and effect.delta is not None]
    verdict = f"no {noun} has a significant effect on {format_count(windows, 'window')} (false discovery rate 5 %)"
    if significant:
        harm = sum(delta > 0 for delta in significant)
        verb = "has a significant effect" if len(significant) == 1 else "have significant effects"
        verdict = f"{len(significant)} of {format_count(len(effects), noun)} {verb} (false discovery rate 5 %)"
        verdict += f": {harm} raise the loss, {len(significant) - harm} lower it"
    diverged = [
        f"{effect.layer}" if effect.head is None else f"{effect.layer}.{effect.head}"
        for effect in effects
        if effect.delta is None
    ]
    return f"{verdict}.{f' Diverged: {noun} {join_items(diverged, 8)}.' if diverged else ''}"


def _format_p(number: float | None) -> str:
    """Format a p-value with two significant digits, or `–` for None."""
    return NO_VALUE if number is None else "<0.0001" if number < 1e-4 else f"{number:.2g}"


@section(46, "swap")
def prediction_section(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield the section on what predicts the harm of each kernel, with a table of the strongest measures."""
    swaps = [swap for swap in shapes.report.swaps if swap.sweep and swap.prediction is not None]
    if not swaps:
        return
    several = len(swaps) > 1
    rows = [
        {
            "kernel": clean(swap.kernel) if several else None,
            "measure": clean(each.measure),
            "ρ": format_number(each.rho, 2),
            "over heads": interval(each.heads_ci95, 2),
            "over layers": interval(each.layers_ci95, 2),
            "over windows": interval(each.sequences_ci95, 2),
            "p": _format_p(each.p_corrected),
            "holds": "*" * each.holds,
            "heads": str(each.heads),
        }
        for swap in swaps
        for each in sorted(swap.predictors, key=lambda each: -abs(each.rho))[
            : FEW_PREDICTORS if several else MOST_PREDICTORS
        ]
    ]
    table = build_table(rows, {"kernel", "measure"}, {"kernel", "measure", "holds"}) if rows else None
    without = [clean(swap.kernel) for swap in swaps if not swap.predictors]
    lines = (
        [f"{join_items(without, 8)}: no measure differs between heads, or the harm has no value."] if without else []
    )
    notes = [_prediction_help(swaps)]
    first = swaps[0].prediction
    if first and first.left_out:
        by_reason = group_pairs((reason, clean(name)) for name, reason in first.left_out.items())
        groups = (f"{join_items(names, 8)} ({clean(reason)})" for reason, names in by_reason.items())
        notes.append(f"Not compared: {'; '.join(groups)}.")
    yield Section("What predicts harm", lines=lines, table=table, notes=notes)


def _prediction_help(swaps: Sequence[Swap]) -> str:
    """Explain the table of predictors and its limits."""
    predictions = [swap.prediction for swap in swaps if swap.prediction is not None]
    measures = " or ".join(dict.fromkeys(str(prediction.measures) for prediction in predictions))
    text = (
        "ρ: Spearman correlation over heads between Δ and a measure of the original model on the same windows. 95 % "
        "intervals: bootstrap of heads, of whole layers, and of windows (or texts). p: permutations of heads, "
        f"corrected for all {measures} measures (maxT). *: p < 0.05, and the interval over layers lies on one side of "
        "0. Correlation is not causation"
    )
    ceilings = [format_number(prediction.ceiling, 2) for prediction in predictions if prediction.ceiling is not None]
    if ceilings:
        least = " and ".join(dict.fromkeys(ceilings))
        text += f"; noise in the windows limits a perfect measure to ρ ≈ {least} (split halves)"
    diverged = sum(prediction.diverged for prediction in predictions)
    return text + (f"; {format_count(diverged, 'diverged head')} left out." if diverged else ".")
