"""What readings are handed to: a collector, or the record of one unit of work, which a collector takes in later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from attnlens.hooks.survey import real_parts
from attnlens.records import AttentionRows, Measure, Null, QueryKey, Selection, Site
from attnlens.registry import Analyzer, Answer, Gathering, Readings
from attnlens.registry.analysis import Named
from attnlens.statistics import summed
from attnlens.weights import Traits

PIECE_BYTES = 32 * 2**20
"""Largest (sequences × heads × tokens × tokens) float64 matrix that is analysed at once."""


def pieces(query_key: QueryKey) -> Iterator[tuple[list[int], QueryKey]]:
    """A batch without its padding, in pieces whose score matrices stay under PIECE_BYTES each, with their sequences.

    A key that no query may see is padding, and in cross-attention a query that may see none. Sequences of one length
    stay together; long ones are cut by heads.
    """
    for batch, queries, keys in real_parts(query_key.allowed, query_key.query.shape[0], query_key.site.part):
        rest = query_key.sequences(batch, queries, keys)
        one_head = 8 * rest.query.shape[-2] * rest.key.shape[-2]
        together = max(1, PIECE_BYTES // (one_head * len(rest.heads)))
        heads = max(1, min(len(rest.heads), PIECE_BYTES // one_head))
        for start in range(0, len(batch), together):
            rows = range(start, min(start + together, len(batch)))
            some = rest.sequences(rows, slice(None), slice(None))
            for head in range(0, len(rest.heads), heads):
                yield [batch[row] for row in rows], some.select(range(head, min(head + heads, len(rest.heads))))


def sequences(query_key: QueryKey) -> Iterator[tuple[int, QueryKey]]:
    """Each sequence of a batch by itself and without its padding, with its number in the batch."""
    for batch, queries, keys in real_parts(query_key.allowed, query_key.query.shape[0], query_key.site.part):
        for row in batch:
            yield row, query_key.sequences([row], queries, keys)


def finite_heads(query_key: QueryKey) -> list[int]:
    """Which heads have finite queries and keys in every sequence, by index."""
    # a sum is finite where all its terms are, and needs no mask of their size
    query, key = (part.sum((-1, -2), dtype=torch.float64).isfinite() for part in (query_key.query, query_key.key))
    fine = query & key[..., list(query_key.key_of)]
    return fine.reshape(-1, len(query_key.heads)).all(0).nonzero().flatten().tolist()


class Sink:
    """Takes in what is read of weights and texts, and what was skipped."""

    chosen_heads: Sequence[int] | None
    """Heads asked for; None means all."""

    def asks(self, head: int) -> bool:
        """Whether a head was asked for."""
        return self.chosen_heads is None or head in self.chosen_heads

    def read_tokens(
        self,
        site: Site,
        query_key: QueryKey,
        analyzers: Iterable[Analyzer],
        numbers: Sequence[int],
        total: int,
        steps: int | None = None,
    ) -> None:
        """Take in what analyzers read of a batch, whose rows belong to the sequences with these `numbers`."""
        for rows, group in pieces(query_key):
            parts = [numbers[row] for row in rows]
            for analyzer in analyzers:
                self.add_tokens(site, parts, group.heads, total, analyzer.function(group), steps)

    def add_tokens(
        self,
        site: Site,
        rows: Sequence[int],
        heads: Sequence[int],
        total: int,
        readings: Readings,
        steps: int | None = None,
    ) -> None:
        """Take in readings of the sequences `rows` and `heads` computed: (sequences, heads), or with steps behind.

        Curves are averaged; cumulative ones of sequences of different lengths are continued to `steps`.
        """
        for name, reading in readings.items():
            if reading.dim() == 3:
                self.add_curve(site, name, *summed(_continued(reading, heads, total, steps)))
            else:
                self.add_values(site, name, list(rows), list(heads), total, reading.double().cpu())

    def add_values(
        self, site: Site, name: str, rows: Sequence[int], heads: Sequence[int], total: int, values: Tensor
    ) -> None:
        """Take in one number of each of these sequences and heads, (sequences, heads), of `total` heads."""
        raise NotImplementedError

    def add_curve(self, site: Site, name: str, count: Tensor, mean: Tensor) -> None:
        """Take in the mean of a curve over `count` sequences, (heads, steps) each."""
        raise NotImplementedError

    def add_weights(
        self,
        site: Site,
        heads: Sequence[int],
        analyzer: Analyzer,
        readings: Readings,
        nulls: Mapping[str, list[Null]],
        base: Readings | None = None,
    ) -> None:
        """Take in readings of shape (heads,) or (heads, steps); `nulls` by measure; `base`: those without adapter."""
        raise NotImplementedError

    def add_layer(self, layer: int, symmetry: float | None) -> None:
        """Take in the symmetry of a layer's summed matrix."""
        raise NotImplementedError

    def add_answers(self, site: Site, gathering: Gathering, answers: Mapping[int, Answer]) -> None:
        """Take in what a gatherer says of a site's heads."""
        raise NotImplementedError

    def add_shown(self, shown: Sequence[Selection], rows: Sequence[AttentionRows]) -> None:
        """Take in what is to be shown: posed problems, rows of attention."""
        raise NotImplementedError

    def add_traits(self, traits: Traits) -> None:
        """Take in what a reader must know of a site's weights."""
        raise NotImplementedError

    def add_losses(self, means: Tensor, counts: Tensor, vocabulary: int) -> None:
        """Take in a model's mean loss on each sequence of a batch, over so many tokens each."""
        raise NotImplementedError

    def skip(self, site: str, reason: str, heads: Sequence[int] = (), measure: str | None = None) -> None:
        """Take in what is not measured, and why."""
        raise NotImplementedError


