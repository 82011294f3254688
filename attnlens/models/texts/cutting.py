"""Build the inputs of a model: windows or lines of texts, or noise if it reads pixels or sound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from hashlib import sha256
from inspect import signature
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from attnlens.errors import TextError, UsageError
from attnlens.models.texts.media import (
    Feed,
    Modality,
    ids_of,
    media_of,
    placed,
    read_files,
    standing_ids,
    types_of,
    without_placeholders,
)
from attnlens.models.texts.sequences import (
    CHARACTERS,
    WindowedText,
    chosen,
    decodes_text,
    lines,
    not_made,
    pairs,
    reads_ids,
    refuse_foreign,
    shares,
    text_inputs,
    token_tensors,
    unknown_shares,
    vocabulary,
    wanted,
    window_length,
    windows,
)
from attnlens.models.texts.sources import Content, thinned
from attnlens.models.texts.windows import Batch, Batches, Cut
from attnlens.records import Text

if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.models.loading import Loaded

IDS = ("input_ids", "inputs", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
"""Names of the inputs that are built from a text."""
Cuttings: TypeAlias = WindowedText | list[tuple[list[int], list[int]]]
"""(ids, token types) of each sequence of a text; token types are empty unless it is a pair."""


@dataclass(frozen=True)
class TokenRows:
    """The ids of sequences; empty if the model reads no tokens."""

    ids: Sequence[Sequence[int]]
    """Ids of each sequence."""
    types: Sequence[Sequence[int]] = ()
    """Token types of each sequence, which number the texts of a pair; empty without pairs."""
    names: tuple[str, ...] = ()
    """Name of the text that each sequence belongs to."""


def batches(
    loaded: Loaded,
    contents: Sequence[Content],
    cut: Cut = Cut(),  # noqa: B008  # it is frozen
    *,
    apart_from: Batches | None = None,
    skip_noise: int = 0,
) -> Batches:
    """Build the inputs of `loaded` from the texts, without the windows in `apart_from`, which were cut the same way.

    A model of pixels or sound gets noise from the seed, without the first `skip_noise` draws (its decoder, or CLIP's
    text encoder, gets the texts). Raises TextError if a text is too short or foreign to the model, or there is no
    usable tokenizer; UsageError for invalid numbers, or more tokens than the model has positions.
    """
    for option, number in (("sequences", cut.sequences), ("batch-size", cut.batch_size)):
        if number < 1:
            raise UsageError(f"--{option} {number} is none at all.", f"Give at least --{option} 1.")
    _check_kind(loaded)
    files, records = dict[Modality, list[dict[str, "Tensor"]]](), list[list[Text]]()
    media_paths: dict[Modality, tuple[str, ...]] = {"image": cut.image, "audio": cut.audio}
    for modality in (modality for modality, paths in media_paths.items() if paths):
        files[modality], file_records = read_files(loaded, modality, media_paths[modality])
        records.append(file_records)
    each = _each(files, cut.sequences)
    taken = apart_from.taken if apart_from else {}
    cuts, texts = _fed(loaded, contents, replace(cut, sequences=each or cut.sequences), taken)
    unknown = unknown_shares(loaded.tokenizer, cuts.ids, cuts.names)
    if not cut.allow_foreign:
        refuse_foreign(unknown)
    count = len(cuts.ids) or each or cut.sequences
    media = media_of(loaded.model, loaded.folder)
    feed = Feed(loaded.model, media, cut.seed, skip_noise, files)
    return Batches(
        batches=_in_batches(loaded, feed, cuts, count, cut.batch_size),
        sequences=count,
        tokens=max(map(len, cuts.ids), default=0),
        texts=(*texts, *(record for of_modality in records for record in of_modality[:count]), *feed.texts),
        unknown=unknown,
        pack=cut.pack,
        notes=(*(() if files else media.notes), *_short(count, each, cut, texts)),
        made_up=reads_noise(loaded) and not files,
        left_out=tuple(content.name for content in contents if cuts.ids and content.name not in cuts.names),
    )


def _each(files: Mapping[Modality, Sequence[object]], most: int) -> int | None:
    """Return how many sequences get a file of each modality; a file in two sequences would count twice. None: no files.

    Raises UsageError if the modalities have different numbers of files, or there are more than `most`.
    """
    if not files:
        return None
    counts = {modality: len(inputs) for modality, inputs in files.items()}
    least = min(counts.values())
    if max(counts.values()) > least:
        counted = " and ".join(f"{count} of --{modality}" for modality, count in counts.items())
        raise UsageError(f"Each sequence has one file of each kind, and there are {counted}.", "Give as many of each.")
    if least > most:
        problem = f"Each sequence has a file of its own: {least} are more than --windows {most}."
        raise UsageError(problem, f"Give --windows {least}.")
    return least


def _short(count: int, files: int | None, cut: Cut, texts: Sequence[Text]) -> Iterator[str]:
    """Yield sentences on why there are fewer sequences than requested, if so."""
    if not texts or count >= cut.sequences:
        return
    what = "lines" if not cut.pack else "windows"
    if count == files:
        yield f"Each sequence has a file of its own: {count} instead of {cut.sequences}."
    else:
        if files is not None:
            yield f"The last {files - count} files are left out: the text has no more {what}."
        yield f"The text has {count} {what} of the {cut.sequences} asked for."


def _check_kind(loaded: Loaded) -> None:
    """Raise TextError if the model requires an input that attnlens can't make up."""
    available = (*media_of(loaded.model, loaded.folder).names, *IDS * reads_text(loaded))
    if missing := [name for name in wanted(loaded.model) if name not in available]:
        raise TextError(*not_made(loaded.model, missing))


