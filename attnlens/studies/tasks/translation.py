"""Translation: the user's own pairs of sentences in byte pairs that both languages share, and the built-in reversal."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from attnlens.errors import TextError
from attnlens.studies.tasks.task import (
    BEGIN,
    END,
    PADDING,
    PARTS,
    SPECIALS,
    BytePairs,
    Examples,
    Split,
    TabbedLines,
    blocks,
    byte_pairs,
    endless,
    in_order,
    numbers,
    paired,
    read_rows,
    spread,
)

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    SentencePair: TypeAlias = tuple[Tensor, Tensor]

HELD_BOOKS = {"validation": ("Eccl", "Esth", "Lam", "Titus"), "test": ("Job", "Ruth", "Jonah", "Phlm")}
"""Books of the Bible without parallel passages in others; the gospels, or Kings and Chronicles, repeat each other."""
VERSE = re.compile(r"(\w+)\.\d+\.\d+")
"""An id that names a book, a chapter and a verse."""
REMEDY = "Give lines of a source and a target, or of an id, a source and a target, in UTF-8 with tabs between them."


@dataclass(frozen=True, eq=False)
class SentencePairs:
    """Sentences in one language with their translations into another."""

    name: str
    """The file's name."""
    length: int
    """The most tokens of a side, with the one that ends it."""
    pairs: BytePairs
    """The encoding of both languages, trained on the training part alone."""
    sentences: Mapping[str, Sequence[SentencePair]]
    """Of each part its pairs of source and target ids, without ids that begin or end."""
    left_out: Mapping[str, int]
    """Of each part the pairs of which a side is longer than `length`."""
    repeated: int
    """Pairs left out of training because they are held out too."""
    split_by: Literal["books", "blocks", "the source"]
    """Whether whole books are held out, contiguous blocks of lines, or what the source of the data holds out."""
    files: Mapping[str, str]
    """SHA-256 of the file by its name."""
    form: Literal["translation"] = field(default="translation", init=False)
    channels: int = field(default=0, init=False)
    metric: str = field(default="BLEU", init=False)
    higher_is_better: bool = field(default=True, init=False)
    padding: int = field(default=PADDING, init=False)
    begin: int = field(default=BEGIN, init=False)
    end: int = field(default=END, init=False)

    @property
    def vocabulary(self) -> int:
        """How many ids the byte pairs have, with those that begin, end and pad."""
        return self.pairs.size

    outputs = vocabulary

    def written(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return self.pairs.text(ids)

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """Shuffled pairs without end, those of about one length together."""
        return endless(self._lengths("training"), size, seed, lambda chosen: self._batch("training", chosen))

    def held_out(self, split: Split, size: int) -> Sequence[Examples]:
        """The pairs of that part, the shortest first."""
        return in_order(self._lengths(split), size, lambda chosen: self._batch(split, chosen))

    def _lengths(self, part: str) -> list[int]:
        return [len(source) + len(target) for source, target in self.sentences[part]]

    def _batch(self, part: str, chosen: Sequence[int]) -> Examples:
        rows = [self.sentences[part][number] for number in chosen]
        return paired([source for source, _ in rows], [target for _, target in rows])


def translation(
    path: str | Path, *, length: int = 96, vocabulary: int = 1024, evaluated: int | None = None
) -> SentencePairs:
    """Translation of a file of lines `source TAB target` or `id TAB source TAB target`, packed by gzip or not.

    Where every id is a verse (`Ruth.1.16`) and the held-out books are there, whole books are held out; elsewhere
    contiguous blocks. `evaluated` bounds the pairs of validation and of test, which are then spread evenly. Raises
    TextError for lines with empty or missing sides, and where a part is left without pairs of at most `length` tokens;
    UsageError for a vocabulary below 259.
    """
    found = read_rows(path, (2, 3), REMEDY)
    by_book = _by_book(found)
    chosen = by_book or numbers(blocks(len(found.rows)))
    return sentence_pairs(
        found.name,
        {part: [found.rows[number][-2:] for number in each] for part, each in chosen.items()},
        {found.name: found.sha256},
        split_by="books" if by_book else "blocks",
        length=length,
        vocabulary=vocabulary,
        evaluated=evaluated,
    )


def sentence_pairs(
    name: str,
    texts: Mapping[str, Sequence[Sequence[str]]],
    files: Mapping[str, str],
    *,
    split_by: Literal["books", "blocks", "the source"],
    length: int,
    vocabulary: int,
    evaluated: int | None,
) -> SentencePairs:
    """Translation of (source, target) rows that are split into parts already; as `translation`, otherwise."""
    code = byte_pairs((side for row in texts["training"] for side in row), vocabulary, SPECIALS)
    every = {part: _encoded(code, rows) for part, rows in texts.items()}
    short = {part: [row for row in rows if max(map(len, row)) < length] for part, rows in every.items()}
    for part, rows in short.items():
        if not rows:
            raise TextError(
                f"{name}: of {len(every[part])} pairs of its {part} part none has at most {length} tokens a side.",
                "Give more pairs, or shorter ones.",
            )
    held = {part: [short[part][at] for at in spread(len(short[part]), evaluated)] for part in PARTS[1:]}
    known = {_key(row) for rows in held.values() for row in rows}
    kept = held | {"training": [row for row in short["training"] if _key(row) not in known]}
    return SentencePairs(
        name=name,
        length=length,
        pairs=code,
        sentences=kept,
        left_out={part: len(every[part]) - len(short[part]) for part in PARTS},
        repeated=len(short["training"]) - len(kept["training"]),
        split_by=split_by,
        files=files,
    )


def _key(row: SentencePair) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(side.tolist()) for side in row)