def _noted(method: str) -> Callable[..., None]:
    """A method that notes down its own name and what it is called with."""

    def note(record: UnitRecord, *given: Any) -> None:
        record.calls.append([method, _plain(given)])

    return note


class UnitRecord(Sink):
    """Notes down what one unit of work hands over, as the plain value of the unit: a list of (method, arguments)."""

    def __init__(self, chosen_heads: Sequence[int] | None) -> None:
        self.chosen_heads = chosen_heads
        self.calls: list[Any] = []

    add_values = _noted("add_values")
    add_curve = _noted("add_curve")
    add_weights = _noted("add_weights")
    add_layer = _noted("add_layer")
    add_answers = _noted("add_answers")
    add_shown = _noted("add_shown")
    add_traits = _noted("add_traits")
    add_losses = _noted("add_losses")

    def skip(self, site: str, reason: str, heads: Sequence[int] = (), measure: str | None = None) -> None:
        """Note down what is not measured."""
        self.calls.append(["skip", [site, reason, list(heads), measure]])


def replay(value: Any, sink: Sink, analyzers: Iterable[Named]) -> None:
    """Hand over what a unit of work noted down, in its order."""
    named: dict[tuple[str, str], Named] = {(one.name, one.source): one for one in analyzers}
    for method, arguments in value:
        if method not in NOTED:  # the file may be anybody's
            raise ValueError(f"No unit notes down {method}.")
        getattr(sink, method)(*(_made(part, named) for part in arguments))


NOTED = {name for name in vars(UnitRecord) if name == "skip" or name.startswith("add_")}
RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (Null, Measure, Selection, AttentionRows)}
PLAIN: dict[str, Any] = {kind.__name__: kind for kind in (Answer, Site, Traits)}


def _plain(value: Any) -> Any:
    """Return a value as lists and dictionaries of tensors and of what JSON holds."""
    kind = type(value).__name__
    if kind in RECORDS:
        return {"kind": kind, "of": value.model_dump()}
    if kind in PLAIN:
        return {"kind": kind, "of": {one.name: _plain(getattr(value, one.name)) for one in fields(value)}}
    if isinstance(value, Named):
        return {"kind": "analyzer", "of": [value.name, value.source]}
    if isinstance(value, Mapping):
        return {"kind": "map", "of": {key: _plain(part) for key, part in value.items()}}
    return [_plain(part) for part in value] if isinstance(value, list | tuple | range) else value


def _made(value: Any, named: Mapping[tuple[str, str], Named]) -> Any:
    """Return the value of which that is the plain form."""
    if isinstance(value, list):
        return [_made(part, named) for part in value]
    if not isinstance(value, dict):
        return value
    kind, of = value["kind"], value["of"]
    if kind in RECORDS:
        return RECORDS[kind].model_validate(of)
    if kind == "analyzer":
        return named[of[0], of[1]]
    parts = {key: _made(part, named) for key, part in of.items()}
    return parts if kind == "map" else PLAIN[kind](**parts)


def _continued(reading: Tensor, heads: Sequence[int], total: int, steps: int | None) -> Tensor:
    """A curve at the places of its heads, NaN for the others; one that has ended early stays where it is."""
    if steps is not None and reading.shape[2] < steps:
        reading = torch.cat([reading, reading[..., -1:].expand(-1, -1, steps - reading.shape[2])], -1)
    full = reading.new_full((reading.shape[0], total, reading.shape[2]), torch.nan)
    full[:, list(heads)] = reading
    return full
