"""What heads do on tokens: the posed queries with their selected tokens and support vectors, and attention rows."""

from __future__ import annotations

from pydantic import model_validator

from attnlens.choices import Space
from attnlens.records.measures import Count, HeadId, Number, Record


class Pick(Record):
    """One posed query and what its head selects for it."""

    sequence: Count
    """The sequence's number among those fed, from 0."""
    query: Count
    """The query's place among its sequence's tokens."""
    selected: list[Count]
    """The places of the selected tokens: one, or those that hold the share of the weight that was asked for."""
    support: list[Count]
    """The places of the support tokens, the rivals whose constraints carry the SVM (λ > 0)."""
    weight: Number
    """p_max, the largest attention weight."""
    margin: Number
    """The query's least margin over the best possible, 1/‖W_mm‖: 1 or more wherever the head is the SVM."""


class Sentence(Record):
    """The tokens of a sequence that a pick points at."""

    sequence: Count
    """The sequence's number among those fed."""
    keys: list[str]
    """What is selected among, token by token."""
    queries: list[str] | None = None
    """What selects, where that is another sequence (cross-attention)."""


class Selection(HeadId):
    """A head's own selection problem, as it was posed and solved."""

    space: Space
    """Whether it was posed on the module's inputs, or on queries and keys."""
    picks: list[Pick]
    """The posed queries, the most decided first."""
    best: Number
    """1/‖W_mm‖_F, the largest least margin that any form of unit norm reaches."""
    null_margins: list[list[Number]] = []
    """Each null head's margins over its own best, ascending."""
    sentences: list[Sentence] = []
    """The sequences of the picks."""


class AttentionRows(HeadId):
    """What each query of one sequence attends to: its largest weights."""

    sequence: Count
    """The sequence's number among those fed."""
    keys: list[list[Count]]
    """For each query the places of the keys with the largest weights, the largest first."""
    weights: list[list[Number]]
    """Their weights."""
    rest: list[Number]
    """For each query the sum of its other weights."""
    sentence: Sentence | None = None
    """The tokens; None where the model reads no text, or its rows are not its tokens."""

    @model_validator(mode="after")
    def _of_one_size(self) -> AttentionRows:
        if not len(self.keys) == len(self.weights) == len(self.rest):
            raise ValueError("keys, weights and rest are of different numbers of queries")
        if any(len(places) != len(row) for places, row in zip(self.keys, self.weights, strict=True)):
            raise ValueError("a query has another number of keys than of weights")
        if self.sentence is not None:
            queries = self.sentence.keys if self.sentence.queries is None else self.sentence.queries
            beyond = any(place >= len(self.sentence.keys) for places in self.keys for place in places)
            if beyond or len(queries) != len(self.keys):
                raise ValueError("its tokens are not those of its rows")
        return self
