"""Tasks of a study, built from texts, sentence pairs, labelled texts, series, or the papers' data."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnlens.errors import TextError, UsageError
from attnlens.files import read_bytes, read_stream, with_home
from attnlens.lab.study.examples import SPECIALS, Cases, StudyTask
from attnlens.models import texts
from attnlens.models.loading.building import DOWNLOADING, silence_logging
from attnlens.wording import format_count

if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.lab.study.tables import Scale

Rows: TypeAlias = list[tuple[str, ...]]  # Columns of each line of a file
Series: TypeAlias = "Sequence[tuple[Tensor, str]]"  # each example's ids (tokens,) or steps (steps, channels); label
LARGEST_CONTENT = 2**30  # maximum size of a file in bytes, both packed and unpacked


def read_whole(path: str | Path, remedy: str) -> tuple[str, str]:
    """Read a text file, gunzipped if its name ends in `.gz`; return the text and the SHA-256 of the file's bytes."""
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
        raise TextError(f"{path} is a binary file, not a text file.", remedy)
    try:
        return content.decode("utf-8-sig"), digest
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8: the byte at offset {error.start} can't be decoded.", remedy) from None


def read_rows(path: str | Path, columns: tuple[int, ...], remedy: str) -> tuple[Rows, dict[str, str]]:
    """Read lines with equal numbers of tab-separated columns; `columns` lists the allowed numbers.

    Return the rows, and a mapping from the file's name to the SHA-256 of the file.
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
        wrong = f"first wrong line: {bad[0]} ({len(bad)} in total)"
        raise TextError(f"{path}: expected {width} non-empty tab-separated columns; {wrong}.", remedy)
    return rows, {Path(path).name: digest}


PARTS = ("training", "validation", "test")
STRETCHES = 10  # a long text is cut into stretches with blocks of all parts: the end of a book is not representative
SHARE = 0.05  # share of validation examples; test examples have the same share


def blocks(count: int, *, stretches: int = STRETCHES, share: float = SHARE) -> dict[str, list[range]]:
    """Cut range(count) into stretches, and each stretch into blocks for training, validation and test.

    Blocks are contiguous because neighbours are related: random windows would divide sentences between the parts.
    """
    parts: dict[str, list[range]] = {part: [] for part in PARTS}
    for number in range(stretches):
        start, stop = number * count // stretches, (number + 1) * count // stretches
        size = max(1, round((stop - start) * share))
        test = max(start, stop - size)
        edges = start, max(start, test - size), test, stop
        for part, (first, last) in zip(PARTS, pairwise(edges), strict=True):
            parts[part] += [range(first, last)] if first < last else []
    return parts


def space_evenly(count: int, most: int) -> list[int]:
    """Return at most `most` numbers from range(count), as evenly spaced as possible."""
    chosen = min(count, most)
    return [int((number + 0.5) * count / chosen) for number in range(chosen)]


def train_byte_pairs(texts: Iterable[str], vocabulary: int, specials: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE tokenizer with at most `vocabulary` ids; `specials` get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """Encode texts as ids, without special tokens."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


BOOK = Path(__file__).parents[3] / "training" / "kjv.txt.gz"  # in a checkout, but not in an installed package
BLOCK_CHARACTERS = 2000  # minimum characters per held-out block; short texts are cut into fewer stretches
LINE_CHARACTERS = 1000  # number of characters after a cut in which to search for an end of line


def language(contents: Sequence[tuple[str, str]], scale: Scale) -> StudyTask:
    """Build a language task from (name, text) pairs or, if there are none, from the built-in King James text."""
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
    """Split a text into blocks for each part; blocks end at ends of lines, unless a line is long."""
    held_out_blocks = int(SHARE * len(text) / BLOCK_CHARACTERS)
    parts = blocks(len(text), stretches=min(max(held_out_blocks, 1), STRETCHES))

    def cut(near: int) -> int:
        """Return the first start of a line at or after position `near`, or `near` itself if the line is long."""
        end = text.find("\n", near - 1, near + LINE_CHARACTERS)
        return near if end == -1 or near in (0, len(text)) else end + 1

    return {part: [text[cut(block.start) : cut(block.stop)] for block in each] for part, each in parts.items()}


