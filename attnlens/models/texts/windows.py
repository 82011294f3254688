"""Inputs of forward passes, options for cutting texts, and the share of tokens that several texts have in common."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnlens.choices import Placement
from attnlens.records import Text

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


RUN = 32
"""Tokens of a run too long for a coincidence, about 10 to 25 words: the two halves of the demo's text, which is one
book, share no run of 12."""
LEAST = 8
"""Minimum length of a whole line that counts as shared: those halves share runs of 8 with 1 to 7 % of their tokens."""
MOST_SHARED = 0.1
"""Share of the evaluated tokens above which a measurement is not held out. In the worst case the shared part has no
loss, so that a tenth hides a tenth of the measured effect: less than the interval of a rise over 32 sequences."""

Ids = Sequence[int]


def shared_share(
    tokenizer: PreTrainedTokenizerBase | None, evaluated: Sequence[Ids], calibrated: Sequence[Ids]
) -> float:
    """Return the share, 0 to 1, of evaluated tokens in runs that also occur within a calibration passage.

    A run has RUN tokens, or fewer if all calibration passages are shorter; special tokens are left out. A passage of
    LEAST tokens or more, but fewer than RUN, counts if all of it occurs; from 2 · LEAST tokens on if all but one occur,
    because the beginning of a text is tokenized differently from its repetitions. The share is 0 without tokens.
    """
    evaluated, calibrated = (_bare(tokenizer, rows) for rows in (evaluated, calibrated))
    longest = min(RUN, max(map(len, calibrated), default=0))
    runs_by_length = defaultdict[int, list[list[bytes]]](list)
    for passage in evaluated:
        length = min(longest, len(passage) - (2 * LEAST <= len(passage) <= RUN))
        if length >= LEAST:
            runs_by_length[length].append(_runs(passage, length))
    covered = 0
    for length, passages_runs in runs_by_length.items():
        evaluated_runs = {run for runs in passages_runs for run in runs}
        shared = {run for passage in calibrated for run in _runs(passage, length) if run in evaluated_runs}
        covered += _count_covered(passages_runs, length, shared)
    return covered / max(1, sum(map(len, evaluated)))


def repeated_share(tokenizer: PreTrainedTokenizerBase | None, sequences: Sequence[Ids]) -> float:
    """Return the share, 0 to 1, of tokens in runs of RUN that several sequences contain, without special tokens."""
    bare = _bare(tokenizer, sequences)
    all_runs = [_runs(row, RUN) for row in bare]
    counts = Counter(run for runs in all_runs for run in set(runs))
    repeated = {run for run, count in counts.items() if count > 1}
    return _count_covered(all_runs, RUN, repeated) / max(1, sum(map(len, bare)))


def _bare(tokenizer: PreTrainedTokenizerBase | None, rows: Iterable[Ids]) -> list[list[int]]:
    """Return the rows without special tokens."""
    special = set(() if tokenizer is None else tokenizer.all_special_ids)
    return [[id_ for id_ in row if id_ not in special] for row in rows]


def _runs(passage: Ids, length: int) -> list[bytes]:
    """Return all runs of `length` ids as bytes, which hash faster than tuples and compare exactly."""
    ids = array("q", passage)
    whole, size = ids.tobytes(), ids.itemsize
    return [whole[size * at : size * (at + length)] for at in range(len(passage) - length + 1)]


def _count_covered(passages_runs: Iterable[Sequence[bytes]], length: int, shared: Container[bytes]) -> int:
    """Count the tokens of passages, each a list of its runs of `length` tokens, that lie in `shared` runs."""
    covered = 0
    for runs in passages_runs:
        end = 0  # of the last shared run
        for start, run in enumerate(runs):
            if run in shared:
                covered += start + length - max(start, end)
                end = start + length
    return covered


PACKED = frozenset({"grid_thw", "image_grid_thw", "target_sizes"})
"""Inputs of models that take the patches of all images in one row, so that a forward pass gets one sequence."""


def sequences_in(inputs: Mapping[str, Tensor]) -> int:
    """Return the number of sequences in a forward pass."""
    return 1 if not PACKED.isdisjoint(inputs) else len(next(iter(inputs.values())))


def first(inputs: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the inputs of the first `count` sequences."""
    whole = sequences_in(inputs) <= count
    return {name: value if whole else value[:count] for name, value in inputs.items()}


