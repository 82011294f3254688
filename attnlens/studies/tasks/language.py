"""Language modelling in byte pairs: the user's texts, the King James Bible, and the papers' own data from the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from attnlens import texts
from attnlens.errors import TextError, UsageError
from attnlens.studies.tasks.task import (
    PARTS,
    SHARES,
    STRETCHES,
    BytePairs,
    Examples,
    Split,
    blocks,
    byte_pairs,
    endless,
    in_order,
    read_whole,
    spread,
)
from attnlens.studies.tasks.translation import SentencePairs, sentence_pairs
from attnlens.texts.corpora import quiet

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

BOOK = Path(__file__).parents[3] / "training" / "kjv.txt.gz"
"""The whole King James Bible, which lies in a checkout and not in an installed package."""
BLOCK_CHARACTERS = 2000
"""Characters that a held-out block should have; a shorter text is cut into fewer stretches."""
LINE_CHARACTERS = 1000
"""How far behind a cut the end of a line is looked for."""


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
LINES = 5_000
"""Of a block, so that no list of ids is as long as the whole text."""


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
