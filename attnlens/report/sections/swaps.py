"""Sections of a swap, the same in terminal, markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnlens.records import Effect, Predictor, Report, Swap
from attnlens.report.sections.section import Column, Section, Table
from attnlens.report.sections.swap_tables import (
    BESIDE,
    MARK,
    cosine_rows,
    has_tests,
    kernel_rows,
    measured_controls,
    place,
    place_rows,
    plan_rows,
    site_rows,
    stage_rows,
    sweep_rows,
    sweeps_rows,
    text_rows,
)
from attnlens.report.sentences import swaps as words
from attnlens.report.sentences.plans import healing, plan_lines, plan_terms
from attnlens.report.sentences.reports import no_errors, population
from attnlens.report.sentences.swaps import UNITS, effect_name, interval
from attnlens.wording import NO_VALUE, clean, format_count, format_number, group_pairs, join_items


def _prediction_sentence(swap: Swap) -> str:
    """State which measure predicts the harm of a kernel, or that none does."""
    prediction = swap.prediction
    if prediction is None or not swap.predictors:
        return f"{clean(swap.kernel)}: no measure can be set against the harm: none differs, or the harm has no value."
    holding = [predictor for predictor in swap.predictors if predictor.holds]
    first = max(holding or swap.predictors, key=lambda predictor: abs(predictor.rho))
    scope = f"{format_count(prediction.measures, 'measure')} over {format_count(first.heads, 'head')}"
    if holding:
        others = f"; so do {len(holding) - 1} more" if len(holding) > 1 else ""
        return f"{clean(swap.kernel)}: of {scope}, {_strength(first)} goes with the harm{others}."
    return f"{clean(swap.kernel)}: of {scope}, none holds over heads and layers; the strongest is {_strength(first)}."


def _strength(predictor: Predictor) -> str:
    """Format a measure's correlation: `tokens.entropy (ρ −0.84, over layers −0.92 to 0.08, p 0.0001)`."""
    layers = "" if predictor.layers_ci95 is None else f", over layers {interval(predictor.layers_ci95, 2)}"
    return (
        f"{clean(predictor.measure)} (ρ {format_number(predictor.rho, 2)}{layers}, p {p_value(predictor.p_corrected)})"
    )


def _prediction_help(swaps: Sequence[Swap]) -> str:
    """Explain the table of predictors and its limits."""
    text = (
        "ρ: Spearman's, over heads, of a measure of the original model on the same windows with Δ. 95 % intervals: "
        "bootstrap of heads, of whole layers, and of windows (or texts). p: permutations of heads, corrected for all "
        "measures (maxT). *: p < 0.05, and the interval over layers lies on one side of 0. A correlation is no cause"
    )
    predictions = [swap.prediction for swap in swaps if swap.prediction is not None]
    ceilings = [format_number(prediction.ceiling, 2) for prediction in predictions if prediction.ceiling is not None]
    if ceilings:
        least = " and ".join(dict.fromkeys(ceilings))
        text += f"; of a measure that told the harm but for the windows' noise, ρ ≈ {least} is expected (split halves)"
    diverged = sum(prediction.diverged for prediction in predictions)
    return text + (f"; {format_count(diverged, 'diverged head')} left out." if diverged else ".")


def p_value(number: float | None) -> str:
    """Format a p-value with two significant digits, or `–` for None."""
    return NO_VALUE if number is None else f"{number:.2g}"


MOST_PREDICTORS, FEW_PREDICTORS = 8, 3
"""Number of measures shown for a single kernel, and for each of several kernels."""


def _prediction_section(swaps: Sequence[Swap]) -> Section:
    """Build the section on what predicts the harm of each kernel, with a table of the strongest measures."""
    lines = [_prediction_sentence(swap) for swap in swaps]
    most = MOST_PREDICTORS if len(swaps) == 1 else FEW_PREDICTORS
    rows: list[tuple[Swap, Predictor]] = []
    for swap in swaps:
        rows += [(swap, each) for each in sorted(swap.predictors, key=lambda each: -abs(each.rho))[:most]]
    notes = [_prediction_help(swaps)]
    first = swaps[0].prediction
    if first and first.left_out:
        by_reason = group_pairs((reason, clean(name)) for name, reason in first.left_out.items())
        groups = (f"{join_items(names, 8)} ({clean(reason)})" for reason, names in by_reason.items())
        notes.append(f"Not compared: {'; '.join(groups)}.")
    table = _predictor_table(rows, named=len(swaps) > 1) if rows else None
    return Section("What predicts harm", lines=lines, table=table, notes=notes)


