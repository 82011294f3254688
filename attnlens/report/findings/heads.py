"""Findings of an inspection: how many heads differ from chance, and by how much.

Each head has one two-sided test per measure. Values of weights.* and selection.* are tested against draws of the null
(Student's t with draws − 1 degrees of freedom), values of tokens.* against a threshold (Student's t over windows or
texts). The p-values of all heads and measures are corrected together (Benjamini & Hochberg 1995). A difference is
significant if q ≤ LEVEL. If no head differs from chance, at most 5 % of runs report a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from shlex import quote
from typing import TYPE_CHECKING

import numpy as np

from attnlens.analyzers.registry import NULL_DRAWS, Analyzer, Gathering, list_analyzers
from attnlens.records import Finding, Head, Report, Severity
from attnlens.report.shapes import MeasureMap, Shapes, middle
from attnlens.wording import capitalise, decimals_for, format_count, format_number, join_items, short, title_of

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SPACES = {"selection.svm_cosine": "on the inputs", "selection.projected_svm_cosine": "on queries and keys"}
"""Measure (cosine similarity of a head and its SVM) → space in which the SVM is computed."""
SEPARATED = {
    "selection.svm_cosine": "On the inputs, the SVM separates the hidden states that the module reads.",
    "selection.projected_svm_cosine": "On queries and keys, the SVM separates the keys.",
}
"""Measure (cosine similarity of a head and its SVM) → sentence on the vectors that the SVM separates."""
CHANCE = ("weights.symmetry", "weights.definiteness", "weights.effective_rank", *SPACES)
"""Measures that are tested against chance, their null distribution."""
SHARES = {  # Share of the variance of the scores → name of this part, and an explanation in brackets
    "tokens.share_key": ("the key alone", ""),
    "tokens.share_position": ("position", " (distance)"),
    "tokens.share_content": ("content", " (query × key)"),
}
LEVEL = 0.02
"""False-discovery rate. It is below 5 % because the measures of small random heads (head_dim 8) have heavier tails than
Student's t: at 0.05, 9 % of runs on random weights would report a difference."""
ADAPTED = "adapter.change"  # Relative change of M by an adapter
FEW_DECIDED = 0.1  # Share of queries with one dominant key below which the SVM describes few of a head's queries
HALF = 0.5  # Threshold for tokens.*: half of the entropy's range, of the variance, or of the weight
SLIGHT = 0.25  # Symmetry, or excess of a cosine over chance, below which a difference is called slight
SLIGHTLY_LOWER = 0.1  # Relative distance of a rank below chance, up to which the difference is called slight
THRESHOLD = ("tokens.entropy", "tokens.share_first", *SHARES)  # Measures that are tested against HALF
ROUNDING = 1e-9  # Relative size up to which an error is only rounding of a constant value
MOST_HEADS = 3  # Number of heads up to which all are named
MOST_LAYERS = 2  # Number of layers up to which all are named; beyond it, only the one with the largest share


@dataclass(frozen=True)
class HeadTests:
    """Significance tests of every head of a report against chance or a threshold."""

    shapes: Shapes

    @cached_property
    def signs(self) -> dict[str, Int[np.ndarray, " heads"]]:
        """Sign per measure and head: 1 or −1 if significantly above or below chance or the threshold, otherwise 0."""
        from scipy.special import stdtr  # not scipy.stats, whose import takes a third of a second

        names = [name for name in (*CHANCE, *THRESHOLD) if name in self.shapes.readings]
        if not names:
            return {}
        differences, errors, freedom = (np.stack(part) for part in zip(*map(self._compare, names), strict=True))
        with np.errstate(divide="ignore", invalid="ignore"):
            p = 2 * stdtr(freedom, -np.abs(differences / errors))
        tested = np.isfinite(p)
        q = np.ones_like(p)
        q[tested] = _adjust(p[tested])
        significant = np.where(tested & (q <= LEVEL), np.sign(differences), 0)
        return {name: row.astype(int) for name, row in zip(names, significant, strict=True)}

    def _compare(self, name: str) -> tuple[Float[np.ndarray, " heads"], Float[np.ndarray, " heads"], np.ndarray]:
        """Return each head's difference from chance or threshold, its standard error, and its degrees of freedom."""
        report, reading, cells = self.shapes.report, self.shapes.readings[name], self.shapes.cells
        value = reading.values[cells]
        if name in CHANCE:
            draws, sd = NULL_DRAWS[reading.info.null], reading.null_sds[cells]
            # the null's mean is itself a mean over draws
            error = np.where(sd > 0, sd, np.nan) * (1 + 1 / draws) ** 0.5
            return value - reading.null_means[cells], error, np.full(len(value), draws - 1)
        error = reading.errors[cells]
        counts = [head.measures[name].n or 0 if name in head.measures else 0 for head in report.heads]
        freedom = np.array([max(1, report.settings.freedom(count)) for count in counts])
        return value - HALF, np.where(error > 0, error, np.nan), freedom

    def heads(self, name: str, sign: int) -> list[Head]:
        """Return the heads whose value is significantly above (`sign` 1) or below (−1) chance or the threshold."""
        if name not in self.signs:
            return []
        return [head for head, each in zip(self.shapes.report.heads, self.signs[name], strict=True) if each == sign]