@dataclass(frozen=True)
class Batch:
    """The keyword arguments of one forward pass."""

    inputs: dict[str, Tensor]  # arguments of `model(**inputs)`, on the model's device
    lengths: tuple[int, ...]
    """Number of ids of each sequence without padding, which is on the right; empty if the model reads no tokens."""
    parts: tuple[str, ...] = ()  # name of the text of each sequence; empty if the model reads no tokens
    start: int = 0  # index of the text's first id in each sequence, after the placeholders of images and sounds

    @property
    def size(self) -> int:
        """Number of sequences."""
        return sequences_in(self.inputs)


@dataclass(frozen=True)
class Batches:
    """All forward passes, and the texts that they are built from."""

    batches: tuple[Batch, ...]  # the forward passes, in the order of the texts and of each text's windows
    sequences: int  # number of sequences; fewer than requested if the texts have no more
    tokens: int  # number of ids of the longest sequence, with special tokens; 0 if the model reads no tokens
    texts: tuple[Text, ...]  # the texts with the numbers of their windows, followed by files or noise, if any
    unknown: Mapping[str, float]
    """Share, 0 to 1, of each text's ids that are the tokenizer's unknown token; near 1, the text is unreadable."""
    pack: bool = True  # True if the sequences are windows of running text instead of lines
    notes: tuple[str, ...] = ()  # sentences for the reader about inputs other than the texts
    made_up: bool = False  # True if the model's main input is noise
    left_out: tuple[str, ...] = ()  # names of texts without any sequence, if there are fewer sequences than texts

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def first(self) -> Batches:
        """Return only the first forward pass."""
        return replace(self, batches=self.batches[:1], sequences=self.batches[0].size)

    def some(self, sequences: int) -> Batches:
        """Return evenly spread passes with about `sequences` sequences; all if there are no more."""
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
    def passages(self) -> list[tuple[int, ...]]:
        """Ids of each passage of text; consecutive windows of a text are joined to one passage."""
        return passages([self])

    @property
    def parts(self) -> tuple[str, ...]:
        """Name of the text of each sequence; empty if the model reads no tokens."""
        return tuple(name for batch in self.batches for name in batch.parts)

    @property
    def taken(self) -> dict[str, frozenset[int]]:
        """Numbers of the windows used of each text, keyed by the text's SHA-256."""
        return {text.sha256: frozenset(text.windows) for text in self.texts}


def passages(several: Iterable[Batches]) -> list[tuple[int, ...]]:
    """Return the ids of all sequences, joining consecutive windows of a text to one passage, across all batches."""
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
    """Options for cutting texts into sequences and for choosing those that are fed."""

    tokens: int | None = None
    """Length of a window in tokens, with special tokens; None: 128, or the model's number of positions if smaller."""
    sequences: int = 32  # number of sequences over all texts, divided as equally as the lengths of the texts allow
    batch_size: int = 8  # number of sequences per forward pass
    pack: bool = True  # True for windows of the running text, False for its lines
    placement: Placement = "spread"  # placement of the windows in each text
    seed: int = 0  # seed of the placement and of noise
    turn: tuple[int, int] = (0, 1)
    """(i, n): use only the chosen sequences i, i + n, i + 2n … of each text, so that n parts are disjoint."""
    image: tuple[str, ...] = ()  # paths of images, one per sequence; empty for noise
    audio: tuple[str, ...] = ()  # paths of sounds, one per sequence; empty for noise
    pairs: bool = False  # True if each line contains two texts separated by a tab, which the tokenizer joins
    allow_foreign: bool = False  # True to feed a text even if half of its tokens or more are unknown to the tokenizer
