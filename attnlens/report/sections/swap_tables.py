"""Tables of a swap as columns of finished text: outcomes, sites, sweep, plan; and as rows of a sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from attnlens.records import Change, Control, Effect, KeyRank, Outcome, Plan, Swap, TextChange, TextCosine
from attnlens.report.sections.section import Cell, Column, Table
from attnlens.report.sentences.swaps import (
    figures,
    interval,
    loss_decimals,
    median_agreement,
    percent,
    ratio,
    rise_interval,
    rise_words,
)
from attnlens.wording import NO_VALUE, clean, decimals_for, format_number, group_pairs

DIVERGED = "diverged"
SHARED = ("one key", "floor")
"""Roles of the controls that do not depend on the kernel."""
BESIDE = "vs"
"""Prefix of a control's name in tables."""


def stage_rows(swap: Swap) -> Table:
    """Build a table of the original, each stage and each control; columns without any value are left out."""
    loss, original = _loss(swap.stages)
    rows: list[Outcome] = [*swap.stages, *measured_controls(swap)]
    columns = []
    for title, tell in (*loss, *_predictions(swap), *_states(swap), *_beyond_columns(rows)):
        cells = [tell(row) for row in rows]
        if set(cells) != {NO_VALUE}:
            columns.append(Column(title, (original.get(title, ""), *cells)))
    if any(row.diverged for row in rows):
        cells = [DIVERGED if row.diverged else "" for row in rows]
        columns.insert(0, Column("outcome", ("", *cells), words=True))
    labels = (*(stage.name for stage in swap.stages), *map(_control_name, measured_controls(swap)))
    names = Column("stage", ("original", *labels), words=True)
    return Table([names], columns)


def measured_controls(swap: Swap) -> list[Control]:
    """Return the controls that were measured, that is, those with a kernel."""
    return [control for control in swap.controls if control.kernel is not None]


def _control_name(control: Control) -> str:
    """Name a control: `vs sink-window:4,64`."""
    healed = " (healed)" if control.role == "far part, healed" else ""
    return f"{BESIDE} {clean(control.kernel or '')}{healed}"


def text_rows(swaps: Sequence[Swap]) -> Table:
    """Build a table with one row per text: its number of windows, and the change in loss under each swap."""
    texts = next(swap.loss_by_text for swap in swaps if swap.loss_by_text)
    columns = []
    for swap in swaps:
        changes = {text.name: text.change for text in swap.loss_by_text}
        deltas = [changes.get(text.name) for text in texts]
        decimals = loss_decimals([change for change in deltas if change is not None])
        group = clean(swap.kernel) if len(swaps) > 1 else ""
        powers = {text.name: text.perplexity for text in swap.loss_by_text}
        pairs = [(change, powers.get(text.name)) for text, change in zip(texts, deltas, strict=True)]
        columns += [
            Column("Δ", [_change(change, decimals) for change in deltas], group=group),
            Column("95 % interval", [_interval(change, decimals) for change in deltas], group=group),
            Column("perplexity", [_figures(powers.get(text.name)) for text in texts], group=group),
            Column("rise", [_rise(*pair, rise_words) for pair in pairs], group=group),
            Column("95 % interval of rise", [_rise(*pair, rise_interval) for pair in pairs], group=group),
        ]
    return Table(_text_names(texts), tuple(columns))


def cosine_rows(swaps: Sequence[Swap]) -> Table:
    """Build a table with one row per text, for swaps without a loss: its number of windows, each hidden cosine."""
    texts = next(swap.hidden_cosine_by_text for swap in swaps if swap.hidden_cosine_by_text)
    columns = []
    for swap in swaps:
        by_name = {text.name: text for text in swap.hidden_cosine_by_text}
        rows = [by_name.get(text.name) for text in texts]
        group = clean(swap.kernel) if len(swaps) > 1 else ""
        cosines = [NO_VALUE if row is None else format_number(row.cosine, 3) for row in rows]
        ends = [NO_VALUE if row is None else interval(row.ci95, 3) for row in rows]
        columns += [Column("hidden cosine", cosines, group=group), Column("95 % interval", ends, group=group)]
    return Table(_text_names(texts), tuple(columns))


