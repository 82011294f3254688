"""Tables of a swap as columns of finished text: stages, kernels, sites, sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from attnlens.records import Change, Effect, KeyRank, Outcome, Plan, Swap, TextChange, TextCosine
from attnlens.sections.section import Column, Table
from attnlens.sentences.effects import figures, interval, loss_decimals, percent, ratio
from attnlens.wording import NO_VALUE, clean, decimals_for, written

DIVERGED = "diverged"
GAP = "…"
"""What stands in a row for units that are left out."""
MARK = "*"
"""What stands beside a significant effect."""


def stage_rows(swap: Swap) -> Table:
    """The original, then a row a stage; a column for what any stage has."""
    losses = [stage.loss for stage in swap.stages if stage.loss is not None]
    decimals = loss_decimals(losses)
    before = losses[0] if losses else None
    powers = [stage.perplexity for stage in swap.stages if stage.perplexity is not None]
    found: list[tuple[str, str, Callable[[Outcome], str]]] = [
        ("loss", "" if before is None else written(before.before, decimals), lambda o: _after(o.loss, decimals)),
        ("Δ", "", lambda o: _delta(o.loss, decimals)),
        ("95 % interval", "", lambda o: _interval(o.loss, decimals)),
        ("perplexity", figures(powers[0].before) if powers else "", lambda o: _figures(o.perplexity)),
        *((title, "", tell) for title, tell in (*_predictions(swap), *_states(swap))),
    ]
    columns = []
    for title, original, tell in found:
        cells = [tell(stage) for stage in swap.stages]
        if set(cells) != {NO_VALUE}:
            columns.append(Column("", title, (original, *cells)))
    if any(stage.diverged for stage in swap.stages):
        cells = [DIVERGED if stage.diverged else "" for stage in swap.stages]
        columns.insert(0, Column("", "outcome", ("", *cells), words=True))
    names = Column("", "stage", ("original", *(stage.name for stage in swap.stages)), words=True)
    return Table((names,), tuple(columns))


def text_rows(swaps: Sequence[Swap]) -> Table:
    """A row a text: how many of its windows were read, and what each swap does to the loss there."""
    texts = next(swap.loss_by_text for swap in swaps if swap.loss_by_text)
    columns = []
    for swap in swaps:
        changes = {text.name: text.change for text in swap.loss_by_text}
        found = [changes.get(text.name) for text in texts]
        decimals = loss_decimals([change for change in found if change is not None])
        group = clean(swap.kernel) if len(swaps) > 1 else ""
        columns += [
            Column(group, "Δ", tuple(_delta(change, decimals) for change in found)),
            Column(group, "95 % interval", tuple(_interval(change, decimals) for change in found)),
        ]
    return Table(_text_names(texts), tuple(columns))


def cosine_rows(swaps: Sequence[Swap]) -> Table:
    """A row a text, where there is no loss: how many of its windows were read, and each swap's hidden cosine there."""
    texts = next(swap.hidden_cosine_by_text for swap in swaps if swap.hidden_cosine_by_text)
    columns = []
    for swap in swaps:
        known = {text.name: text for text in swap.hidden_cosine_by_text}
        found = [known.get(text.name) for text in texts]
        group = clean(swap.kernel) if len(swaps) > 1 else ""
        cosines = (NO_VALUE if one is None else written(one.cosine, 3) for one in found)
        ends = (NO_VALUE if one is None else interval(one.ci95, 3) for one in found)
        columns += [Column(group, "hidden cosine", tuple(cosines)), Column(group, "95 % interval", tuple(ends))]
    return Table(_text_names(texts), tuple(columns))


def _text_names(texts: Sequence[TextChange | TextCosine]) -> tuple[Column, ...]:
    return (
        Column("", "text", tuple(clean(text.name) for text in texts), words=True),
        Column("", "windows", tuple(str(text.sequences) for text in texts)),
    )


def kernel_rows(swaps: Sequence[Swap]) -> Table:
    """A row a kernel, the original first."""
    losses = [swap.loss for swap in swaps if swap.loss is not None]
    decimals = loss_decimals(losses)
    loss: Cells = (
        ("loss", lambda swap: _after(swap.loss, decimals)),
        ("Δ", lambda swap: _delta(swap.loss, decimals)),
        ("95 % interval", lambda swap: _interval(swap.loss, decimals)),
    )
    predictions, states = _predictions(swaps[0]), _states(swaps[0])
    (first, tell), *others = {
        "loss": (*loss, *predictions),
        "kl": (*predictions, *states),
        "hidden": states,
    }[swaps[0].judged_by]
    original = written(losses[0].before, decimals) if losses else ""
    outcomes = (DIVERGED if swap.diverged else tell(swap) for swap in swaps)
    columns = [Column("", first, (original, *outcomes))]
    columns += [Column("", title, ("", *map(told, swaps))) for title, told in (*others, ("speed", _speed))]
    names = Column("", "kernel", ("original", *map(_named, swaps)), words=True)
    return Table((names,), tuple(columns))