def _adjust(p: Float[np.ndarray, " tests"]) -> Float[np.ndarray, " tests"]:
    """Compute the q-value of each p-value (Benjamini & Hochberg 1995)."""
    order = np.argsort(p)[::-1]
    q = np.empty_like(p)
    q[order] = np.minimum.accumulate(p[order] * len(p) / np.arange(len(p), 0, -1))
    return q


def findings(shapes: Shapes) -> Iterator[Finding]:
    """Yield a finding on any adapter, the answers to QUESTIONS, and medians of measures that these do not cover."""
    tests = HeadTests(shapes)
    questions = (_adapted, *QUESTIONS) if shapes.report.model.adapter is not None else QUESTIONS
    answered = [finding for question in questions if (finding := question(tests)) is not None]
    yield from answered
    names = {name for finding in answered for name in finding.measures}
    groups = [(entry, {info.name for info in entry.measures}) for entry in list_analyzers()]
    # a report can also contain measures of analyzers that are not registered here
    covered = set[str]().union(*(group for entry, group in groups if _is_standard(entry) or group & names))
    others = [reading for name, reading in shapes.readings.items() if name not in covered or not answered]
    yield from _medians(others, shapes)


def _adapted(tests: HeadTests) -> Finding | None:
    if (reading := tests.shapes.readings.get(ADAPTED)) is None:
        return None
    count = int((reading.present > 0).sum())
    answer = f"M changed in {count} of {_count(reading)}."
    evidence = f"‖ΔM‖/‖M‖: median {_middle(reading)}, largest {short(float(reading.present.max()))}."
    return _finding("Adapter?", answer, evidence, [ADAPTED], notable=count > 0)


def _symmetric(tests: HeadTests) -> Finding | None:
    """Count the heads that are more symmetric, antisymmetric or definite than expected by chance."""
    name = "weights.symmetry"
    if (reading := tests.shapes.readings.get(name)) is None or reading.null is None:
        return None
    above, below = tests.heads(name, 1), tests.heads(name, -1)
    marked = above or below
    values = [(value, head) for head in marked if (value := head.measures[name].value) is not None]
    median = float(np.median([value for value, _ in values])) if values else None
    typical = _middle(reading) if median is None else short(median)
    slight = median is not None and abs(median) < SLIGHT
    large = sum(abs(value) > HALF for value, _ in values)
    degree = "slightly " if slight and not large else ""
    parts = [f"{_format_share(above, reading)} {degree if above else ''}more symmetric than chance"]
    parts[0] += f"{_places(tests.shapes, above)}{', most only slightly' if above and slight and large else ''}"
    if below:
        degree = "" if above else degree
        parts.append(f"{degree}more antisymmetric: {format_count(len(below), 'head')}{_places(tests.shapes, below)}")
    answer = f"{'; '.join(parts)}."
    if reading.present.size > 1:
        for side, place in ((1, "above 0.5"), (-1, "below −0.5")):
            count = int((side * reading.present > HALF).sum())
            answer += f" {format_count(count, 'head')} {'are' if count > 1 else 'is'} {place}." if count else ""
    scope = f"Median of the {len(marked)}:" if len(marked) > 1 else _noun(reading)
    evidence = f"{scope} {typical} ({'1: symmetric' if above or not below else '−1: antisymmetric'}); {_null(reading)}."
    if len(values) > MOST_HEADS:
        extremes = _name_extremes(values, tests.shapes, 1 if above else -1)
        evidence += f" {'Highest' if above else 'Lowest'}: {extremes}."
    counts = {
        sign: len(tests.heads("weights.definiteness", side)) for sign, side in (("positive", 1), ("negative", -1))
    }
    if signs := [sign for sign, count in counts.items() if count]:
        if reading.present.size == 1:
            evidence += f" More {signs[0]} definite than chance."
        else:
            evidence += f" Definiteness: {format_count(counts['positive'], 'head')} above chance, "
            evidence += f"{counts['negative']} below."
    measures = [name, "weights.definiteness"]
    return _finding("Symmetric?", answer, evidence, measures, notable=bool(marked))