def _text_names(texts: Sequence[TextChange | TextCosine]) -> tuple[Column, ...]:
    return (
        Column("text", [clean(text.name) for text in texts], words=True),
        Column("windows", [str(text.sequences) for text in texts]),
    )


def place_rows(swap: Swap) -> Table:
    """Build a table with one row per range of positions: its number of tokens, their loss before and after, Δ."""
    parts = swap.loss_by_position
    changes = [part.change for part in parts]
    decimals = loss_decimals(changes)
    columns = (
        Column("count", [str(part.tokens) for part in parts]),
        Column("before", [format_number(change.before, decimals) for change in changes]),
        Column("after", [_change(change, decimals, "after") for change in changes]),
        Column("Δ", [_change(change, decimals) for change in changes]),
        Column("95 % interval", [_interval(change, decimals) for change in changes]),
    )
    return Table([Column("tokens", [f"{part.first}–{part.last}" for part in parts])], columns)


def kernel_rows(swaps: Sequence[Swap]) -> Table:
    """Build a table of the original, each kernel followed by its own controls, and the controls shared by all."""
    loss, original = _loss(swaps)
    rows, predictions, states = _rows(swaps), _predictions(swaps[0]), _states(swaps[0])
    (first, tell), *others = {
        "loss": (*loss, *predictions, *_beyond_columns([row for _, row in rows])),
        "kl": (*predictions, *states),
        "hidden": states,
    }[swaps[0].judged_by]
    outcomes = (DIVERGED if row.diverged else tell(row) for _, row in rows)
    columns = [Column(first, (original.get(first, ""), *outcomes))]
    columns += [Column(title, (original.get(title, ""), *(show(row) for _, row in rows))) for title, show in others]
    times = [ratio(row.tokens_per_second) if isinstance(row, Swap) else math.nan for _, row in rows]
    speeds = (NO_VALUE if time is None else "" if math.isnan(time) else f"× {format_number(time, 2)}" for time in times)
    columns.append(Column("speed", ("", *speeds)))
    columns = [column for column in columns if column.title not in OPTIONAL or set(column.cells[1:]) != {NO_VALUE}]
    names = Column("kernel", ("original", *(name for name, _ in rows)), words=True)
    return Table([names], columns)


def _rows(swaps: Sequence[Swap]) -> list[tuple[str, Outcome]]:
    """List (name, outcome) of each kernel followed by its own controls, then of the controls shared by all kernels.

    No control is shared if the report uses several windows for the loss on tokens beyond a window.
    """
    rows: list[tuple[str, Outcome]] = []
    shared: dict[str, Control] = {}
    controls = [control for swap in swaps for control in measured_controls(swap)]
    windows = {control.beyond_window.window for control in controls if control.beyond_window is not None}
    for swap in swaps:
        rows.append((clean(swap.kernel) + (" (fitted)" if swap.fitted else ""), swap))
        for control in measured_controls(swap):
            # with several windows, a control's loss beyond the window differs between kernels: each lists its own
            if control.role in SHARED and len(windows) < 2:
                shared.setdefault(_control_name(control), control)
            else:
                rows.append((_control_name(control), control))
    return [*rows, *shared.items()]


def number(value: float | None) -> str:
    """Format three significant digits, or `–` for None."""
    return NO_VALUE if value is None else figures(value)


def share(value: float | None) -> str:
    """Format a share in per cent, or `–` for None."""
    return NO_VALUE if value is None else percent(value, 1)


Cells = tuple[tuple[str, Callable[[Outcome], str]], ...]
"""Columns as (title, function that formats the cell of an outcome)."""


def _change(change: Change | None, decimals: int, name: str = "delta") -> str:
    return NO_VALUE if change is None else format_number(getattr(change, name), decimals)


def _interval(change: Change | None, decimals: int) -> str:
    return NO_VALUE if change is None else interval(change.ci95, decimals)


def _figures(change: Change | None) -> str:
    return NO_VALUE if change is None else figures(change.after)


def _rise(loss: Change | None, perplexity: Change | None, words: Callable[[Change], str]) -> str:
    """Format the rise of the perplexity, or its interval, with `words`; `–` if it is unknown."""
    return NO_VALUE if loss is None or perplexity is None else words(loss) or NO_VALUE


