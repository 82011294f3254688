"""Share of the evaluated tokens that stand in long runs of another text too."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
