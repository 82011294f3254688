"""Split batches into sequences, collect values per sequence and head, and select the data of `--show` for a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.analyzers.registry import Analyzer, Readings
from attnlens.choices import Part
from attnlens.errors import UsageError
from attnlens.maths.statistics import count_and_mean
from attnlens.models import loading, texts
from attnlens.models.hooks import SiteCall
from attnlens.models.hooks.survey import real_parts
from attnlens.records import AttentionRows, QueryKey, Selection, Sentence, Site

if TYPE_CHECKING:
    from jaxtyping import Float

PIECE_BYTES = 32 * 2**20  # bytes of the largest float64 matrix (sequences, heads, tokens, tokens) analysed at once
Place = tuple[str, str]  # name of a site, and name of a measure


def split_batch(query_key: QueryKey) -> Iterator[tuple[list[int], QueryKey]]:
    """Split a batch into pieces with at most PIECE_BYTES of scores; yield (row indices, piece without padding).

    A piece with a single row and a single head can exceed PIECE_BYTES.
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
    """Yield (index in the batch, queries and keys without padding) for each sequence that is not only padding."""
    for batch, queries, keys in real_parts(query_key.allowed, query_key.query.shape[0], query_key.site.part):
        for row in batch:
            yield row, query_key.sequences([row], queries, keys)


def finite_heads(query_key: QueryKey) -> list[int]:
    """Return the indices of the heads with finite queries and keys in every sequence."""
    # a sum is finite only if all its terms are, and needs less memory than a mask
    query, key = (part.sum((-1, -2), dtype=torch.float64).isfinite() for part in (query_key.query, query_key.key))
    finite = query & key[..., list(query_key.key_of)]
    return finite.reshape(-1, len(query_key.heads)).all(0).nonzero().flatten().tolist()