RISES: Cells = (
    ("rise", lambda outcome: _rise(outcome.loss, outcome.perplexity, rise_words)),
    ("95 % interval of rise", lambda outcome: _rise(outcome.loss, outcome.perplexity, rise_interval)),
)
"""Columns of the relative rise of the perplexity."""


def _loss(outcomes: Sequence[Outcome]) -> tuple[Cells, dict[str, str]]:
    """Return the columns of loss and perplexity, and the original's cells by column title."""
    losses = [outcome.loss for outcome in outcomes if outcome.loss is not None]
    powers = [outcome.perplexity for outcome in outcomes if outcome.perplexity is not None]
    decimals = loss_decimals(losses)
    columns: Cells = (
        ("loss", lambda outcome: _change(outcome.loss, decimals, "after")),
        ("Δ", lambda outcome: _change(outcome.loss, decimals)),
        ("95 % interval", lambda outcome: _interval(outcome.loss, decimals)),
        ("perplexity", lambda outcome: _figures(outcome.perplexity)),
        *RISES,
    )
    original = {"loss": format_number(losses[0].before, decimals)} if losses else {}
    return columns, original | ({"perplexity": figures(powers[0].before)} if powers else {})


def _beyond_columns(rows: Sequence[Outcome]) -> Cells:
    """Return the columns of the loss beyond a window (its size is added if rows differ) and of greedy agreement."""
    records = [row.beyond_window for row in rows if row.beyond_window is not None]
    decimals = loss_decimals([record.change for record in records])
    several = len({record.window for record in records}) > 1

    def beyond(outcome: Outcome) -> str:
        record = outcome.beyond_window
        window = f" (> {record.window})" if several and record is not None else ""
        return _change(record.change if record else None, decimals) + window

    return ("Δ beyond", beyond), ("greedy", lambda outcome: median_agreement(outcome.agreement) or NO_VALUE)


OPTIONAL = ("rise", "95 % interval of rise", "perplexity", "Δ beyond", "greedy")
"""Titles of the columns that are left out if no row has a value."""


def _predictions(swap: Swap) -> Cells:
    """Return the columns of KL, its interval if the swap is judged by KL, and top-1 agreement."""

    def ends(outcome: Outcome) -> str:
        return NO_VALUE if outcome.kl is None else interval(outcome.kl_ci95, decimals_for([outcome.kl], 3))

    more: Cells = (("95 % interval", ends),) if swap.judged_by == "kl" else ()
    return (("KL", lambda outcome: number(outcome.kl)), *more, ("top-1", lambda outcome: share(outcome.top1_agreement)))


def _states(swap: Swap) -> Cells:
    """Return the columns of the hidden states' cosine, its interval if the swap is judged by it, and their CKA."""
    ends: Cells = (("95 % interval", lambda outcome: interval(outcome.hidden_cosine_ci95, 3)),)
    more = ends if swap.judged_by == "hidden" else ()
    cka: Cells = (("CKA", lambda outcome: format_number(outcome.hidden_cka, 3)),)
    return (("hidden cosine", lambda outcome: format_number(outcome.hidden_cosine, 3)), *more, *cka)


MARK = "*"
"""Mark of a significant effect."""


def site_rows(swap: Swap) -> Table:
    """Build a table with one row per swapped site: layer, part, heads, output error, computation path, name."""
    sites = swap.sites
    columns = [
        Column("heads", [spans(site.heads) for site in sites]),
        Column("output error", [number(site.output_error) for site in sites]),
        Column("path", [clean(site.path) for site in sites], words=True),
        Column("site", [clean(site.site) for site in sites], words=True),
    ]
    if any(site.off_simplex for site in sites):
        columns.insert(2, Column("off simplex", [share(site.off_simplex) for site in sites]))
    names = [
        Column("layer", [str(site.layer) for site in sites]),
        Column("part", [site.part for site in sites], words=True),
    ]
    return Table(names, columns)


