"""The sections of a swap, the same in terminal, markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnlens.records import Effect, Report, Swap
from attnlens.tables.population import no_errors, population
from attnlens.tables.sections import Section
from attnlens.tables.swaps import facts
from attnlens.tables.swaps.judged import UNITS, effect_name
from attnlens.tables.swaps.plans import explained, plan_lines, plan_rows
from attnlens.tables.swaps.rows import (
    MARK,
    cosine_rows,
    kernel_rows,
    place,
    site_rows,
    stage_rows,
    sweep_rows,
    sweeps_rows,
    tested,
    text_rows,
)
from attnlens.wording import clean, counted, listed

MOST = 10
"""Most and least harmful units that are shown of one kernel."""


def sections(report: Report) -> Iterator[Section]:
    """All that a summary of `swap-kernel` says below the model and its coverage."""
    if report.swap is None:
        return
    yield from _several(report) if report.more_swaps else _one(report, report.swap)
    swept = [swap for swap in report.swaps if swap.sweep]
    if swept:
        yield _sweeps(swept) if len(swept) > 1 else _sweep(swept[0], report)
    for title, lines in (
        ("Notes", facts.notes(report.swaps)),
        ("No value", facts.without_value(report.swaps)),
    ):
        if lines:
            yield Section(title, tuple(lines), items=True)


def site_sections(report: Report) -> Iterator[Section]:
    """Every exchanged site of every kernel."""
    for swap in report.swaps:
        of = f" of {clean(swap.kernel)}" if report.more_swaps else ""
        below = (
            "output error: ‖new − own‖ / ‖own‖ of the site's output on the original model's queries, keys and values."
        )
        yield Section(f"Sites{of}", rows=site_rows(swap), below=(below,))


def _one(report: Report, swap: Swap) -> Iterator[Section]:
    unit = UNITS[swap.task]
    known = (facts.kernel(swap), facts.reach(report), _calibration(report))
    yield Section("", tuple(line for line in known if line))
    sentences = (facts.verdict(swap), facts.stages_sentence(swap))
    help_ = () if facts.diverged(swap) else (_reading_help(swap, report),)
    yield Section("What it does", tuple(line for line in sentences if line), stage_rows(swap), help_)
    yield from _by_text([swap])
    if report.plan is not None:
        plan = report.plan
        yield Section("Ranks", tuple(plan_lines(plan)), plan_rows(plan), (explained(plan),), items=True)
    more = (facts.proof([swap]), facts.cost(swap), facts.off_simplex(swap), facts.site_errors(swap))
    yield Section("Checks and cost", tuple(line for line in more if line), items=True)
    if swap.healing is not None:
        yield Section("Healing", tuple(facts.healing(swap.healing, unit)), items=True)


def _several(report: Report) -> Iterator[Section]:
    first = report.swaps[0]
    yield Section("", (facts.reach(report), *filter(None, [_calibration(report)])))
    lines = filter(None, [facts.ranking(report.swaps) or facts.verdict(first)])
    yield Section("What they do", tuple(lines), kernel_rows(report.swaps), (_reading_help(first, report),))
    yield from _by_text(report.swaps)
    yield Section("Kernels", tuple(map(facts.kernel, report.swaps)), items=True)
    yield Section("Checks", (facts.proof(report.swaps),), items=True)


def _by_text(swaps: Sequence[Swap]) -> Iterator[Section]:
    """The loss on each text alone, or the hidden cosine where there is no loss."""
    counts = [text.sequences for swap in swaps for text in swap.loss_by_text or swap.hidden_cosine_by_text]
    help_ = "{} with a 95 % interval over that text's windows; one text is not another."
    help_ += " One window has no spread: no interval." * (1 in counts)
    if any(swap.loss_by_text for swap in swaps):
        yield Section("Text by text", (), text_rows(swaps), (help_.format("Δ of the loss"),))
    elif swaps[0].judged_by == "hidden" and any(swap.hidden_cosine_by_text for swap in swaps):
        yield Section("Text by text", (), cosine_rows(swaps), (help_.format("Cosine of the last hidden states"),))


def _calibration(report: Report) -> str:
    text = report.settings.calibration
    if text is None:
        return ""
    same = text == report.settings.text
    where = f"other windows of {text.name}" if same else text.name
    return f"calibration text: {clean(where)}, no part of what was evaluated"


def _reading_help(swap: Swap, report: Report) -> str:
    about, none = population(report), no_errors(report)
    ends = f"; {none}" if none else " with a bootstrap interval" + (f" ({about})" if about else "")
    states = "CKA compares the last hidden states too; 1 is the original's own"
    if swap.judged_by == "hidden":
        return f"hidden cosine{ends}; {states}."
    unit, top = UNITS[swap.task], "top-1: share of the same first choice"
    if swap.judged_by == "kl":
        states = "hidden cosine and CKA compare the last hidden states; 1 is the original's own."
        return f"KL(original ‖ changed) in {unit}{ends}; {top}; {states}"
    delta = none or f"Δ{ends.replace('a boot', 'a paired boot')}"
    return f"loss and KL in {unit}; {delta}; KL(original ‖ changed); {top}."


def _sweep(swap: Swap, report: Report) -> Section:
    effects, noun = swap.sweep, _noun(swap)
    cut = f" Shown are the {MOST} most and the {MOST} least harmful." if len(effects) > 2 * MOST else ""
    if not tested(swap):
        below = f"{_effect_help(swap)}{cut}"
        return Section(f"Each {noun} alone", (), sweep_rows(swap, MOST), (below,))
    below = f"{_effect_help(swap)}; {MARK} significant at a false discovery rate of 5 %.{cut}"
    said = _significant(effects, noun, report.settings.sequences or 0)
    return Section(f"Each {noun} alone", (said,), sweep_rows(swap, MOST), (below,))


def _sweeps(swaps: list[Swap]) -> Section:
    below = _effect_help(swaps[0])
    below += "; FDR 5 %: how many matter at a false discovery rate of 5 %." if tested(swaps[0]) else ""
    return Section(f"Each {_noun(swaps[0])} alone", (), sweeps_rows(swaps), (below,))


def _noun(swap: Swap) -> str:
    return "head" if any(effect.head is not None for effect in swap.sweep) else "layer"


def _effect_help(swap: Swap) -> str:
    untested = "" if tested(swap) else ", a distance: it is never negative, and nothing is tested."
    return f"Δ of the {effect_name(swap)}{untested}"


def _significant(effects: list[Effect], noun: str, windows: int) -> str:
    """How many matter, in which direction; which diverge. That none could be shown to matter does not say none does."""
    if all(effect.ci95 is None for effect in effects if effect.delta is not None):
        return "One window has no spread: nothing is tested."
    found = [effect for effect in effects if effect.significant and effect.delta is not None]
    harm = sum(effect.delta > 0 for effect in found if effect.delta is not None)
    help_ = len(found) - harm
    verb = "matters" if len(found) == 1 else "matter"
    none = f"no {noun} could be shown to matter with {counted(windows, 'window')} (false discovery rate 5 %)"
    verdict = (
        none if not found else f"{len(found)} of {counted(len(effects), noun)} {verb} at a false discovery rate of 5 %"
    )
    split = f": {harm} harm, {help_} help" if found else ""
    lost = [place(effect) for effect in effects if effect.delta is None]
    return f"{verdict}{split}.{f' Diverged: {listed(lost, 8)}.' if lost else ''}"