def _peaked(tests: HeadTests) -> Finding | None:
    """Count the heads whose entropy lies significantly below ½, and the heads that attend mostly to the first key."""
    name = "tokens.entropy"
    if (reading := tests.shapes.readings.get(name)) is None:
        return None
    below, first = tests.heads(name, -1), tests.heads("tokens.share_first", 1)
    evidence = f"{_noun(reading)} {_middle(reading, tests.shapes)} (0: one key, 1: even)."
    if first:
        evidence += f" Most weight on the first token, a sink: {format_count(len(first), 'head')}."
    answer = f"{_format_share(below, reading)} peaked: entropy below ½{_places(tests.shapes, below)}."
    if reading.present.size == 1 and not below:
        answer = "The head is not peaked: its entropy is not significantly below ½."
    return _finding("Peaked?", answer, evidence, [name, "tokens.share_first"], notable=bool(below or first))


def _by_content(tests: HeadTests) -> Finding | None:
    """Count the heads whose scores depend mostly on the key, on the distance, or on query and key together."""
    readings = {name: tests.shapes.readings[name] for name in SHARES if name in tests.shapes.readings}
    if not readings:
        return None
    ruled = sorted(((len(tests.heads(name, 1)), name) for name in readings), reverse=True)
    counts = [("".join(SHARES[name]), count) for count, name in ruled if count]
    size = max(reading.present.size for reading in readings.values())  # heads of cross-attention have no distances
    of, single, half = format_count(size, "head"), size == 1, "most of the score variance"
    answer = f"Undecided: no part alone significantly explains {half}" + ("" if single else f" in any of {of}")
    if counts:
        (part, count), *others = counts
        answer = f"{capitalise(part)} explains {half}" + ("" if single else f" in {count} of {of}")
        answer += "".join(f", {part} in {count}" for part, count in others)
        undecided = size - sum(count for _, count in counts)
        answer += f", undecided in {undecided}" if undecided else ""
    parts = "; ".join(
        f"{SHARES[name][0].removeprefix('the ').removesuffix(' alone')} {_percent(reading, tests.shapes)}"
        for name, reading in sorted(readings.items(), key=lambda item: -middle(item[1].values))
    )
    name = "Shares" if single else "Medians"
    scope = f"{name} ± se" if readings.keys() & tests.shapes.report.summary.median_errors.keys() else name
    return Finding(
        question="By content or position?", answer=f"{answer}.", evidence=f"{scope}: {parts}.", measures=list(readings)
    )


def _low_rank(tests: HeadTests) -> Finding | None:
    name = "weights.effective_rank"
    if (reading := tests.shapes.readings.get(name)) is None or reading.null is None:
        return None
    below = tests.heads(name, -1)
    evidence = (
        f"{'Median effective' if reading.present.size > 1 else 'Effective'} rank {_middle(reading)}; {_null(reading)}."
    )
    if (needed := tests.shapes.readings.get("tokens.logit_rank90")) is not None:
        evidence += f" On text, {_middle(needed, tests.shapes)} directions keep 90 % of the scores."
    places = _places(tests.shapes, below) if len(below) < reading.present.size else ""
    degree, size = "", ""
    if below:
        shares = [value / chance for value, chance in _pair_with_null(below, name)]
        lower = 1 - float(np.median(shares))
        degree = "slightly " if lower < SLIGHTLY_LOWER else ""
        size = f": {'' if len(below) == 1 else 'median '}{100 * lower:.2g} % lower"
    answer = f"{_format_share(below, reading)} of {degree}lower rank than chance{places}{size}."
    return _finding("Low rank?", answer, evidence, [name, "tokens.logit_rank90"], notable=bool(below))


