"""Cut texts into sequences, and build the batches of a model's forward passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from hashlib import sha256
from inspect import signature
from random import Random
from typing import TYPE_CHECKING

from attnlens.choices import Placement
from attnlens.errors import TextError, UsageError
from attnlens.models.loading.placement import device_of_inputs
from attnlens.models.texts import media, sequences
from attnlens.models.texts.sequences import CHARACTERS, PACKED, Content, Row, sequences_in, vocabulary
from attnlens.records import Text

if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.models.loading import Loaded

IDS = ("input_ids", "inputs", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
"""Names of the inputs that are built from a text."""


@dataclass(frozen=True)
class Batch:
    """The inputs of one forward pass, and the lengths and texts of its sequences."""

    inputs: dict[str, Tensor]  # arguments of `model(**inputs)`, on the model's device
    lengths: tuple[int, ...]  # number of ids of each sequence, including placeholders but not padding; empty if no ids
    parts: tuple[str, ...] = ()  # name of the text of each sequence; empty if no text is read
    start: int = 0  # index of the text's first id in each sequence, after the placeholders of images and sounds

    @property
    def size(self) -> int:
        """Number of sequences."""
        return sequences_in(self.inputs)


@dataclass(frozen=True)
class Batches:
    """All forward passes of a run, and the texts from which their inputs are built."""

    batches: tuple[Batch, ...]  # the forward passes, in the order of the texts and of each text's windows
    sequences: int  # number of sequences; fewer than requested if there are too few windows or files
    tokens: int  # number of ids of the longest window or line, with special tokens; 0 if no tokens are read
    texts: tuple[Text, ...]  # the texts with the indices of their windows, followed by files or noise, if any
    unknown: Mapping[str, float]  # share, 0 to 1, of unknown tokens among the ids read, keyed by name of the text
    pack: bool = True  # True if the sequences are windows of running text instead of lines
    notes: tuple[str, ...] = ()  # sentences for the report about inputs other than the texts
    made_up: bool = False  # True if the model's main input is noise
    left_out: tuple[str, ...] = ()  # names of texts that contribute no sequence; empty if no text is read

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def some(self, sequences: int) -> Batches:
        """Return evenly spaced forward passes with at least `sequences` sequences in total; all if they are too few."""
        count = -(-len(self.batches) * sequences // self.sequences)
        if count >= len(self.batches):
            return self
        batches = tuple(self.batches[index * len(self.batches) // count] for index in range(count))
        return replace(self, batches=batches, sequences=sum(batch.size for batch in batches))

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """Ids of each sequence's text, without padding; empty if the model reads no tokens."""
        all_ids = [batch.inputs.get("input_ids", batch.inputs.get("decoder_input_ids")) for batch in self.batches]
        return [
            tuple(row[batch.start : length])
            for batch, ids in zip(self.batches, all_ids, strict=True)
            for row, length in zip([] if ids is None else ids.tolist(), batch.lengths, strict=True)
        ]

    @property
    def parts(self) -> tuple[str, ...]:
        """Name of the text of each sequence; empty if no text is read."""
        return tuple(name for batch in self.batches for name in batch.parts)

    @property
    def taken(self) -> dict[str, frozenset[int]]:
        """Indices of the windows that are used from each text, keyed by the text's SHA-256."""
        return {text.sha256: frozenset(text.windows) for text in self.texts}


def passages(several: Iterable[Batches]) -> list[tuple[int, ...]]:
    """Return the ids of all windows; join consecutive windows of a text, even if they are in different `Batches`.

    If any `Batches` contain lines, nothing is joined.
    """
    ids_by_window, packed = dict[tuple[str, int], tuple[int, ...]](), True
    for batches in several:
        numbers = [number for text in batches.texts for number in text.windows]
        ids_by_window |= zip(zip(batches.parts, numbers, strict=True), batches.ids, strict=True)
        packed &= batches.pack
    joined: list[tuple[int, ...]] = []
    for name, number in sorted(ids_by_window):
        if packed and (name, number - 1) in ids_by_window:
            joined[-1] += ids_by_window[name, number]
        else:
            joined.append(ids_by_window[name, number])
    return joined


@dataclass(frozen=True)
class Cut:
    """Options for cutting texts into sequences, and for choosing the sequences that the model reads."""

    tokens: int | None = None  # length of a window with special tokens; None: 128, or the model's limit if smaller
    sequences: int = 32  # number of sequences from all texts, divided among them as equally as their lengths allow
    batch_size: int = 8  # number of sequences per forward pass
    pack: bool = True  # True for windows of the running text, False for its lines
    placement: Placement = "spread"  # placement of the windows in each text
    seed: int = 0  # seed of the placement and of noise
    turn: tuple[int, int] = (0, 1)  # (i, n): use only the chosen sequences i, i + n, i + 2n … of each text
    image: tuple[str, ...] = ()  # paths of images, one per sequence; empty for noise
    audio: tuple[str, ...] = ()  # paths of sounds, one per sequence; empty for noise
    pairs: bool = False  # True if each line contains two texts separated by a tab, which the tokenizer joins
    allow_foreign: bool = False  # True to accept a text even if half of its tokens or more are unknown to the tokenizer


