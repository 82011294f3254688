"""The page of one measure or kernel: formula, range, null, errors, source and use, for `attnlens explain`."""

from __future__ import annotations

from collections.abc import Mapping

from attnlens.errors import UsageError
from attnlens.kernels import FILTERS, HYBRIDS, TIES, Modifier, kernels
from attnlens.kernels.spelling import example, far_kernels
from attnlens.registry import (
    BETWEEN_FORMS,
    BETWEEN_ROWS,
    Analyzer,
    Gathering,
    KernelInfo,
    MeasureInfo,
    checked_name,
    every_analyzer,
)
from attnlens.sections.reference.lists import bounds, fitted, range_of, told_parameters
from attnlens.sections.section import Section
from attnlens.sentences.findings import WORDS
from attnlens.wording import clean

READ = {
    "weights": "the weights alone",
    "tokens": "queries and keys of forward passes over text",
}
EXACT = "none: weights are read once, and there is nothing to sample"
SAMPLED = "standard error of the mean over windows; with five texts or more, over texts like these (--intervals)"
OWN_REASON = "for the reason that stands in its place"
ONCE = "posed once over all windows: only what is a mean over them has a standard error"
CURVE = "none: a curve is the mean over windows"
PAIRED = "both models read the same windows, and it is over these (--intervals texts: over texts)"
IDENTIFIED = {
    "weights": "in every head: no change of basis within it changes the number",
    "tokens": "in every head: all scores that give the model's attention give this number",
}


def measure_pages() -> dict[str, Section]:
    """The page of every measure and curve, and of every distance between two models, by name."""
    found = sorted(every_analyzer(), key=lambda each: not each.by_default)
    pages = {info.name: _measured(info, each) for each in found for info in each.measures}
    compared = {"tokens": BETWEEN_ROWS, "weights": BETWEEN_FORMS}
    return pages | {info.name: _distance(info, source) for source, infos in compared.items() for info in infos}


def kernel_pages() -> dict[str, Section]:
    """The page of every kernel, tie and filter, by name."""
    modifiers = {name: _modifier("tie", tie) for name, tie in TIES.items()}
    modifiers |= {name: _modifier("filter", kept) for name, kept in FILTERS.items()}
    modifiers |= {name: _modifier("hybrid", found) for name, found in HYBRIDS.items()}
    return {name: _kernel(info) for name, info in kernels().items()} | modifiers


def explanation(name: str) -> Section:
    """The page of that name; of a measure the part behind its source is enough, where no other has the same.

    Raises UsageError for a name that is none, with the nearest one, and for one that several measures have.
    """
    pages = measure_pages() | kernel_pages()
    ends = [full for full in pages if full.endswith(f".{name}")]
    if name not in pages and len(ends) > 1:
        raise UsageError(f"{name!r} is the name of several measures.", f"Name one of them: {', '.join(ends)}.")
    if name not in pages and ends:
        (name,) = ends
    return pages[checked_name("measure or kernel", name, pages)]


def _measured(info: MeasureInfo, found: Analyzer | Gathering) -> Section:
    if found.source == "weights":
        error = EXACT
    elif info.curve:
        error = CURVE
    else:
        error = ONCE if isinstance(found, Gathering) else SAMPLED
    wholes = [[one.name for one in found.measures if whole in one.wholes and one is not info] for whole in info.wholes]
    needs_base = isinstance(found, Analyzer) and found.needs_base
    runs = f"{'where the model has an adapter, or' if needs_base else 'only'} with --analyzer {found.name}"
    facts = {
        **_facts(info, found.source),
        "error": error,
        "null": _null(info, found.source),
        "sums to 1": "; ".join(f"with {', '.join(parts)}" for parts in wholes),
        "analyzer": f"{found.name}: {found.question}",
        "runs": "in a plain inspect" if found.by_default else runs,
        "definitions": found.definitions,
    }
    return _page(info.name, info.meaning, facts | _ends(info))


def _distance(info: MeasureInfo, source: str) -> Section:
    error = PAIRED if source == "tokens" else EXACT
    null = "0 between equal heads; what counts is beyond what rounding to the stored number type does"
    facts = {**_facts(info, source), "error": error, "null": null, "runs": "in compare"}
    return _page(info.name, info.meaning, facts | _ends(info))


def _facts(info: MeasureInfo, source: str) -> dict[str, str]:
    """What is to be said first of any measure."""
    steps = f"; each {bounds(info)}" if info.curve else ""
    apart = ", or the head is of cross-attention" if info.self_only else ""
    return {
        "formula": info.formula,
        "range": range_of(info) + steps,
        "read from": READ[source],
        "identified": info.caution or IDENTIFIED[source],
        "no value": (f"where {info.missing}" if info.missing != MeasureInfo.missing else OWN_REASON) + apart,
    }


def _ends(info: MeasureInfo) -> dict[str, str]:
    """What is to be said last of any measure."""
    return {"read beside": info.beside, "what to do": info.use, "source": info.paper}


def _null(info: MeasureInfo, source: str) -> str:
    if info.curve or not (info.null == "rotations" or (source == "weights" and info.has_null)):
        return "none"
    return WORDS[info.null]


def _kernel(info: KernelInfo) -> Section:
    kinds = {"none": "not known to be an inner product", "finite": "finitely many", "infinite": "infinitely many"}
    typed = [
        (each.name, next((word for word, _ in each.words), "…")) for each in info.parameters if each.default is None
    ]
    needed = ",".join(f"{name}={word}" for name, word in typed)
    facts = {
        "log k(q, k)": info.formula,
        "parameters": "; ".join(told_parameters(info.parameters)),
        "k ≥ 0": "yes" if info.positive else "no: rows of attention leave the simplex",
        "k(x, y) = k(y, x)": "yes, where queries and keys are projected alike" if info.symmetric else "no",
        "features": kinds[info.features],
        "fit": fitted(info),
        "keys of one length": info.equal_lengths,
        "caution": info.caution,
        "computed by": info.fused,
        "command": f"swap-kernel --kernel {info.name}{needed and f':{needed}'}",
        "source": info.source,
    }
    return _page(info.name, info.meaning, facts)


def _modifier(kind: str, modifier: Modifier) -> Section:
    hybrid = {
        "kernels": ", ".join(far_kernels()),
        "fit": "--fit: γ of each head, at which near keys have as large a share of the weights as in the model itself",
        "command": f"swap-kernel --kernel elu+{example(modifier.name, modifier.parameters)} --fit",
    }
    facts = {
        {"filter": "keys kept", "hybrid": "weights"}.get(kind, "log k(q_i, k_j)"): modifier.formula,
        "parameters": "; ".join(told_parameters(modifier.parameters)),
        "kind": f"{kind}: it goes with any kernel{' of positive features' if kind == 'hybrid' else ''}",
        **(hybrid if kind == "hybrid" else {}),
        "caution": modifier.caution,
        "source": modifier.source,
    }
    return _page(modifier.name, modifier.meaning, facts)


def _page(name: str, meaning: str, facts: Mapping[str, str]) -> Section:
    items = tuple((word, clean(fact)) for word, fact in facts.items() if fact)
    return Section(clean(name), lines=(clean(meaning),), items=items)
