"""The papers' own data, fetched by the datasets library: WikiText-103 and IWSLT'14."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from attnlens.errors import TextError, UsageError
from attnlens.studies.tasks.language import NextTokens, next_tokens
from attnlens.studies.tasks.splitting import PARTS
from attnlens.studies.tasks.translation import SentencePairs, sentence_pairs
from attnlens.texts.corpora import quiet

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
