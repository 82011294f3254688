"""Build the inputs of a model: windows or lines of texts, and noise or files if it reads pixels or sound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from hashlib import sha256
from inspect import signature
from random import Random
from typing import TYPE_CHECKING

from attnlens.errors import TextError, UsageError
from attnlens.models.texts import media, sequences
from attnlens.models.texts.sequences import CHARACTERS, Row, vocabulary
from attnlens.models.texts.sources import Content, thin_text
from attnlens.models.texts.windows import Batch, Batches, Cut
from attnlens.records import Text

if TYPE_CHECKING:
    from attnlens.models.loading import Loaded

IDS = ("input_ids", "inputs", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
"""Names of the inputs that are built from a text."""


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
    for option, number in (("windows", cut.sequences), ("batch-size", cut.batch_size)):
        if number < 1:
            raise UsageError(f"--{option} {number} is not a positive number.", f"Give at least --{option} 1.")
    accepted = _checked_media(loaded)
    paths: dict[media.Modality, tuple[str, ...]] = {"image": cut.image, "audio": cut.audio}
    prepared = {modality: media.read_files(loaded, modality, each) for modality, each in paths.items() if each}
    files = {modality: inputs for modality, (inputs, _) in prepared.items()}
    files_each = _count_files(files, cut.sequences)
    taken = apart_from.taken if apart_from else {}
    rows, texts = _cut_texts(loaded, contents, replace(cut, sequences=files_each or cut.sequences), taken)
    unknown = sequences.unknown_shares(loaded.tokenizer, rows)
    if not cut.allow_foreign:
        sequences.refuse_foreign(unknown)
    count = len(rows) or files_each or cut.sequences
    feed = media.Feed(loaded.model, accepted, cut.seed, skip_noise, files)
    return Batches(
        batches=_build_batches(loaded, feed, rows, count, cut.batch_size),
        sequences=count,
        tokens=max((len(row.ids) for row in rows), default=0),
        texts=(*texts, *(record for _, records in prepared.values() for record in records[:count]), *feed.texts),
        unknown=unknown,
        pack=cut.pack,
        notes=(*(() if files else accepted.notes), *_explain_fewer(count, files_each, cut, texts)),
        made_up=reads_noise(loaded) and not files,
        left_out=tuple(content.name for content in contents if rows and content.name not in unknown),
    )


def _count_files(files: Mapping[media.Modality, Sequence[object]], most: int) -> int | None:
    """Return the number of files of each modality, one per sequence, or None without files.

    Raises UsageError if modalities differ in it, or it is above `most`: a file in two sequences would count twice.
    """
    counts = {modality: len(inputs) for modality, inputs in files.items()}
    if len(set(counts.values())) > 1:
        counted = " and ".join(f"{count} of --{modality}" for modality, count in counts.items())
        raise UsageError(
            f"Each sequence needs one file of each kind, but there are {counted}.", "Give as many of each."
        )
    count = next(iter(counts.values()), None)
    if count is not None and count > most:
        problem = f"Each sequence uses one file: {count} files are more than --windows {most}."
        raise UsageError(problem, f"Give --windows {count}.")
    return count


def _explain_fewer(count: int, files: int | None, cut: Cut, texts: Sequence[Text]) -> Iterator[str]:
    """Yield sentences on why there are fewer sequences than requested, if so."""
    if not texts or count >= cut.sequences:
        return
    what = "windows" if cut.pack else "lines"
    if count == files:
        yield f"Each sequence uses one file: {count} sequences instead of {cut.sequences}."
    else:
        if files is not None:
            yield f"The last {files - count} files are not used: the text has no more {what}."
        yield f"The text has only {count} of the {cut.sequences} requested {what}."


def _checked_media(loaded: Loaded) -> media.Media:
    """Return the model's images and sounds. Raises TextError if it requires an input that attnlens can't make up."""
    accepted = media.media_of(loaded.model, loaded.folder)
    available = (*accepted.names, *IDS * reads_text(loaded))
    if missing := [name for name in sequences.required_inputs(loaded.model) if name not in available]:
        raise TextError(*sequences.describe_missing_inputs(loaded.model, missing))
    return accepted


def reads_text(loaded: Loaded) -> bool:
    """Return whether any part of the model reads token ids (as Whisper's decoder and CLIP's text encoder do)."""
    return sequences.reads_ids(loaded.model) or sequences.decodes_text(loaded.model)


def reads_noise(loaded: Loaded) -> bool:
    """Return whether the model's main input is made up (pixels, sound, series), so that it has no meaningful loss."""
    return loaded.kind not in ("text", "seq2seq")