def batches(
    loaded: Loaded,
    contents: Sequence[Content],
    cut: Cut = Cut(),  # it is frozen
    *,
    apart_from: Batches | None = None,
    skip_noise: int = 0,
) -> Batches:
    """Build a model's inputs from the texts. Leave out the windows of `apart_from`, which is cut with the same options.

    A model of pixels or sound reads files or, if there are none, noise, whose first `skip_noise` random draws are
    skipped; its decoder, or CLIP's text encoder, reads the texts. Raises TextError if a text or file is unsuitable or
    there is no tokenizer, UsageError if there are too many tokens or the number of files is wrong, and ModelError if a
    file can't be prepared.
    """
    accepted = _find_media(loaded)
    paths: dict[media.Modality, tuple[str, ...]] = {"image": cut.image, "audio": cut.audio}
    prepared = {modality: media.read_files(loaded, modality, each) for modality, each in paths.items() if each}
    files = {modality: inputs for modality, (inputs, _) in prepared.items()}
    files_each = _count_files(files, cut.sequences)
    wanted = files_each or cut.sequences
    taken = apart_from.taken if apart_from else {}
    rows, texts = _cut_texts(loaded, contents, replace(cut, sequences=wanted), taken)
    unknown_id, ids = getattr(loaded.tokenizer, "unk_token_id", None), defaultdict[str, list[int]](list)
    for row in rows:
        ids[row.text] += row.ids
    unknown = {name: sum(id_ == unknown_id for id_ in each) / len(each) for name, each in ids.items()}
    if not cut.allow_foreign and (problems := sequences.foreign_notes(unknown, sequences.FOREIGN)):
        raise TextError(problems[0], "Give a text that suits the model with --text, or add --allow-foreign-text.")
    count, notes = len(rows) or wanted, list(() if files else accepted.notes)
    if rows and count < cut.sequences:
        what = "windows" if cut.pack else "lines"
        few = f"Each sequence uses one file, so the number of sequences is {count} instead of {cut.sequences}."
        notes.append(few if count == files_each else f"The text has only {count} of the {wanted} requested {what}.")
    feed = media.Feed(loaded.model, accepted, cut.seed, skip_noise, files)
    return Batches(
        batches=_build_batches(loaded, feed, rows, count, cut.batch_size),
        sequences=count,
        tokens=max((len(row.ids) for row in rows), default=0),
        texts=(*texts, *(record for _, records in prepared.values() for record in records[:count]), *feed.texts),
        unknown=unknown,
        pack=cut.pack,
        notes=tuple(notes),
        made_up=reads_noise(loaded) and not files,
        left_out=tuple(content.name for content in contents if rows and content.name not in unknown),
    )


def _count_files(files: Mapping[media.Modality, Sequence[object]], most: int) -> int | None:
    """Return the number of files per modality, or None if there are no files.

    Raises UsageError if modalities have different numbers of files, or more than `most`.
    """
    counts = {modality: len(inputs) for modality, inputs in files.items()}
    if len(set(counts.values())) > 1:
        counted = " and ".join(f"{count} for {modality}" for modality, count in counts.items())
        problem = f"Each sequence needs one file of each kind, but there are {counted}."
        raise UsageError(problem, "Give the same number of files of each kind.")
    count = next(iter(counts.values()), None)
    if count is not None and count > most:
        problem = f"Each sequence uses one file, but there are {count} files for --windows {most}."
        raise UsageError(problem, f"Give --windows {count}.")
    return count


def _find_media(loaded: Loaded) -> media.Media:
    """Return the images and sounds that the model reads; raise TextError if the model requires other inputs."""
    accepted = media.media_of(loaded.model, loaded.folder)
    available = (*accepted.names, *IDS * reads_text(loaded))
    if missing := [name for name in sequences.required_inputs(loaded.model) if name not in available]:
        raise TextError(*sequences.describe_missing_inputs(loaded.model, missing))
    return accepted


def reads_text(loaded: Loaded) -> bool:
    """Return True if any part of the model reads token ids, such as Whisper's decoder or CLIP's text encoder."""
    return sequences.reads_ids(loaded.model) or sequences.decodes_text(loaded.model)


def reads_noise(loaded: Loaded) -> bool:
    """Return True for models of pixels, sound or series, and for CLIP: their input is noise unless files are given."""
    return loaded.kind not in ("text", "seq2seq")


