"""Split batches into sequences without padding, and collect values per sequence and head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.analyzers.registry import Readings
from attnlens.maths.statistics import count_and_mean
from attnlens.models import texts
from attnlens.models.hooks.survey import real_parts
from attnlens.records import QueryKey, Site

if TYPE_CHECKING:
    from jaxtyping import Float

PIECE_BYTES = 32 * 2**20
"""Largest (sequences × heads × tokens × tokens) float64 matrix that is analysed at once, in bytes."""
Place = tuple[str, str]
"""Name of a site, and name of a measure."""


def split_batch(query_key: QueryKey) -> Iterator[tuple[list[int], QueryKey]]:
    """Yield a batch without padding, in pieces with score matrices under PIECE_BYTES each, with their sequences.

    A key that no query can see is padding, and in cross-attention so is a query that sees none. Sequences of one length
    stay together; long ones are split by heads.
    """
    for batch, queries, keys in real_parts(query_key.allowed, query_key.query.shape[0], query_key.site.part):
        unpadded = query_key.sequences(batch, queries, keys)
        head_bytes = 8 * unpadded.query.shape[-2] * unpadded.key.shape[-2]
        sequences_at_once = max(1, PIECE_BYTES // (head_bytes * len(unpadded.heads)))
        heads_at_once = max(1, min(len(unpadded.heads), PIECE_BYTES // head_bytes))
        for start in range(0, len(batch), sequences_at_once):
            rows = range(start, min(start + sequences_at_once, len(batch)))
            part = unpadded.sequences(rows, slice(None), slice(None))
            for head in range(0, len(unpadded.heads), heads_at_once):
                heads = range(head, min(head + heads_at_once, len(unpadded.heads)))
                yield [batch[row] for row in rows], part.select(heads)


def split_sequences(query_key: QueryKey) -> Iterator[tuple[int, QueryKey]]:
    """Yield each sequence of a batch separately and without its padding, with its number in the batch."""
    for batch, queries, keys in real_parts(query_key.allowed, query_key.query.shape[0], query_key.site.part):
        for row in batch:
            yield row, query_key.sequences([row], queries, keys)


def finite_heads(query_key: QueryKey) -> list[int]:
    """Return the indices of the heads with finite queries and keys in every sequence."""
    # a sum is finite only if all its terms are, and needs no mask of their size
    query, key = (part.sum((-1, -2), dtype=torch.float64).isfinite() for part in (query_key.query, query_key.key))
    finite = query & key[..., list(query_key.key_of)]
    return finite.reshape(-1, len(query_key.heads)).all(0).nonzero().flatten().tolist()


def sequence_numbers(rows: int, batch: texts.Batch, start: int) -> list[int]:
    """Return the sequence of each row; there are more rows if a module cuts a sequence into windows (Swin)."""
    return [start + row * batch.size // rows for row in range(rows)]


@dataclass
class SequenceValues:
    """Scalars of each sequence and head, and the parts of mean curves, by site and measure."""

    count: int
    """Number of sequences."""
    sums: dict[Place, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Sum and number of values of each sequence's rows: a module may cut a sequence into windows (Swin)."""
    curves: dict[Place, list[list[Tensor]]] = field(default_factory=dict)
    """Number of sequences and mean curve of each piece, both (heads, steps)."""

    def add(
        self,
        site: Site,
        readings: Readings,
        sequences: Sequence[int],
        heads: Sequence[int],
        total: int,
        steps: int | None = None,
    ) -> None:
        """Add what an analyzer returns for these sequences and heads: (sequences, heads) or (sequences, heads, steps).

        `total` is the site's number of heads. Curves shorter than `steps` are cumulative and are extended.
        """
        for name, reading in readings.items():
            place = site.name, name
            if reading.dim() == 3:
                self.curves.setdefault(place, []).append(
                    list(count_and_mean(_extend_curve(reading, heads, total, steps)))
                )
                continue
            values = reading.double().cpu()
            empty = torch.zeros(self.count, total, dtype=torch.float64)
            sums, counts = self.sums.setdefault(place, (empty, empty.clone()))
            index = torch.tensor(list(sequences))[:, None], torch.tensor(list(heads))
            # NaN is a missing value and adds 0; infinite values stay
            sums.index_put_(index, values.nan_to_num(posinf=torch.inf, neginf=-torch.inf), accumulate=True)
            counts.index_put_(index, (~values.isnan()).double(), accumulate=True)

    @property
    def means(self) -> dict[Place, Float[Tensor, "sequences heads"]]:
        """Mean over each sequence's rows; NaN if it has no value."""
        return {place: sums / counts for place, (sums, counts) in self.sums.items()}


def _extend_curve(reading: Tensor, heads: Sequence[int], total: int, steps: int | None) -> Tensor:
    """Expand a curve to all heads, NaN for missing ones; a shorter curve is extended by its last value."""
    if steps is not None and reading.shape[2] < steps:
        reading = torch.cat([reading, reading[..., -1:].expand(-1, -1, steps - reading.shape[2])], -1)
    full = reading.new_full((reading.shape[0], total, reading.shape[2]), torch.nan)
    full[:, list(heads)] = reading
    return full


def arrange_by_measure(
    windows: Mapping[Place, Tensor], heads: Sequence[tuple[str, int]], count: int
) -> dict[str, Float[Tensor, "windows heads"]]:
    """Arrange the values of `count` windows as one table per measure, with one column per (site, head) of `heads`."""
    missing = torch.full((count,), torch.nan, dtype=torch.float64)
    tables = {}
    for name in dict.fromkeys(name for _, name in windows):
        columns = [windows[site, name][:, head] if (site, name) in windows else missing for site, head in heads]
        tables[name] = torch.stack(columns, 1)
    return tables