def _like_svm(tests: HeadTests) -> Finding | None:
    """Count the heads that are closer to their max-margin SVM than randomly rotated heads are to theirs."""
    names = [name for name in SPACES if name in tests.signs and tests.shapes.readings[name].null is not None]
    if not names:
        return None
    parts, evidence = [], []
    for name in names:
        reading, above = tests.shapes.readings[name], tests.heads(name, 1)
        rises = [value - chance for value, chance in _pair_with_null(above, name)]
        degree = "slightly " if rises and float(np.median(rises)) < SLIGHT else ""
        closer = f"{degree}closer to the SVM than expected by chance"
        parts.append(f"{_format_share(above, reading)} {closer} {SPACES[name]}")
        evidence.append(f"{_middle(reading)} {SPACES[name]}, {_null(reading)}")
    median = "Cosine" if len(tests.shapes.report.heads) == 1 else "Median cosine"
    text = f"{median} (1: the SVM) {'; '.join(evidence)}."
    if (decided := tests.shapes.readings.get("selection.decided")) is not None:
        text += f" {_percent(decided)} of the queries give one key at least half of their weight."
        if middle(decided.values) < FEW_DECIDED:
            text += " The SVM describes so few queries that other windows may lead to a different verdict."
    text = " ".join((text, *(SEPARATED[name] for name in names)))
    shares = [len(tests.heads(name, 1)) / tests.shapes.readings[name].present.size for name in names]
    verdict = "Not shown" if max(shares) == 0 else "Yes" if min(shares) == 1 else "Partly"
    answer = "; ".join(f"{part[0].lower()}{part[1:]}" for part in parts)
    return _finding("Selects like an SVM?", f"{verdict}: {answer}.", text, names, notable=max(shares) > 0)


def _is_standard(entry: Analyzer | Gathering) -> bool:
    """Return True for a built-in analyzer that runs by default."""
    owner = entry.begin if isinstance(entry, Gathering) else entry.function
    return entry.by_default and owner.__module__.startswith("attnlens.")


QUESTIONS = (_symmetric, _peaked, _by_content, _low_rank, _like_svm)


def _medians(readings: Iterable[MeasureMap], shapes: Shapes) -> Iterator[Finding]:
    """Yield findings with medians, or counts of categories, for up to three measures that differ between heads."""
    varying = [reading for reading in readings if not reading.constant]
    for reading in [each for each in varying if each.info.headline][:3] or varying[:3]:
        evidence = ""
        if reading.labels:
            names = Counter(reading.labels[round(value)] for value in reading.present.tolist())
            answer = join_items((f"{name} {count}" for name, count in names.most_common()), 5)
        else:
            low, high = (short(float(end(reading.present))) for end in (np.min, np.max))
            answer = f"Median {_middle(reading, shapes)}, from {low} to {high}, {_count(reading)}"
            evidence = f"{capitalise(reading.info.meaning)}. " if reading.info.meaning else ""
            evidence = (evidence + _name_highest(reading.name, shapes)).rstrip()
        question = f"{title_of(reading.name).capitalize()}?"
        yield Finding(question=question, answer=f"{answer}.", evidence=evidence, measures=[reading.name])


def _name_highest(name: str, shapes: Shapes) -> str:
    """Name the MOST_HEADS heads with the largest values of a measure; "" if there are not more heads than that."""
    measured = [(head.measures[name].value, head) for head in shapes.report.heads if name in head.measures]
    values = [(value, head) for value, head in measured if value is not None]
    return f"Highest: {_name_extremes(values, shapes)}." if len(values) > MOST_HEADS else ""


def _name_extremes(values: Iterable[tuple[float, Head]], shapes: Shapes, sign: int = 1) -> str:
    """Name the MOST_HEADS heads with the highest or, if `sign` is −1, lowest values: `3.7 (0.078), 3.2 (0.077)`."""
    ranked = sorted(values, key=lambda pair: -sign * pair[0])
    return ", ".join(f"{shapes.name_head(head)} ({short(value)})" for value, head in ranked[:MOST_HEADS])


def _finding(question: str, answer: str, evidence: str, measures: list[str], *, notable: bool) -> Finding:
    severity: Severity = "notable" if notable else "none"
    return Finding(question=question, answer=answer, evidence=evidence, severity=severity, measures=measures)


def _format_share(heads: Sequence[Head], reading: MeasureMap) -> str:
    """Begin a sentence with the number of `heads` among all heads with a value: `8 of 32 heads are`."""
    if reading.present.size == 1:
        return f"The head is{'' if heads else ' not'}"
    return f"{len(heads) or 'None'} of {_count(reading)} {'are' if len(heads) > 1 else 'is'}"


def _count(reading: MeasureMap) -> str:
    return format_count(reading.present.size, "head")


def _pair_with_null(heads: Sequence[Head], name: str) -> list[tuple[float, float]]:
    """Return (value, mean of the null) of a measure for each head that has both."""
    measures = [head.measures[name] for head in heads]
    return [(each.value, each.null.mean) for each in measures if each.value is not None and each.null is not None]


def _noun(reading: MeasureMap) -> str:
    return "Median" if reading.present.size > 1 else "Value"