def sweep_rows(swap: Swap, most: int) -> Table:
    """Build a table of the most and the least harmful units, `most` of each; all units if there are fewer."""
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
        _units("Δ", shown, lambda effect: DIVERGED if effect.delta is None else format_number(effect.delta, decimals)),
        _units("95 % interval", shown, lambda effect: interval(effect.ci95, decimals)),
    ]
    if has_tests(swap):
        columns.append(_units("p", shown, lambda effect: _p_value(effect.p_value)))
        columns.append(_units("FDR 5 %", shown, lambda effect: MARK if effect.significant else "", words=True))
    return Table(names, columns)


def has_tests(swap: Swap) -> bool:
    """Return True if effects are differences of losses, which can be tested; distances are never negative."""
    return swap.judged_by == "loss"


def sweeps_rows(swaps: Sequence[Swap]) -> Table:
    """Build a table with one row per kernel: its number of significant units, its most and least harmful unit."""
    decimals = _decimals([effect for swap in swaps for effect in swap.sweep])
    columns = []
    if any(map(has_tests, swaps)):
        counts = [sum(effect.significant for effect in swap.sweep) for swap in swaps]
        cells = tuple(f"{n} of {len(swap.sweep)}" for n, swap in zip(counts, swaps, strict=True))
        columns.append(Column("FDR 5 %", cells))
    for group, index in (("most harmful", 0), ("least harmful", -1)):
        effects = [swap.sweep[index] for swap in swaps]
        deltas = (DIVERGED if effect.delta is None else format_number(effect.delta, decimals) for effect in effects)
        columns.append(Column("where", [*map(place, effects)], group=group, words=True))
        columns.append(Column("Δ", tuple(deltas), group=group))
        if index == 0:
            columns.append(Column("95 % interval", [interval(e.ci95, decimals) for e in effects], group=group))
    return Table([Column("kernel", [clean(swap.kernel) for swap in swaps], words=True)], columns)


def plan_rows(plan: Plan) -> Table:
    """Build a table with one row per layer: its mean rank per head, and the rank of each key head or latent."""
    rows = group_pairs((key.layer, key) for key in plan.ranks).values()
    shared = any(key.kv_heads for key in plan.ranks)
    ranks = (numbers_kept(keys) if shared else " ".join(str(key.rank) for key in keys) for keys in rows)
    means = (sum(k.rank / k.keys * len(k.heads) for k in keys) / sum(len(k.heads) for k in keys) for keys in rows)
    names = (Column("layer", [str(keys[0].layer) for keys in rows]),)
    columns = (
        Column("mean rank", [f"{mean:.1f}" for mean in means]),
        Column("of", [str(keys[0].head_dim // keys[0].keys) for keys in rows]),
        Column("numbers kept" if shared else "rank by key head", tuple(ranks), words=True),
    )
    return Table(names, columns)


def numbers_kept(keys: Sequence[KeyRank]) -> str:
    """Format the rank of each latent and the size of its keys: `40 of 128`, `20 18 of 32 each`, `20 of 48, 9 of 32`."""
    totals = {key.head_dim for key in keys}
    if len(totals) > 1:
        return ", ".join(f"{key.rank} of {key.head_dim}" for key in keys)
    each = " each" * (len(keys) > 1)
    return f"{' '.join(str(key.rank) for key in keys)} of {totals.pop()}{each}"


def place(effect: Effect) -> str:
    """Name a unit: `layer 3 head 7`, or `layer 3` for a whole layer."""
    return f"layer {effect.layer}" + ("" if effect.head is None else f" head {effect.head}")


def spans(numbers: Sequence[int]) -> str:
    """Format numbers with consecutive ones as a range: `0–7`, `0, 3–5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _units(title: str, shown: Sequence[Effect | None], tell: Callable[[Effect], str], *, words: bool = False) -> Column:
    """Build a column with one cell per unit; `…` marks the units left out."""
    return Column(title, ["…" if effect is None else tell(effect) for effect in shown], words=words)


def _decimals(effects: Sequence[Effect]) -> int:
    """Return the decimals that show two significant digits of the median effect size, from two to six."""
    sizes = [abs(effect.delta) for effect in effects if effect.delta]
    middle = median(sizes) if sizes else 1.0
    return 6 if middle < 1e-4 else min(6, max(2, decimals_for([middle], 2)))


def _p_value(number: float | None) -> str:
    return NO_VALUE if number is None else "<0.0001" if number < 1e-4 else f"{number:.2g}"


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
