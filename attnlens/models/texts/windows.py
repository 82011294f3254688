"""Forward passes: their inputs, how texts are cut for them, and which runs of tokens they share."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnlens.choices import Placement
from attnlens.records import Text

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


RUN = 32
"""Tokens of a run that is no coincidence, some 10 to 25 words: the first and the second half of the demo's text, one
book, share no run of 12."""
LEAST = 8
"""Tokens below which a whole line proves nothing: those halves share runs of 8 that hold 1 to 7 % of their tokens."""
MOST_SHARED = 0.1
"""Share of the evaluated tokens above which a measurement is not held out. At worst the shared part shows no loss at
all, so that a tenth of it hides a tenth of what is measured: less than the interval of a rise over 32 sequences."""

Ids = Sequence[int]


def shared_share(
    tokenizer: PreTrainedTokenizerBase | None, evaluated: Sequence[Ids], calibrated: Sequence[Ids]
) -> float:
    """The share, 0 to 1, of evaluated tokens in runs of at least RUN that a calibration passage has too.

    Special tokens are left out. A passage shorter than RUN counts where all of it is found, from LEAST tokens on. 0
    where no tokens are fed.
    """
    return share_in_runs(*(_bare(tokenizer, rows) for rows in (evaluated, calibrated)))


def repeated_share(tokenizer: PreTrainedTokenizerBase | None, sequences: Sequence[Ids]) -> float:
    """The share, 0 to 1, of tokens in runs of RUN that another of the sequences has too, special tokens left out."""
    bare = _bare(tokenizer, sequences)
    every = [_runs(row, RUN) if len(row) >= RUN else [] for row in bare]
    holders = Counter(run for runs in every for run in set(runs))
    again = {run for run, count in holders.items() if count > 1}
    total = sum(map(len, bare))
    return _count_covered(every, RUN, again) / total if total else 0.0


def share_in_runs(evaluated: Sequence[Ids], calibrated: Sequence[Ids]) -> float:
    """The same of passages of ids, across whose ends no run goes; where all of `calibrated` are shorter than RUN, the
    longest of them is as long as a run. Of a passage no longer than that all but one token is asked for: the beginning
    of a text is cut otherwise than its repetitions.
    """
    longest = min(RUN, max(map(len, calibrated), default=0))
    alike: dict[int, list[list[bytes]]] = {}
    for passage in evaluated:
        length = min(longest, len(passage) - (2 * LEAST <= len(passage) <= RUN))
        if length >= LEAST:
            alike.setdefault(length, []).append(_runs(passage, length))
    total = sum(map(len, evaluated))
    return sum(_covered(runs, length, calibrated) for length, runs in alike.items()) / total if total else 0.0


def _bare(tokenizer: PreTrainedTokenizerBase | None, rows: Iterable[Ids]) -> list[list[int]]:
    """The rows without special tokens."""
    special = set(() if tokenizer is None else tokenizer.all_special_ids)
    return [[id_ for id_ in row if id_ not in special] for row in rows]


def _runs(passage: Ids, length: int) -> list[bytes]:
    """Every run of that length, as bytes: they hash faster than tuples, and compare exactly."""
    ids = array("q", passage)
    whole, size = ids.tobytes(), ids.itemsize
    return [whole[size * at : size * (at + length)] for at in range(len(passage) - length + 1)]


def _covered(evaluated: Sequence[Sequence[bytes]], length: int, calibrated: Sequence[Ids]) -> int:
    """How many tokens of these passages, given as their runs of that length, lie in one that `calibrated` has too."""
    wanted = {run for runs in evaluated for run in runs}
    held = {run for passage in calibrated for run in _runs(passage, length) if run in wanted}
    return _count_covered(evaluated, length, held)


def _count_covered(passages: Iterable[Sequence[bytes]], length: int, held: Container[bytes]) -> int:
    """How many tokens of these passages, given as their runs of that length, lie in a run that is `held`."""
    covered = 0
    for runs in passages:
        counted = 0
        for at, run in enumerate(runs):
            if run in held:
                covered += at + length - max(at, counted)
                counted = at + length
    return covered


PACKED = frozenset({"grid_thw", "image_grid_thw", "target_sizes"})
"""Inputs beside which the patches of all images stand in one row, so that a forward pass gets one sequence."""


def sequences_in(inputs: Mapping[str, Tensor]) -> int:
    """How many sequences a forward pass gets."""
    return 1 if not PACKED.isdisjoint(inputs) else len(next(iter(inputs.values())))


def first(inputs: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """The inputs of the first `count` sequences."""
    whole = sequences_in(inputs) <= count
    return {name: value if whole else value[:count] for name, value in inputs.items()}


@dataclass(frozen=True)
class Batch:
    """The keyword arguments of one forward pass."""

    inputs: dict[str, Tensor]
    """`model(**inputs)`; on the model's device."""
    lengths: tuple[int, ...]
    """Ids of each sequence that are no padding (which stands on the right); empty where no tokens are fed."""
    parts: tuple[str, ...] = ()
    """The name of the text that each sequence is of; empty where no tokens are fed."""
    start: int = 0
    """Where the text begins in each sequence: behind the ids that stand for an image or a sound."""

    @property
    def size(self) -> int:
        """How many sequences it holds."""
        return sequences_in(self.inputs)


