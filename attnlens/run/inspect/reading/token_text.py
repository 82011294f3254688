"""The text of selected tokens in their sequences."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnlens import models, texts
from attnlens.choices import Part
from attnlens.records import Selection, Sentence

SIGNS = {"\n": "↵", "\t": "→"}
"""What stands for a token of white space; a blank is ␣."""


def told(selection: Selection, loaded: models.Loaded, batches: Sequence[texts.Batch]) -> Selection:
    """The selection with the texts of its sequences; unchanged where the model reads no text."""
    numbers = sorted({pick.sequence for pick in selection.picks})
    found = [sentence_of(selection.part, loaded, batches, number) for number in numbers]
    return selection.model_copy(update={"sentences": [sentence for sentence in found if sentence is not None]})


def sentence_of(part: Part, loaded: models.Loaded, batches: Sequence[texts.Batch], number: int) -> Sentence | None:
    """The tokens that this part of the model reads of a sequence; None where it reads no text."""
    unread = part in ("vision", "audio") or loaded.kind not in ("text", "seq2seq")
    if unread or loaded.tokenizer is None:
        return None
    starts = [sum(batch.size for batch in batches[:index]) for index in range(len(batches))]
    index = max(place for place, start in enumerate(starts) if start <= number)
    return _sentence(part, loaded, batches[index].inputs, number, number - starts[index])


def _sentence(part: Part, loaded: models.Loaded, inputs: dict[str, Tensor], number: int, row: int) -> Sentence:
    decoder = "decoder_" if part in ("decoder", "cross") and "decoder_input_ids" in inputs else ""
    queries = _words(loaded, inputs, decoder, row)
    if part != "cross":
        return Sentence(sequence=number, keys=queries)
    return Sentence(sequence=number, keys=_words(loaded, inputs, "", row), queries=queries)


def _words(loaded: models.Loaded, inputs: dict[str, Tensor], prefix: str, row: int) -> list[str]:
    """The real tokens of one sequence, one word each."""
    ids, mask = inputs[f"{prefix}input_ids"][row], inputs.get(f"{prefix}attention_mask")
    return [_word(loaded, number) for number in (ids if mask is None else ids[mask[row].bool()]).tolist()]


def _word(loaded: models.Loaded, number: int) -> str:
    word = (
        "" if loaded.tokenizer is None else str(loaded.tokenizer.decode([number], clean_up_tokenization_spaces=False))
    )
    return word.strip() or SIGNS.get(word[:1], "␣")
