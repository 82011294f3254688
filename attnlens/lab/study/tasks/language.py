"""Language modelling and translation in byte pairs: the user's files, the papers' data, and the built-in reversal."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from attnlens.errors import TextError, UsageError
from attnlens.lab.study.tasks.task import (
    BEGIN,
    END,
    PADDING,
    PARTS,
    SHARES,
    SPECIALS,
    STRETCHES,
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
    read_whole,
    spread,
)
from attnlens.models import texts
from attnlens.models.texts.sources import quiet

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    SentencePair: TypeAlias = tuple[Tensor, Tensor]


HELD_BOOKS = {"validation": ("Eccl", "Esth", "Lam", "Titus"), "test": ("Job", "Ruth", "Jonah", "Phlm")}
"""Books of the Bible without parallel passages in others; the gospels, or Kings and Chronicles, repeat each other."""
VERSE = re.compile(r"(\w+)\.\d+\.\d+")  # an id that names a book, a chapter and a verse
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
    shortest: int = 4  # the fewest letters of a source
    longest: int = 8  # the most
    evaluated: int = 256  # pairs of validation and of test
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


BOOK = Path(__file__).parents[4] / "training" / "kjv.txt.gz"
"""The whole King James Bible, which lies in a checkout and not in an installed package."""
BLOCK_CHARACTERS = 2000
"""Characters that a held-out block should have; a shorter text is cut into fewer stretches."""
LINE_CHARACTERS = 1000  # how far behind a cut the end of a line is looked for


@dataclass(frozen=True, eq=False)
class NextTokens:
    """Windows of a text; of each token but the first of a block, the window before it is to predict it."""

    name: str
    """What the texts are called."""
    length: int
    """Tokens of a window."""
    pairs: BytePairs
    """The encoding, trained on the training part alone."""
    windows: Mapping[str, Int[Tensor, "windows tokens"]]
    """Of each part its windows with the token that follows, so that they have `length` + 1 tokens."""
    files: Mapping[str, str]
    """SHA-256 of each text by its name; empty for the built-in text."""
    form: Literal["language"] = field(default="language", init=False)
    channels: int = field(default=0, init=False)
    metric: str = field(default="perplexity", init=False)
    higher_is_better: bool = field(default=False, init=False)

    @property
    def vocabulary(self) -> int:
        """How many ids the byte pairs have."""
        return self.pairs.size

    outputs = vocabulary

    @cached_property
    def widths(self) -> Float[Tensor, " vocabulary"]:
        """How many bytes each id stands for."""
        return self.pairs.widths

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """Shuffled windows without end."""
        rows = self.windows["training"]
        return endless([self.length] * len(rows), size, seed, lambda numbers: _examples(rows[list(numbers)]))

    def held_out(self, split: Split, size: int) -> Sequence[Examples]:
        """The windows of that part."""
        rows = self.windows[split]
        return in_order([self.length] * len(rows), size, lambda numbers: _examples(rows[list(numbers)]))


def _examples(rows: Int[Tensor, "batch tokens"]) -> Examples:
    return Examples(rows[:, :-1], None, rows[:, 1:])


def default_text() -> tuple[str, str]:
    """A name and the King James text: the whole book in a checkout, the passages that ship in an installed package."""
    if not BOOK.is_file():
        (passages,) = texts.sample("demo")
        return passages.name, passages.text
    text, _ = read_whole(BOOK, "Restore the file from the repository.")
    # its first lines repeat the beginning, and lines in brackets name chapters
    verses = [line for line in text.splitlines()[2:] if line and not line.startswith("[")]
    return "King James Bible", "\n".join(verses) + "\n"


def language(
    given: Sequence[tuple[str, str]] = (), *, length: int = 128, vocabulary: int = 1024, evaluated: int | None = None
) -> NextTokens:
    """Language modelling on texts, each (name, text); none: the King James text that ships with attnlens.

    Each text is cut into stretches, and each stretch into training (90 %), validation and test (5 % each); `evaluated`
    bounds the windows of validation and of test, which are then spread evenly. Raises TextError where a part has no
    window of `length` + 1 tokens, UsageError for a vocabulary below 256.
    """
    contents = list(given) or [default_text()]
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    for _, text in contents:
        for part, found in split_text(text).items():
            parts[part] += found
    digests = {name: sha256(text.encode()).hexdigest() for name, text in given}
    name = " and ".join(name for name, _ in contents)
    return next_tokens(name, parts, digests, length=length, vocabulary=vocabulary, evaluated=evaluated)


def next_tokens(
    name: str,
    parts: Mapping[str, Sequence[str]],
    files: Mapping[str, str],
    *,
    length: int,
    vocabulary: int,
    evaluated: int | None,
) -> NextTokens:
    """Language modelling on blocks of text that are split into parts already; as `language`, otherwise."""
    pairs = byte_pairs((line for block in parts["training"] for line in block.splitlines(keepends=True)), vocabulary)
    windows = {part: _windows(pairs, each, length) for part, each in parts.items()}
    for part, rows in windows.items():
        if not len(rows):
            raise TextError(
                f"The text ({name}) is too short: its {part} part has no window of {length} tokens.",
                "Give a longer text.",
            )
    chosen = {
        part: rows if part == "training" else rows[spread(len(rows), evaluated)] for part, rows in windows.items()
    }
    return NextTokens(name, length, pairs, chosen, files)


def split_text(text: str) -> dict[str, list[str]]:
    """The blocks of each part, cut at ends of lines where lines are short; together they are the text."""
    held = min(SHARES) * len(text) / BLOCK_CHARACTERS
    parts = blocks(len(text), stretches=min(max(int(held), 1), STRETCHES))
    return {
        part: [text[_cut(text, block.start) : _cut(text, block.stop)] for block in each] for part, each in parts.items()
    }


def _cut(text: str, near: int) -> int:
    """The end of the line at that place; the place itself where the line is long, or begins there."""
    if near in (0, len(text)):
        return near
    end = text.find("\n", near - 1, near + LINE_CHARACTERS)
    return near if end == -1 else end + 1


def _windows(pairs: BytePairs, parts: Sequence[str], length: int) -> Int[Tensor, "windows tokens"]:
    """Windows of `length` + 1 tokens, the last of each the first of the next; the rest of a block is left out."""
    rows = []
    for block in parts:
        lines = pairs.ids(block.splitlines(keepends=True))
        ids = torch.tensor([number for line in lines for number in line], dtype=torch.int64)
        if len(ids) > length:
            rows.append(ids.unfold(0, length + 1, length))
    return torch.cat(rows) if rows else torch.zeros(0, length + 1, dtype=torch.int64)


WIKITEXT = ("Salesforce/wikitext", "wikitext-103-raw-v1")
"""Merity et al. 2017, as it was written: with its capitals and rare words, which byte pairs can spell."""
IWSLT = ("bbaaaa/iwslt14-de-en",)
"""160,239 pairs from German and English talks (Cettolo et al. 2014), 7,283 for validation, 6,750 for test."""
LINES = 5_000  # of a block, so that no list of ids is as long as the whole text


def wikitext(*, length: int, vocabulary: int, evaluated: int | None) -> NextTokens:
    """Language modelling on WikiText-103, in its own parts.

    Raises UsageError where datasets is missing, TextError where the data can't be had or are not as they were.
    """
    splits = _splits("--text", *WIKITEXT)
    parts = {part: _blocks([line.rstrip("\n") + "\n" for line in rows["text"]]) for part, rows in splits.items()}
    sizes: dict[str, Any] = {"length": length, "vocabulary": vocabulary, "evaluated": evaluated}
    return next_tokens("WikiText-103", parts, _digests(WIKITEXT, parts), **sizes)


def iwslt(*, length: int, vocabulary: int, evaluated: int | None) -> SentencePairs:
    """Translation from German on IWSLT'14, in its own parts; raises as `wikitext`."""
    splits = _splits("--pairs", *IWSLT)
    parts = {part: [(row["de"], row["en"]) for row in rows["translation"]] for part, rows in splits.items()}
    sizes: dict[str, Any] = {"length": length, "vocabulary": vocabulary, "evaluated": evaluated}
    return sentence_pairs(
        "IWSLT'14 de-en",
        parts,
        _digests(IWSLT, {part: [side for row in rows for side in row] for part, rows in parts.items()}),
        split_by="the source",
        **sizes,
    )


def _splits(instead: str, *name: str) -> Mapping[str, Any]:
    """The three parts of a dataset on the hub; `instead` is the option for files of one's own."""
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"The papers' data are fetched by datasets, which is not installed, and no {instead} is given.",
            f'Run: pip install "attnlens[papers]", or give {instead}.',
        ) from None
    try:
        with quiet():
            found = datasets.load_dataset(*name)
        return {part: found[own] for part, own in zip(PARTS, ("train", "validation", "test"), strict=True)}
    except (OSError, ValueError, KeyError) as error:  # the hub can't be reached, or has it no more in this form
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TextError(f"{name[0]} can't be had from the hub: {said}", f"Go online, or give {instead}.") from None


def _blocks(lines: Sequence[str]) -> list[str]:
    return ["".join(lines[start : start + LINES]) for start in range(0, len(lines), LINES)]


def _digests(name: Sequence[str], parts: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """SHA-256 of each part's text."""
    return {f"{name[0]} {part}": sha256("".join(texts).encode()).hexdigest() for part, texts in parts.items()}