def placeholder(loaded: Loaded, tokens: int, seed: int, sequences: int = 1, *, bare: bool = False) -> Batches:
    """Build random ids (and noise for models of pixels or sound), to find a model's attention sites without a text.

    `bare` omits images and sounds that have placeholder ids, so that such models see only text. Raises TextError if the
    model requires an input that attnlens can't make up.
    """
    accepted = _checked_media(loaded)
    ids: list[list[int]] = []
    if reads_text(loaded):
        draws = Random(seed)  # noqa: S311  # not for cryptography
        known, placeholders = vocabulary(loaded.model) or CHARACTERS, media.placeholder_ids(loaded.model)
        usable = (number for number in iter(lambda: draws.randrange(known), None) if number not in placeholders)
        ids = [[next(usable) for _ in range(tokens)] for _ in range(sequences)]
    feed = media.Feed(loaded.model, media.without_placeholders(accepted) if bare else accepted, seed)
    texts = [Text(name="random tokens", sha256=sha256(repr(ids).encode()).hexdigest())] * bool(ids)
    passes = _build_batches(loaded, feed, [Row(row) for row in ids], sequences, sequences)
    return Batches(passes, sequences, tokens * bool(ids), (*texts, *feed.texts), {})


def _cut_texts(
    loaded: Loaded, contents: Sequence[Content], cut: Cut, taken: Mapping[str, AbstractSet[int]]
) -> tuple[list[Row], list[Text]]:
    """Cut the texts and choose sequences; return them and a record per text. Raises TextError if none is left."""
    if not reads_text(loaded):
        return [], []
    length = sequences.window_length(loaded.model, cut.tokens)
    cuttings = [_cut_text(loaded, content, length, cut) for content in contents]
    digests = [sha256(content.text.encode()).hexdigest() for content in contents]
    skips = [taken.get(digest, frozenset()) for digest in digests]
    counts = sequences.split_evenly(
        [len(cutting) - len(used) for cutting, used in zip(cuttings, skips, strict=True)], cut.sequences
    )
    rows, texts = list[Row](), list[Text]()
    for content, cutting, used, count, digest in zip(contents, cuttings, skips, counts, digests, strict=True):
        chosen = sequences.choose_windows(len(cutting), count, cut.placement, cut.seed, used)
        numbers = chosen[cut.turn[0] :: cut.turn[1]]
        rows += [cutting[number]._replace(text=content.name) for number in numbers]
        if numbers:
            texts.append(Text(name=content.name, sha256=digest, windows=numbers, available=len(cutting)))
    if not rows:
        names_of_texts = ", ".join(content.name for content in contents)
        problem = f"The text ({names_of_texts}) has no windows left besides the evaluated ones."
        raise TextError(problem, "Give a longer text, another one with --calibration, or fewer --windows.")
    known, largest = vocabulary(loaded.model), max(max(row.ids) for row in rows)
    if known is not None and largest >= known:
        problem = f"The tokenizer returns token {largest}, but the model's vocabulary has only {known} tokens."
        raise TextError(problem, "Tokenizer and weights don't belong together; use --source weights.")
    return rows, texts


def _cut_text(loaded: Loaded, content: Content, length: int, cut: Cut) -> list[Row]:
    """Cut a text into all its windows, lines or pairs, or return the last result if it was cut in the same way."""
    tokenizer, is_spread = loaded.tokenizer, cut.placement != "first"
    key = (tokenizer, length, cut.pairs, cut.pack, is_spread)
    if key not in content.cuttings:
        if tokenizer is None:
            problem = f"This model has no usable tokenizer: {loaded.tokenizer_problem}."
            raise TextError(problem, "Put its tokenizer files into the model's folder, or use --source weights.")
        content.cuttings.clear()  # each checkpoint of a series has its own tokenizer, so results would pile up
        windows_or_lines = sequences.cut_windows if cut.pack else sequences.cut_lines
        cut_into = sequences.cut_pairs if cut.pairs else windows_or_lines
        content.cuttings[key] = cut_into(tokenizer, thin_text(content, spread=is_spread), tokens=length)
    return content.cuttings[key]


def _build_batches(loaded: Loaded, feed: media.Feed, rows: Sequence[Row], count: int, size: int) -> tuple[Batch, ...]:
    """Split the sequences into batches of `size`; of 1 for files, or if the patches of all images form one row."""
    size = 1 if feed.media.alone or feed.files else size
    return tuple(_build_batch(loaded, feed, rows, slice(at, min(at + size, count))) for at in range(0, count, size))


def _build_batch(loaded: Loaded, feed: media.Feed, rows: Sequence[Row], part: slice) -> Batch:
    """Build one batch of sequences, each preceded by the same placeholders of images and sounds."""
    model, rows = loaded.model, rows[part]
    placeholders = feed.placeholders(part.start)
    before = media.ids_of(placeholders) if rows else []
    id_rows = [[*before, *row.ids] for row in rows]
    inputs = feed.take(range(part.start, part.stop))
    if rows:
        choices = (getattr(loaded.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        padding = next((choice for choice in choices if choice is not None), 0)  # the mask hides padding
        ids, mask = sequences.token_tensors(id_rows, padding)
        inputs |= sequences.text_inputs(model, ids, mask, len(before)) | media.types_of(model, placeholders, ids)
    if rows and rows[0].types and "token_type_ids" in signature(model.forward).parameters:
        types = [[*[0] * len(before), *row.types] for row in rows]
        inputs["token_type_ids"] = sequences.token_tensors(types, 0)[0]
    parts = tuple(row.text for row in rows if row.text)
    return Batch(media.move_inputs(model, inputs), tuple(map(len, id_rows)), parts, len(before))