@dataclass(frozen=True)
class Batches:
    """All forward passes, and what they are made of."""

    batches: tuple[Batch, ...]
    """In the order of the texts, and of each text's windows."""
    sequences: int
    """How many sequences there are; fewer than asked for, where the texts have no more."""
    tokens: int
    """Ids of the longest sequence, special tokens included; 0 where no tokens are fed."""
    texts: tuple[Text, ...]
    """The texts fed, with the numbers of their windows; the noise after them, if there is any."""
    unknown: Mapping[str, float]
    """Share of each text's ids that are the tokenizer's unknown token; near 1, the model can't read that text."""
    pack: bool = True
    """Whether the sequences are windows of running text, and not lines."""
    notes: tuple[str, ...] = ()
    """What a reader must know of what is fed beside the texts."""
    made_up: bool = False
    """Whether what the model reads first of all is noise."""
    left_out: tuple[str, ...] = ()
    """Texts of which nothing is fed, since there are fewer sequences than texts."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def first(self) -> Batches:
        """The first pass alone."""
        return replace(self, batches=self.batches[:1], sequences=self.batches[0].size)

    def some(self, sequences: int) -> Batches:
        """As many passes, spread evenly, as hold about so many sequences; all where there are no more."""
        count = -(-len(self.batches) * sequences // self.sequences)
        if count >= len(self.batches):
            return self
        found = tuple(self.batches[index * len(self.batches) // count] for index in range(count))
        return replace(self, batches=found, sequences=sum(batch.size for batch in found))

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """What each sequence says, without padding; empty where no tokens are fed."""
        said = [batch.inputs.get("input_ids", batch.inputs.get("decoder_input_ids")) for batch in self.batches]
        return [
            tuple(row[batch.start : length])
            for batch, ids in zip(self.batches, said, strict=True)
            for row, length in zip([] if ids is None else ids.tolist(), batch.lengths, strict=True)
        ]

    @property
    def passages(self) -> list[tuple[int, ...]]:
        """What the sequences say, windows that follow each other in a text joined to one passage."""
        return passages([self])

    @property
    def parts(self) -> tuple[str, ...]:
        """The name of the text that each sequence is of; empty where no tokens are fed."""
        return tuple(name for batch in self.batches for name in batch.parts)

    @property
    def taken(self) -> dict[str, frozenset[int]]:
        """The windows' numbers of each text, by its SHA-256."""
        return {text.sha256: frozenset(text.windows) for text in self.texts}


def passages(several: Iterable[Batches]) -> list[tuple[int, ...]]:
    """What the sequences say, windows that follow each other in a text joined to one passage, across all of these."""
    said: dict[tuple[str, int], tuple[int, ...]] = {}
    packed = True
    for found in several:
        numbers = [number for text in found.texts for number in text.windows]
        said |= zip(zip(found.parts, numbers, strict=True), found.ids, strict=True)
        packed &= found.pack
    joined: list[tuple[int, ...]] = []
    for name, number in sorted(said):
        if packed and (name, number - 1) in said:
            joined[-1] += said[name, number]
        else:
            joined.append(said[name, number])
    return joined


@dataclass(frozen=True)
class Cut:
    """How texts are cut into sequences, and which of these are fed."""

    tokens: int | None = None
    """Length of a window, of which the special tokens are a part; None: 128, or what the model has positions for."""
    sequences: int = 32
    """How many, over all texts; each gives its share, as equal as their lengths allow."""
    batch_size: int = 8
    """How many go through the model at once."""
    pack: bool = True
    """Windows of the running text, or its lines."""
    placement: Placement = "spread"
    """Where in each text the windows lie."""
    seed: int = 0
    """Of the placement, and of noise."""
    turn: tuple[int, int] = (0, 1)
    """(i, n): of the chosen sequences of each text only number i, i + n, i + 2n …, so that n parts are disjoint."""
    image: tuple[str, ...] = ()
    """Files of images, of which each sequence gets the next one in turn; none: noise."""
    audio: tuple[str, ...] = ()
    """Files of sounds, in the same way."""
    pairs: bool = False
    """Whether each line holds two texts with a tab between them, which the tokenizer joins."""
    allow_foreign: bool = False
    """Whether a text of which the tokenizer does not know half of the tokens is fed all the same."""
