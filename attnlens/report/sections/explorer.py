"""Build the data for the interactive part of an HTML page, and sections on the tokens that single heads select."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from attnlens.analyzers.registry import OWN_ROWS
from attnlens.choices import WHERE_POSED
from attnlens.records import AttentionRows, Pick, Report, Sentence
from attnlens.report import atlas
from attnlens.report.findings.heads import CHANCE
from attnlens.report.sections.layers import missing_reason
from attnlens.report.sections.section import Passage, Piece, Section, View, section
from attnlens.report.shapes import MeasureMap, Shapes, group_of
from attnlens.wording import clean, decimals_with_error, group_pairs, join_items, short, source_of, title_of

if TYPE_CHECKING:
    from jaxtyping import Float


AROUND = 3  # Number of tokens shown on each side of a marked token
SIGNS = {"selected": ("[", "]"), "support": ("{", "}"), "query": ("<", ">")}
"""Kind of mark → signs around a marked token; a token can have several marks."""
LEGEND = "<query> [selected token] {support vector among the other tokens}; …: omitted tokens"


@section(70, "inspection", ("screen",))
def selections(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield a section per selection, with up to five queries, their selected tokens and support vectors in context."""
    for selection in shapes.report.inspection.selections:
        queries = "1 query" if len(selection.picks) == 1 else f"{len(selection.picks)} queries"
        sentences = {sentence.sequence: sentence for sentence in selection.sentences}
        first = {pick.sequence: pick for pick in reversed(selection.picks)}  # the most decided query of each sequence
        passages: list[Passage] = []  # of at most five queries; the report's JSON contains all
        for pick in sorted(selection.picks, key=lambda pick: pick is not first[pick.sequence])[:5]:
            place = f"sequence {pick.sequence}, token {pick.query}"
            caption = f"{place}: weight {short(pick.weight)}, margin {short(pick.margin)}"
            passages.append((caption, [*_pieces(pick, sentences.get(pick.sequence))]))
        yield Section(
            f"What layer {shapes.report.model.layer_name(selection.layer)} head {selection.head} selects",
            notes=(
                f"The SVM is posed {WHERE_POSED[selection.space]}, for the {queries} with the largest weights. Weight: "
                "the model's own attention weight on the selected token, which is the largest but can be small. "
                "Margins are divided by the best possible margin, that of the SVM: a head's smallest margin is at most "
                "1, but a single query's can exceed 1.",
                LEGEND,
            ),
            passages=passages,
        )


def _pieces(pick: Pick, sentence: Sentence | None) -> Iterator[Piece]:
    """Yield the pieces of a sentence with their marks; without a sentence, yield one piece with token positions."""
    marks = [*((place, "selected") for place in pick.selected), *((place, "support") for place in pick.support)]
    if sentence is None:
        yield f"token {pick.query} selects {join_items(pick.selected)}; support: {join_items(pick.support, 20)}", ()
    elif sentence.queries is None:
        yield from _mark_tokens(sentence.keys, group_pairs([*marks, (pick.query, "query")]))
    else:
        yield from _mark_tokens(sentence.queries, {pick.query: ["query"]})
        yield "\n", ()
        yield from _mark_tokens(sentence.keys, group_pairs(marks))


def _mark_tokens(tokens: list[str], kinds: dict[int, list[str]]) -> Iterator[Piece]:
    near = {place + step for place in kinds for step in range(-AROUND, AROUND + 1)}
    before = ""
    for place, token in enumerate(tokens):
        if place not in near:
            before = before if before.endswith("… ") else f"{before}… "
            continue
        yield before, ()
        text, before = clean(token), " "
        for kind in kinds.get(place, []):
            left, right = SIGNS[kind]
            text = f"{left}{text}{right}"
        yield text, tuple(kinds.get(place, []))
    if before.endswith("… "):
        yield before.rstrip(), ()


MOST_STEPS = 400_000  # Largest number of curve values on a page; if there are more, curves keep evenly spaced steps
VALUE_DIGITS, ERROR_DIGITS, CURVE_DIGITS = 5, 3, 4
"""Significant digits of values, errors and curves on the page; the report's numbers have nine."""
Numbers = list[float | None]
COMPARED = ("compare", "change")
"""Sources of measures that compare two models, which the page lists before measures of the second model."""


def explorer(shapes: Shapes) -> dict[str, object] | None:
    """Build the data for the page's interactive part; return None if no measure has a value."""
    from attnlens.report.pictures import maps  # imported in functions here and below because it loads matplotlib

    report = shapes.report
    if not shapes.readings:
        return None
    places = [*zip(*shapes.cells, strict=True)]
    names = sorted(shapes.readings, key=lambda name: (name != OWN_ROWS, name.split(".")[0] not in COMPARED))
    sections = zip(report.inspection.selections, selections(shapes, "page"), strict=True)
    return {
        "layers": [int(number) for number in shapes.layer_numbers],  # numbers within the parts: the rows of the map
        "names": shapes.layer_names,  # names of the layers, unique among all parts
        "parts": list(shapes.parts),  # part of the model to which each row belongs
        "columns": list(shapes.heads),  # head numbers: the columns of the map
        "places": places,  # row and column of each head, in the order of all lists by head
        "key_heads": [head.kv_head for head in report.heads],
        "sites": {row: clean(head.site) for head, (row, _) in zip(report.heads, places, strict=True)},
        "measures": [_measure(shapes, shapes.readings[name]) for name in names],  # the most informative first
        "curves": [_curve(shapes, name) for name in shapes.curves],
        "wholes": [  # sets of measures that sum to 1, with the name and colour of each part
            {
                "title": maps.heading_of_shares(shapes, whole),
                "group": group_of(shapes.info(names[0])),
                "parts": [(clean(name), *style) for name, style in zip(names, maps.named_parts(names), strict=True)],
            }
            for whole, names in shapes.shares.items()
        ],
        "selections": {shapes.name_head(entry): section for entry, section in sections},
        "attention": {shapes.name_head(entry): _rows(entry) for entry in report.inspection.attention},
    }


