"""Sections and tables of a swap, the same in terminal, markdown and HTML; its rows of a sheet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from attnlens.records import Change, Control, Effect, KeyRank, Outcome, Plan, Report, Swap, TextChange, TextCosine
from attnlens.report.sections.section import Cell, Column, Section, Table, build_columns, build_table
from attnlens.report.sentences import swaps as words
from attnlens.report.sentences.plans import healing, plan_lines, plan_terms
from attnlens.report.sentences.reports import no_errors, population
from attnlens.report.sentences.swaps import (
    UNITS,
    figures,
    interval,
    loss_decimals,
    percent,
    ratio,
    rise_interval,
    rise_words,
)
from attnlens.wording import NO_VALUE, clean, decimals_for, format_count, format_number, group_pairs, join_items

DIVERGED = "diverged"
SHARED = ("one key", "floor")
"""Roles of the controls that do not depend on the kernel."""
MOST, FEW = 10, 3
"""Number of most harmful units, and of least harmful ones, shown for a single kernel, and for each of several."""
MOST_PREDICTORS, FEW_PREDICTORS = 8, 3
"""Number of measures shown for a single kernel, and for each of several kernels."""


def swap_sections(report: Report) -> Iterator[Section]:
    """Yield the sections of `swap-kernel` below the model and its coverage."""
    swaps, swap, plan = report.swaps, report.swaps[0], report.plan
    single = len(swaps) == 1
    kernels = [f"{clean(each.kernel)}: {words.formula(each)}" for each in swaps]
    yield Section(lines=[*kernels * single, words.reach(report), *_calibration(report)])
    effect = (words.verdict(swap), words.recovery(swap)) if single else ()
    texts = (words.greedy(swap), words.beyond(swap)) if single else ()
    help_ = [] if single and swap.diverged else [_reading_help(report)]
    lines = _sentences(*effect, *map(words.better_controls, swaps), *texts)
    yield Section("Effect" if single else "Effects", lines=lines, table=_outcome_table(swaps), notes=help_)
    yield from _by_text(swaps)
    if plan is not None:
        yield Section("Ranks", items=plan_lines(plan), table=plan_rows(plan), notes=[plan_terms(plan)])
    if not single:
        yield Section("Kernels", items=kernels)
    costs = (words.cost(swap), words.off_simplex(swap)) if single else ()
    yield Section("Checks and cost" if single else "Checks", items=_sentences(words.proof(swaps), *costs))
    if single and swap.healing is not None:
        yield Section("Healing", items=healing(swap.healing, UNITS[swap.task]))
    swept = [each for each in swaps if each.sweep]
    if swept:
        yield _sweep(swept, report)
    predicted = [each for each in swept if each.prediction is not None]
    if predicted:
        yield _prediction_section(predicted)
    for title, items in (("Notes", words.notes(swaps)), ("No value", words.without_value(swaps))):
        if items:
            yield Section(title, items=items)


def _sentences(*sentences: str) -> tuple[str, ...]:
    return tuple(filter(None, sentences))


def _calibration(report: Report) -> Iterator[str]:
    if (text := report.settings.calibration) is not None:
        where = f"other windows of {text.name}" if text == report.settings.text else text.name
        yield f"calibration text: {clean(where)}, not part of the evaluated text"


def _control_name(control: Control) -> str:
    """Name a control: `vs sink-window:4,64`."""
    return f"vs {clean(control.kernel or '')}{' (healed)' * (control.role == 'far part, healed')}"


def _outcomes(swaps: Sequence[Swap]) -> list[tuple[str, Outcome]]:
    """List (name, outcome) of each stage or, of several kernels, of each kernel, followed by its controls.

    Controls that several kernels share come last. None is shared if the report uses several windows for the loss on
    tokens beyond a window, because a control's loss beyond the window then differs between kernels.
    """
    rows: list[tuple[str, Outcome]] = []
    shared: dict[str, Outcome] = {}
    records = [control.beyond_window for swap in swaps for control in measured_controls(swap)]
    sharing = len(swaps) > 1 and len({record.window for record in records if record is not None}) < 2
    for swap in swaps:
        stages: list[tuple[str, Outcome]] = [(stage.name, stage) for stage in swap.stages]
        rows += stages if stages and len(swaps) == 1 else [(clean(swap.kernel) + " (fitted)" * bool(swap.fitted), swap)]
        for control in measured_controls(swap):
            if sharing and control.role in SHARED:
                shared.setdefault(_control_name(control), control)
            else:
                rows.append((_control_name(control), control))
    return [*rows, *shared.items()]


def _outcome_table(swaps: Sequence[Swap]) -> Table:
    """Build a table of the original, its changes and their controls; columns without any value are left out."""
    rows, swap = _outcomes(swaps), swaps[0]
    outcomes = [outcome for _, outcome in rows]
    kernels = [outcome for outcome in outcomes if not isinstance(outcome, Control)]
    losses = [outcome.loss for outcome in kernels if outcome.loss is not None]
    powers = [outcome.perplexity for outcome in kernels if outcome.perplexity is not None]
    beyond = [outcome.beyond_window for outcome in outcomes if outcome.beyond_window is not None]
    decimals, beyond_decimals = loss_decimals(losses), loss_decimals([record.change for record in beyond])
    several = len({record.window for record in beyond}) > 1

    def format_outcome(outcome: Outcome) -> dict[str, str]:
        loss, kl, record = outcome.loss, outcome.kl, outcome.beyond_window
        window = f" (> {record.window})" if several and record is not None else ""
        last = {
            "Δ beyond": NO_VALUE if record is None else format_number(record.change.delta, beyond_decimals) + window,
            "greedy": words.median_agreement(outcome.agreement) or NO_VALUE,
        }
        if isinstance(outcome, Swap):
            times = ratio(outcome.tokens_per_second)
            last["speed"] = NO_VALUE if times is None else f"× {format_number(times, 2)}"
        cosine = {"hidden cosine": format_number(outcome.hidden_cosine, 3)}
        cka = {"CKA": format_number(outcome.hidden_cka, 3)}
        if swap.judged_by == "hidden":
            return cosine | {"95 % interval": interval(outcome.hidden_cosine_ci95, 3)} | cka | last
        top = {"top-1": percent(outcome.top1_agreement, 1)}
        predictions = {"KL": figures(kl)}
        if swap.judged_by == "kl":
            bounds = interval(outcome.kl_ci95, decimals_for([kl or 0.0], 3))
            return predictions | {"95 % interval": bounds} | top | cosine | cka | last
        return (
            _loss_cells(loss, outcome.perplexity, decimals)
            | predictions
            | top
            | (cosine | cka if len(swaps) == 1 else {})
            | last
        )

    cells = [format_outcome(outcome) for outcome in outcomes]
    first = next(iter(cells[0]))
    for outcome, row in zip(outcomes, cells, strict=True):
        row |= {first: DIVERGED} if outcome.diverged else {}
    original = dict.fromkeys(cells[0], "")
    original |= {"loss": format_number(losses[0].before, decimals)} if losses else {}
    original |= {"perplexity": figures(powers[0].before)} if powers else {}
    columns = build_columns([original, *cells], missing="")
    names = Column("stage" if len(swaps) == 1 else "kernel", ["original", *(name for name, _ in rows)], words=True)
    return Table([names], [column for column in columns if set(column.cells[1:]) != {NO_VALUE}])


def _loss_cells(loss: Change | None, perplexity: Change | None, decimals: int) -> dict[str, str]:
    """Format a loss, its change, the perplexity and its rise, with intervals."""
    risen = loss if perplexity is not None else None
    return {
        "loss": format_number(getattr(loss, "after", None), decimals),
        "Δ": format_number(getattr(loss, "delta", None), decimals),
        "95 % interval": interval(getattr(loss, "ci95", None), decimals),
        "perplexity": figures(getattr(perplexity, "after", None)),
        "rise": NO_VALUE if risen is None else rise_words(risen),
        "95 % interval of rise": (rise_interval(risen) if risen else "") or NO_VALUE,
    }


def _reading_help(report: Report) -> str:
    """Explain the columns of the table of outcomes, its intervals, and its rows of controls."""
    swap, none, scope = report.swaps[0], no_errors(report), population(report, "token")
    rows = [row for each in report.swaps for row in (each, *each.stages, *measured_controls(each))]
    top = "KL(original ‖ changed); top-1: share of equal top predictions"
    states = "hidden cosine and CKA compare the last hidden states; 1: as in the original"
    rise = "rise: of the perplexity, e^Δ − 1; " * (swap.perplexity is not None)
    unit = UNITS[swap.task]
    columns = {"loss": f"loss and KL in {unit}; {rise}{top}", "kl": f"KL in {unit}; {top}; {states}", "hidden": states}
    intervals = none or f"intervals: paired bootstrap{f' ({scope})' if scope else ''}"
    greedy = "greedy: median number of generated tokens before the first difference from the original."
    return " ".join(
        _sentences(
            f"{columns[swap.judged_by]}; {intervals}.",
            words.legend(report.swaps),
            words.beyond_legend(rows),
            greedy if any(row.agreement for row in rows) else "",
        )
    )


def measured_controls(swap: Swap) -> list[Control]:
    """Return the controls that were measured, that is, those with a kernel."""
    return [control for control in swap.controls if control.kernel is not None]


def _by_text(swaps: Sequence[Swap]) -> Iterator[Section]:
    """Yield a table of the loss on each text, or of the hidden cosine if the model has no loss."""
    hidden = swaps[0].judged_by == "hidden"
    records: list[Sequence[TextChange | TextCosine]] = [
        swap.hidden_cosine_by_text if hidden else swap.loss_by_text for swap in swaps
    ]
    texts = next(filter(None, records), ())
    if not texts:
        return
    columns = [
        *build_columns([{"text": clean(text.name)} for text in texts], {"text"}),
        *build_columns([{"windows": str(text.sequences)} for text in texts]),
    ]
    for swap, changes in zip(swaps, records, strict=True):
        decimals = loss_decimals([each.change for each in changes if isinstance(each, TextChange)])
        cells = {
            each.name: _loss_cells(each.change, each.perplexity, decimals)
            if isinstance(each, TextChange)
            else {"hidden cosine": format_number(each.cosine, 3), "95 % interval": interval(each.ci95, 3)}
            for each in changes
        }
        rows = [{title: text for title, text in cells.get(each.name, {}).items() if title != "loss"} for each in texts]
        columns += build_columns(rows, group=clean(swap.kernel) if len(swaps) > 1 else "")
    what = "Cosine of the last hidden states" if hidden else "Δ of the loss and rise of the perplexity"
    note = f"{what} with a 95 % interval over that text's windows; it does not apply to other texts."
    note += " A single window has no interval." * any(each.sequences == 1 for each in texts)
    yield Section("Text by text", table=Table(columns[:2], columns[2:]), notes=(note,))


def site_sections(report: Report) -> Iterator[Section]:
    """Yield for each kernel the table of its swapped sites, and of its loss by position in the sequence."""
    for swap in report.swaps:
        of = f" of {clean(swap.kernel)}" if len(report.swaps) > 1 else ""
        error = "output error: ‖new − original‖ / ‖original‖ of the output on the original model's queries, keys, "
        "values."
        yield Section(f"Sites{of}", table=_site_table(swap), notes=(error,))
        if swap.loss_by_position:
            decimals = loss_decimals([part.change for part in swap.loss_by_position])
            rows = [
                {
                    "tokens": f"{part.first}–{part.last}",
                    "count": str(part.tokens),
                    "before": format_number(part.change.before, decimals),
                    "after": format_number(part.change.after, decimals),
                    "Δ": format_number(part.change.delta, decimals),
                    "95 % interval": interval(part.change.ci95, decimals),
                }
                for part in swap.loss_by_position
            ]
            note = f"loss in {UNITS[swap.task]} by position in the sequence, counted from 1; Δ with a paired interval."
            yield Section(f"By position{of}", table=build_table(rows), notes=(note,))


def _site_table(swap: Swap) -> Table:
    off_simplex = any(site.off_simplex for site in swap.sites)
    rows = [
        {
            "layer": str(site.layer),
            "part": site.part,
            "heads": spans(site.heads),
            "output error": figures(site.output_error),
            **({"off simplex": percent(site.off_simplex, 1)} if off_simplex else {}),
            "path": clean(site.path),
            "site": clean(site.site),
        }
        for site in swap.sites
    ]
    return build_table(rows, {"part", "path", "site"}, names=2)


def spans(numbers: Sequence[int]) -> str:
    """Format numbers with consecutive ones as a range: `0–7`, `0, 3–5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _sweep(swaps: Sequence[Swap], report: Report) -> Section:
    """Build the section on units swapped alone: the most and the least harmful of each kernel, and how many matter."""
    effects = [effect for swap in swaps for effect in swap.sweep]
    tested, several = swaps[0].judged_by == "loss", len(swaps) > 1  # a distance is never negative, so nothing is tested
    heads, parts = any(effect.head is not None for effect in effects), len({effect.part for effect in effects}) > 1
    sizes = [abs(effect.delta) for effect in effects if effect.delta]
    middle = median(sizes) if sizes else 1.0
    # two significant digits of the median size, from two to six decimals
    decimals = 6 if middle < 1e-4 else min(6, max(2, decimals_for([middle], 2)))

    def format_effect(swap: Swap, effect: Effect) -> dict[str, str]:
        p = effect.p_value
        tests = {
            "p": "<0.0001" if p is not None and p < 1e-4 else p_value(p),
            "FDR 5 %": "*" if effect.significant else "",
        }
        return {
            **({"kernel": clean(swap.kernel)} if several else {}),
            "layer": str(effect.layer),
            **({"head": "all" if effect.head is None else str(effect.head)} if heads else {}),
            **({"part": effect.part} if parts else {}),
            "Δ": DIVERGED if effect.delta is None else format_number(effect.delta, decimals),
            "95 % interval": interval(effect.ci95, decimals),
            **(tests if tested else {}),
        }

    most = FEW if several else MOST
    rows: list[dict[str, str]] = []
    for swap in swaps:
        cells = [format_effect(swap, effect) for effect in swap.sweep]
        if len(cells) > 2 * most:
            cells[most:-most] = [dict.fromkeys(cells[0], "…")]
        rows += cells
    noun, windows = "head" if heads else "layer", report.settings.windows or 0
    note = f"Δ of the {words.effect_name(swaps[0])}"
    note += (
        "; * significant at a false discovery rate of 5 %."
        if tested
        else ", a distance: never negative, and not tested."
    )
    note += f" … omits all but the {most} most and {most} least harmful." * (len(rows) < len(effects))
    kernels = [f"{clean(swap.kernel)}: " * several for swap in swaps]
    lines = [name + _significant(swap.sweep, noun, windows) for name, swap in zip(kernels, swaps, strict=True)]
    table = build_table(rows, {"kernel", "part", "FDR 5 %"}, names=1 + several + heads + parts)
    return Section(f"Each {noun} alone", lines=lines * tested, table=table, notes=[note])


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
    names = [f"{effect.layer}" if effect.head is None else f"{effect.layer}.{effect.head}" for effect in effects]
    diverged = [name for name, effect in zip(names, effects, strict=True) if effect.delta is None]
    return f"{verdict}.{f' Diverged: {noun} {join_items(diverged, 8)}.' if diverged else ''}"


def _prediction_section(swaps: Sequence[Swap]) -> Section:
    """Build the section on what predicts the harm of each kernel, with a table of the strongest measures."""
    several = len(swaps) > 1
    rows = []
    for swap in swaps:
        strongest = sorted(swap.predictors, key=lambda each: -abs(each.rho))
        for each in strongest[: FEW_PREDICTORS if several else MOST_PREDICTORS]:
            row = {
                **({"kernel": clean(swap.kernel)} if several else {}),
                "measure": clean(each.measure),
                "ρ": format_number(each.rho, 2),
                "over heads": interval(each.heads_ci95, 2),
                "over layers": interval(each.layers_ci95, 2),
                "over windows": interval(each.sequences_ci95, 2),
                "p": p_value(each.p_corrected),
                "holds": "*" if each.holds else "",
                "heads": str(each.heads),
            }
            rows.append(row)
    table = build_table(rows, {"kernel", "measure", "holds"}, names=1 + several) if rows else None
    unmeasured = [clean(swap.kernel) for swap in swaps if not swap.predictors]
    none = (
        [f"{join_items(unmeasured, 8)}: no measure differs between heads, or the harm has no value."]
        if unmeasured
        else []
    )
    notes = [_prediction_help(swaps)]
    first = swaps[0].prediction
    if first and first.left_out:
        by_reason = group_pairs((reason, clean(name)) for name, reason in first.left_out.items())
        groups = (f"{join_items(names, 8)} ({clean(reason)})" for reason, names in by_reason.items())
        notes.append(f"Not compared: {'; '.join(groups)}.")
    return Section("What predicts harm", lines=none, table=table, notes=notes)


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


def p_value(number: float | None) -> str:
    """Format a p-value with two significant digits, or `–` for None."""
    return NO_VALUE if number is None else f"{number:.2g}"


def plan_rows(plan: Plan) -> Table:
    """Build a table with one row per layer: its mean rank per head, and the rank of each key head or latent."""
    shared = any(key.kv_heads for key in plan.ranks)
    title = "numbers kept" if shared else "rank by key head"
    rows = []
    for keys in group_pairs((key.layer, key) for key in plan.ranks).values():
        mean = sum(key.rank / key.keys * len(key.heads) for key in keys) / sum(len(key.heads) for key in keys)
        ranks = numbers_kept(keys) if shared else " ".join(str(key.rank) for key in keys)
        size = str(keys[0].head_dim // keys[0].keys)
        rows.append({"layer": str(keys[0].layer), "mean rank": f"{mean:.1f}", "of": size, title: ranks})
    return build_table(rows, {title})


def numbers_kept(keys: Sequence[KeyRank]) -> str:
    """Format the rank of each latent and the size of its keys: `40 of 128`, `20 18 of 32 each`, `20 of 48, 9 of 32`."""
    totals = {key.head_dim for key in keys}
    if len(totals) > 1:
        return ", ".join(f"{key.rank} of {key.head_dim}" for key in keys)
    each = " each" * (len(keys) > 1)
    return f"{' '.join(str(key.rank) for key in keys)} of {totals.pop()}{each}"


def swap_rows(swaps: list[Swap]) -> list[dict[str, Cell]]:
    """Build one row per kernel and stage or control; if units were swapped alone, one row per kernel and unit."""
    if any(swap.sweep for swap in swaps):
        return [_effect(swap, effect, place) for swap in swaps for place, effect in enumerate(swap.sweep)]
    rows = []
    for swap in swaps:
        rows += [_outcome(swap, stage.name, "", swap.state, stage) for stage in swap.stages]
        rows += [
            _outcome(swap, "", control.kernel or control.role, control.state, control) for control in swap.controls
        ]
    return rows


def _outcome(swap: Swap, stage: str, control: str, state: float | None, outcome: Outcome) -> dict[str, Cell]:
    """Build the row of a stage or control of a kernel; a control has no speed, memory or off-simplex share."""
    costs: dict[str, Cell] = {"off_simplex": None if control else swap.off_simplex}
    for name in ("tokens_per_second", "peak_memory_bytes"):
        pair = getattr(swap, name)
        costs |= {f"{name}.{when}": None if control else getattr(pair, when) for when in ("before", "after")}
    beyond, agreement = outcome.beyond_window, outcome.agreement
    return {
        **{"kernel": swap.kernel, "stage": stage, "control": control, "state": state},
        **_change_cells("loss", outcome.loss),
        **_change_cells("perplexity", outcome.perplexity),
        "kl": outcome.kl,
        **_bounds("kl", outcome.kl_ci95),
        "top1_agreement": outcome.top1_agreement,
        "hidden_cosine": outcome.hidden_cosine,
        **_bounds("hidden_cosine", outcome.hidden_cosine_ci95),
        "hidden_cka": outcome.hidden_cka,
        **_change_cells("beyond_window", beyond.change if beyond else None),
        "beyond_window.tokens": beyond.tokens if beyond else None,
        "greedy.median": agreement.median if agreement else None,
        "greedy.tokens": agreement.tokens if agreement else None,
        **costs,
    }


def _effect(swap: Swap, effect: Effect, place: int) -> dict[str, Cell]:
    """Build the row of a unit swapped alone: its effect, and its value of each measure if predictors were read."""
    where = {name: getattr(effect, name) for name in ("layer", "head", "part", "delta")}
    tests = {name: getattr(effect, name) for name in ("p_value", "significant")}
    values = {
        predictor.measure: predictor.values[place]
        for predictor in sorted(swap.predictors, key=lambda predictor: predictor.measure)
    }
    return {"kernel": swap.kernel, **where, **_bounds("delta", effect.ci95), **tests, **values}


def _change_cells(name: str, change: Change | None) -> dict[str, Cell]:
    cells: dict[str, Cell] = {f"{name}.{part}": getattr(change, part, None) for part in ("before", "after", "delta")}
    return cells | _bounds(f"{name}.delta", change.ci95 if change else None)


def _bounds(name: str, ci95: tuple[float, float] | None) -> dict[str, Cell]:
    low, high = ci95 or (None, None)
    return {f"{name}.low": low, f"{name}.high": high}
