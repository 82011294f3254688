"""Sections and rows on swaps: effects on the model, controls, checks, cost and missing values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from attnlens.records import Change, Control, Effect, Outcome, Pair, Report, Swap, TextChange, TextCosine
from attnlens.report.sections.facts import no_errors, population
from attnlens.report.sections.section import Cell, Column, Section, Table, View, build_columns, build_table, section
from attnlens.report.shapes import Shapes
from attnlens.wording import NO_VALUE, clean, decimals_for, format_count, format_number, group_pairs, join_items

DIVERGED, DESTROYED = "diverged", "destroyed"
LARGE = 11.0  # Ratio of perplexities from which a rise is shown as a factor instead of a percentage
SCREEN_COLUMNS = 5  # Number of columns of the outcome table that the screen shows
SHARED = ("one key", "floor")  # Roles of the controls that do not depend on the kernel
UNITS = {  # Task → unit of loss and KL
    "causal": "nats per token",
    "masked": "nats per masked token",
    "seq2seq": "nats per token",
    "classification": "nats per prediction",
    "hidden": "nats",
}
EFFECTS = {"loss": "loss", "kl": "KL to the original", "hidden": "1 − cosine of hidden states"}
"""`judged_by` of a swap → short name of the quantity by which it is judged, for axes."""
CONTROLS = {  # Role of a control → explanation
    "same size": "a sink-window with a state of equal size (64 tokens and the first 4 if the kernel keeps all)",
    "one key": "one key (hard)",
    "floor": "equal weights (uniform)",
    "filter alone": "the filter alone and the kernel alone, or a hybrid's window alone and far part alone",
    "far part, healed": "the hybrid's far part alone after healing",
}
WORDS = {  # Field of a Swap → its name in words, if different
    "kl": "KL",
    "loss.ci95": "interval of the loss",
    "perplexity.ci95": "interval of the perplexity",
    "kl_ci95": "interval of KL",
    "hidden_cosine_ci95": "interval of the hidden cosine",
    "top1_agreement": "top-1",
    "hidden_cka": "CKA",
    "off_simplex": "off-simplex share",
    "beyond_window": "loss beyond a window",
    "agreement": "greedy agreement",
}
PARAMETERS = {  # Fitted parameter → its name in words, if different
    "near_log_weight": "γ",
    "query_weight": "map of queries",
    "key_weight": "map of keys",
    "centre": "mean ū",
    "factor": "form N",
    "signs": "form N",
    "gate": "gates",
}


def format_figures(number: float | None) -> str:
    """Format a number with three significant digits, or `–` for None."""
    return NO_VALUE if number is None else format_number(number, decimals_for([number]))


def percent(share: float | None) -> str:
    """Format a share as a percentage, `27.6 %`, or `–` for None."""
    return NO_VALUE if share is None else f"{format_number(100 * share, 1)} %"


def loss_decimals(changes: Sequence[Change]) -> int:
    """Choose two to four decimals for losses and their changes, from the median half-width of the intervals."""
    halves = [(change.ci95[1] - change.ci95[0]) / 2 for change in changes if change.ci95 is not None]
    middle = median([half for half in halves if half > 0] or [0.02])
    return min(4, max(2, decimals_for([middle], 2)))


def interval(bounds: tuple[float, float] | None, decimals: int) -> str:
    """Format an interval, `0.49 to 0.65`, or `–` for None."""
    return " to ".join(format_number(end, decimals) for end in bounds or ()) or NO_VALUE


def format_rise(loss: Change | None, perplexity: Change | None, *, destroyed: bool = False) -> tuple[str, str]:
    """Format the rise in perplexity, e^Δ − 1 for a rise Δ of the loss, and its interval: `+5.6 %`, `4.9 to 6.4 %`.

    Both are factors (`× 12`) if the perplexity grows by a factor of LARGE or more. Return (DESTROYED, "") if the model
    is destroyed, and (`–`, "") without a loss or perplexity.
    """
    if destroyed:
        return DESTROYED, ""
    if loss is None or perplexity is None:
        return NO_VALUE, ""
    factors = [math.exp(min(delta, 700.0)) for delta in (loss.delta, *(loss.ci95 or ()))]  # a double ends at e^709
    if factors[0] >= LARGE:
        factor, *limits = (format_number(each, decimals_for([each], 2)) for each in factors)
        return f"× {factor}", f"× {' to '.join(limits)}" * bool(limits)
    rise, *ends = (100 * math.expm1(min(delta, 700.0)) for delta in (loss.delta, *(loss.ci95 or ())))
    size = (ends[1] - ends[0]) / 2 if ends else abs(rise)  # the interval justifies at most two decimals
    decimals = 0 if size >= 1e6 else min(2, max(0, decimals_for([size], 2)))
    number, *bounds = (format_number(each, decimals) for each in (rise, *ends))
    return f"{'' if number.startswith('−') else '+'}{number} %", " to ".join(bounds) + " %" * bool(ends)


def effect_name(swap: Swap) -> str:
    """Name the quantity by which a swap is judged, with its unit if it has one: `loss in nats per token`."""
    return EFFECTS[swap.judged_by] + ("" if swap.judged_by == "hidden" else f" in {UNITS[swap.task]}")


def effect(swap: Swap, outcome: Outcome) -> tuple[float | None, tuple[float, float] | None]:
    """Return an outcome's effect on the quantity by which the swap is judged, and its 95 % interval."""
    if swap.judged_by == "loss":
        return (None, None) if outcome.loss is None else (outcome.loss.delta, outcome.loss.ci95)
    if swap.judged_by == "kl":
        return outcome.kl, outcome.kl_ci95
    ends, cosine = outcome.hidden_cosine_ci95, outcome.hidden_cosine
    return None if cosine is None else 1 - cosine, None if ends is None else (1 - ends[1], 1 - ends[0])


