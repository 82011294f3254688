"""Classification of the user's own labelled texts, in byte pairs."""

from __future__ import annotations

from pathlib import Path

import torch

from attnlens.errors import TextError
from attnlens.studies.tasks.byte_pairs import byte_pairs
from attnlens.studies.tasks.classification import Cases, Labelled
from attnlens.studies.tasks.files import read_rows
from attnlens.studies.tasks.splitting import PARTS, blocks, numbers

HEADER = ("text", "label")
"""The columns of a first line that is no case."""
SHARES = (0.1, 0.1)
"""Shares of validation and test of each class."""
REMEDY = "Give lines of a text and its label, in UTF-8 with a tab between them."


def labelled(path: str | Path, *, length: int = 128, vocabulary: int = 1024) -> Labelled:
    """Classification of a file of lines `text TAB label`, packed by gzip or not; a first line `text TAB label` is none.

    A text that stands there again, whatever its label, is left out, so that none is in two parts. The cases of each
    class are split in the order of the file by contiguous blocks: 80 % training, 10 % validation, 10 % test. Texts
    beyond `length` tokens lose what is beyond. Raises TextError for lines with empty or missing columns, one label
    alone, and a label with fewer than three texts; UsageError for a vocabulary below 256.
    """
    found = read_rows(path, (2,), REMEDY)
    rows = found.rows[1:] if tuple(word.lower() for word in found.rows[0]) == HEADER else found.rows
    once: dict[str, str] = {}
    for text, label in rows:
        once.setdefault(text, label)
    texts = list(once.items())
    classes = sorted(set(once.values()))
    parts = _parts(str(path), texts, classes)
    code = byte_pairs((texts[number][0] for number in parts["training"]), vocabulary)
    ids = code.ids([text for text, _ in texts])
    cases = {
        part: Cases(
            [torch.tensor(ids[number][:length], dtype=torch.int64) for number in chosen],
            torch.tensor([classes.index(texts[number][1]) for number in chosen]),
        )
        for part, chosen in parts.items()
    }
    return Labelled(
        name=found.name,
        classes=tuple(classes),
        cases=cases,
        files={found.name: found.sha256},
        vocabulary=code.size,
        pairs=code,
        left_out={"repeated": len(rows) - len(texts), "cut": sum(len(row) > length for row in ids)},
    )


def _parts(path: str, texts: list[tuple[str, str]], classes: list[str]) -> dict[str, list[int]]:
    """The numbers of each part's texts, in the order of the file."""
    if len(classes) < 2:
        only = f"one label only: {classes[0]}" if classes else "no text below its header"
        raise TextError(f"{path} has {only}.", "Give texts with two labels or more.")
    parts: dict[str, list[int]] = {part: [] for part in PARTS}
    for name in classes:
        own = [number for number, (_, label) in enumerate(texts) if label == name]
        if len(own) < len(PARTS):
            raise TextError(
                f"{path} has {len(own)} text(s) with label {name}, too few to train and judge on.",
                "Give each label ten texts or more.",
            )
        split = numbers(blocks(len(own), stretches=1, shares=SHARES))
        for part, chosen in split.items():
            parts[part] += [own[number] for number in chosen]
    return {part: sorted(chosen) for part, chosen in parts.items()}
