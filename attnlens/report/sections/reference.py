"""Reference of measures, analyzers, kernels and model types: tables for `attnlens list`, pages for `explain`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from attnlens.analyzers.registry import (
    BETWEEN_FORMS,
    BETWEEN_ROWS,
    NULLS,
    Analyzer,
    Gathering,
    MeasureInfo,
    list_analyzers,
)
from attnlens.arguments import format_argument
from attnlens.errors import UsageError
from attnlens.kernels import FILTERS, HYBRIDS, TIES, Modifier, kernels
from attnlens.kernels.registry import KernelInfo, KernelParameter
from attnlens.kernels.spelling import example, far_kernels, format_default
from attnlens.records.architectures import Architecture
from attnlens.report.sections.section import Section, Table, build_table
from attnlens.wording import NO_VALUE, clean, join_items, short, source_of

DEMO_HEADS = Path(__file__).parent.parent / "demo_heads.json"  # File of `demo_heads`, made by training/demo_heads.py
SYNONYMS = {  # Words that users search for → measure
    **dict.fromkeys(("sink", "sinks", "first token"), "tokens.share_first"),
    **dict.fromkeys(("peaked", "peakedness", "collapse"), "tokens.entropy"),
    **dict.fromkeys(("position", "positional", "distance", "the distance"), "tokens.share_position"),
    **dict.fromkeys(("content", "query × key", "pair"), "tokens.share_content"),
    **dict.fromkeys(("key alone", "the key alone"), "tokens.share_key"),
    "psd": "weights.definiteness",
    "svm": "selection.svm_cosine",
    "copying": "weights.positivity",
    **dict.fromkeys(("low rank", "effective rank", "effective_rank"), "weights.effective_rank"),
    "directions": "tokens.logit_rank90",
    **dict.fromkeys(("gaussian", "gauss"), "rbf"),
}
TERMS = {  # Term used on screens and in reports → explanation
    "null": "Chance: a measure's values for random heads of the same shape (or for random rotations of the head); a "
    "report gives their mean and standard deviation (sd) for one head.",
    "standard error": "The number after ±: the standard deviation of an estimate over repeated choices of windows, or "
    "of texts if there are at least five.",
    "significant": "Differs from chance, or from a threshold, after correction for the number of heads and measures "
    "(false-discovery rate, Benjamini & Hochberg 1995). --fdr sets the rate of `compare`.",
    "p and q": "p is the probability of a difference at least this large if chance alone were at work. q is p "
    "corrected for all heads and measures: the smallest false-discovery rate at which the difference counts as "
    "significant (Benjamini & Hochberg 1995).",
    "att-svm": "The problem min ‖W‖_F subject to q_iᵀW(k_opt(i) − k_j) ≥ 1 for every query i and every other key j "
    "that the query can see, where opt(i) is the key with the largest score. It is the hard-margin SVM that separates "
    "the selected keys (Tarzanagh et al. 2023, Eq. Att-SVM). selection.svm_cosine compares a head with its solution.",
    "windows": "Sequences of consecutive tokens that the model reads at once: --windows sets their number, --length "
    "their length, and --placement whether they are spread over the text or taken from its beginning.",
    "verified": "attnlens recomputes attention from queries and keys, runs the model with it, and states how much "
    "the outputs change; a large change means that the queries and keys were not read correctly.",
    "median": "The middle value over all heads of the report that have a value; summary.medians in a report.",
    "comparison.named": "Number of significant changes that `compare` reports: the 30 in `30 of 863 changes are "
    "significant`. Each is a change of one measure in one head. A rule: 'comparison.named: value == 0'.",
    "comparison.tests": "Number of changes that `compare` tested, of every measure in every head: the 863 in `30 of "
    "863 changes are significant`.",
    "swap.loss.delta": "Change in the loss, in nats per token: the loss with the kernel minus the original loss; "
    "swap.loss.ci95 is its 95 % interval.",
    "summary.medians": "Median over heads of each measure; in a rule, as summary.medians.tokens.entropy.",
    "form M": "M = s·W_Q W_Kᵀ, the bilinear form of a head: the score of a query input x and a key input y is xᵀMy, "
    "plus positions and biases. s is the scale, usually 1/√head_dim.",
    "complete": "Every site and head of the model, or of the part requested, was read; otherwise the reasons follow.",
    "head": "Heads are named LAYER.HEAD, both counted from 0: 3.7 is head 7 of layer 3. In models of "
    "several parts, the part comes first: decoder.3.7.",
    "effect": "What a change does to the model's predictions: the change in the loss with its 95 % interval and, in "
    "`compare`, the KL divergence between both models' predictions. Findings on heads state values and chance instead.",
    "cache": "The keys and values of earlier tokens, which a model keeps while it generates: `ranks` makes the keys "
    "smaller within a loss budget, `swap-kernel --kernel sink-window:4,64` keeps fewer tokens, and `doctor --masks "
    "cache` tests that a pass with the cache gives the same outputs. Findings give its size in bytes or numbers.",
    "site": "One attention computation of the model: a layer's self-attention, or its cross-attention.",
    "loss": "Cross-entropy of the model's predictions, in nats per token; lower is better. Its exponential is "
    "the perplexity.",
    "calibration": "Text on which a kernel's parameters are fitted, ranks are chosen or heads are trained; it is never "
    "part of the evaluated text.",
    "greedy continuation": "Text that the model generates after a prompt by always choosing the most probable token.",
    "latent": "Numbers that a model made by `ranks` caches instead of the keys of one head or of several heads.",
    "budget": "The rise in the loss (or perplexity) that `ranks` allows. The estimated rise plus a margin, twice the "
    "half-width of its 95 % interval, must stay within the budget, so the rise itself is usually smaller.",
    "posed": "The SVM's problem is posed for the 64 most decided queries of a head: for each query, the key with the "
    "largest weight must have a larger score than all other keys.",
    "identified": "A measure is identified if the attention weights determine it. In a causal model, no query is "
    "compared with a later key, so measures of the symmetric part of the scores are not identified.",
    "layer symmetry": "Symmetry of the sum of a layer's forms M over its heads (Saponati et al. 2025); it can differ "
    "greatly from the symmetry of the heads.",
    "kl": "Kullback–Leibler divergence between two distributions, such as the predictions of two models: 0 if they are "
    "equal. In `converge`, the divergence of hard selection (all weight on one key) from the head's softmax.",
    "atlas": "Values of measures in trained models, shipped with attnlens. The HTML page gives a head's percentile "
    "among their heads (of the same part and third of the layers) and, in the column `pct.`, among all "
    "heads of its own model.",
    "z": "Distance of a value from chance: (value − mean of the null) / standard deviation of the null.",
    "nats": "Unit of losses, entropies and KL divergences with the natural logarithm: 1 nat is 1.44 bits.",
}
TERM_SYNONYMS = {
    **dict.fromkeys(("chance", "nulls", "sd"), "null"),
    **dict.fromkeys(("se", "±", "error", "standard errors", "interval"), "standard error"),
    **dict.fromkeys(("significance", "significantly", "fdr", "false-discovery rate"), "significant"),
    **dict.fromkeys(("q", "p", "p-value", "q-value"), "p and q"),
    **dict.fromkeys(("sites", "layer"), "site"),
    "perplexity": "loss",
    "layer_symmetry": "layer symmetry",
    **dict.fromkeys(("not identified", "no value"), "identified"),
    **dict.fromkeys(("hardening", "own kl", "kl divergence"), "kl"),
    **dict.fromkeys(("pct", "pct.", "percentile"), "atlas"),
    **dict.fromkeys(("continuation", "greedy", "greedy continuations"), "greedy continuation"),
    "latents": "latent",
    **dict.fromkeys(("length", "placement"), "windows"),
    "medians": "median",
    **dict.fromkeys(("effects", "cost", "effect size"), "effect"),
    **dict.fromkeys(("kv cache", "kv-cache", "kv_cache", "key-value cache", "caches"), "cache"),
    **dict.fromkeys(("m", "form", "w_q w_k", "form m"), "form M"),
    **dict.fromkeys(("layer.head", "heads"), "head"),
}
NAMED = {"measure", "analyzer", "kernel", "with a kernel", "model type"}  # Titles of columns that identify rows


def measure_list(infos: Iterable[MeasureInfo]) -> Section:
    """List measures and curves with range, meaning and formula; measures of the default analyzers come first."""
    rows = []
    for info in sorted(infos, key=lambda info: (info.name not in _default_measures(), not info.headline)):
        meaning = _join_lines(info.meaning, info.formula, info.caution, info.paper)
        rows.append({"measure": info.name, "range": range_of(info), "meaning": meaning})
    return Section(table=_folded_table(rows))


def analyzer_list(analyzers: Iterable[Analyzer | Gathering]) -> Section:
    """List analyzers with source, question, and the names and number of their measures and curves."""
    rows = []
    for analyzer in analyzers:
        prefixes = f"{analyzer.source}.", f"{analyzer.name}."
        names = [info.name.removeprefix(prefixes[0]).removeprefix(prefixes[1]) for info in analyzer.measures]
        only = "" if analyzer.by_default else f"Runs only with --analyzer {analyzer.name}"
        question = _join_lines(analyzer.question, only, ", ".join(names))
        row = {"analyzer": analyzer.name, "source": analyzer.source, "question": question}
        rows.append(row | {"measures": str(len(names))})
    return Section(table=_folded_table(rows, numbers={"measures"}))


def kernel_list(
    infos: Iterable[KernelInfo], ties: Iterable[Modifier], filters: Iterable[Modifier], hybrids: Iterable[Modifier] = ()
) -> list[Section]:
    """List kernels in command-line syntax with their properties; a second table lists ties, filters and hybrids."""
    kernels = []
    for info in infos:
        facts = (info.meaning, *describe_parameters(info.parameters), describe_fit(info))
        row = {
            "kernel": _syntax(info.name, info.parameters),
            "log k(q, k)": _join_lines(info.formula, *facts, f"computed by {info.fused}", info.source),
            "≥ 0": "yes" if info.positive else "no",
            "sym.": "yes" if info.symmetric else "no",
            "features": info.features,
        }
        kernels.append(row)
    modifiers = []
    for kind, entries in (("tie", ties), ("filter", filters), ("hybrid", hybrids)):
        for entry in entries:
            texts = (f"{kind}: {entry.meaning}", *describe_parameters(entry.parameters), entry.caution, entry.source)
            row = {
                "with a kernel": _syntax(entry.name, entry.parameters),
                "log k(q_i, k_j), or the keys j that query i keeps": _join_lines(entry.formula, *texts),
            }
            modifiers.append(row)
    return [Section(table=_folded_table(kernels)), Section(table=_folded_table(modifiers))]


def architecture_list(measured: str, architectures: Iterable[Architecture]) -> list[Section]:
    """List model types with their level of support; a second table lists what is missing, and why.

    `measured` states the library versions with which the types were run.
    """
    types = list(architectures)
    counts = Counter(entry.read for entry in types)
    coverage = ", ".join(f"{count} {read}" for read, count in counts.most_common())
    titles = ("model type", "read", "through", "positions", "weights.*", "doctor", "swap")  # fields before the reason
    rows = [{title: cell or NO_VALUE for title, cell in zip(titles, entry, strict=False)} for entry in types]
    lines = (
        f"{len(types)} model types, each run as a tiny model with its own configuration ({measured}): {coverage}.",
        "A type is read in part if part of the model is not run, cannot be read or lacks weights.*; reasons are below.",
    )
    reasons = [(entry.model_type, clean(entry.reason)) for entry in types if entry.reason]
    missing = [{"model type": name, "what is missing, and why": reason} for name, reason in reasons]
    table = Section("Model types", lines=lines, table=_folded_table(rows))
    return [table, Section("What is missing", table=_folded_table(missing))]


def _folded_table(rows: Sequence[Mapping[str, str]], numbers: Collection[str] = ()) -> Table | None:
    """Build a table with wrapped cells, aligned left except in the columns `numbers`; return None without rows."""
    titles = {title for row in rows for title in row}
    return build_table(rows, NAMED, titles - {*numbers}, fit="folded")


def _join_lines(first: str, *others: str) -> str:
    return "\n".join(map(clean, (first, *filter(None, others))))


def describe_fit(info: KernelInfo) -> str:
    """Describe a kernel's fit, from the docstring of its class, and whether it is required; "" without a fit."""
    if info.fit is None:
        return ""
    first = (info.fit.__doc__ or "").partition("\n")[0].partition(":")[0]
    chosen = first.removeprefix("Fit of ").removeprefix("Initial ")
    how = "must be fitted" if info.needs_fit else "--fit"
    return f"{how if info.fit_reads else 'trained by heal'}: {chosen}"


