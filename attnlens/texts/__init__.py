"""What is a model fed with? A text cut into sequences, or noise for one that reads pixels or sound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from random import Random
from typing import TYPE_CHECKING

from attnlens.errors import TextError, UsageError
from attnlens.records import Text
from attnlens.texts.inputs import noise, text_inputs, token_tensors
from attnlens.texts.overlap import MOST_SHARED, RUN, shared_share
from attnlens.texts.sequences import lines, position_limit, window_length, windows
from attnlens.texts.sources import Content, joined, read_each, read_text

if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.models import Loaded

__all__ = [
    "MOST_SHARED",
    "RUN",
    "Batch",
    "Batches",
    "Content",
    "batches",
    "joined",
    "placeholder",
    "position_limit",
    "read_each",
    "read_text",
    "reads_text",
    "shared_share",
    "window_length",
]

NOISE = {"pixels": "pixel_values", "pixels+text": "pixel_values", "audio": None}
"""For each kind of model that reads noise, which input it is; None means the model's main input."""
NOISE_NAMES = {"pixel_values": "random pixels", "input_features": "random sound", "input_values": "random sound"}


@dataclass(frozen=True)
class Batch:
    """The keyword arguments of one forward pass."""

    inputs: dict[str, Tensor]
    """`model(**inputs)`; on the model's device."""
    lengths: tuple[int, ...]
    """Real tokens of each sequence (padding stands on the right); empty where no tokens are fed."""
    parts: tuple[str, ...] = ()
    """The text that each sequence is of, by name, where they are of several in turn; empty otherwise."""

    @property
    def size(self) -> int:
        """How many sequences it holds."""
        return next(iter(self.inputs.values())).shape[0]


