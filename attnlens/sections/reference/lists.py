"""Every kernel, analyzer and measure as tables, for `attnlens list`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from attnlens.architectures import Architecture
from attnlens.kernels import Modifier
from attnlens.kernels.spelling import default_of
from attnlens.registry import Analyzer, Gathering, KernelInfo, KernelParameter, MeasureInfo
from attnlens.sections.section import Column, Section, Table
from attnlens.wording import NO_VALUE, clean


def measure_list(infos: Iterable[MeasureInfo]) -> Section:
    """Name, range and meaning of every measure and curve; below the meaning its formula, cautions and source."""
    every = list(infos)
    return _folded(
        ("measure", [info.name for info in every]),
        ("range", [range_of(info) for info in every]),
        ("meaning", [_lines(info.meaning, info.formula, info.caution, info.paper) for info in every]),
    )


def analyzer_list(analyzers: Iterable[Analyzer | Gathering]) -> Section:
    """Every analyzer: its name, what it reads, the question it answers, how many measures and curves it returns."""
    every = list(analyzers)
    return _folded(
        ("analyzer", [found.name for found in every]),
        ("source", [found.source for found in every]),
        ("question", [_asked(found) for found in every]),
        last=(Column("", "measures", tuple(str(len(found.measures)) for found in every)),),
    )


def kernel_list(
    infos: Iterable[KernelInfo], ties: Iterable[Modifier], filters: Iterable[Modifier], hybrids: Iterable[Modifier] = ()
) -> list[Section]:
    """Every kernel as it is typed: log k, what it is, its parameters, what a fit chooses, its fast form and its source.

    Whether k ≥ 0, is symmetric, has finitely many features. A second table holds what goes with any kernel.
    """
    every = list(infos)
    kernels = _folded(
        ("kernel", [_typed(info.name, info.parameters) for info in every]),
        ("log k(q, k)", [_kernel(info) for info in every]),
        ("≥ 0", ["yes" if info.positive else "no" for info in every]),
        ("sym.", ["yes" if info.symmetric else "no" for info in every]),
        ("features", [info.features for info in every]),
    )
    found = [("tie", tie) for tie in ties] + [("filter", kept) for kept in filters]
    found += [("hybrid", hybrid) for hybrid in hybrids]
    modifiers = _folded(
        ("with a kernel", [_typed(modifier.name, modifier.parameters) for _, modifier in found]),
        ("log k(q_i, k_j), or the keys j that query i keeps", [_modifier(kind, modifier) for kind, modifier in found]),
    )
    return [kernels, modifiers]


def architecture_list(measured: str, found: Iterable[Architecture]) -> list[Section]:
    """Every model type: how much of it is read and through what, its positions, weights and checks; what is missing."""
    every = list(found)
    counts = Counter(one.read for one in every)
    told = ", ".join(f"{count} {read}" for read, count in counts.most_common())
    table = _folded(
        ("model type", [one.model_type for one in every]),
        ("read", [one.read for one in every]),
        ("through", [one.route or NO_VALUE for one in every]),
        ("positions", [one.positions or NO_VALUE for one in every]),
        ("weights.*", [one.weights or NO_VALUE for one in every]),
        ("doctor", [one.doctor or NO_VALUE for one in every]),
        ("swap", [one.swap or NO_VALUE for one in every]),
    )
    lines = (
        f"{len(every)} model types, each built tiny from its own configuration and run ({measured}): {told}.",
        "A type is read in part where a part is not run, can't be read or has no weights.*, for the reason below.",
    )
    lacking = [one for one in every if one.reason]
    reasons = _folded(
        ("model type", [one.model_type for one in lacking]),
        ("what is missing, and why", [clean(one.reason) for one in lacking]),
    )
    return [replace(table, title="Model types", lines=lines), replace(reasons, title="What is missing")]


def _folded(*columns: tuple[str, list[str]], last: tuple[Column, ...] = ()) -> Section:
    names, *others = (Column("", title, tuple(cells), words=True) for title, cells in columns)
    return Section(table=Table((names,), (*others, *last), fit="folded"))


def _lines(first: str, *others: str) -> str:
    """The first line, and below it those that say something."""
    return "\n".join(map(clean, (first, *filter(None, others))))


def _asked(found: Analyzer | Gathering) -> str:
    own = f"{found.source}.", f"{found.name}."
    names = [info.name for info in found.measures]
    names = [next((name.removeprefix(start) for start in own if name.startswith(start)), name) for name in names]
    only = "" if found.by_default else f"Runs only where it is named: --analyzer {found.name}"
    return _lines(found.question, only, ", ".join(names))


def _kernel(info: KernelInfo) -> str:
    told = (info.meaning, *told_parameters(info.parameters), fitted(info))
    return _lines(info.formula, *told, f"computed by {info.fused}", info.source)


def fitted(info: KernelInfo) -> str:
    """What its fit to text chooses, and whether there must be one; empty where there is none."""
    if info.fit is None:
        return ""
    first = (info.fit.__doc__ or "").splitlines()[0]
    how = "must be fitted" if info.needs_fit else "--fit"
    return f"{how if info.fit_reads else 'trained by --heal'}: {first.partition(':')[0]}"


def _modifier(kind: str, modifier: Modifier) -> str:
    facts = [f"{kind}: {modifier.meaning}", *told_parameters(modifier.parameters), modifier.caution, modifier.source]
    return _lines(modifier.formula, *facts)


def told_parameters(parameters: Iterable[KernelParameter]) -> list[str]:
    """What each does, and in which range."""
    return [f"{parameter.name}: {parameter.meaning}{_allowed(parameter)}" for parameter in parameters]


def _typed(name: str, parameters: Sequence[KernelParameter]) -> str:
    """The name, and below it how parameters are added: `:gamma=0.5`."""
    pairs = zip(parameters, map(default_of, parameters), strict=True)
    return _lines(name, *(f"{',' if n else ':'}{p.name}={default}" for n, (p, default) in enumerate(pairs)))


def _allowed(parameter: KernelParameter) -> str:
    """Its range in words, after its meaning, or the words that can be typed."""
    named = [word for word, _ in parameter.words]
    if named and parameter.high is None:
        return f" ({' or '.join(named)})"
    even = parameter.even or parameter.multiple_of == 2
    words = ["even"] if even else ["whole"] if parameter.kind is int else []
    words += [] if parameter.low is None else [f"≥ {parameter.low:g}"]
    words += [] if parameter.above is None else [f"> {parameter.above:g}"]
    words += [f"or {word}" for word in named]
    return f" ({', '.join(words)})" if words else ""


def range_of(info: MeasureInfo) -> str:
    """Between which numbers it lies, what its categories are, or over what it is a curve."""
    if info.curve:
        return f"curve over {info.steps}"
    return " | ".join(info.labels) or bounds(info)


def bounds(info: MeasureInfo) -> str:
    """Its least and its largest value in words."""
    if info.low is None and info.high is None:
        return "any"
    low = "−∞" if info.low is None else f"{info.low:g}"
    high = "∞" if info.high is None else f"{info.high:g}"
    return f"{low} to {high}"