def _predictor_table(rows: Sequence[tuple[Swap, Predictor]], *, named: bool) -> Table:
    """Build a table with one row per measure; `named` adds a column of kernels."""
    predictors = [predictor for _, predictor in rows]
    names = [Column("measure", [clean(predictor.measure) for predictor in predictors], words=True)]
    if named:
        names.insert(0, Column("kernel", [clean(swap.kernel) for swap, _ in rows], words=True))
    columns = [
        Column("ρ", [format_number(predictor.rho, 2) for predictor in predictors]),
        Column("over heads", [interval(predictor.heads_ci95, 2) for predictor in predictors]),
        Column("over layers", [interval(predictor.layers_ci95, 2) for predictor in predictors]),
        Column("over windows", [interval(predictor.sequences_ci95, 2) for predictor in predictors]),
        Column("p", [p_value(predictor.p_corrected) for predictor in predictors]),
        Column("holds", ["*" if predictor.holds else "" for predictor in predictors], words=True),
    ]
    if len({predictor.heads for predictor in predictors}) > 1:
        columns.append(Column("heads", [str(predictor.heads) for predictor in predictors]))
    return Table(names, columns)


MOST = 10
"""Number of most harmful units, and of least harmful units, shown for a single kernel."""


def swap_sections(report: Report) -> Iterator[Section]:
    """Yield the sections of `swap-kernel` below the model and its coverage."""
    yield from _several_swaps(report) if len(report.swaps) > 1 else _single_swap(report, report.swaps[0])
    swept = [swap for swap in report.swaps if swap.sweep]
    if swept:
        yield _sweep(swept, report)
    predicted = [swap for swap in swept if swap.prediction is not None]
    if predicted:
        yield _prediction_section(predicted)
    for title, lines in (("Notes", words.notes(report.swaps)), ("No value", words.without_value(report.swaps))):
        if lines:
            yield Section(title, items=lines)


def site_sections(report: Report) -> Iterator[Section]:
    """Yield for each kernel the table of its swapped sites, and of its loss by position in the sequence."""
    for swap in report.swaps:
        of = f" of {clean(swap.kernel)}" if len(report.swaps) > 1 else ""
        notes = (
            "output error: ‖new − own‖ / ‖own‖ of the site's output on the original model's queries, keys and values.",
        )
        yield Section(f"Sites{of}", table=site_rows(swap), notes=notes)
        if swap.loss_by_position:
            notes = (f"loss in {UNITS[swap.task]} by place in the sequence, counted from 1; Δ with a paired interval.",)
            yield Section(f"By place{of}", table=place_rows(swap), notes=notes)


def _single_swap(report: Report, swap: Swap) -> Iterator[Section]:
    unit = UNITS[swap.task]
    yield Section(lines=_sentences(words.kernel(swap), words.reach(report), _calibration(report)))
    help_ = () if swap.diverged else (_reading_help(swap, report),)
    lines = _sentences(words.verdict(swap), words.stages_sentence(swap), words.control_costs(swap), words.greedy(swap))
    lines += _sentences(words.beyond(swap), words.worst_text(swap) or words.one_text(swap, report.settings.texts))
    yield Section("What it does", lines=lines, table=stage_rows(swap), notes=help_)
    yield from _by_text([swap])
    if report.plan is not None:
        plan = report.plan
        yield Section("Ranks", items=tuple(plan_lines(plan)), table=plan_rows(plan), notes=(plan_terms(plan),))
    more = (words.proof([swap]), words.cost(swap), words.off_simplex(swap))
    yield Section("Checks and cost", items=_sentences(*more))
    if swap.healing is not None:
        yield Section("Healing", items=tuple(healing(swap.healing, unit)))


def _several_swaps(report: Report) -> Iterator[Section]:
    first = report.swaps[0]
    yield Section(lines=_sentences(words.reach(report), _calibration(report)))
    lines = _sentences(words.ranking(report.swaps) or words.verdict(first), *map(words.beside_size, report.swaps))
    lines += _sentences(
        *(f"{clean(swap.kernel)}: {words.worst_text(swap)}" for swap in report.swaps if swap.loss_by_text)
    )
    lines += _sentences("" if first.loss_by_text else words.one_text(first, report.settings.texts))
    table, notes = kernel_rows(report.swaps), (_reading_help(first, report),)
    yield Section("What they do", lines=lines, table=table, notes=notes)
    yield from _by_text(report.swaps)
    yield Section("Kernels", items=tuple(map(words.kernel, report.swaps)))
    yield Section("Checks", items=(words.proof(report.swaps),))


def _sentences(*sentences: str) -> tuple[str, ...]:
    return tuple(filter(None, sentences))