@dataclass(frozen=True)
class Batches:
    """All forward passes, and what they are made of."""

    batches: tuple[Batch, ...]
    """In the order of the text."""
    sequences: int
    """How many sequences there are; fewer than asked for, where the text has no more."""
    tokens: int
    """Ids of the longest sequence, special tokens included; 0 where no tokens are fed."""
    text: Text
    """What was fed: the name, and the SHA-256 of the text in UTF-8 (then of the noise, if there is any)."""
    end: int
    """Characters of the text up to the end of the last line; 0 for windows, and where no text is fed."""
    unknown_share: float
    """Share of ids that are the tokenizer's unknown token; near 1, the model reads another language than the text's."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """What each sequence says, without padding; empty where no tokens are fed."""
        said = [batch.inputs.get("input_ids", batch.inputs.get("decoder_input_ids")) for batch in self.batches]
        return [
            tuple(row[:length])
            for batch, ids in zip(self.batches, said, strict=True)
            for row, length in zip([] if ids is None else ids.tolist(), batch.lengths, strict=True)
        ]


def batches(
    loaded: Loaded,
    content: Content,
    *,
    tokens: int | None = None,
    sequences: int = 32,
    batch_size: int = 8,
    pack: bool = True,
    skip: int = 0,
    start: int = 0,
    skip_noise: int = 0,
    seed: int = 0,
    parts: Sequence[Content] = (),
) -> Batches:
    """The inputs of `loaded` made of `content`: windows of the running text, or its lines (`pack=False`).

    `tokens` is the length of a window, of which the special tokens are a part; None means 128, or what the model has
    positions for, if that is less. The text is read from its character `start` on, and its first `skip` sequences are
    left out. Where `content` is joined of several `parts`, one sequence of each is taken in turn, from its beginning
    on; where one has no more, of those that have. A model of pixels or sound gets noise from `seed`, the first
    `skip_noise` draws left out (and its decoder, or CLIP's text side, the text). Raises TextError where a text is too
    short or there is no usable tokenizer; UsageError for numbers that make no sense, or more tokens than the model has
    positions.
    """
    _check(loaded, sequences, batch_size)
    rows, names, end = _cut(loaded, content, parts, tokens, slice(skip, skip + sequences), pack, start)
    made = _noise(loaded, len(rows) or sequences, seed, skip_noise)
    count = len(rows) or sequences
    cuts = [slice(start, start + batch_size) for start in range(0, count, batch_size)]
    return Batches(
        batches=tuple(
            _batch(loaded, rows[cut], {name: tensor[cut] for name, tensor in made.items()}, names[cut]) for cut in cuts
        ),
        sequences=count,
        tokens=max(map(len, rows), default=0),
        text=_text(content if rows else None, made),
        end=end,
        unknown_share=_unknown_share(loaded, rows),
    )


def _check(loaded: Loaded, sequences: int, batch_size: int) -> None:
    """Raise UsageError or TextError where there is nothing to cut, or nothing to cut it for."""
    for option, number in (("sequences", sequences), ("batch-size", batch_size)):
        if number < 1:
            raise UsageError(f"--{option} {number} is none at all.", f"Give at least --{option} 1.")
    if loaded.kind == "other":
        main = loaded.model.main_input_name
        raise TextError(f"attnlens can't make up {main} for a {loaded.info.architecture}.", "Use --source weights.")


def reads_text(loaded: Loaded) -> bool:
    """Whether any part of the model reads token ids (Whisper's decoder and CLIP's text side do)."""
    return loaded.kind in ("text", "seq2seq", "pixels+text") or bool(loaded.model.config.is_encoder_decoder)


def placeholder(loaded: Loaded, tokens: int, seed: int, sequences: int = 1) -> Batches:
    """Random ids (and noise for models of pixels or sound) of the right shape: to find a model's sites without a text.

    Raises TextError for a model whose inputs attnlens can't make up.
    """
    config = loaded.model.config
    rows: list[list[int]] = []
    if reads_text(loaded):
        draws = Random(seed)  # noqa: S311  # no secret
        known = config.get_text_config().vocab_size
        rows = [[draws.randrange(known) for _ in range(tokens)] for _ in range(sequences)]
    made = _noise(loaded, sequences, seed)
    name = " + ".join(["random tokens"] * bool(rows) + [NOISE_NAMES[name] for name in made])
    batch = _batch(loaded, rows, made, ())
    return Batches((batch,), sequences, tokens * bool(rows), Text(name=name, sha256=_digest(rows, made)), 0, 0.0)


def _cut(
    loaded: Loaded,
    content: Content,
    parts: Sequence[Content],
    tokens: int | None,
    wanted: slice,
    pack: bool,
    start: int,
) -> tuple[list[list[int]], tuple[str, ...], int]:
    """The sequences of one text, no names, and where the last line ends; of several parts one each in turn, the name of
    the part of each, and 0.
    """
    if not reads_text(loaded):
        return [], (), 0
    length = window_length(loaded.model, tokens)
    if len(parts) < 2:
        rows, end = _rows(loaded, content, length, wanted, pack, start)
        return rows, (), end
    found = [
        [(row, part.name) for row in _rows(loaded, part, length, slice(0, wanted.stop), pack, 0)[0]] for part in parts
    ]
    turns = [one for turn in zip_longest(*found) for one in turn if one is not None][wanted]
    return [row for row, _ in turns], tuple(name for _, name in turns), 0


def _rows(
    loaded: Loaded,
    content: Content,
    length: int,
    part: slice,
    pack: bool,
    start: int,
) -> tuple[list[list[int]], int]:
    """Those sequences of ids, and where the last line ends; every id is one that the model knows."""
    if loaded.tokenizer is None:
        raise TextError(
            f"This model has no usable tokenizer: {loaded.tokenizer_problem}.",
            "Put its tokenizer files beside its weights, or use --source weights.",
        )
    rest = Content(content.text[start:], f"{content.name}, behind its evaluated lines") if start else content
    found, end = (windows if pack else lines)(loaded.tokenizer, rest, tokens=length, sequences=part.stop)
    rows = found[part]
    if not rows:
        raise TextError(
            f"The text ({content.name}) has nothing left behind its first {part.start} sequences.",
            "Give a longer text, another one with --calibration, or fewer --sequences.",
        )
    known, largest = loaded.model.config.get_text_config().vocab_size, max(map(max, rows))
    if largest >= known:
        raise TextError(
            f"The tokenizer gives token {largest} and the model knows only {known}.",
            "Tokenizer and weights don't belong together; use --source weights.",
        )
    return rows, start + end


def _noise(loaded: Loaded, count: int, seed: int, skip: int = 0) -> dict[str, Tensor]:
    if loaded.kind not in NOISE:
        return {}
    name = NOISE[loaded.kind] or loaded.model.main_input_name
    return {name: noise(loaded.model, name, count, seed, skip)}


def _batch(loaded: Loaded, rows: Sequence[Sequence[int]], made: dict[str, Tensor], parts: tuple[str, ...]) -> Batch:
    model = loaded.model
    inputs = {name: tensor.to(model.device, model.dtype) for name, tensor in made.items()}
    if rows:
        ids, mask = token_tensors(rows, _padding(loaded))
        inputs |= text_inputs(model, ids, mask, encoder_reads=loaded.kind in ("text", "seq2seq", "pixels+text"))
    return Batch(inputs, tuple(map(len, rows)), parts)


def _padding(loaded: Loaded) -> int:
    """The id that stands for nothing; any id would do, since the mask hides it."""
    choices = (getattr(loaded.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((choice for choice in choices if choice is not None), 0)


def _text(content: Content | None, made: dict[str, Tensor]) -> Text:
    names, digest = [], sha256()
    if content is not None:
        names.append(content.name)
        digest.update(content.text.encode("utf-8"))
    for name, tensor in made.items():
        names.append(NOISE_NAMES[name])
        digest.update(tensor.numpy().tobytes())
    return Text(name=" + ".join(names), sha256=digest.hexdigest())


def _digest(rows: Sequence[Sequence[int]], made: dict[str, Tensor]) -> str:
    digest = sha256(repr(rows).encode())
    for tensor in made.values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _unknown_share(loaded: Loaded, rows: list[list[int]]) -> float:
    unknown = getattr(loaded.tokenizer, "unk_token_id", None)
    ids = [id_ for row in rows for id_ in row]
    return ids.count(unknown) / len(ids) if ids and unknown is not None else 0.0