def cut_windows(name: str, parts: Mapping[str, Sequence[str]], files: Mapping[str, str], scale: Scale) -> StudyTask:
    """Build a language task from texts already split into parts: each token of a window predicts the next token."""
    lines = (line for block in parts["training"] for line in block.splitlines(keepends=True))
    tokenizer, cases = train_byte_pairs(lines, scale.vocabulary), {}
    for part, part_blocks in parts.items():
        windows = [torch.zeros(0, scale.length + 1, dtype=torch.int64)]
        for block in part_blocks:
            by_line = encode(tokenizer, block.splitlines(keepends=True))
            ids = torch.tensor(list(chain.from_iterable(by_line)), dtype=torch.int64)
            if len(ids) > scale.length:  # windows of `length` + 1 tokens overlap by one; the remainder is left out
                windows.append(ids.unfold(0, scale.length + 1, scale.length))
        rows = torch.cat(windows)
        if not len(rows):
            problem = f"The {part} part of the text ({name}) is shorter than one window of {scale.length} tokens."
            raise TextError(problem, "Give a longer text.")
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


# books without parallel passages in other books
HELD_BOOKS = {"validation": ("Eccl", "Esth", "Lam", "Titus"), "test": ("Job", "Ruth", "Jonah", "Phlm")}
VERSE = re.compile(r"(\w+)\.\d+\.\d+")  # id of a verse: book, chapter, verse
PAIRS_REMEDY = "Give a UTF-8 file with one pair per line: source and target, optionally after an id, separated by tabs."


def translation(path: str | Path, scale: Scale) -> StudyTask:
    """Read a translation task from lines `source TAB target` or `id TAB source TAB target`.

    If every id names a verse (`Ruth.1.16`) and no part would be empty, whole books are held out; otherwise, blocks of
    lines are held out.
    """
    rows, files = read_rows(path, (2, 3), PAIRS_REMEDY)
    chosen = _split_by_book(rows) or {part: list(chain.from_iterable(each)) for part, each in blocks(len(rows)).items()}
    parts = {part: [rows[number][-2:] for number in numbers] for part, numbers in chosen.items()}
    return pair_rows(Path(path).name, parts, files, scale)


def _split_by_book(rows: Rows) -> dict[str, list[int]] | None:
    """Return the line numbers of each part, split by book; None if a line names no verse or a part is empty."""
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
    """Build a translation task from (source, target) rows already split into parts.

    Pairs with a side of at least `scale.length` tokens, and training pairs that are also held out, are left out.
    """
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
            problem = f"{name}: the {part} part has no usable pair with fewer than {scale.length} tokens per side."
            raise TextError(problem, "Give more pairs, or shorter ones.")
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


def load_labelled(path: str | Path, scale: Scale) -> StudyTask:
    """Read a classification task from lines `text TAB label`, after an optional header.

    Only the first occurrence of a repeated text is kept, even if the labels differ, so that no text is in two parts.
    The texts of each class are split in file order: 80 % training, 10 % validation, 10 % test. Texts are cut to the
    scale's `length`.
    """
    remedy = "Give a UTF-8 file with one text and its label per line, separated by a tab."
    rows, files = read_rows(path, (2,), remedy)
    rows = rows[1:] if [word.lower() for word in rows[0]] == ["text", "label"] else rows
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
    """Build a classification task from (ids or series, label) pairs that are already split into parts."""
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
    """Split the texts of each class into parts; return the indices of each part's texts in file order.

    Raises TextError for fewer than two classes, or a class of fewer than three texts.
    """
    if len(classes) < 2:
        only = f"a single label: {classes[0]}" if classes else "no text below its header"
        raise TextError(f"{path} has {only}.", "Give texts with at least two labels.")
    parts: dict[str, list[int]] = {part: [] for part in PARTS}
    for name in classes:
        of_class = [number for number, label in enumerate(labels) if label == name]
        if len(of_class) < len(PARTS):
            found = format_count(len(of_class), "text")
            problem = f"{path} has {found} with label {name}, too few for training and evaluation."
            raise TextError(problem, "Give at least ten texts per label.")
        for part, (chosen,) in blocks(len(of_class), stretches=1, share=0.1).items():
            parts[part] += of_class[chosen.start : chosen.stop]
    return {part: sorted(chosen) for part, chosen in parts.items()}


EVERY = 5  # every fifth case of each class of the training file is used for validation
REMEDY = "Give a file in the .ts format of the UEA archive, with class labels and without missing values."
SAY_DATASET = "Give the training and test files of one dataset."