def describe_parameters(parameters: Iterable[KernelParameter]) -> list[str]:
    """Return one text per parameter: its name, meaning and range."""
    return [f"{parameter.name}: {parameter.meaning}{_format_range(parameter)}" for parameter in parameters]


def _syntax(name: str, parameters: Sequence[KernelParameter]) -> str:
    """Return a name and, one per line, the parameters with their defaults in command-line syntax: `:gamma=0.5`."""
    pairs = zip(parameters, map(format_default, parameters), strict=True)
    return _join_lines(name, *(f"{',' if n else ':'}{p.name}={default}" for n, (p, default) in enumerate(pairs)))


def _format_range(parameter: KernelParameter) -> str:
    """Format a parameter's range and accepted words in brackets; return "" if the parameter can be any number."""
    choices = [word for word, _ in parameter.words]
    if choices and parameter.high is None:
        return f" ({' or '.join(choices)})"
    even = parameter.even or parameter.multiple_of == 2
    words = ["even"] if even else ["whole"] if parameter.kind is int else []
    words += [] if parameter.low is None else [f"≥ {parameter.low:g}"]
    words += [] if parameter.above is None else [f"> {parameter.above:g}"]
    words += [f"or {word}" for word in choices]
    return f" ({', '.join(words)})" if words else ""


