"""A head's most decided queries in their sentences, with every kind of token marked."""

from __future__ import annotations

from collections.abc import Iterator

from attnlens.choices import WHERE_POSED
from attnlens.records import Pick, Report, Selection, Sentence
from attnlens.sections.section import Passage, Section
from attnlens.wording import clean, counted, listed, short

MOST_SHOWN = 5
"""Sentences of a head that are printed; the report's JSON holds all."""
AROUND = 3
"""Unmarked tokens that stay on each side of a marked one."""
SIGNS = {"selected": ("[", "]"), "support": ("{", "}"), "query": ("<", ">")}
"""Signs around a token; several may hold for one token."""
LEGEND = "<query> [selected] {support}: rivals whose constraints hold the SVM up; … unmarked tokens"


def selections(report: Report) -> Iterator[Section]:
    """For every head that is to be shown: a few of its sentences with query, selected and support tokens marked.

    The marks are signs, and kinds that a page may colour. Tokens are a stranger's: cleaned, and never read as markup.
    """
    for found in report.selections:
        posed = f"{counted(len(found.picks), 'query')} posed".replace("querys", "queries")
        yield Section(
            f"What layer {found.layer} head {found.head} selects",
            notes=(
                f"{posed} {WHERE_POSED[found.space]}; margins are over the best least margin, 1/‖W_mm‖:",
                "no head's least exceeds 1, a single query's may",
                LEGEND,
            ),
            passages=tuple(_passages(found)),
        )


def _passages(found: Selection) -> Iterator[Passage]:
    sentences = {sentence.sequence: sentence for sentence in found.sentences}
    for pick in _one_a_sequence(found.picks)[:MOST_SHOWN]:
        fact = f"sequence {pick.sequence}, token {pick.query}: weight {short(pick.weight)}, margin {short(pick.margin)}"
        yield fact, tuple(_pieces(pick, sentences.get(pick.sequence)))


def _one_a_sequence(picks: list[Pick]) -> list[Pick]:
    """The most decided query of each sequence, then the others."""
    first: dict[int, Pick] = {}
    for pick in picks:
        first.setdefault(pick.sequence, pick)
    leading = list(first.values())
    return leading + [pick for pick in picks if pick not in leading]


Piece = tuple[str, tuple[str, ...]]
"""A text, and the kinds of its marks."""


def _pieces(pick: Pick, sentence: Sentence | None) -> Iterator[Piece]:
    """The sentence with its marks; places alone where the model reads no text."""
    if sentence is None:
        yield f"token {pick.query} selects {listed(pick.selected)}; support: {listed(pick.support, 20)}", ()
    elif sentence.queries is None:
        yield from _marked(sentence.keys, _kinds(pick, among_keys=True))
    else:
        yield from _marked(sentence.queries, _kinds(pick, among_keys=False))
        yield "\n", ()
        yield from _marked(sentence.keys, _kinds(pick, among_keys=None))


def _kinds(pick: Pick, *, among_keys: bool | None) -> dict[int, list[str]]:
    """Place → kinds of mark. `among_keys`: whether the query stands among the keys; None: keys alone."""
    kinds: dict[int, list[str]] = {}
    marked = {"selected": pick.selected, "support": pick.support} if among_keys is not False else {}
    for kind, places in (marked | ({"query": [pick.query]} if among_keys is not None else {})).items():
        for place in places:
            kinds.setdefault(place, []).append(kind)
    return kinds


def _marked(tokens: list[str], kinds: dict[int, list[str]]) -> Iterator[Piece]:
    near = {place + step for place in kinds for step in range(-AROUND, AROUND + 1)}
    before = ""
    for place, token in enumerate(tokens):
        if place not in near:
            before = before if before.endswith("… ") else f"{before}… "
            continue
        yield before, ()
        yield _token(token, kinds.get(place, []))
        before = " "
    if before.endswith("… "):
        yield before.rstrip(), ()


def _token(token: str, kinds: list[str]) -> Piece:
    text = clean(token)
    for kind in kinds:
        left, right = SIGNS[kind]
        text = f"{left}{text}{right}"
    return text, tuple(kinds)