def sequence_numbers(rows: int, batch: texts.Batch, start: int) -> list[int]:
    """Return the index of the sequence that each row belongs to; some modules split a sequence into rows (Swin)."""
    return [start + row * batch.size // rows for row in range(rows)]


@dataclass
class SequenceValues:
    """Scalars of each sequence and head, and mean curves of each piece of a batch, keyed by (site, measure)."""

    count: int  # number of sequences
    steps: int | None = None  # length to which shorter curves are extended; None: not extended
    sums: dict[Place, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Sum and number of values over the rows of each sequence (several in Swin), both of shape (sequences, heads)."""
    curves: dict[Place, list[list[Tensor]]] = field(default_factory=dict)
    """Number of sequences and mean curve of each piece, both of shape (heads, steps)."""

    def measure(self, query_key: QueryKey, analyzers: Sequence[Analyzer], numbers: Sequence[int], total: int) -> None:
        """Add the analyzers' values for a batch with rows of the sequences `numbers`, at a site with `total` heads."""
        for rows, piece in split_batch(query_key):
            for analyzer in analyzers:
                readings = analyzer.read(piece)
                self.add(query_key.site, readings, [numbers[row] for row in rows], piece.heads, total)

    def add(self, site: Site, readings: Readings, sequences: Sequence[int], heads: Sequence[int], total: int) -> None:
        """Add readings of shape (sequences, heads) or, for curves, (sequences, heads, steps)."""
        for name, reading in readings.items():
            place = site.name, name
            if reading.dim() == 3:
                if self.steps is not None and reading.shape[2] < self.steps:
                    last = reading[..., -1:].expand(-1, -1, self.steps - reading.shape[2])
                    reading = torch.cat([reading, last], -1)
                full = reading.new_full((reading.shape[0], total, reading.shape[2]), torch.nan)
                full[:, list(heads)] = reading
                self.curves.setdefault(place, []).append(list(count_and_mean(full)))
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
        """Mean value of each head over each sequence's rows, keyed by (site, measure); NaN if no row has a value."""
        return {place: sums / counts for place, (sums, counts) in self.sums.items()}


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


SIGNS = {"\n": "↵", "\t": "→"}  # symbols for tokens of white space; ␣ for a space
MOST_TOKENS, MOST_ROWS = 512, 40_000  # maximum number of tokens in a sequence, and of rows over all heads, in a report
MOST_WEIGHTS, LEAST = 8, 0.02  # maximum number of weights per row; smallest weight, except for the largest of a row


def add_sentences(shown: Selection | None, loaded: loading.Loaded, batches: Sequence[texts.Batch]) -> Selection | None:
    """Return the selection with the texts of its sequences, if the model reads text; None if there is no selection."""
    if shown is None:
        return None
    numbers = sorted({pick.sequence for pick in shown.picks})
    sentences = (decode_sentence(shown.part, loaded, batches, number) for number in numbers)
    return shown.model_copy(update={"sentences": [sentence for sentence in sentences if sentence is not None]})


def decode_sentence(part: Part, loaded: loading.Loaded, batches: Sequence[texts.Batch], number: int) -> Sentence | None:
    """Decode the tokens of sequence `number` that this part of the model reads.

    Return None if the part does not read text, or if there is no tokenizer.
    """
    tokenizer = loaded.tokenizer
    if part in ("vision", "audio") or loaded.kind not in ("text", "seq2seq") or tokenizer is None:
        return None
    inputs, row = [(batch.inputs, row) for batch in batches for row in range(batch.size)][number]

    def decode(prefix: str) -> list[str]:
        ids, mask = inputs[f"{prefix}input_ids"][row], inputs.get(f"{prefix}attention_mask")
        real = (ids if mask is None else ids[mask[row].bool()]).tolist()
        decoded = [str(tokenizer.decode([id_], clean_up_tokenization_spaces=False)) for id_ in real]
        return [word.strip() or SIGNS.get(word[:1], "␣") for word in decoded]

    queries = decode("decoder_" if part in ("decoder", "cross") and "decoder_input_ids" in inputs else "")
    if part != "cross":
        return Sentence(sequence=number, keys=queries)
    return Sentence(sequence=number, keys=decode(""), queries=queries)


def refuse_many_rows(site_calls: Sequence[SiteCall], heads: Sequence[int] | None) -> None:
    """Raise UsageError if the requested heads have too many attention rows or tokens for a report."""
    shapes = [(*each.call.query.shape[1:3], each.call.key.shape[2]) for each in site_calls]
    longest = max((max(queries, keys) for _, queries, keys in shapes), default=0)
    rows = sum((count if heads is None else len(heads)) * queries for count, queries, _ in shapes)
    if longest > MOST_TOKENS:
        problem = f"--show attention supports sequences of at most {MOST_TOKENS} tokens, but these have {longest}."
        raise UsageError(problem, f"Add --length {MOST_TOKENS}.")
    if rows > MOST_ROWS:
        problem = f"--show attention supports at most {MOST_ROWS:,} rows (heads × queries), but there are {rows:,}."
        raise UsageError(problem, "Choose fewer heads with --layers or --heads, or fewer tokens with --length.")


def attention_rows(query_key: QueryKey, sentence: Sentence | None) -> list[AttentionRows]:
    """Return each head's attention rows for a batch's first sequence, without padding; [] if all is padding."""
    first = next((sequence for row, sequence in split_sequences(query_key) if row == 0), None)
    if first is None:
        return []
    attention = first.attention[0].double().cpu()
    # in modules with windows, or with images, rows are not tokens
    if sentence is not None and attention.shape[1:] != (len(sentence.queries or sentence.keys), len(sentence.keys)):
        sentence = None
    weights, keys = attention.topk(min(MOST_WEIGHTS, attention.shape[-1]))
    counts = (weights >= LEAST).sum(-1).clamp(min=1)
    rounded = weights.round(decimals=4)
    records = []
    for index, head in enumerate(query_key.heads):
        rows = list(enumerate(counts[index].tolist()))
        rests = [float(attention[index, row].sum() - weights[index, row, :count].sum()) for row, count in rows]
        records.append(
            AttentionRows(
                site=query_key.site.name,
                layer=query_key.site.layer,
                head=head,
                kv_head=query_key.key_of[index],
                part=query_key.site.part,
                sequence=0,
                keys=[keys[index, row, :count].tolist() for row, count in rows],
                weights=[rounded[index, row, :count].tolist() for row, count in rows],
                rest=[round(max(0.0, rest), 4) for rest in rests],
                sentence=sentence,
            )
        )
    return records