def _measure(shapes: Shapes, reading: MeasureMap) -> dict[str, object]:
    from attnlens.report.pictures import maps

    heads = shapes.report.heads
    info = reading.info
    why = [missing_reason(head, reading.name) for head in heads]

    def pack(values: Float[np.ndarray, "layers heads"], digits: int) -> Numbers:
        return [] if np.isnan(values).all() else round_significant(values[shapes.cells], digits)

    reasons = list(dict.fromkeys(filter(None, why)))
    return {
        "name": clean(reading.name),
        "title": title_of(reading.name),
        "group": group_of(info),
        "meaning": clean(info.meaning),
        "formula": clean(info.formula),
        "caution": clean(info.caution),
        "decimals": decimals_with_error(reading.present.tolist(), reading.error),  # −1: scientific notation
        "values": round_significant(reading.values[shapes.cells], VALUE_DIGITS),
        "errors": pack(reading.errors, ERROR_DIGITS),  # empty if no head has an error
        "null_means": pack(reading.null_means, VALUE_DIGITS),
        "null_sds": pack(reading.null_sds, ERROR_DIGITS),
        "typical": _typical_places(shapes.report, reading.name),  # percentiles among heads of other trained models
        "reasons": [clean(reason) for reason in reasons],
        "why": [reasons.index(reason) if reason else -1 for reason in why] if reasons else [],  # index of the reason
        "labels": {number: clean(label) for number, label in reading.labels.items()},  # category number → name
        "palette": maps.palette(reading),
        # 1 or −1 for each head that is significantly above or below chance, otherwise 0; empty if not tested
        "signs": maps.compare_with_chance(shapes, reading.name)[shapes.cells].tolist()
        if reading.name in CHANCE
        else [],
    }


def _typical_places(report: Report, measure: str) -> list[float | None]:
    """Return the percentile of each head's value among comparable atlas heads, or None; return [] if all are None."""
    if report.command != "inspect":  # in other reports heads are retrained, or their values are changes
        return []
    depths = atlas.depths(report)
    places: list[float | None] = []
    subjects = {part: atlas.subject_of(report, part) for part in {head.part for head in report.heads}}
    for head in report.heads:
        value = head.measures[measure].value if measure in head.measures else None
        shared = source_of(measure) == "weights" and atlas.shares_weights(head)
        reference = atlas.reference(measure, "all" if shared else depths[head.layer], subjects[head.part])
        place = None if value is None else reference.percentile(value)
        places.append(None if place is None else round(place))
    return places if any(place is not None for place in places) else []


def _curve(shapes: Shapes, name: str) -> dict[str, object]:
    from attnlens.report.pictures import maps

    info, curves = shapes.info(name), shapes.curves[name]
    length = max(len(curve) for _, curve in curves)
    count = min(length, max(24, MOST_STEPS // (len(curves) * len(shapes.curves))))
    indices = sorted({round(step) for step in np.linspace(0, length - 1, count).tolist()})
    parts = maps.groups_by_part(shapes, name)
    medians = [part.quartiles[1] for part in parts]
    return {
        "title": title_of(name) + (f" of {clean(info.matrix)}" if info.matrix else ""),
        "meaning": clean(info.meaning),
        "formula": clean(info.formula),
        "axis": "index k" if info.steps == "index" else clean(info.steps),
        "steps": [int(step) + maps.first_step(info) for step in indices],  # the selected steps
        "length": length,  # number of steps before the selection
        "logarithmic": maps.falls_far(np.concatenate([curve for _, curve in curves]), medians),
        "quartiles": {part.title: [_line(line, indices) for line in part.quartiles.tolist()] for part in parts},
        "lines": [_line(head.curves.get(name, []), indices) for head in shapes.report.heads],
    }


def _line(curve: list[float], steps: Iterable[int]) -> Numbers:
    return round_significant([curve[step] for step in steps if step < len(curve)], CURVE_DIGITS)


def round_significant(numbers: Iterable[float] | Float[np.ndarray, " heads"], digits: int) -> Numbers:
    """Round to `digits` significant digits; NaN becomes None, and whole numbers become int (shorter in JSON)."""
    short_numbers = (None if number != number else float(f"{number:.{digits}g}") for number in numbers)
    return [int(n) if n is not None and n.is_integer() and abs(n) < 1e9 else n for n in short_numbers]


def _rows(rows: AttentionRows) -> dict[str, object]:
    """Build the page's data on each query's largest attention weights; without text, positions replace tokens."""
    sentence = rows.sentence
    count = 1 + max((place for places in rows.keys for place in places), default=0)
    keys = [clean(token) for token in sentence.keys] if sentence else [str(place) for place in range(count)]
    queries = sentence.queries if sentence else [str(place) for place in range(len(rows.keys))]
    return {
        "queries": keys if queries is None else [clean(token) for token in queries],
        "keys": keys,
        "places": rows.keys,  # for each query, the indices of the keys with its largest weights
        "weights": [[round(1000 * weight) for weight in row] for row in rows.weights],  # in thousandths, like `rest`
        "rest": [round(1000 * weight) for weight in rows.rest],  # sum of the other weights
    }
