"""The study's tasks: texts, sentence pairs, labelled texts and series; the papers' data, and the built-in reversal."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

import torch

from attnlens.errors import TextError, UsageError
from attnlens.files import read_bytes, read_stream, with_home
from attnlens.lab.study.examples import (
    PARTS,
    SHARE,
    SPECIALS,
    STRETCHES,
    Cases,
    Examples,
    StudyTask,
    blocks,
    encode,
    numbers,
    pair_sentences,
    space_evenly,
    train_byte_pairs,
)
from attnlens.models import texts
from attnlens.models.loading.building import silence_logging

if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.lab.study.tables import Scale

Rows: TypeAlias = list[tuple[str, ...]]  # Columns of each line of a file
Series: TypeAlias = "Sequence[tuple[Tensor, str]]"
"""Ids (tokens,) or a series (steps, channels) of each example, and its label; numbers of steps can differ."""
LARGEST_CONTENT = 2**30  # bytes of the largest file accepted, both packed and unpacked


def read_whole(path: str | Path, remedy: str) -> tuple[str, str]:
    """Read a text file, gunzipped if its name ends in `.gz`; return the text and the SHA-256 of the file's bytes.

    Raises TextError with `remedy` for a file that is missing, too large, broken, binary or not UTF-8.
    """
    location = with_home(str(path))
    content = read_bytes(location, TextError, remedy, most=LARGEST_CONTENT)
    digest = sha256(content).hexdigest()
    if location.suffix == ".gz":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = read_stream(cast(BinaryIO, file), str(path), TextError, remedy, most=LARGEST_CONTENT)
        except (OSError, EOFError, zlib.error) as error:
            raise TextError(f"{path} can't be unpacked: {error}.", remedy) from None
    if b"\0" in content:
        raise TextError(f"{path} is a binary file, not a text.", remedy)
    try:
        return content.decode("utf-8-sig"), digest
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8: the byte at {error.start} can't be decoded.", remedy) from None


def read_rows(path: str | Path, columns: tuple[int, ...], remedy: str) -> tuple[Rows, dict[str, str]]:
    """Read the columns of each line of a file; the first line sets their number, which must be in `columns`.

    Returns them stripped, with the file's name and SHA-256. Raises TextError with `remedy` for any other file.
    """
    text, digest = read_whole(path, remedy)
    # not splitlines, which would also split at characters that can occur inside sentences
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if not text.strip():
        raise TextError(f"{path} is empty.", remedy)
    rows = [tuple(column.strip() for column in line.split("\t")) for line in lines]
    width = len(rows[0]) if len(rows[0]) in columns else columns[0]
    bad = [number for number, row in enumerate(rows, 1) if len(row) != width or not all(row)]
    if bad:
        others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise TextError(f"{path}: line {bad[0]}{others}: expected {width} non-empty columns separated by tabs.", remedy)
    return rows, {Path(path).name: digest}


BOOK = Path(__file__).parents[3] / "training" / "kjv.txt.gz"  # in a checkout, but not in an installed package
BLOCK_CHARACTERS = 2000  # minimum characters per held-out block; a shorter text is cut into fewer stretches
LINE_CHARACTERS = 1000  # largest distance behind a cut at which an end of line is searched


def language(contents: Sequence[tuple[str, str]], scale: Scale) -> StudyTask:
    """Build a language task from (name, text) pairs; without any, from the King James text that ships with attnlens.

    Each text is cut into stretches, and each stretch into training (90 %), validation and test (5 % each). Raises
    TextError for a short text, UsageError for a vocabulary below 256.
    """
    files = {name: sha256(text.encode()).hexdigest() for name, text in contents}
    contents = contents or [load_default_text()]
    by_text = [split_text(text) for _, text in contents]
    parts = {part: [block for text_parts in by_text for block in text_parts[part]] for part in PARTS}
    return cut_windows(" and ".join(name for name, _ in contents), parts, files, scale)


def load_default_text() -> tuple[str, str]:
    """Load the King James text with its name: the whole book in a checkout, passages in an installed package."""
    if not BOOK.is_file():
        (passages,) = texts.sample("demo")
        return passages.name, passages.text
    text, _ = read_whole(BOOK, "Restore the file from the repository.")
    # the first two lines repeat the beginning, and lines in brackets name chapters
    verses = [line for line in text.splitlines()[2:] if line and not line.startswith("[")]
    return "King James Bible", "\n".join(verses) + "\n"


def split_text(text: str) -> dict[str, list[str]]:
    """Split the text into blocks per part, cut at ends of lines if lines are short; the blocks cover the text."""
    held_out_blocks = int(SHARE * len(text) / BLOCK_CHARACTERS)
    parts = blocks(len(text), stretches=min(max(held_out_blocks, 1), STRETCHES))

    def cut(near: int) -> int:
        """Return the next end of line at or after a position; the position itself if the line is long."""
        if near in (0, len(text)):
            return near
        end = text.find("\n", near - 1, near + LINE_CHARACTERS)
        return near if end == -1 else end + 1

    return {part: [text[cut(block.start) : cut(block.stop)] for block in each] for part, each in parts.items()}


def cut_windows(name: str, parts: Mapping[str, Sequence[str]], files: Mapping[str, str], scale: Scale) -> StudyTask:
    """Build a language task from blocks of text already split into parts: windows that predict every next token."""
    tokenizer = train_byte_pairs(
        (line for block in parts["training"] for line in block.splitlines(keepends=True)), scale.vocabulary
    )
    cases = {}
    for part, part_blocks in parts.items():
        windows = [torch.zeros(0, scale.length + 1, dtype=torch.int64)]
        for block in part_blocks:
            lines = encode(tokenizer, block.splitlines(keepends=True))
            ids = torch.tensor(list(chain.from_iterable(lines)), dtype=torch.int64)
            if len(ids) > scale.length:  # windows of `length` + 1 tokens overlap by one; the remainder is left out
                windows.append(ids.unfold(0, scale.length + 1, scale.length))
        rows = torch.cat(windows)
        if not len(rows):
            raise TextError(
                f"The text ({name}) is too short: its {part} part is shorter than one window of {scale.length} tokens.",
                "Give a longer text.",
            )
        if part != "training":
            rows = rows[space_evenly(len(rows), scale.evaluated)]
        cases[part] = Cases(rows[:, :-1], rows[:, 1:])
    return StudyTask(
        name=name,
        form="language",
        cases=cases,
        length=scale.length,
        vocabulary=tokenizer.get_vocab_size(),
        files=files,
        tokenizer=tokenizer,
    )


HELD_BOOKS = {"validation": ("Eccl", "Esth", "Lam", "Titus"), "test": ("Job", "Ruth", "Jonah", "Phlm")}
"""Held-out books of the Bible, without parallels in other books; the gospels, or Kings and Chronicles, overlap."""
VERSE = re.compile(r"(\w+)\.\d+\.\d+")  # id of a verse: book, chapter, verse
PAIRS_REMEDY = (
    "Give a UTF-8 file with one pair per line: source and target, or id, source and target, separated by tabs."
)


def translation(path: str | Path, scale: Scale) -> StudyTask:
    """Read a translation task from lines `source TAB target` or `id TAB source TAB target`, gzipped or not.

    If every id is a verse (`Ruth.1.16`) and the held-out books occur, whole books are held out, otherwise contiguous
    blocks. Raises TextError for data that cannot be used, UsageError for a vocabulary below 259.
    """
    rows, files = read_rows(path, (2, 3), PAIRS_REMEDY)
    chosen = _split_by_book(rows) or numbers(blocks(len(rows)))
    parts = {part: [rows[number][-2:] for number in of_part] for part, of_part in chosen.items()}
    return pair_rows(Path(path).name, parts, files, scale)


def _split_by_book(rows: Rows) -> dict[str, list[int]] | None:
    """Split lines by book if every line names a verse and no part is empty; return None otherwise."""
    parts: dict[str, list[int]] = {part: [] for part in PARTS}
    for number, row in enumerate(rows):
        match = VERSE.fullmatch(row[0]) if len(row) == 3 else None
        if match is None:
            return None
        parts[next((part for part, books in HELD_BOOKS.items() if match[1] in books), "training")].append(number)
    return parts if all(parts.values()) else None


def pair_rows(
    name: str, parts: Mapping[str, Sequence[Sequence[str]]], files: Mapping[str, str], scale: Scale
) -> StudyTask:
    """Build a translation task from (source, target) rows already split into parts; long pairs are left out."""
    tokenizer = train_byte_pairs(chain.from_iterable(parts["training"]), scale.vocabulary, SPECIALS)
    short = {}
    for part, rows in parts.items():
        sides = (encode(tokenizer, [row[side] for row in rows]) for side in (0, 1))
        pairs = [(tuple(source), tuple(target)) for source, target in zip(*sides, strict=True)]
        short[part] = [pair for pair in pairs if max(map(len, pair)) < scale.length]
    chosen = {
        part: [short[part][index] for index in space_evenly(len(short[part]), scale.evaluated)] for part in PARTS[1:]
    }
    held_out = set(chain.from_iterable(chosen.values()))
    chosen["training"] = [pair for pair in short["training"] if pair not in held_out]
    for part, pairs in chosen.items():
        if not pairs:
            raise TextError(
                f"{name}: no pair of its {part} part can be used, with at most {scale.length} tokens per side.",
                "Give more pairs, or shorter ones.",
            )
    return StudyTask(
        name=name,
        form="translation",
        cases={
            part: Cases(*([torch.tensor(ids, dtype=torch.int64) for ids in side] for side in zip(*pairs, strict=True)))
            for part, pairs in chosen.items()
        },
        length=scale.length,
        vocabulary=tokenizer.get_vocab_size(),
        files=files,
        tokenizer=tokenizer,
        left_out={part: len(parts[part]) - len(short[part]) for part in PARTS},
        repeated=len(short["training"]) - len(chosen["training"]),
    )


HELD_OUT = {"validation": 10**9 + 7, "test": 10**9 + 9}  # seeds of the held-out examples, far from training seeds


class Reversal(StudyTask):
    """Random letters written backwards; a letter becomes a capital if the letter before it in the source is odd.

    For a source x₁ … xₙ the target is yₜ = (x_i, x_{i−1} odd) with i = n + 1 − t, and x₀ is even. An encoder without
    positions yields the same set of states for every order of its tokens (Tsai et al. 2019, Proposition 1), and
    cross-attention without positions ignores their order. The decoder's output then depends on the source only through
    its bag of letters, even if the decoder has positions. The target reveals the order, but the bag does not: given a
    bag, sources and targets correspond one to one.
    """

    def __init__(self, letters: int = 8, shortest: int = 4, longest: int = 8, evaluated: int = 256) -> None:
        self.letters, self.shortest, self.longest = letters, shortest, longest
        seeds = HELD_OUT.items()
        super().__init__(
            name="planted reversal",
            form="translation",
            cases={part: Cases(*self._draw(evaluated, torch.Generator().manual_seed(seed))) for part, seed in seeds},
            length=longest + 1,
            vocabulary=len(SPECIALS) + 2 * letters,  # letters and capitals
        )

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """Yield batches of new pairs without end."""
        draws = torch.Generator().manual_seed(seed)
        while True:
            yield pair_sentences(*self._draw(size, draws))

    def _draw(self, count: int, draws: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
        """Draw random sources with their targets; letters and numbers of letters are uniform."""
        first = len(SPECIALS)
        sizes = torch.randint(self.shortest, self.longest + 1, (count,), generator=draws).tolist()
        sources = [torch.randint(first, first + self.letters, (size,), generator=draws) for size in sizes]
        return sources, [self.target(source) for source in sources]

    def target(self, source: Tensor) -> Tensor:
        """Reverse the source; capitalise each letter whose predecessor in the source is odd."""
        before = torch.cat((torch.zeros(1, dtype=torch.int64), (source[:-1] - len(SPECIALS)) % 2))
        return (source + self.letters * before).flip(0)


HEADER = ("text", "label")  # columns of a header line
CLASS_SHARE = 0.1  # share of validation cases of each class, and of test cases
TEXT_REMEDY = "Give a UTF-8 file with one text and its label per line, separated by a tab."


def load_labelled(path: str | Path, scale: Scale) -> StudyTask:
    """Read a classification task from lines `text TAB label`, gzipped or not; a header `text TAB label` is skipped.

    Repeated texts are omitted even if their labels differ, so no text is in two parts; texts longer than `length`
    tokens are cut. The cases of each class are split in file order into 80 % training, 10 % validation and 10 % test.
    Raises TextError for data that cannot be used, UsageError for a vocabulary below 256.
    """
    rows, files = read_rows(path, (2,), TEXT_REMEDY)
    rows = rows[1:] if tuple(word.lower() for word in rows[0]) == HEADER else rows
    label_of: dict[str, str] = {}
    for text, label in rows:
        label_of.setdefault(text, label)
    lines, labels = list(label_of), list(label_of.values())
    classes = sorted(set(labels))
    parts = _split_by_class(str(path), labels, classes)
    tokenizer = train_byte_pairs((lines[number] for number in parts["training"]), scale.vocabulary)
    ids = encode(tokenizer, lines)
    rows_of = {
        part: [(torch.tensor(ids[number][: scale.length], dtype=torch.int64), labels[number]) for number in chosen]
        for part, chosen in parts.items()
    }
    task = build_classification(Path(path).name, rows_of, classes, files)
    left_out = {"repeated": len(rows) - len(lines), "cut": sum(len(row) > scale.length for row in ids)}
    return replace(task, vocabulary=tokenizer.get_vocab_size(), tokenizer=tokenizer, left_out=left_out)


def build_classification(
    name: str, parts: Mapping[str, Series], classes: Sequence[str], files: Mapping[str, str]
) -> StudyTask:
    """Build a classification task from rows with their labels already split into parts."""
    return StudyTask(
        name=name,
        form="classification",
        cases={
            part: Cases([row for row, _ in rows], torch.tensor([classes.index(label) for _, label in rows]))
            for part, rows in parts.items()
        },
        length=max(len(row) for rows in parts.values() for row, _ in rows),
        classes=len(classes),
        files=files,
    )


def _split_by_class(path: str, labels: Sequence[str], classes: Sequence[str]) -> dict[str, list[int]]:
    """Split the texts of each class into parts; return the text numbers of each part in file order."""
    if len(classes) < 2:
        only = f"a single label: {classes[0]}" if classes else "no text below its header"
        raise TextError(f"{path} has {only}.", "Give texts with at least two labels.")
    parts: dict[str, list[int]] = {part: [] for part in PARTS}
    for name in classes:
        of_class = [number for number, label in enumerate(labels) if label == name]
        if len(of_class) < len(PARTS):
            raise TextError(
                f"{path} has {len(of_class)} text(s) with label {name}, too few for training and evaluation.",
                "Give at least ten texts per label.",
            )
        for part, chosen in numbers(blocks(len(of_class), stretches=1, share=CLASS_SHARE)).items():
            parts[part] += [of_class[number] for number in chosen]
    return {part: sorted(chosen) for part, chosen in parts.items()}


REMEDY = "Give a file in the .ts format of the UEA archive, with class labels and without missing values."


def read_series(path: str | Path) -> tuple[dict[str, str], Series, str]:
    """Read a `.ts` file: channels separated by `:`, numbers by `,`, and the label last.

    Returns the header's words in lower case with their values, the cases, and the SHA-256 of the file's bytes. Raises
    TextError for time stamps, missing labels or values, and channels of unequal length or number.
    """
    text, digest = read_whole(path, REMEDY)
    header: dict[str, str] = {}
    lines = iter(text.splitlines())
    for line in lines:
        word, _, value = line.strip().partition(" ")
        header[word.lower()] = value.strip()
        if word.lower() == "@data":
            break
    if header.get("@timestamps", "").lower() == "true":
        raise TextError(f"{path} has time stamps, which are not supported.", REMEDY)
    if header.get("@classlabel", "").startswith("false"):
        raise TextError(f"{path} has no class labels.", REMEDY)
    cases = list[tuple["Tensor", str]]()
    for number, line in enumerate((line for line in lines if line.strip() and not line.startswith("#")), 1):
        *channels, label = line.split(":")
        if not channels or not label.strip():
            raise TextError(f"{path}: case {number} has no class label, or no channel.", REMEDY)
        try:
            values = [[float(part.strip().replace("?", "nan")) for part in channel.split(",")] for channel in channels]
            case = torch.tensor(values, dtype=torch.float64).T
        except ValueError as error:  # a word, or channels of unequal length
            raise TextError(f"{path}: case {number}: {str(error)[:80]}.", REMEDY) from None
        if not bool(case.isfinite().all()):
            raise TextError(f"{path}: case {number} has a missing value.", "Remove the case, or fill in the value.")
        if cases and case.shape[1] != (before := cases[0][0].shape[1]):
            raise TextError(
                f"{path}: case {number} has {case.shape[1]} channels, but the cases before it have {before}.",
                "Give all cases the same number of channels.",
            )
        cases.append((case, label.strip()))
    if not cases:
        raise TextError(f"{path} has no cases below its @data line.", REMEDY)
    return header, cases, digest


EVERY = 5  # every fifth case of each class of the training file is used for validation


def series(train: str | Path, test: str | Path) -> StudyTask:
    """Read a classification task from two `.ts` files of series; the second is the test set.

    Validation is every fifth case of each class of the first file, whatever the seed. Each channel is scaled to mean 0
    and standard deviation 1 over the steps of the training part; a constant channel is only centred. Raises TextError
    for files that cannot be read or do not belong together.
    """
    (header, first, digest), (_, second, test_digest) = read_series(train), read_series(test)
    first_name, second_name = Path(train).name, Path(test).name
    files = {first_name: digest} | {second_name if first_name != second_name else str(test): test_digest}
    channels, others = (cases[0][0].shape[1] for cases in (first, second))
    if channels != others:
        raise TextError(
            f"{first_name} has {channels} channels and {second_name} has {others}.",
            "Give the training and test files of one dataset.",
        )
    labels = [label for _, label in first]
    classes = _list_classes(labels, header, first_name)
    if unknown := sorted({label for _, label in second} - set(classes)):
        raise TextError(f"{second_name} has the label {unknown[0]}, which is missing in {first_name}.", REMEDY)
    if digest == test_digest:
        raise TextError(f"The training and test files have the same content ({first_name}).", "Give another test file.")
    validation: list[int] = []
    for label in classes:
        of_label = [number for number, other in enumerate(labels) if other == label]
        validation += of_label[EVERY - 1 :: EVERY] or of_label[-1:]  # the last case if there are fewer than EVERY
    parts = {
        "training": [case for number, case in enumerate(first) if number not in validation],
        "validation": [first[number] for number in sorted(validation)],
        "test": second,
    }
    steps = torch.cat([case for case, _ in parts["training"]])
    deviation = steps.std(0, correction=0)
    mean, scale = steps.mean(0), torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    scaled = {part: [(((case - mean) / scale).float(), label) for case, label in rows] for part, rows in parts.items()}
    return replace(
        build_classification(header.get("@problemname", first_name), scaled, classes, files), channels=channels
    )


def _list_classes(labels: Sequence[str], header: Mapping[str, str], name: str) -> list[str]:
    """Return the labels of a training file: first those of its header in that order, then the others sorted."""
    if len(set(labels)) < 2:
        raise TextError(f"{name} has a single label: {labels[0]}.", "Give a file with at least two classes.")
    single = sorted(label for label in set(labels) if labels.count(label) < 2)
    if single:
        raise TextError(f"{name} has a single case with label {single[0]}.", "Give at least two cases per class.")
    listed = header.get("@classlabel", "").split()[1:]
    return list(dict.fromkeys([*(label for label in listed if label in labels), *sorted(set(labels))]))


WIKITEXT = ("Salesforce/wikitext", "wikitext-103-raw-v1")
"""WikiText-103 (Merity et al. 2017), the raw version: it keeps capitals and rare words, which byte pairs can spell."""
IWSLT = ("bbaaaa/iwslt14-de-en",)
"""German-English pairs from talks (Cettolo et al. 2014): 160,239 for training, 7,283 validation, 6,750 test."""
LINES = 5_000  # lines per block; limits the length of the lists of ids


def wikitext(scale: Scale) -> StudyTask:
    """Load language modelling on WikiText-103 with its own split.

    Raises UsageError if datasets is missing, TextError if the data cannot be fetched or have changed their form.
    """
    parts = {}
    for part, rows in _load_splits("--text", *WIKITEXT).items():
        lines = [line.rstrip("\n") + "\n" for line in rows["text"]]
        parts[part] = ["".join(lines[start : start + LINES]) for start in range(0, len(lines), LINES)]
    return cut_windows("WikiText-103", parts, _hash_parts(WIKITEXT, parts), scale)


def iwslt(scale: Scale) -> StudyTask:
    """Load German-English translation on IWSLT'14 with its own split; raises as `wikitext`."""
    splits = _load_splits("--pairs", *IWSLT)
    parts = {part: [(row["de"], row["en"]) for row in rows["translation"]] for part, rows in splits.items()}
    files = _hash_parts(IWSLT, {part: chain.from_iterable(rows) for part, rows in parts.items()})
    return pair_rows("IWSLT'14 de-en", parts, files, scale)


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
        with silence_logging("datasets", "huggingface_hub"):
            dataset = datasets.load_dataset(*name)
        return {part: dataset[split] for part, split in zip(PARTS, ("train", "validation", "test"), strict=True)}
    except (OSError, ValueError, KeyError) as error:  # the hub is unreachable, or the dataset has changed
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TextError(
            f"{name[0]} can't be downloaded from the hub: {reason}", f"Go online or give {instead}."
        ) from None


def _hash_parts(name: Sequence[str], parts: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {f"{name[0]} {part}": sha256("".join(each).encode()).hexdigest() for part, each in parts.items()}