def range_of(info: MeasureInfo) -> str:
    """Describe the possible values of a measure: axis of a curve, categories, or bounds."""
    if info.curve:
        return f"curve over {info.steps}"
    return " | ".join(info.labels) or bounds(info)


READ = {"weights": "the weights alone", "tokens": "queries and keys of forward passes over text"}
EXACT = "none: weights are not sampled"
SAMPLED = "standard error of the mean over windows, or over texts if there are at least five (intervals)"
ONCE = "none: the problem is posed once over all windows (means over windows have a standard error)"
IDENTIFIED = {
    "weights": "in every head: independent of the head's basis",
    "tokens": "in every head: any scores that yield the same attention weights yield the same value",
}


def measure_pages() -> dict[str, Section]:
    """Build the pages of all measures, curves, and distances between two models, keyed by name."""
    analyzers = sorted(list_analyzers(), key=lambda analyzer: not analyzer.by_default)
    pages = {info.name: _measure_section(info, analyzer) for analyzer in analyzers for info in analyzer.measures}
    compared = {"tokens": BETWEEN_ROWS, "weights": BETWEEN_FORMS}
    return pages | {info.name: _distance(info, source) for source, infos in compared.items() for info in infos}


def kernel_pages() -> dict[str, Section]:
    """Build the page of every kernel, tie, filter and hybrid, keyed by name."""
    kinds = {"tie": TIES, "filter": FILTERS, "hybrid": HYBRIDS}
    modifiers = {name: _modifier(kind, each) for kind, entries in kinds.items() for name, each in entries.items()}
    return {name: _kernel(info) for name, info in kernels().items()} | modifiers