def _by_book(found: TabbedLines) -> dict[str, list[int]] | None:
    """The lines of each part where every line names a verse and each part has books; None elsewhere."""
    matches = [VERSE.fullmatch(row[0]) if len(row) == 3 else None for row in found.rows]
    parts: dict[str, list[int]] = {part: [] for part in PARTS}
    for number, match in enumerate(matches):
        if match is None:
            return None
        held = (part for part, books in HELD_BOOKS.items() if match[1] in books)
        parts[next(held, "training")].append(number)
    return parts if all(parts.values()) else None


def _encoded(code: BytePairs, rows: Sequence[Sequence[str]]) -> list[SentencePair]:
    sources, targets = (code.ids([row[side] for row in rows]) for side in (0, 1))
    return [
        (torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
        for source, target in zip(sources, targets, strict=True)
    ]


HELD_OUT = {"validation": 10**9 + 7, "test": 10**9 + 9}
"""Seeds of what models are judged on, far from those that they are trained with."""


@dataclass(frozen=True, eq=False)
class Reversal:
    """A sentence of random letters, written backwards, in capitals where the letter before it in the source is odd.

    Of a source x₁ … xₙ the target is yₜ = (x_i, x_{i−1} odd) with i = n + 1 − t, and x₀ is even. An encoder without
    positions gives the same set of states for every order of its tokens (Tsai et al. 2019, Proposition 1), and
    cross-attention without positions does not know in which order they stand; so what the decoder writes depends on
    the source through its bag of letters alone, whatever it knows of its own order. The bag does not tell the order,
    and the target does: given a bag, sources and targets are one to one. The least loss is `bag_bound`.
    """

    letters: int = 8
    """How many letters there are."""
    shortest: int = 4
    """The fewest letters of a source."""
    longest: int = 8
    """The most."""
    evaluated: int = 256
    """Pairs of validation and of test."""
    name: str = field(default="planted reversal", init=False)
    form: Literal["translation"] = field(default="translation", init=False)
    channels: int = field(default=0, init=False)
    metric: str = field(default="BLEU", init=False)
    higher_is_better: bool = field(default=True, init=False)
    files: Mapping[str, str] = field(default_factory=dict, init=False)
    padding: int = field(default=PADDING, init=False)
    begin: int = field(default=BEGIN, init=False)
    end: int = field(default=END, init=False)

    @property
    def vocabulary(self) -> int:
        """Letters, their capitals, and the ids that begin, end and pad."""
        return len(SPECIALS) + 2 * self.letters

    outputs = vocabulary

    @property
    def length(self) -> int:
        """The most tokens of a side, with the one that ends it."""
        return self.longest + 1

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """New pairs without end."""
        draws = torch.Generator().manual_seed(seed)
        while True:
            yield self._examples(self.sources(size, draws))

    def held_out(self, split: Split, size: int) -> Sequence[Examples]:
        """Pairs that are the same at each call."""
        sources = self._held_out(split)
        return in_order([*map(len, sources)], size, lambda chosen: self._examples([sources[at] for at in chosen]))

    def bound(self, split: Split) -> float:
        """The least loss on that part of a model without positions in encoder and cross-attention: `bag_bound`."""
        return bag_bound(source.tolist() for source in self._held_out(split))

    def sources(self, count: int, draws: torch.Generator) -> list[Int[Tensor, " tokens"]]:
        """Random sources: each letter, and each number of letters, as likely as any other."""
        first = len(SPECIALS)
        sizes = torch.randint(self.shortest, self.longest + 1, (count,), generator=draws).tolist()
        return [torch.randint(first, first + self.letters, (size,), generator=draws) for size in sizes]

    def target(self, source: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
        """The source backwards, a letter in capitals where the one before it in the source is odd."""
        before = torch.cat((torch.zeros(1, dtype=torch.int64), (source[:-1] - len(SPECIALS)) % 2))
        return (source + self.letters * before).flip(0)

    def written(self, ids: Sequence[int]) -> str:
        """The numbers of letters with spaces between them."""
        return " ".join(str(number) for number in ids if number >= len(SPECIALS))

    def _held_out(self, split: Split) -> list[Int[Tensor, " tokens"]]:
        return self.sources(self.evaluated, torch.Generator().manual_seed(HELD_OUT[split]))

    def _examples(self, sources: Sequence[Int[Tensor, " tokens"]]) -> Examples:
        return paired(sources, [self.target(source) for source in sources])


def bag_bound(sources: Iterable[Sequence[int]]) -> float:
    """The least loss (nats a target token, END included) on those sources of a model that sees their bags alone.

    Σ log(n!/Π c_v!) / Σ (n + 1), c_v how often letter v stands in a source of n: given its bag, a source is one of
    n!/Π c_v! orders, all as likely; each has a target of its own, and the sum over a target's tokens of the least loss
    is minus the logarithm of its probability, by the chain rule. The size of the bag tells where END stands.
    """
    total, tokens = 0.0, 0
    for source in sources:
        orders = math.factorial(len(source)) // math.prod(map(math.factorial, Counter(source).values()))
        total += math.log(orders)
        tokens += len(source) + 1
    return total / tokens
