"""A head's most decided queries in their sentences, with every kind of token marked."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from attnlens.records import WHERE_POSED, Pick, Report, Selection, Sentence
from attnlens.wording import clean, counted, listed, short

MOST_SHOWN = 5
"""Sentences of a head that are printed; the report's JSON holds all."""
AROUND = 3
"""Unmarked tokens that stay on each side of a marked one."""
MARKS = {"selected": ("[", "]", "bold blue"), "support": ("{", "}", "yellow"), "query": ("<", ">", "bold underline")}
"""Signs around a token, and how they look where there is colour; several may hold for one token."""
LEGEND = "<query> [selected] {support}: rivals whose constraints hold the SVM up; … unmarked tokens"


def selections(report: Report) -> Group:
    """For every head that is to be shown: a few of its sentences with query, selected and support tokens marked.

    The marks are signs, which a pipe keeps, and colours. Tokens are a stranger's: cleaned, and never read as markup.
    """
    return Group(*(line for found in report.selections for line in _shown(found)))


def _shown(found: Selection) -> Iterator[RenderableType]:
    yield ""
    yield Text(f"What layer {found.layer} head {found.head} selects", style="bold")
    posed = f"{counted(len(found.picks), 'query')} posed".replace("querys", "queries")
    yield Text(f"{posed} {WHERE_POSED[found.space]}; margins are over the best least margin, 1/‖W_mm‖:", style="dim")
    yield Text("no head's least exceeds 1, a single query's may", style="dim")
    yield Text(LEGEND, style="dim")
    sentences = {sentence.sequence: sentence for sentence in found.sentences}
    for pick in _one_a_sequence(found.picks)[:MOST_SHOWN]:
        fact = f"sequence {pick.sequence}, token {pick.query}: weight {short(pick.weight)}, margin {short(pick.margin)}"
        yield Text(fact, style="dim")
        yield Padding(_line(pick, sentences.get(pick.sequence)), (0, 0, 0, 2))


def _one_a_sequence(picks: list[Pick]) -> list[Pick]:
    """The most decided query of each sequence, then the others."""
    first: dict[int, Pick] = {}
    for pick in picks:
        first.setdefault(pick.sequence, pick)
    leading = list(first.values())
    return leading + [pick for pick in picks if pick not in leading]


def _line(pick: Pick, sentence: Sentence | None) -> Text:
    """The sentence with its marks; places alone where the model reads no text."""
    if sentence is None:
        return Text(f"token {pick.query} selects {listed(pick.selected)}; support: {listed(pick.support, 20)}")
    if sentence.queries is None:
        return _marked(sentence.keys, _kinds(pick, among_keys=True))
    head = _marked(sentence.queries, _kinds(pick, among_keys=False))
    return Text.assemble(head, "\n", _marked(sentence.keys, _kinds(pick, among_keys=None)))


def _kinds(pick: Pick, *, among_keys: bool | None) -> dict[int, list[str]]:
    """Place → kinds of mark. `among_keys`: whether the query stands among the keys; None: keys alone."""
    kinds: dict[int, list[str]] = {}
    marked = {"selected": pick.selected, "support": pick.support} if among_keys is not False else {}
    for kind, places in (marked | ({"query": [pick.query]} if among_keys is not None else {})).items():
        for place in places:
            kinds.setdefault(place, []).append(kind)
    return kinds


def _marked(tokens: list[str], kinds: dict[int, list[str]]) -> Text:
    text, gap = Text(overflow="fold"), False
    near = {place + step for place in kinds for step in range(-AROUND, AROUND + 1)}
    for place, token in enumerate(tokens):
        if place not in near:
            gap = True
            continue
        text.append(" … " if gap and text else "… " if gap else " " if text else "")
        text.append_text(_token(clean(token), kinds.get(place, [])))
        gap = False
    return text.append(" …") if gap else text


def _token(token: str, kinds: list[str]) -> Text:
    text, style = Text(token), " ".join(MARKS[kind][2] for kind in kinds)
    for kind in kinds:
        text = Text.assemble(MARKS[kind][0], text, MARKS[kind][1])
    text.stylize(style)
    return text