def _default_measures() -> set[str]:
    return {info.name for analyzer in list_analyzers() if analyzer.by_default for info in analyzer.measures}


def explanation(name: str) -> Section:
    """Return the page of a measure, kernel or term. Raise UsageError if the name is unknown or ambiguous.

    The source can be omitted: `entropy` is `tokens.entropy`. Measures of the default analyzers take precedence.
    """
    word = name.strip().lower()
    kernel = word.partition(":")[0]
    if kernel in kernel_pages() and "+" not in word:  # with parameters, such as `sink-window:4,64`
        word = kernel
    term = TERM_SYNONYMS.get(word, word)
    if term in TERMS:
        return _page(term, TERMS[term], {})
    pages = measure_pages() | kernel_pages()
    word = word if word in SYNONYMS else word.replace(" ", "_")
    ends = [full for full in pages if full.endswith(f".{word}")]
    default = [full for full in ends if full in _default_measures()]
    for candidates in ([word] if word in pages else [], ends, default, [SYNONYMS.get(word, "")]):
        if len(candidates) == 1 and candidates[0] in pages:
            return pages[candidates[0]]
    if ends:
        raise UsageError(f"{name!r} is the name of several measures.", f"Name one of them: {', '.join(ends)}.")
    measures = [info.name for analyzer in list_analyzers() if analyzer.name == word for info in analyzer.measures]
    if measures:
        raise UsageError(
            f"{name!r} is an analyzer, not a measure.", f"Name one of its measures: {', '.join(measures)}."
        )
    near = get_close_matches(word, [*pages, *(full.rpartition(".")[2] for full in pages), *SYNONYMS, *TERMS], 3)
    hint = f"Did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
    remedy = f"{hint}`attnlens list measures` and `attnlens list kernels` show all names."
    raise UsageError(f"Unknown measure, kernel or term {format_argument(name)}.", remedy)


@cache
def demo_heads() -> dict[str, list[tuple[int, int, float]]]:
    """Map each measure to the (layer, head, value) of its smallest and largest value in the model `demo`."""
    entries: dict[str, list[tuple[int, int, float]]] = json.loads(DEMO_HEADS.read_text(encoding="utf-8"))
    return entries


