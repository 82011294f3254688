"""Language modelling and translation in byte pairs: the user's files, the papers' data, and the built-in reversal."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch

from attnlens.errors import TextError, UsageError
from attnlens.lab.study.tasks import task
from attnlens.models import texts
from attnlens.models.texts.sequences import quiet

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    SentencePair: TypeAlias = tuple[Tensor, Tensor]


HELD_BOOKS = {"validation": ("Eccl", "Esth", "Lam", "Titus"), "test": ("Job", "Ruth", "Jonah", "Phlm")}
"""Held-out books of the Bible, without parallels in other books; the gospels, or Kings and Chronicles, overlap."""
VERSE = re.compile(r"(\w+)\.\d+\.\d+")  # id of a verse: book, chapter, verse
SplitBy: TypeAlias = Literal["books", "blocks", "the source"]
"""Unit of the held-out parts."""
REMEDY = "Give a UTF-8 file with one pair per line: source and target, or id, source and target, separated by tabs."


class _Sentences(task.Task):
    """Attributes of all translation tasks."""

    form: ClassVar[Literal["translation"]] = "translation"
    metric: ClassVar[Literal["BLEU"]] = "BLEU"


@dataclass(frozen=True, eq=False, kw_only=True)
class SentencePairs(_Sentences):
    """Sentences in one language with their translations into another."""

    name: str  # file name
    length: int  # largest number of tokens of a side, including END
    pairs: task.BytePairs  # encoding of both languages
    sentences: Mapping[str, Sequence[SentencePair]]  # source and target ids of each part's pairs, without BEGIN and END
    split_by: SplitBy
    files: Mapping[str, str]  # SHA-256 of the file by name

    @property
    def vocabulary(self) -> int:
        """Number of ids, including BEGIN, END and PADDING."""
        return self.pairs.size

    outputs = vocabulary

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text."""
        return self.pairs.text(ids)

    def lengths(self, part: str) -> Sequence[int]:
        """Return the number of tokens of each pair of a part."""
        return [len(source) + len(target) for source, target in self.sentences[part]]

    def batch(self, part: str, chosen: Sequence[int]) -> task.Examples:
        """Build a batch of the chosen pairs of a part."""
        return task.pair_sentences([self.sentences[part][number] for number in chosen])


def translation(
    path: str | Path, *, length: int = 96, vocabulary: int = 1024, evaluated: int | None = None
) -> SentencePairs:
    """Read a translation task from lines `source TAB target` or `id TAB source TAB target`, gzipped or not.

    If every id is a verse (`Ruth.1.16`) and the held-out books occur, whole books are held out, otherwise contiguous
    blocks. `evaluated` limits the pairs of validation and test, which are then spread evenly. Raises TextError for data
    that cannot be used, UsageError for a vocabulary below 259.
    """
    lines = task.read_rows(path, (2, 3), REMEDY)
    by_book = _split_by_book(lines)
    chosen = by_book or task.numbers(task.blocks(len(lines.rows)))
    parts = {part: [lines.rows[number][-2:] for number in of_part] for part, of_part in chosen.items()}
    split_by: SplitBy = "books" if by_book else "blocks"
    return sentence_pairs(lines.name, parts, {lines.name: lines.sha256}, split_by, length, vocabulary, evaluated)


def sentence_pairs(
    name: str,
    texts: Mapping[str, Sequence[Sequence[str]]],
    files: Mapping[str, str],
    split_by: SplitBy,
    length: int,
    vocabulary: int,
    evaluated: int | None,
) -> SentencePairs:
    """Build a translation task from (source, target) rows already split into parts; see `translation`."""
    code = task.byte_pairs((side for row in texts["training"] for side in row), vocabulary, task.SPECIALS)
    short: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for part, rows in texts.items():
        sources, targets = (map(tuple, code.ids([row[side] for row in rows])) for side in (0, 1))
        short[part] = [pair for pair in zip(sources, targets, strict=True) if max(map(len, pair)) < length]
        if not short[part]:
            raise TextError(
                f"{name}: none of the {len(rows)} pairs in its {part} part has at most {length} tokens per side.",
                "Give more pairs, or shorter ones.",
            )
    chosen = {
        part: [short[part][index] for index in task.space_evenly(len(short[part]), evaluated)]
        for part in task.PARTS[1:]
    }
    held_out = {pair for pairs in chosen.values() for pair in pairs}
    chosen["training"] = [pair for pair in short["training"] if pair not in held_out]
    as_ids = partial(torch.tensor, dtype=torch.int64)
    return SentencePairs(
        name=name,
        length=length,
        pairs=code,
        sentences={
            part: [(as_ids(source), as_ids(target)) for source, target in pairs] for part, pairs in chosen.items()
        },
        left_out={part: len(texts[part]) - len(short[part]) for part in task.PARTS},
        repeated=len(short["training"]) - len(chosen["training"]),
        split_by=split_by,
        files=files,
    )