def _middle(reading: MeasureMap, shapes: Shapes | None = None) -> str:
    """Format a measure's median over heads, with its standard error if the report in `shapes` contains one."""
    value = middle(reading.values)
    error = None if shapes is None else shapes.report.summary.median_errors.get(reading.name)
    if error:
        return with_error(value, error)
    if reading.null is None or not reading.null[1]:
        return short(value)
    return format_number(value, min(decimals_for([value]), _null_decimals(*reading.null)))


def _percent(reading: MeasureMap, shapes: Shapes | None = None) -> str:
    error = None if shapes is None else shapes.report.summary.median_errors.get(reading.name)
    value = 100 * middle(reading.values)
    return f"{with_error(value, 100 * error) if error else f'{value:.0f}'} %"


def with_error(value: float, error: float) -> str:
    """Format value ± error, with two significant digits of the error; omit an error that is only rounding."""
    if error < ROUNDING * abs(value):
        return short(value)
    decimals = decimals_for([error], 2)
    return f"{format_number(value, decimals)} ± {format_number(error, decimals)}"


def _null(reading: MeasureMap) -> str:
    """Format the medians over heads of the null's mean and sd: `chance for one head 0.01 (sd 0.02)`."""
    mean, sd = reading.null or (0.0, 0.0)
    decimals = _null_decimals(mean, sd)
    scope = "" if reading.present.size == 1 else " for one head"
    return f"chance{scope} {format_number(mean, decimals)} (sd {format_number(sd, decimals)})"


def _null_decimals(mean: float, sd: float) -> int:
    """Choose the decimals of a null: one or two significant digits of the sd or, if the sd is 0, two of the mean."""
    if not sd:
        return decimals_for([mean], 2)
    return min(decimals_for([sd], 2), max(decimals_for([mean]), decimals_for([sd], 1)))


def _places(shapes: Shapes, heads: Sequence[Head]) -> str:
    """Name in brackets the heads if few, else the exceptions if few, else the layers with the largest shares."""
    counts = Counter(head.layer for head in heads)
    totals = Counter(head.layer for head in shapes.report.heads)
    if not counts or len(shapes.report.heads) == 1:
        return ""
    chosen = {(head.layer, head.head) for head in heads}
    others = [shapes.name_head(head) for head in shapes.report.heads if (head.layer, head.head) not in chosen]
    if len(heads) <= MOST_HEADS:
        return f" ({', '.join(map(shapes.name_head, heads))})"
    if 0 < len(others) <= MOST_HEADS:
        return f" (all but {', '.join(others)})"
    if len(totals) < 2:
        return ""
    ranked = sorted(counts, key=lambda layer: (-counts[layer] / totals[layer], layer))
    named = [
        f"layer {shapes.report.model.layer_name(layer)}: {counts[layer]} of {totals[layer]}"
        for layer in ranked[: MOST_LAYERS if len(ranked) <= MOST_LAYERS else 1]
    ]
    return f" ({'most in ' if len(ranked) > MOST_LAYERS else ''}{', '.join(named)})"


def next_commands(shapes: Shapes) -> Iterator[str]:
    """Yield commands that follow up the findings, such as swapping a kernel to measure its effect on the loss."""
    report, tests = shapes.report, HeadTests(shapes)
    model = model_argument(report) + ("" if shapes.written is None else shapes.written.options("text"))
    predicts = "LM" in report.model.architecture or "For" in report.model.architecture
    if predicts and tests.heads("weights.effective_rank", -1):
        yield f"attnlens ranks {model} --budget loss:1%"
    if tests.heads("weights.symmetry", 1) or tests.heads("weights.symmetry", -1):
        yield f"attnlens swap-kernel {model} --kernel symmetric"
    if tests.heads("tokens.share_first", 1):
        yield f"attnlens swap-kernel {model} --kernel sink-window:4,64"
    selected = any(name.startswith("selection.") for name in shapes.readings)
    if selected:
        yield f"attnlens converge {model} --head {shapes.name_head(report.heads[0])}"
    if report.summary.extremes:
        extreme = report.summary.extremes[0]
        yield f"attnlens inspect {model} --head {shapes.name_head(extreme)} --show attention --html head.html"
    yield f"attnlens swap-kernel {model} --kernel rbf"
    if not selected:
        yield f"attnlens inspect {model} --analyzer selection"


def model_argument(report: Report) -> str:
    """Format the model, and its adapter if there is one, as command-line arguments."""
    adapter = report.model.adapter
    return quote(report.model.id) + ("" if adapter is None else f" --adapter {quote(adapter.id)}")