def reads_text(loaded: Loaded) -> bool:
    """Return whether any part of the model reads token ids (as Whisper's decoder and CLIP's text encoder do)."""
    return reads_ids(loaded.model) or decodes_text(loaded.model)


def reads_noise(loaded: Loaded) -> bool:
    """Return whether the model's main input is made up (pixels, sound, series), so that it has no meaningful loss."""
    return loaded.kind not in ("text", "seq2seq")


def placeholder(loaded: Loaded, tokens: int, seed: int, sequences: int = 1, *, bare: bool = False) -> Batches:
    """Build random ids (and noise for models of pixels or sound), to find a model's attention sites without a text.

    `bare` omits images and sounds that have placeholder ids, so that such models see only text. Raises TextError if
    the model requires an input that attnlens can't make up.
    """
    _check_kind(loaded)
    rows: list[list[int]] = []
    if reads_text(loaded):
        draws = Random(seed)  # noqa: S311  # not for cryptography
        known = vocabulary(loaded.model) or CHARACTERS
        standing = standing_ids(loaded.model)
        # without placeholders of images and sounds
        usable = filter(lambda number: number not in standing, iter(lambda: draws.randrange(known), None))
        rows = [list(islice(usable, tokens)) for _ in range(sequences)]
    media = media_of(loaded.model, loaded.folder)
    feed = Feed(loaded.model, without_placeholders(media) if bare else media, seed)
    texts = [Text(name="random tokens", sha256=sha256(repr(rows).encode()).hexdigest())] * bool(rows)
    passes = _in_batches(loaded, feed, TokenRows(rows), sequences, sequences)
    return Batches(passes, sequences, tokens * bool(rows), (*texts, *feed.texts), {})