def _split_by_book(lines: task.TabbedLines) -> dict[str, list[int]] | None:
    """Split lines by book if every line names a verse and no part is empty; return None otherwise."""
    matches = [VERSE.fullmatch(row[0]) if len(row) == 3 else None for row in lines.rows]
    parts: dict[str, list[int]] = {part: [] for part in task.PARTS}
    for number, match in enumerate(matches):
        if match is None:
            return None
        part = next((part for part, books in HELD_BOOKS.items() if match[1] in books), "training")
        parts[part].append(number)
    return parts if all(parts.values()) else None


HELD_OUT = {"validation": 10**9 + 7, "test": 10**9 + 9}
"""Seeds of the held-out examples, far from training seeds."""


@dataclass(frozen=True, eq=False)
class Reversal(_Sentences):
    """Random letters written backwards; a letter becomes a capital if the letter before it in the source is odd.

    For a source x₁ … xₙ the target is yₜ = (x_i, x_{i−1} odd) with i = n + 1 − t, and x₀ is even. An encoder without
    positions yields the same set of states for every order of its tokens (Tsai et al. 2019, Proposition 1), and
    cross-attention without positions ignores their order. The decoder's output then depends on the source only through
    its bag of letters, even if the decoder has positions. The target reveals the order, but the bag does not: given a
    bag, sources and targets correspond one to one. The smallest possible loss is `bag_bound`.
    """

    letters: int = 8
    shortest: int = 4  # smallest number of letters in a source
    longest: int = 8  # largest number of letters in a source
    evaluated: int = 256  # number of pairs in validation and in test
    name: ClassVar[str] = "planted reversal"
    files: ClassVar[Mapping[str, str]] = {}

    @property
    def vocabulary(self) -> int:
        """Number of letters, capitals, and special ids (BEGIN, END, PADDING)."""
        return len(task.SPECIALS) + 2 * self.letters

    outputs = vocabulary

    @property
    def length(self) -> int:
        """Largest number of tokens of a side, including END."""
        return self.longest + 1

    @cached_property
    def sources(self) -> dict[str, list[Int[Tensor, " tokens"]]]:
        """Sources of the held-out parts, always the same."""
        seeds = HELD_OUT.items()
        return {part: self._draw(self.evaluated, torch.Generator().manual_seed(seed)) for part, seed in seeds}

    def training(self, size: int, seed: int) -> Iterator[task.Examples]:
        """Yield batches of new pairs without end."""
        draws = torch.Generator().manual_seed(seed)
        while True:
            yield self._pair(self._draw(size, draws))

    def lengths(self, part: str) -> Sequence[int]:
        """Return the number of letters of each held-out source."""
        return [len(source) for source in self.sources[part]]

    def batch(self, part: str, chosen: Sequence[int]) -> task.Examples:
        """Build a batch of the chosen held-out pairs."""
        return self._pair([self.sources[part][number] for number in chosen])

    def _draw(self, count: int, draws: torch.Generator) -> list[Int[Tensor, " tokens"]]:
        """Draw random sources; letters and numbers of letters are uniform."""
        first = len(task.SPECIALS)
        sizes = torch.randint(self.shortest, self.longest + 1, (count,), generator=draws).tolist()
        return [torch.randint(first, first + self.letters, (size,), generator=draws) for size in sizes]

    def _pair(self, sources: Sequence[Int[Tensor, " tokens"]]) -> task.Examples:
        return task.pair_sentences([(source, self.target(source)) for source in sources])

    def target(self, source: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
        """Reverse the source; capitalise each letter whose predecessor in the source is odd."""
        before = torch.cat((torch.zeros(1, dtype=torch.int64), (source[:-1] - len(task.SPECIALS)) % 2))
        return (source + self.letters * before).flip(0)

    def decode(self, ids: Sequence[int]) -> str:
        """Format the letters as numbers separated by spaces."""
        return " ".join(str(number) for number in ids if number >= len(task.SPECIALS))


def bag_bound(sources: Iterable[Sequence[int]]) -> float:
    """Compute the smallest loss (nats per target token, END included) of a model that sees only the sources' bags.

    It is Σ log(n!/Π c_v!) / Σ (n + 1), where letter v occurs c_v times in a source of n letters: given its bag, a
    source is one of n!/Π c_v! equally likely orders, each with its own target. The bag's size determines where END is.
    """
    total, tokens = 0.0, 0
    for source in sources:
        orders = math.factorial(len(source)) // math.prod(map(math.factorial, Counter(source).values()))
        total += math.log(orders)
        tokens += len(source) + 1
    return total / tokens


BOOK = Path(__file__).parents[4] / "training" / "kjv.txt.gz"
"""Whole King James Bible, present in a checkout but not in an installed package."""
BLOCK_CHARACTERS = 2000
"""Minimum characters per held-out block; a shorter text is cut into fewer stretches."""
LINE_CHARACTERS = 1000  # largest distance behind a cut at which an end of line is searched


@dataclass(frozen=True, eq=False, kw_only=True)
class NextTokens(task.Task):
    """Windows of a text, for predicting every token except the first of each block."""

    name: str  # names of the texts
    length: int  # tokens per window
    pairs: task.BytePairs
    windows: Mapping[str, Int[Tensor, "windows tokens"]]  # of `length` + 1 tokens: with the one that follows
    files: Mapping[str, str]  # SHA-256 of each text by name; empty for the built-in text
    form: ClassVar[Literal["language"]] = "language"
    metric: ClassVar[Literal["perplexity"]] = "perplexity"
    higher_is_better: ClassVar[bool] = False

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self.pairs.size

    outputs = vocabulary

    def lengths(self, part: str) -> Sequence[int]:
        """Return the number of tokens of each window of a part, which is `length`."""
        return [self.length] * len(self.windows[part])

    def batch(self, part: str, chosen: Sequence[int]) -> task.Examples:
        """Build a batch of the chosen windows of a part."""
        rows = self.windows[part][list(chosen)]
        return task.Examples(rows[:, :-1], None, rows[:, 1:])


def default_text() -> tuple[str, str]:
    """Load the King James text with its name: the whole book in a checkout, passages in an installed package."""
    if not BOOK.is_file():
        (passages,) = texts.sample("demo")
        return passages.name, passages.text
    text, _ = task.read_whole(BOOK, "Restore the file from the repository.")
    # the first two lines repeat the beginning, and lines in brackets name chapters
    verses = [line for line in text.splitlines()[2:] if line and not line.startswith("[")]
    return "King James Bible", "\n".join(verses) + "\n"


def language(
    texts: Sequence[tuple[str, str]] = (), *, length: int = 128, vocabulary: int = 1024, evaluated: int | None = None
) -> NextTokens:
    """Build a language task from (name, text) pairs; without any, from the King James text that ships with attnlens.

    Each text is cut into stretches, and each stretch into training (90 %), validation and test (5 % each). `evaluated`
    limits the windows of validation and of test, which are then spread evenly. Raises TextError if a part has no window
    of `length` + 1 tokens, UsageError for a vocabulary below 256.
    """
    contents = list(texts) or [default_text()]
    parts: dict[str, list[str]] = {part: [] for part in task.PARTS}
    for _, text in contents:
        for part, text_blocks in split_text(text).items():
            parts[part] += text_blocks
    digests = {name: sha256(text.encode()).hexdigest() for name, text in texts}
    return next_tokens(" and ".join(name for name, _ in contents), parts, digests, length, vocabulary, evaluated)


def next_tokens(
    name: str,
    parts: Mapping[str, Sequence[str]],
    files: Mapping[str, str],
    length: int,
    vocabulary: int,
    evaluated: int | None,
) -> NextTokens:
    """Build a language task from blocks of text already split into parts; see `language`."""
    pairs = task.byte_pairs(
        (line for block in parts["training"] for line in block.splitlines(keepends=True)), vocabulary
    )
    windows = {}
    for part, part_blocks in parts.items():
        cut = [torch.zeros(0, length + 1, dtype=torch.int64)]
        for block in part_blocks:
            ids = torch.tensor(list(chain.from_iterable(pairs.ids(block.splitlines(keepends=True)))), dtype=torch.int64)
            if len(ids) > length:  # windows of `length` + 1 tokens overlap by one; the remainder is left out
                cut.append(ids.unfold(0, length + 1, length))
        rows = torch.cat(cut)
        if not len(rows):
            raise TextError(
                f"The text ({name}) is too short: its {part} part is shorter than one window of {length} tokens.",
                "Give a longer text.",
            )
        windows[part] = rows if part == "training" else rows[task.space_evenly(len(rows), evaluated)]
    return NextTokens(name=name, length=length, pairs=pairs, windows=windows, files=files)


def split_text(text: str) -> dict[str, list[str]]:
    """Split the text into blocks per part, cut at ends of lines if lines are short; the blocks cover the text."""
    held_out_blocks = int(task.SHARE * len(text) / BLOCK_CHARACTERS)
    parts = task.blocks(len(text), stretches=min(max(held_out_blocks, 1), task.STRETCHES))
    return {
        part: [text[_cut(text, block.start) : _cut(text, block.stop)] for block in each] for part, each in parts.items()
    }


def _cut(text: str, near: int) -> int:
    """Return the next end of line at or after a position; the position itself if the line is long or begins there."""
    if near in (0, len(text)):
        return near
    end = text.find("\n", near - 1, near + LINE_CHARACTERS)
    return near if end == -1 else end + 1


WIKITEXT = ("Salesforce/wikitext", "wikitext-103-raw-v1")
"""WikiText-103 (Merity et al. 2017), the raw version: it keeps capitals and rare words, which byte pairs can spell."""
IWSLT = ("bbaaaa/iwslt14-de-en",)
"""German-English pairs from talks (Cettolo et al. 2014): 160,239 for training, 7,283 validation, 6,750 test."""
LINES = 5_000  # lines per block; limits the length of the lists of ids


def wikitext(*, length: int, vocabulary: int, evaluated: int | None) -> NextTokens:
    """Load language modelling on WikiText-103 with its own split.

    Raises UsageError if datasets is missing, TextError if the data cannot be fetched or have changed their form.
    """
    parts = {}
    for part, rows in _load_splits("--text", *WIKITEXT).items():
        lines = [line.rstrip("\n") + "\n" for line in rows["text"]]
        parts[part] = ["".join(lines[start : start + LINES]) for start in range(0, len(lines), LINES)]
    return next_tokens("WikiText-103", parts, _hash_parts(WIKITEXT, parts), length, vocabulary, evaluated)


def iwslt(*, length: int, vocabulary: int, evaluated: int | None) -> SentencePairs:
    """Load German-English translation on IWSLT'14 with its own split; raises as `wikitext`."""
    splits = _load_splits("--pairs", *IWSLT)
    parts = {part: [(row["de"], row["en"]) for row in rows["translation"]] for part, rows in splits.items()}
    digests = _hash_parts(IWSLT, {part: [side for row in rows for side in row] for part, rows in parts.items()})
    return sentence_pairs("IWSLT'14 de-en", parts, digests, "the source", length, vocabulary, evaluated)


def _load_splits(instead: str, *name: str) -> Mapping[str, Any]:
    """Fetch the three parts of a dataset from the hub; `instead` is the option for the user's files."""
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"The papers' data require the package datasets, which is not installed; no {instead} was given.",
            f'Run: pip install "attnlens[papers]", or give {instead}.',
        ) from None
    try:
        with quiet():
            dataset = datasets.load_dataset(*name)
        return {part: dataset[split] for part, split in zip(task.PARTS, ("train", "validation", "test"), strict=True)}
    except (OSError, ValueError, KeyError) as error:  # the hub is unreachable, or the dataset has changed
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TextError(
            f"{name[0]} can't be downloaded from the hub: {reason}", f"Go online or give {instead}."
        ) from None


def _hash_parts(name: Sequence[str], parts: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {f"{name[0]} {part}": sha256("".join(texts).encode()).hexdigest() for part, texts in parts.items()}