def _named(swap: Swap) -> str:
    """The kernel's spelling, and whether its parameters are fitted."""
    return clean(swap.kernel) + (" (fitted)" if swap.fitted else "")


def site_rows(swap: Swap) -> Table:
    """Every exchanged site: where it is, how it was computed, how far its output moves."""
    sites = swap.sites
    columns = [
        Column("", "heads", tuple(spans(site.heads) for site in sites)),
        Column("", "output error", tuple(_number(site.output_error) for site in sites)),
        Column("", "path", tuple(clean(site.path) for site in sites), words=True),
        Column("", "site", tuple(clean(site.site) for site in sites), words=True),
    ]
    if any(site.off_simplex for site in sites):
        columns.insert(2, Column("", "off simplex", tuple(_share(site.off_simplex) for site in sites)))
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
            tuple(" ".join(str(key.rank) for key in keys) for keys in rows),
            words=True,
        ),
    )
    return Table(names, columns)


def place(effect: Effect) -> str:
    """`layer 3 head 7`."""
    return f"layer {effect.layer}" + ("" if effect.head is None else f" head {effect.head}")


def spans(numbers: Sequence[int]) -> str:
    """`0–7`, `0, 3–5`: neighbours as a range."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)


def _units(title: str, shown: Sequence[Effect | None], tell: Callable[[Effect], str], *, words: bool = False) -> Column:
    return Column("", title, tuple(GAP if effect is None else tell(effect) for effect in shown), words=words)


def _decimals(effects: Sequence[Effect]) -> int:
    """What two figures of the middle effect take, two to six."""
    sizes = [abs(effect.delta) for effect in effects if effect.delta]
    middle = median(sizes) if sizes else 1.0
    return 6 if middle < 1e-4 else min(6, max(2, decimals_for([middle], 2)))


def _after(change: Change | None, decimals: int) -> str:
    return NO_VALUE if change is None else written(change.after, decimals)


def _delta(change: Change | None, decimals: int) -> str:
    return NO_VALUE if change is None else written(change.delta, decimals)


def _interval(change: Change | None, decimals: int) -> str:
    return NO_VALUE if change is None else interval(change.ci95, decimals)


def _figures(change: Change | None) -> str:
    return NO_VALUE if change is None else figures(change.after)


def _number(number: float | None) -> str:
    return NO_VALUE if number is None else figures(number)


def _share(number: float | None) -> str:
    return NO_VALUE if number is None else percent(number, 1)


def _speed(swap: Swap) -> str:
    times = ratio(swap.tokens_per_second)
    return NO_VALUE if times is None else f"× {written(times, 2)}"


Cells = tuple[tuple[str, Callable[[Outcome], str]], ...]
"""Titles of columns, and what stands in them."""


def _predictions(swap: Swap) -> Cells:
    """KL, with its interval where the swap is judged by it, and how many first choices are the same."""
    ends: Cells = (("95 % interval", lambda found: _ends(found.kl, found.kl_ci95)),)
    more = ends if swap.judged_by == "kl" else ()
    return (("KL", lambda found: _number(found.kl)), *more, ("top-1", lambda found: _share(found.top1_agreement)))


def _states(swap: Swap) -> Cells:
    """The hidden states' cosine, with its interval where the swap is judged by it, and their CKA."""
    ends: Cells = (("95 % interval", lambda found: interval(found.hidden_cosine_ci95, 3)),)
    more = ends if swap.judged_by == "hidden" else ()
    cka: Cells = (("CKA", lambda found: written(found.hidden_cka, 3)),)
    return (("hidden cosine", lambda found: written(found.hidden_cosine, 3)), *more, *cka)


def _ends(number: float | None, bounds: tuple[float, float] | None) -> str:
    """An interval with as many decimals as three figures of its number take."""
    return NO_VALUE if number is None else interval(bounds, decimals_for([number], 3))


def _p_value(number: float | None) -> str:
    return NO_VALUE if number is None else "<0.0001" if number < 1e-4 else f"{number:.2g}"