def read_series(path: str | Path) -> tuple[dict[str, str], Series, str]:
    """Read a `.ts` file, in which `:` separates channels and the final label, and `,` separates numbers.

    Return the header's values keyed by lower-case word, the cases, and the SHA-256 of the file's bytes.
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
            raise TextError(f"{path}: case {number} lacks a class label or channels.", REMEDY)
        try:
            values = [[float(part.strip().replace("?", "nan")) for part in channel.split(",")] for channel in channels]
            case = torch.tensor(values, dtype=torch.float64).T
        except ValueError as error:  # a word, or channels of unequal length
            raise TextError(f"{path}: case {number}: {str(error)[:80]}.", REMEDY) from None
        if not bool(case.isfinite().all()):
            problem = f"{path}: case {number} has a missing or infinite value."
            raise TextError(problem, "Remove the case, or replace the value.")
        if cases and case.shape[1] != (before := cases[0][0].shape[1]):
            found = format_count(case.shape[1], "channel")
            problem = f"{path}: case {number} has {found}, but earlier cases have {before}."
            raise TextError(problem, "Give all cases the same number of channels.")
        cases.append((case, label.strip()))
    if not cases:
        raise TextError(f"{path} has no cases below its @data line.", REMEDY)
    return header, cases, digest


def series(train: str | Path, test: str | Path) -> StudyTask:
    """Read a classification task from two `.ts` files of series, for training and for testing.

    In the first file, every fifth case of each class is used for validation (if there are fewer, the last case). Each
    channel is scaled to mean 0 and standard deviation 1 over the steps of the training part; a constant channel is only
    centred.
    """
    (header, first, digest), (_, second, test_digest) = read_series(train), read_series(test)
    first_name, second_name = Path(train).name, Path(test).name
    files = {first_name: digest} | {second_name if first_name != second_name else str(test): test_digest}
    channels, others = (cases[0][0].shape[1] for cases in (first, second))
    if channels != others:
        problem = f"{first_name} has {format_count(channels, 'channel')}, but the test file {second_name} has {others}."
        raise TextError(problem, SAY_DATASET)
    labels = [label for _, label in first]
    if len(set(labels)) < 2:
        raise TextError(f"{first_name} has a single label: {labels[0]}.", "Give a file with at least two classes.")
    if single := sorted(label for label in set(labels) if labels.count(label) < 2):
        raise TextError(f"{first_name} has a single case with label {single[0]}.", "Give at least two cases per class.")
    listed = [label for label in header.get("@classlabel", "").split()[1:] if label in labels]
    classes = list(dict.fromkeys([*listed, *sorted(set(labels))]))  # in the order of the header, then sorted
    if unknown := sorted({label for _, label in second} - set(classes)):
        raise TextError(f"{second_name} has the label {unknown[0]}, which is missing from {first_name}.", SAY_DATASET)
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
    task = build_classification(header.get("@problemname", first_name), scaled, classes, files)
    return replace(task, channels=channels)


WIKITEXT = ("Salesforce/wikitext", "wikitext-103-raw-v1")  # raw version of Merity et al. 2017
IWSLT = ("bbaaaa/iwslt14-de-en",)  # German-English pairs from talks (Cettolo et al. 2014)
LINES = 5_000  # lines per block; limits the length of the lists of ids


def wikitext(scale: Scale) -> StudyTask:
    """Load WikiText-103, with its published split, as a language task."""
    parts = {}
    for part, rows in _load_splits("--text", *WIKITEXT).items():
        lines = [line.rstrip("\n") + "\n" for line in rows["text"]]
        parts[part] = ["".join(lines[start : start + LINES]) for start in range(0, len(lines), LINES)]
    return cut_windows("WikiText-103", parts, _hash_parts(WIKITEXT, parts), scale)


def iwslt(scale: Scale) -> StudyTask:
    """Load IWSLT'14 German-English, with its published split, as a translation task."""
    splits = _load_splits("--pairs", *IWSLT)
    parts = {part: [(row["de"], row["en"]) for row in rows["translation"]] for part, rows in splits.items()}
    files = _hash_parts(IWSLT, {part: chain.from_iterable(rows) for part, rows in parts.items()})
    return pair_rows("IWSLT'14 de-en", parts, files, scale)


def _load_splits(instead: str, *name: str) -> Mapping[str, Any]:
    """Fetch the three parts of a dataset from the hub; errors suggest `instead`, the option that reads local files."""
    try:
        import datasets
    except ImportError:
        remedy = f'Run: pip install "attnlens[papers]", or use local files with {instead}.'
        raise UsageError("The papers' data require the package `datasets`.", remedy) from None
    try:
        with silence_logging(*DOWNLOADING):
            dataset = datasets.load_dataset(*name)
        return {part: dataset[split] for part, split in zip(PARTS, ("train", "validation", "test"), strict=True)}
    except (OSError, ValueError, KeyError) as error:  # the hub is unreachable, or the dataset has changed
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        problem = f"{name[0]} can't be downloaded from the hub: {reason}"
        raise TextError(problem, f"Connect to the internet, or use local files with {instead}.") from None


def _hash_parts(name: Sequence[str], parts: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {f"{name[0]} {part}": sha256("".join(each).encode()).hexdigest() for part, each in parts.items()}