def _measure_section(info: MeasureInfo, analyzer: Analyzer | Gathering) -> Section:
    error = ONCE if isinstance(analyzer, Gathering) else SAMPLED
    error = "none: a curve is the mean over windows" if info.curve else error
    wholes = [
        [measure.name for measure in analyzer.measures if whole in measure.wholes and measure is not info]
        for whole in info.wholes
    ]
    has_null = info.null == "rotations" or (analyzer.source == "weights" and info.has_null)
    needs_base = isinstance(analyzer, Analyzer) and analyzer.needs_base
    runs = f"{'if the model has an adapter, or' if needs_base else 'only'} with --analyzer {analyzer.name}"
    facts = {
        "error": EXACT if analyzer.source == "weights" else error,
        "null": null_words([info]) if has_null and not info.curve else "none",
        "sums to 1": "; ".join(f"with {', '.join(parts)}" for parts in wholes),
        "analyzer": f"{analyzer.name}: {analyzer.question}",
        "runs": "in a plain inspect" if analyzer.by_default else runs,
        "definitions": analyzer.definitions,
    }
    return _measure_page(info, analyzer.source, facts)


def _distance(info: MeasureInfo, source: str) -> Section:
    paired = "over windows, which both models share (intervals='texts': over texts)"
    facts = {
        "error": paired if source == "tokens" else EXACT,
        "null": "0 for equal heads; changes count only beyond the rounding error of the stored number type",
        "runs": "in compare",
    }
    return _measure_page(info, source, facts)


def _measure_page(info: MeasureInfo, source: str, facts: Mapping[str, str]) -> Section:
    """Build the page of a measure, or of a distance between two models; `facts` are further (name, text) items."""
    steps = f"; each {bounds(info)}" if info.curve else ""
    reason = f"if {info.missing}" if info.missing != MeasureInfo.missing else "the report states the reason"
    low, high = info.scale
    ends = zip(("smallest", "largest"), demo_heads().get(info.name, ()), strict=False)
    examples = [f"{which} {short(value)} (layer {layer} head {head})" for which, (layer, head, value) in ends]
    first = {
        "low": low,
        "high": high,
        "in demo": ", ".join(examples),
        "what to do": info.use,
        "formula": info.formula,
        "range": range_of(info) + steps,
        "read from": READ[source],
        "identified": info.caution or IDENTIFIED[source],
        "no value": reason + ", or for cross-attention" * info.self_only,
    }
    last = {"compare with": info.beside, "source": info.paper}
    return _page(info.name, info.meaning, {**first, **facts, **last})


def _kernel(info: KernelInfo) -> Section:
    kinds = {"none": "not known to be an inner product", "finite": "finitely many", "infinite": "infinitely many"}
    required = [each for each in info.parameters if each.default is None]
    needed = ",".join(f"{each.name}={each.words[0][0] if each.words else '…'}" for each in required)
    facts = {
        "log k(q, k)": info.formula,
        "parameters": "; ".join(describe_parameters(info.parameters)),
        "k ≥ 0": "yes" if info.positive else "no: attention weights can be negative",
        "k(x, y) = k(y, x)": "yes, if queries and keys have the same projection" if info.symmetric else "no",
        "features": kinds[info.features],
        "fit": describe_fit(info),
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
        "fit": "--fit: γ per head, so that near keys have the same total weight as in the original model",
        "command": f"swap-kernel --kernel elu+{example(modifier.name, modifier.parameters)} --fit",
    }
    facts = {
        {"filter": "keys kept", "hybrid": "weights"}.get(kind, "log k(q_i, k_j)"): modifier.formula,
        "parameters": "; ".join(describe_parameters(modifier.parameters)),
        "kind": f"{kind}: combines with any kernel{' of positive features' if kind == 'hybrid' else ''}",
        **(hybrid if kind == "hybrid" else {}),
        "caution": modifier.caution,
        "source": modifier.source,
    }
    return _page(modifier.name, modifier.meaning, facts)


def _page(name: str, meaning: str, facts: Mapping[str, str]) -> Section:
    items = tuple((word, clean(fact)) for word, fact in facts.items() if fact)
    return Section(clean(name), lines=(clean(meaning),), items=items)


def bounds(info: MeasureInfo) -> str:
    """Format the range of a measure's possible values: `−1 to 1`, or `any` if no bound is known."""
    if info.low is None and info.high is None:
        return "any"
    low = "−∞" if info.low is None else f"{info.low:g}".replace("-", "−")
    high = "∞" if info.high is None else f"{info.high:g}"
    return f"{low} to {high}"


def null_words(measures: Iterable[MeasureInfo]) -> str:
    """Describe the nulls of these measures; if there are both kinds, name the sources that use random rotations."""
    kinds = {source_of(info.name): info.null for info in measures}
    if len(set(kinds.values())) < 2:
        return NULLS[next(iter(kinds.values()), "factors")]
    rotated = join_items(f"{source}.*" for source, kind in kinds.items() if kind == "rotations")
    return f"{NULLS['factors']}, for {rotated} {NULLS['rotations']}"