def _by_text(swaps: Sequence[Swap]) -> Iterator[Section]:
    """Yield a table of the loss on each text, or of the hidden cosine if there is no loss."""
    counts = [text.sequences for swap in swaps for text in swap.loss_by_text or swap.hidden_cosine_by_text]
    help_ = "{} with a 95 % interval over that text's windows; one text is not another."
    help_ += " One window has no spread: no interval." * (1 in counts)
    if any(swap.loss_by_text for swap in swaps):
        yield Section(
            "Text by text", table=text_rows(swaps), notes=(help_.format("Δ of the loss and rise of the perplexity"),)
        )
    elif swaps[0].judged_by == "hidden" and any(swap.hidden_cosine_by_text for swap in swaps):
        notes = (help_.format("Cosine of the last hidden states"),)
        yield Section("Text by text", table=cosine_rows(swaps), notes=notes)


def _calibration(report: Report) -> str:
    text = report.settings.calibration
    if text is None:
        return ""
    same = text == report.settings.text
    where = f"other windows of {text.name}" if same else text.name
    return f"calibration text: {clean(where)}, no part of what was evaluated"


def _reading_help(swap: Swap, report: Report) -> str:
    scope, none = population(report, "token"), no_errors(report)
    ends = f"; {none}" if none else " with a bootstrap interval" + (f" ({scope})" if scope else "")
    states = "CKA compares the last hidden states too; 1 is the original's own"
    if swap.judged_by == "hidden":
        return f"hidden cosine{ends}; {states}.{_beside_help(report.swaps)}"
    unit, top = UNITS[swap.task], "top-1: share of the same first choice"
    if swap.judged_by == "kl":
        states = "hidden cosine and CKA compare the last hidden states; 1 is the original's own."
        return f"KL(original ‖ changed) in {unit}{ends}; {top}; {states}{_beside_help(report.swaps)}"
    delta = none or f"Δ{ends.replace('a boot', 'a paired boot')}"
    more = "; rise: of the perplexity, e^Δ − 1" * (swap.perplexity is not None)
    return f"loss and KL in {unit}; {delta}{more}; KL(original ‖ changed); {top}.{_beside_help(report.swaps)}"


def _beside_help(swaps: Sequence[Swap]) -> str:
    """Explain the rows of controls, the column of the loss beyond a window, and that of greedy agreement."""
    rows = [row for swap in swaps for row in (swap, *swap.stages, *measured_controls(swap))]
    controls, beyond = words.legend(swaps), words.beyond_legend(rows)
    text = f" {BESIDE}: {controls}" if controls else ""
    text += f" {beyond}" if beyond else ""
    if any(row.agreement for row in rows):
        text += " greedy: tokens that generated texts have in common with the original's, median."
    return text


def _sweep(swaps: list[Swap], report: Report) -> Section:
    """Build the section on units swapped alone: the most and least harmful of one kernel, or one row per kernel."""
    first = swaps[0]
    noun = "head" if any(effect.head is not None for effect in first.sweep) else "layer"
    title, note = f"Each {noun} alone", f"Δ of the {effect_name(first)}"
    note += "" if has_tests(first) else ", a distance: it is never negative, and nothing is tested."
    if len(swaps) > 1:
        note += "; FDR 5 %: how many matter at a false discovery rate of 5 %." if has_tests(first) else ""
        return Section(title, table=sweeps_rows(swaps), notes=(note,))
    note += f"; {MARK} significant at a false discovery rate of 5 %." if has_tests(first) else ""
    note += f" Shown are the {MOST} most and the {MOST} least harmful." if len(first.sweep) > 2 * MOST else ""
    lines = (_significant(first.sweep, noun, report.settings.windows or 0),) if has_tests(first) else ()
    return Section(title, lines=lines, table=sweep_rows(first, MOST), notes=(note,))


def _significant(effects: list[Effect], noun: str, windows: int) -> str:
    """State how many units have a significant effect and in which direction, and which diverge."""
    if all(effect.ci95 is None for effect in effects if effect.delta is not None):
        return "One window has no spread: nothing is tested."
    significant = [effect for effect in effects if effect.significant and effect.delta is not None]
    verdict = f"no {noun} could be shown to matter with {format_count(windows, 'window')} (false discovery rate 5 %)"
    if significant:
        harm = sum(effect.delta > 0 for effect in significant if effect.delta)
        verb = "matters" if len(significant) == 1 else "matter"
        verdict = f"{len(significant)} of {format_count(len(effects), noun)} {verb} at a false discovery rate of 5 %"
        verdict += f": {harm} harm, {len(significant) - harm} help"
    diverged = [place(effect) for effect in effects if effect.delta is None]
    return f"{verdict}.{f' Diverged: {join_items(diverged, 8)}.' if diverged else ''}"
