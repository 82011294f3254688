"""Select what `--show` adds to a report: the attention rows of one sequence, and the tokens of sequences as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnlens.choices import Part
from attnlens.errors import UsageError
from attnlens.models import loading, texts
from attnlens.models.hooks import SiteCall
from attnlens.records import AttentionRows, QueryKey, Selection, Sentence
from attnlens.runs.inspect.sequences import split_sequences

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

SIGNS = {"\n": "↵", "\t": "→"}
"""Symbols for tokens of white space; ␣ for a space."""
MOST_TOKENS, MOST_ROWS = 512, 40_000
"""Maximum number of tokens in a sequence, and of rows over all heads, in a report."""
MOST_WEIGHTS, LEAST = 8, 0.02
"""Maximum number of weights kept per row, and the smallest weight kept; the largest always is."""


def add_sentences(selection: Selection, loaded: loading.Loaded, batches: Sequence[texts.Batch]) -> Selection:
    """Return the selection with the texts of its sequences; unchanged if the model does not read text."""
    numbers = sorted({pick.sequence for pick in selection.picks})
    sentences = [sentence_of(selection.part, loaded, batches, number) for number in numbers]
    return selection.model_copy(update={"sentences": [sentence for sentence in sentences if sentence is not None]})


def sentence_of(part: Part, loaded: loading.Loaded, batches: Sequence[texts.Batch], number: int) -> Sentence | None:
    """Return the tokens of a sequence that this part of the model reads, one word each; None if it reads no text."""
    tokenizer = loaded.tokenizer
    if part in ("vision", "audio") or loaded.kind not in ("text", "seq2seq") or tokenizer is None:
        return None
    starts = [sum(batch.size for batch in batches[:index]) for index in range(len(batches))]
    index = max(place for place, start in enumerate(starts) if start <= number)
    inputs, row = batches[index].inputs, number - starts[index]

    def words(prefix: str) -> list[str]:
        ids, mask = inputs[f"{prefix}input_ids"][row], inputs.get(f"{prefix}attention_mask")
        real = (ids if mask is None else ids[mask[row].bool()]).tolist()
        decoded = [str(tokenizer.decode([id_], clean_up_tokenization_spaces=False)) for id_ in real]
        return [word.strip() or SIGNS.get(word[:1], "␣") for word in decoded]

    queries = words("decoder_" if part in ("decoder", "cross") and "decoder_input_ids" in inputs else "")
    if part != "cross":
        return Sentence(sequence=number, keys=queries)
    return Sentence(sequence=number, keys=words(""), queries=queries)


def refuse_many_rows(reached: Sequence[SiteCall], heads: Sequence[int] | None) -> None:
    """Raise UsageError if the requested heads have more rows, or more tokens, than a report keeps."""
    shapes = [each.call.query.shape for each in reached]
    longest = max((max(each.call.query.shape[2], each.call.key.shape[2]) for each in reached), default=0)
    rows = sum((shape[1] if heads is None else len(heads)) * shape[2] for shape in shapes)
    if longest > MOST_TOKENS:
        raise UsageError(
            f"--show attention supports sequences of at most {MOST_TOKENS} tokens, but these have {longest}.",
            f"Add --length {MOST_TOKENS}.",
        )
    if rows > MOST_ROWS:
        raise UsageError(
            f"--show attention keeps at most {MOST_ROWS:,} rows, but these heads have {rows:,}.",
            "Choose fewer heads with --layers or --heads, or fewer tokens with --length.",
        )


def attention_rows(query_key: QueryKey, sentence: Sentence | None) -> list[AttentionRows]:
    """Return the attention rows of every head in the batch's first sequence, without padding; none if it is empty."""
    first = next((sequence for row, sequence in split_sequences(query_key) if row == 0), None)
    if first is None:
        return []
    attention = first.attention[0].double().cpu()
    sentence = sentence if sentence is not None and _fits(sentence, attention) else None
    weights, keys = attention.topk(min(MOST_WEIGHTS, attention.shape[-1]))
    counts = (weights >= LEAST).sum(-1).clamp(min=1)
    rounded = weights.round(decimals=4)
    records = []
    for index, head in enumerate(query_key.heads):
        rows = [(row, int(count)) for row, count in enumerate(counts[index])]
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
                rest=[
                    round(max(0.0, float(attention[index, row].sum() - weights[index, row, :count].sum())), 4)
                    for row, count in rows
                ],
                sentence=sentence,
            )
        )
    return records


def _fits(sentence: Sentence, attention: Float[Tensor, "heads queries keys"]) -> bool:
    """Return whether rows and columns match its tokens: modules with windows, or images too, have other rows."""
    queries = sentence.keys if sentence.queries is None else sentence.queries
    return attention.shape[1:] == (len(queries), len(sentence.keys))
