"""The tables of `attnlens list` and `attnlens doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Protocol

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnlens.kernels import Modifier
from attnlens.registry import Analyzer, Gathering, KernelInfo, MeasureInfo, Parameter
from attnlens.wording import NO_VALUE, clean

WIDEST_SITE = 24
"""Characters of a site's path that a terminal of 100 columns shows on one line."""


class DoctorRow(Protocol):
    """What doctor found at one site."""

    @property
    def site(self) -> str:
        """The site's name."""

    @property
    def part(self) -> str:
        """encoder, decoder or cross."""

    @property
    def heads(self) -> int:
        """How many query heads it has."""

    @property
    def route(self) -> str:
        """How attnlens reaches its queries and keys."""

    @property
    def tokens_error(self) -> float | None:
        """Worst relative error of softmax(q·k) against the model's own attention probabilities."""

    @property
    def weights_error(self) -> float | None:
        """Worst relative error of weights × inputs against the model's own logits."""

    @property
    def reason(self) -> str | None:
        """Why something was not checked or does not agree."""

    @property
    def verdict(self) -> str | None:
        """What is to be said of it; None in reports of attnlens 1."""


def measures_table(infos: Iterable[MeasureInfo]) -> Table:
    """Name, range and meaning of every measure and curve; its formula below the meaning, and what is not identified."""
    table = _table("measure", "range", "meaning")
    for info in infos:
        meaning = Text(clean(info.meaning))
        if info.formula:
            meaning.append(f"\n{clean(info.formula)}", style="dim")
        if info.caution:
            meaning.append(f"\n{clean(info.caution)}")
        table.add_row(Text(info.name, style="bold"), _range(info), meaning)
    return table


def analyzers_table(analyzers: Iterable[Analyzer | Gathering]) -> Table:
    """Every analyzer: its name, what it reads, the question it answers, how many measures and curves it returns."""
    table = _table("analyzer", "source", "question", "measures")
    for found in analyzers:
        own = (f"{found.source}.", f"{found.name}.")
        names = ", ".join(_without(info.name, own) for info in found.measures)
        question = Text(clean(found.question))
        if not found.by_default:
            question.append(f"\nRuns only where it is named: --analyzer {clean(found.name)}")
        question.append(f"\n{names}", style="dim")
        table.add_row(Text(found.name, style="bold"), found.source, question, str(len(found.measures)))
    table.columns[-1].justify = "right"
    return table


def _without(name: str, prefixes: Sequence[str]) -> str:
    """The measure's name as the table's row leaves it to be said."""
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)


def kernels_table(infos: Iterable[KernelInfo], ties: Iterable[Modifier], filters: Iterable[Modifier]) -> RenderableType:
    """Every kernel as it is typed: log k, what it is, its parameters, what a fit chooses, its fast form and its source.

    Whether k ≥ 0, is symmetric, has finitely many features. A second table holds what goes with any kernel.
    """
    kernels = _table("kernel", "log k(q, k)", "≥ 0", "sym.", "features")
    for info in infos:
        facts = [f"{p.name}: {p.meaning}{_allowed(p)}" for p in info.parameters]
        if info.fit is not None:
            first = (info.fit.__doc__ or "").splitlines()[0]
            facts.append(f"{'must be fitted' if info.needs_fit else '--fit'}: {first.partition(':')[0]}")
        facts += [f"computed by {info.fused}", info.source]
        traits = ("yes" if info.positive else "no", "yes" if info.symmetric else "no", info.features)
        kernels.add_row(_typed(info.name, info.parameters), _explained(info.formula, [info.meaning, *facts]), *traits)
    modifiers = _table("with any kernel", "log k(q_i, k_j), or the keys j that query i keeps")
    for kind, found in (("tie", ties), ("filter", filters)):
        for modifier in found:
            facts = [f"{p.name}: {p.meaning}{_allowed(p)}" for p in modifier.parameters]
            facts += [modifier.caution] * bool(modifier.caution)
            cell = _explained(modifier.formula, [f"{kind}: {modifier.meaning}", *facts, modifier.source])
            modifiers.add_row(_typed(modifier.name, modifier.parameters), cell)
    return Group(kernels, Text(), modifiers)


def _typed(name: str, parameters: Sequence[Parameter]) -> Text:
    """The name, and below it how parameters are added: `:gamma=0.5`."""
    shown = Text(clean(name), style="bold")
    for index, parameter in enumerate(parameters):
        default = "…" if parameter.default is None else f"{parameter.default:g}"
        shown.append(f"\n{',' if index else ':'}{clean(parameter.name)}={default}", style="not bold")
    return shown


def _explained(formula: str, facts: Iterable[str]) -> Text:
    """The formula, and what there is to say about it in dim lines below."""
    cell = Text(clean(formula))
    for fact in facts:
        cell.append(f"\n{clean(fact)}", style="dim")
    return cell


def _allowed(parameter: Parameter) -> str:
    """Its range in words, after its meaning."""
    low = [] if parameter.low is None else [f"≥ {parameter.low:g}"]
    above = [] if parameter.above is None else [f"> {parameter.above:g}"]
    whole = ["whole"] if parameter.kind is int else []
    words = [*(["even"] if parameter.even else whole), *low, *above]
    return f" ({', '.join(words)})" if words else ""


def doctor_table(rows: Sequence[DoctorRow]) -> Table:
    """Every site: its route, both errors (relative, worst), and the verdict in words."""
    table = _table("site", "part", "heads", "route", "q·k logits", "weights × inputs", "verdict")
    table.columns[2].justify = table.columns[4].justify = table.columns[5].justify = "right"
    shared = _shared_path([clean(row.site) for row in rows])
    for row in rows:
        differs, said = row.verdict == "differs", row.verdict or NO_VALUE
        verdict = Text(said.upper() if differs else said, style="bold yellow" if differs else "bold")
        if row.reason:
            verdict.append(f"\n{clean(row.reason)}", style="dim")
        errors = (_error(row.tokens_error), _error(row.weights_error))
        site = Text(("…" if shared else "") + clean(row.site).removeprefix(shared))
        table.add_row(site, row.part, str(row.heads), Text(clean(row.route)), *errors, verdict)
    if shared:
        table.caption, table.caption_justify = Text(f"… stands for {shared}"), "left"
    return table


def _shared_path(sites: Sequence[str]) -> str:
    """What all paths begin with, up to a dot, where they are too long for their column; else nothing."""
    if len(sites) < 2 or max(map(len, sites)) <= WIDEST_SITE:
        return ""
    shared = os.path.commonprefix(list(sites))  # noqa: RUF071  # dotted paths, compared character by character
    return shared[: shared.rfind(".") + 1]


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _error(error: float | None) -> str:
    return NO_VALUE if error is None else f"{error:.1e}"


def _range(info: MeasureInfo) -> str:
    if info.curve:
        return f"curve over {info.steps}"
    if info.labels:
        return " | ".join(info.labels)
    if info.low is None and info.high is None:
        return "any"
    low = "−∞" if info.low is None else f"{info.low:g}"
    high = "∞" if info.high is None else f"{info.high:g}"
    return f"{low} to {high}"