def ratio(pair: Pair) -> float | None:
    """Compute after / before; return None if either is missing or `before` is 0."""
    return pair.after / pair.before if pair.before and pair.after is not None else None


def formula(swap: Swap) -> str:
    """Format the formula of the kernel, `log k = …`, and its fitted parameters."""
    names = dict.fromkeys(PARAMETERS.get(name, name.replace("_", " ")) for name in swap.fitted)
    fitted = f"; fitted per head: {join_items(names)}" if names else ""
    left = "" if swap.formula_of == "output" else "log k = "
    return f"{left}{clean(swap.formula)}{fitted}"


def measured_controls(swap: Swap) -> list[Control]:
    """Return the controls that were measured."""
    return [control for control in swap.controls if control.kernel is not None]


@section(10, "swap", ("screen", "terminal", "markdown", "page"))
def effect_sections(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield the kernel, coverage and effects of a swap; the screen shows only a table of several kernels."""
    report, swaps, swap = shapes.report, shapes.report.swaps, shapes.report.swaps[0]
    single = len(swaps) == 1
    if view == "screen":
        if not single:
            table = _outcome_table(swaps)
            yield Section(table=replace(table, columns=table.columns[:SCREEN_COLUMNS]))
        return
    sites = min(len(each.sites) for each in swaps)
    heads = min(sum(len(site.heads) for site in each.sites) for each in swaps)
    paths = join_items(dict.fromkeys(site.path for each in swaps for site in each.sites))
    lines = [f"{clean(swap.kernel)}: {formula(swap)}"] if single else []
    coverage = report.coverage
    lines.append(
        f"{sites} of {format_count(coverage.model_sites or coverage.sites, 'site')}, {heads} of "
        f"{format_count(coverage.model_heads or coverage.heads, 'head')} · path: {paths}"
    )
    if (text := report.settings.calibration) is not None:
        where = f"other windows of {text.name}" if text == report.settings.text else text.name
        lines.append(f"calibration text: {clean(where)}, not part of the evaluated text")
    yield Section(lines=lines)
    lines = _state_long_range(swap) if single else []
    notes = [] if single and swap.diverged else [_reading_help(report)]
    yield Section("Effect" if single else "Effects", lines=lines, table=_outcome_table(swaps), notes=notes)
    yield from _by_text(swaps)


def _state_long_range(swap: Swap) -> list[str]:
    """State the change in the loss on tokens that repeat a bigram last seen outside a window; return [] if unknown."""
    if (record := swap.beyond_window) is None:
        return []
    change, decimals = record.change, loss_decimals([record.change])
    ends = "" if change.ci95 is None else f" ({interval(change.ci95, decimals)})"
    return [
        f"Long-range copying: on the {format_count(record.tokens, 'token')} that repeat a bigram last seen more than "
        f"{record.window} tokens back, the loss changes by {format_number(change.delta, decimals)}{ends}."
    ]


def _outcomes(swaps: Sequence[Swap]) -> list[tuple[str, Outcome]]:
    """List (name, outcome) for the stages of a single kernel, or for several kernels, and for their controls."""
    rows: list[tuple[str, Outcome]] = []
    shared: dict[str, Outcome] = {}
    # the controls of two kernels differ if their Δ beyond has different windows
    records = [control.beyond_window for swap in swaps for control in measured_controls(swap)]
    sharing = len(swaps) > 1 and len({record.window for record in records if record is not None}) < 2
    for swap in swaps:
        stages = swap.stages if len(swaps) == 1 else []
        rows += [(stage.name, stage) for stage in stages]
        rows += [] if stages else [(clean(swap.kernel) + " (fitted)" * bool(swap.fitted), swap)]
        for control in measured_controls(swap):
            name = f"vs {clean(control.kernel or '')}{' (healed)' * (control.role == 'far part, healed')}"
            if sharing and control.role in SHARED:
                shared.setdefault(name, control)
            else:
                rows.append((name, control))
    return [*rows, *shared.items()]


def _outcome_table(swaps: Sequence[Swap]) -> Table:
    """Build a table of the original model, the stages or kernels, and the controls; omit empty columns."""
    rows, judged_by, single = _outcomes(swaps), swaps[0].judged_by, len(swaps) == 1
    outcomes = [outcome for _, outcome in rows]
    kernels = [outcome for outcome in outcomes if not isinstance(outcome, Control)]
    losses = [outcome.loss for outcome in kernels if outcome.loss is not None]
    powers = [outcome.perplexity for outcome in kernels if outcome.perplexity is not None]
    beyond = [outcome.beyond_window for outcome in outcomes if outcome.beyond_window is not None]
    decimals, beyond_decimals = loss_decimals(losses), loss_decimals([record.change for record in beyond])
    several = len({record.window for record in beyond}) > 1
    first = {"loss": "loss", "kl": "KL", "hidden": "hidden cosine"}[judged_by]

    def format_outcome(outcome: Outcome) -> dict[str, str]:
        kl, record, agreement = outcome.kl, outcome.beyond_window, outcome.agreement
        cells: dict[str, str] = {}
        if judged_by == "loss":
            cells = _loss_cells(outcome.loss, outcome.perplexity, decimals, destroyed=outcome.destroyed)
        cells["KL"] = format_figures(kl)
        if judged_by == "kl":
            cells["95 % interval"] = interval(outcome.kl_ci95, decimals_for([kl or 0.0], 3))
        cells["top-1"] = percent(outcome.top1_agreement)
        if judged_by != "loss" or single:
            cells["hidden cosine"] = format_number(outcome.hidden_cosine, 3)
            if judged_by == "hidden":
                cells["95 % interval"] = interval(outcome.hidden_cosine_ci95, 3)
            cells["CKA"] = format_number(outcome.hidden_cka, 3)
        window = f" (> {record.window})" if several and record is not None else ""
        cells["Δ beyond"] = format_number(record.change.delta, beyond_decimals) + window if record else NO_VALUE
        cells["greedy"] = NO_VALUE
        if agreement:
            never = agreement.median >= agreement.tokens  # half of the continuations never differ
            cells["greedy"] = f"≥ {agreement.tokens}" if never else f"{agreement.median:.0f}"
        if isinstance(outcome, Swap):
            times = ratio(outcome.tokens_per_second)
            cells["speed"] = NO_VALUE if times is None else f"× {format_number(times, 2)}"
        return cells | ({first: DIVERGED} if outcome.diverged else {})

    cells = [format_outcome(outcome) for outcome in outcomes]
    original = dict.fromkeys(cells[0], "")
    original |= {"loss": format_number(losses[0].before, decimals)} if losses else {}
    original |= {"perplexity": format_figures(powers[0].before)} if powers else {}
    columns = build_columns([original, *cells], missing="")
    names = Column("stage" if single else "kernel", ["original", *(name for name, _ in rows)], words=True)
    return Table([names], [column for column in columns if set(column.cells[1:]) != {NO_VALUE}])


def _loss_cells(
    loss: Change | None, perplexity: Change | None, decimals: int, *, destroyed: bool = False
) -> dict[str, str]:
    rise, ends = format_rise(loss, perplexity, destroyed=destroyed)
    return {
        "loss": format_number(getattr(loss, "after", None), decimals),
        "Δ": format_number(getattr(loss, "delta", None), decimals),
        "95 % interval": interval(getattr(loss, "ci95", None), decimals),
        "perplexity": format_figures(getattr(perplexity, "after", None)),
        "rise": rise,
        "95 % interval of rise": ends or NO_VALUE,
    }


def _reading_help(report: Report) -> str:
    """Explain the columns, intervals and controls in the table of outcomes."""
    swap, none, scope = report.swaps[0], no_errors(report), population(report, "token")
    controls = [control for each in report.swaps for control in measured_controls(each)]
    rows = [*controls, *(row for each in report.swaps for row in (each, *each.stages))]
    top = "KL(original ‖ changed); top-1: share of equal top predictions"
    states = "hidden cosine and CKA compare the last hidden states; 1: as in the original"
    rise = "rise: of the perplexity, e^Δ − 1; " * (swap.perplexity is not None)
    rise += f"{DESTROYED}: a uniform guess over the vocabulary is better; " * any(row.destroyed for row in rows)
    unit = UNITS[swap.task]
    columns = {"loss": f"loss and KL in {unit}; {rise}{top}", "kl": f"KL in {unit}; {top}; {states}", "hidden": states}
    intervals = none or f"intervals: paired {report.settings.interval_method}{f' ({scope})' if scope else ''}"
    sentences = [f"{columns[swap.judged_by]}; {intervals}."]
    roles = {control.role for control in controls}
    if roles:
        meanings = join_items(words for role, words in CONTROLS.items() if role in roles)
        sentences.append(f"vs: controls in the same heads, untrained: {meanings}.")
    windows = {row.beyond_window.window for row in rows if row.beyond_window is not None}
    if windows:
        far = f"more than {format_count(max(windows), 'token')} back"
        far = far if len(windows) == 1 else "further back than the number in brackets"
        sentences.append(f"Δ beyond: on tokens that repeat a bigram last seen {far}.")
    if any(row.agreement for row in rows):
        sentences.append("greedy: median number of generated tokens before the first difference from the original.")
    return " ".join(sentences)


def _by_text(swaps: Sequence[Swap]) -> Iterator[Section]:
    """Yield a table with one row per text: change in the loss or, if swaps are judged by it, hidden cosine."""
    hidden = swaps[0].judged_by == "hidden"
    records: list[Sequence[TextChange | TextCosine]]
    records = [swap.hidden_cosine_by_text if hidden else swap.loss_by_text for swap in swaps]
    texts = next(filter(None, records), ())
    if not texts:
        return
    names = build_columns([{"text": clean(text.name), "windows": str(text.sequences)} for text in texts], {"text"})
    columns = []
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
    what = "Cosine of the last hidden states" if hidden else "Δ of the loss and rise in the perplexity"
    note = f"{what} with a 95 % interval over that text's windows, which does not cover other texts."
    note += " A single window has no interval." * any(each.sequences == 1 for each in texts)
    yield Section("Text by text", table=Table(names, columns), notes=(note,))


@section(30, "swap")
def check_sections(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield the largest verification errors, and the formulas of several kernels or the cost of a single kernel."""
    swaps = shapes.report.swaps
    single, facts = len(swaps) == 1, []
    if not single:
        yield Section("Kernels", items=[f"{clean(swap.kernel)}: {formula(swap)}" for swap in swaps])
    for name in ("identity", "causality", "mask"):
        errors: list[float] = [error for swap in swaps if (error := getattr(swap, f"{name}_error")) is not None]
        facts.append(f"{name} error {f'{max(errors):.1e}' if any(errors) else '0' if errors else NO_VALUE}")
    items = [f"Verification: {', '.join(facts)}{' (worst of all kernels)' * (not single)}"]
    if single:
        items += [format_cost(swaps[0]), *_off_simplex(swaps[0])]
    yield Section("Checks and cost" if single else "Checks", items=items)


def format_cost(swap: Swap) -> str:
    """Format tokens per second and peak memory of the original and of the changed model."""
    texts = []
    for name, size, unit in (("tokens_per_second", 1, "tokens per second"), ("peak_memory_bytes", 2**20, "MiB peak")):
        pair: Pair = getattr(swap, name)
        ends = (NO_VALUE if number is None else f"{number / size:,.0f}" for number in (pair.before, pair.after))
        times = ratio(pair)
        texts.append(f"{' → '.join(ends)} {unit}{'' if times is None else f' (× {format_number(times, 2)})'}")
    return f"Cost: {'; '.join(texts)}"


def _off_simplex(swap: Swap) -> list[str]:
    """State the share of the attention weight that is negative; return [] if the share is 0 or unknown."""
    if not (share := swap.off_simplex):
        return []
    text = percent(share) if share >= 5e-4 else "Less than 0.1 %"
    return [f"{text} of the attention weight is negative, outside the simplex."]


@section(48, "swap")
def note_sections(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield notes, naming the kernels if a note does not apply to all, and the missing values."""
    swaps = shapes.report.swaps
    several = len(swaps) > 1
    pairs = ((note, swap.kernel) for swap in swaps for note in (*swap.notes, *_off_simplex(swap) * several))
    about = group_pairs((clean(note), kernel) for note, kernel in pairs)
    notes = [note if len(names) == len(swaps) else f"{join_items(names, 8)}: {note}" for note, names in about.items()]
    for title, items in (("Notes", notes), ("No value", _without_value(swaps))):
        if items:
            yield Section(title, items=items)


def _without_value(swaps: Sequence[Swap]) -> list[str]:
    """List the fields without a value, one line per reason, naming the kernel and stage if there are several."""
    places: list[tuple[str, dict[str, str]]] = []  # kernel and stage, reason by field
    for swap in swaps:  # the swap's reasons contain those of its last stage
        kernel = swap.kernel * (len(swaps) > 1)
        for stage in swap.stages[:-1]:
            others = {name: why for name, why in stage.reasons.items() if swap.reasons.get(name) != why}
            places.append((f"{kernel} {stage.name}".strip(), others))
        places.append((kernel, swap.reasons))
    entries = []  # ((fields, reason), kernel and stage)
    for place, reasons in places:
        by_reason = group_pairs(
            (reason, WORDS.get(name, name.replace("_", " ")))
            for name, reason in reasons.items()  # if a number is missing, its interval needs no mention
            if not (name.endswith("_ci95") and reasons.get(name.removesuffix("_ci95")) == reason)
        )
        entries += [((join_items(names, 8), clean(reason)), place) for reason, names in by_reason.items()]
    where = {key: join_items(filter(None, dict.fromkeys(of)), 8) for key, of in group_pairs(entries).items()}
    return [f"{fields}{f' ({place})' if place else ''}: {reason}" for (fields, reason), place in where.items()]


@section(49, "swap", ("verbose", "page"))
def site_sections(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield, for each kernel, a table of the swapped sites and, if known, a table of the loss by position."""
    swaps = shapes.report.swaps
    for swap in swaps:
        name = f" of {clean(swap.kernel)}" if len(swaps) > 1 else ""
        sites = [
            {
                "layer": shapes.report.model.layer_number(site.layer),
                "part": site.part,
                "heads": join_items(site.heads, 8),
                "output error": format_figures(site.output_error),
                "off simplex": percent(site.off_simplex) if any(site.off_simplex for site in swap.sites) else None,
                "path": clean(site.path),
                "site": clean(site.site),
            }
            for site in swap.sites
        ]
        error = "output error: ‖new − original‖ / ‖original‖ of the output on the original's queries, keys, values."
        table = build_table(sites, {"layer", "part"}, {"part", "path", "site"})
        yield Section(f"Sites{name}", table=table, notes=(error,))
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
            yield Section(f"By position{name}", table=build_table(rows, {"tokens"}), notes=(note,))


def swap_rows(report: Report) -> list[dict[str, Cell]]:
    """Build one row per stage or control of each kernel or, after a sweep, one per kernel and swept head or layer."""
    swaps = report.swaps
    if any(swap.sweep for swap in swaps):
        return [_effect_row(swap, effect, place) for swap in swaps for place, effect in enumerate(swap.sweep)]
    rows = []
    for swap in swaps:
        rows += [_outcome_row(swap, stage.name, "", swap.state, stage) for stage in swap.stages]
        rows += [_outcome_row(swap, "", each.kernel or each.role, each.state, each) for each in swap.controls]
    return rows


def _outcome_row(swap: Swap, stage: str, control: str, state: float | None, outcome: Outcome) -> dict[str, Cell]:
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


def _effect_row(swap: Swap, effect: Effect, place: int) -> dict[str, Cell]:
    where = {name: getattr(effect, name) for name in ("layer", "head", "part", "delta")}
    tests = {name: getattr(effect, name) for name in ("p_value", "significant")}
    predictors = sorted(swap.predictors, key=lambda predictor: predictor.measure)
    values = {predictor.measure: predictor.values[place] for predictor in predictors}
    return {"kernel": swap.kernel, **where, **_bounds("delta", effect.ci95), **tests, **values}


def _change_cells(name: str, change: Change | None) -> dict[str, Cell]:
    cells: dict[str, Cell] = {f"{name}.{part}": getattr(change, part, None) for part in ("before", "after", "delta")}
    return cells | _bounds(f"{name}.delta", change.ci95 if change else None)


def _bounds(name: str, ci95: tuple[float, float] | None) -> dict[str, Cell]:
    low, high = ci95 or (None, None)
    return {f"{name}.low": low, f"{name}.high": high}