def placeholder(loaded: Loaded, tokens: int, seed: int, sequences: int = 1, *, bare: bool = False) -> Batches:
    """Build inputs of random ids (and noise for pixels or sound), to find a model's attention sites without a text.

    `bare` omits images and sounds that have placeholder ids. Raises TextError if an input can't be generated.
    """
    accepted = _find_media(loaded)
    ids: list[list[int]] = []
    if reads_text(loaded):
        draws = Random(seed)  # noqa: S311  # not for cryptography
        known, placeholders = vocabulary(loaded.model) or CHARACTERS, media.placeholder_ids(loaded.model)
        usable = (number for number in iter(lambda: draws.randrange(known), None) if number not in placeholders)
        ids = [[next(usable) for _ in range(tokens)] for _ in range(sequences)]
    if bare and accepted.before:
        removed = {modality for modality, _, _ in accepted.before}
        processors = {name: processor for name, processor in accepted.processors.items() if name not in removed}
        names = accepted.names - PACKED if "image" in removed else accepted.names
        accepted = replace(accepted, processors=processors, before=(), names=names)
    feed = media.Feed(loaded.model, accepted, seed)
    texts = [Text(name="random tokens", sha256=sha256(repr(ids).encode()).hexdigest())] * bool(ids)
    passes = _build_batches(loaded, feed, [Row(row) for row in ids], sequences, sequences)
    return Batches(passes, sequences, tokens * bool(ids), (*texts, *feed.texts), {})


def _cut_texts(
    loaded: Loaded, contents: Sequence[Content], cut: Cut, taken: Mapping[str, AbstractSet[int]]
) -> tuple[list[Row], list[Text]]:
    """Return the sequences chosen from the texts, and records of the texts used; [] and [] if the model reads no text.

    Raises TextError if no sequence is chosen, or if an id is outside the model's vocabulary.
    """
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
        problem = f"The text ({names_of_texts}) has no windows besides those used for evaluation."
        raise TextError(problem, "Give a longer text, a different text with --calibration, or a smaller --windows.")
    known, largest = vocabulary(loaded.model), max(max(row.ids) for row in rows)
    if known is not None and largest >= known:
        problem = f"The tokenizer returns token {largest}, but the model's vocabulary has only {known} tokens."
        raise TextError(problem, f"Use the tokenizer that belongs to these weights, or {sequences.WITHOUT_TEXT}")
    return rows, texts


def _cut_text(loaded: Loaded, content: Content, length: int, cut: Cut) -> list[Row]:
    """Return all windows, lines or pairs of a text; reuse the last result if it was cut with the same options."""
    tokenizer, is_spread = loaded.tokenizer, cut.placement != "first"
    key = (tokenizer, length, cut.pairs, cut.pack, is_spread)
    if key not in content.cuttings:
        if tokenizer is None:
            problem = f"This model has no usable tokenizer: {loaded.tokenizer_problem}."
            raise TextError(problem, f"Put the tokenizer files into the model's folder, or {sequences.WITHOUT_TEXT}")
        content.cuttings.clear()  # keeps one result: each checkpoint of a series has its own tokenizer
        thinned = sequences.thin_text(content, spread=is_spread)
        if cut.pack and not cut.pairs:
            content.cuttings[key] = sequences.cut_windows(tokenizer, thinned, tokens=length)
        else:
            content.cuttings[key] = sequences.cut_lines(tokenizer, thinned, tokens=length, pairs=cut.pairs)
    return content.cuttings[key]


def _build_batches(loaded: Loaded, feed: media.Feed, rows: Sequence[Row], count: int, size: int) -> tuple[Batch, ...]:
    """Build batches of `size` sequences, or of one sequence if files are read or images are packed into one row."""
    if feed.files or not PACKED.isdisjoint(feed.media.names):
        size = 1
    choices = (getattr(loaded.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    known = vocabulary(loaded.model)
    # any token of the vocabulary can be padding, because the mask hides it
    padding = next((choice for choice in choices if choice is not None and (known is None or choice < known)), 0)
    typed = "token_type_ids" in signature(loaded.model.forward).parameters
    built = []
    for at in range(0, count, size):
        part = rows[at : at + size]
        inputs, start = feed.inputs(range(at, min(at + size, count)), [row.ids for row in part], padding)
        if typed and part and part[0].types:
            types = [[*[0] * start, *row.types] for row in part]
            inputs["token_type_ids"] = sequences.token_tensors(types, 0)[0].to(device_of_inputs(loaded.model))
        lengths = tuple(start + len(row.ids) for row in part)
        built.append(Batch(inputs, lengths, tuple(row.text for row in part if row.text), start))
    return tuple(built)