def _fed(
    loaded: Loaded, contents: Sequence[Content], cut: Cut, taken: Mapping[str, AbstractSet[int]]
) -> tuple[TokenRows, list[Text]]:
    """Cut the texts and choose sequences; return their ids and a record per text. Raises TextError if none is left."""
    if not reads_text(loaded):
        return TokenRows(()), []
    length = window_length(loaded.model, cut.tokens)
    cuttings = [_sequences(loaded, content, length, cut) for content in contents]
    digests = [sha256(content.text.encode()).hexdigest() for content in contents]
    skips = [taken.get(digest, frozenset()) for digest in digests]
    counts = shares([len(cutting) - len(used) for cutting, used in zip(cuttings, skips, strict=True)], cut.sequences)
    rows, types, names, texts = list[list[int]](), list[list[int]](), list[str](), list[Text]()
    for content, cutting, used, count, digest in zip(contents, cuttings, skips, counts, digests, strict=True):
        numbers = chosen(len(cutting), count, cut.placement, cut.seed, used)[cut.turn[0] :: cut.turn[1]]
        rows += [cutting[number][0] for number in numbers]
        types += [cutting[number][1] for number in numbers if cut.pairs]
        names += [content.name] * len(numbers)
        if numbers:
            texts.append(Text(name=content.name, sha256=digest, windows=numbers, available=len(cutting)))
    if not rows:
        raise TextError(
            f"The text ({', '.join(content.name for content in contents)}) has nothing left beside what is evaluated.",
            "Give a longer text, another one with --calibration, or fewer --windows.",
        )
    known, largest = vocabulary(loaded.model), max(map(max, rows))
    if known is not None and largest >= known:
        problem = f"The tokenizer gives token {largest} and the model knows only {known}."
        raise TextError(problem, "Tokenizer and weights don't belong together; use --source weights.")
    return TokenRows(rows, types, tuple(names)), texts


def _sequences(loaded: Loaded, content: Content, length: int, cut: Cut) -> Cuttings:
    """Cut a text into all its windows, lines or pairs, or return the last result if it was cut in the same way."""
    way = (loaded.tokenizer, length, cut.pairs, cut.pack, cut.placement != "first")
    if way in content.made:
        known: Cuttings = content.made[way]
        return known
    if loaded.tokenizer is None:
        problem = f"This model has no usable tokenizer: {loaded.tokenizer_problem}."
        raise TextError(problem, "Put its tokenizer files beside its weights, or use --source weights.")
    content.made.clear()  # each checkpoint of a series has its own tokenizer, so results would pile up
    thin = thinned(content, spread=cut.placement != "first")
    cuttings: Cuttings
    if cut.pairs:
        cuttings = pairs(loaded.tokenizer, thin, tokens=length)
    elif cut.pack:
        cuttings = windows(loaded.tokenizer, thin, tokens=length)
    else:
        cuttings = [(ids, []) for ids in lines(loaded.tokenizer, thin, tokens=length)]
    content.made[way] = cuttings
    return cuttings


def _in_batches(loaded: Loaded, feed: Feed, rows: TokenRows, count: int, size: int) -> tuple[Batch, ...]:
    """Split the sequences into batches of `size`; of 1 for files, or if the patches of all images form one row."""
    size = 1 if feed.media.alone or feed.files else size
    return tuple(_batch(loaded, feed, rows, range(start, min(start + size, count))) for start in range(0, count, size))


def _batch(loaded: Loaded, feed: Feed, rows: TokenRows, numbers: range) -> Batch:
    """Build one batch of sequences, each preceded by the same placeholders of images and sounds."""
    model, of = loaded.model, slice(numbers.start, numbers.stop)
    part = TokenRows(rows.ids[of], rows.types[of], rows.names[of])
    standing = feed.placeholders(numbers.start)
    before = ids_of(standing) if part.ids else []
    whole = [[*before, *row] for row in part.ids]
    inputs = feed.take(numbers)
    if part.ids:
        choices = (getattr(loaded.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        padding = next((choice for choice in choices if choice is not None), 0)  # the mask hides padding
        ids, mask = token_tensors(whole, padding)
        inputs |= text_inputs(model, ids, mask, len(before)) | types_of(model, standing, ids)
    if part.types and "token_type_ids" in signature(model.forward).parameters:
        inputs["token_type_ids"] = token_tensors([[*[0] * len(before), *row] for row in part.types], 0)[0]
    return Batch(placed(model, inputs), tuple(map(len, whole)), part.names, len(before))
