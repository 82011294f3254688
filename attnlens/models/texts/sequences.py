"""Read texts, cut them into sequences of token ids, choose sequences, and measure shares of repeated tokens."""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding
from torch.nn.utils.rnn import pad_sequence

from attnlens.arguments import DATASETS, DatasetRows, dataset_rows
from attnlens.choices import LENGTH, Placement
from attnlens.errors import TextError, UsageError, empty_text
from attnlens.files import read_bytes, read_stream, shorten_text, with_home
from attnlens.models.loading.building import DOWNLOADING, silence_logging
from attnlens.models.loading.configs import text_config
from attnlens.models.loading.locate import DEMO, foreign, reachable
from attnlens.wording import format_count, join_items

if TYPE_CHECKING:
    from jaxtyping import Int
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WITHOUT_TEXT = "read only the weights: attnlens inspect --source weights"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Pattern of a dataset's name on the hub, with its owner, since a name without one can mean a file format (csv)."""
SAY_NAME = "Give OWNER/NAME of an accessible dataset on the hub, or a folder of data files (jsonl, parquet, csv, txt)."


def read_rows(rows: DatasetRows, *, most: int, offline: bool = False) -> Content:
    """Read a dataset's rows as lines of text, at most `most` characters in all, without running the dataset's code.

    Raises UsageError if the package `datasets` is not installed, and TextError if the dataset, its split or its column
    can't be read.
    """
    try:
        import datasets
    except ImportError:
        problem = f"{DATASETS}{rows.name} needs the package `datasets`, which is not installed."
        raise UsageError(problem, 'Run: pip install "attnlens[datasets]", or name a text file.') from None
    from huggingface_hub import constants, is_offline_mode
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2

    place, folder = rows.name, with_home(rows.name)
    if folder.is_dir():
        place = str(folder.resolve())
    elif not HUB_NAME.fullmatch(place):
        raise TextError(f"{place} is neither a local folder nor the name of a dataset on the hub.", SAY_NAME)
    elif offline or (not is_offline_mode() and not reachable(constants.ENDPOINT)):
        why = "--offline is set" if offline else "the hub can't be reached"
        remedy = "Leave out --offline" if offline else "Connect to the network"
        raise TextError(f"{place} is not a local folder, and {why}.", f"{remedy}, or name a folder of data files.")
    split, text = rows.split or "test", ""
    try:
        with silence_logging(*DOWNLOADING):
            parts = datasets.load_dataset(place, rows.config, streaming=True)
            if split not in parts:
                problem = f"The dataset {rows.name} has no split {split!r}; its splits are {', '.join(parts)}."
                raise TextError(problem, f"Name one of its splits: {DATASETS}{rows.name},split={next(iter(parts))}")
            for number, row in enumerate(parts[split], 1):
                if not isinstance(value := row.get(rows.column), str):
                    problem = f"Row {number} of {rows.name} has no text in the column {rows.column!r}; its columns are "
                    raise TextError(f"{problem}{', '.join(row)}.", "Append `,column=NAME` to read a column of texts.")
                text += value.rstrip("\n") + "\n"
                if len(text) >= most:
                    break
    # RuntimeError: the dataset is a script, which the library does not run
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, HTTPError) as error:
        message = shorten_text(str(error)) or type(error).__name__
        raise TextError(f"The dataset {rows.name} can't be read: {message.rstrip('.')}.", SAY_NAME) from None
    label = Path(place).name if Path(place).is_absolute() else rows.name
    options = {"config": rows.config, "split": split, "column": rows.column}
    name = ",".join([DATASETS + label, *(f"{key}={value}" for key, value in options.items() if value is not None)])
    return Content(text[:most], name if len(text) < most else f"{name} (the first {most:,} characters)")


SAMPLES = Path(__file__).parent.parent / "samples"
SAMPLE_NAMES = {
    DEMO / "text.txt": "King James passages",
    SAMPLES / "documentation.txt": "attnlens documentation",
    SAMPLES / "source.txt": "attnlens source code",
}
"""Names of the built-in samples: three kinds of text, because results from one kind need not hold for others."""
LARGEST_FILE = 2**30  # maximum size of a text in bytes
LONGEST, BLOCKS = 2**23, 64
"""Maximum length of a text in characters, and number of blocks of a longer text that `thin_text` keeps if `spread`."""
SAY_TEXT = "Give a plain text file in UTF-8."


class Row(NamedTuple):
    """One sequence of a text."""

    ids: Sequence[int]
    types: Sequence[int] = ()  # token type of each id: which text of a pair it belongs to; empty without pairs or types
    text: str = ""  # name of the text; empty for random ids


@dataclass(frozen=True)
class Content:
    """A text and its name."""

    text: str
    name: str  # file name, `stdin`, the specification of a dataset's rows, or the name of a built-in text
    cuttings: dict[object, list[Row]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache of the last cutting, keyed by its options, since a run cuts its texts several times."""


def read(path: str, *, offline: bool = False) -> Content:
    """Read a file, standard input (`-`) or rows of a dataset (`datasets:NAME`).

    JSON rows are read from their field `text` or `content`. Raises TextError if the text can't be read, and UsageError
    if the package `datasets` is needed but not installed.
    """
    if (rows := dataset_rows(path)) is not None:
        return read_rows(rows, most=LONGEST, offline=offline)
    text, name = _read_text(path, path), "stdin" if path == "-" else Path(path).name
    objects = _json_rows(text)
    if objects is None:
        if Path(path).suffix in (".jsonl", ".ndjson"):
            raise TextError(f"{name} is not JSON lines: not every line is a JSON object.", SAY_TEXT)
        return Content(text, name)
    for field_name in ("text", "content"):
        values = [value for row in objects if isinstance(value := row.get(field_name), str)]
        if len(values) == len(objects):
            return Content("".join(value.rstrip("\n") + "\n" for value in values), f"{name} (field {field_name})")
    fields = join_items(dict.fromkeys(field_name for row in objects for field_name in row))
    problem = (
        f"{name} is JSON, but neither `text` nor `content` contains a string in every row; its fields are: {fields}."
    )
    raise TextError(problem, "Rename the field that contains the text to `text`, or give a plain text file.")


def _json_rows(text: str) -> list[dict[str, object]] | None:
    """Return the objects in JSON lines or a JSON array, or [object] for a single JSON object; None for other texts."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        try:
            # not splitlines: a JSON string can contain other line separators
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        except (ValueError, RecursionError):
            return None
    rows = rows if isinstance(rows, list) else [rows]
    return rows if rows and all(isinstance(row, dict) for row in rows) else None


def read_each(paths: Sequence[str], *, offline: bool = False) -> tuple[Content, ...]:
    """Read texts, and give each a unique name. Raises TextError if a text is empty, or if two texts are identical."""
    contents = [read(path, offline=offline) for path in paths]
    counts, known = Counter(content.name for content in contents), dict[str, Content]()
    for path, content in zip(paths, contents, strict=True):
        unique = replace(content, name=path) if counts[content.name] > 1 else content
        if not unique.text.strip():
            raise empty_text(unique.name)
        if (earlier := known.setdefault(unique.text, unique)) is not unique:
            raise TextError(f"{earlier.name} and {unique.name} have the same content.", "Give each text only once.")
    return tuple(known.values())


def sample(model: str) -> tuple[Content, ...]:
    """Return the built-in texts for a model: all, or only King James passages if the model is derived from `demo`."""
    names = list(SAMPLE_NAMES.items())[: 1 if model == "demo" or _reads_like_demo(Path(model)) else None]
    return tuple(Content(_read_text(str(path), name), name) for path, name in names)


def _reads_like_demo(folder: Path) -> bool:
    """Return True if a folder belongs to `demo` or contains its vocabulary, as after fine-tuning or conversion."""
    try:
        if folder.resolve().is_relative_to(DEMO):
            return True
        vocabularies = [json.loads((each / "tokenizer.json").read_bytes())["model"]["vocab"] for each in (folder, DEMO)]
    except (OSError, ValueError, LookupError, TypeError):  # no folder, or no tokenizer of this kind
        return False
    return bool(vocabularies[0] == vocabularies[1])


def thin_text(content: Content, *, spread: bool) -> Content:
    """Shorten a text longer than LONGEST to its beginning or, if `spread`, to BLOCKS evenly spaced blocks."""
    length, size = len(content.text), LONGEST // BLOCKS
    if length <= LONGEST:
        return content
    if not spread:
        return replace(content, text=content.text[:LONGEST])
    starts = [index * (length - size) // (BLOCKS - 1) for index in range(BLOCKS)]
    return replace(content, text="\n".join(content.text[start : start + size] for start in starts))


def _read_text(path: str, name: str) -> str:
    """Read a file, or standard input (`-`), as UTF-8; raise TextError if this fails. `name` is for error messages."""
    if path != "-":
        content = read_bytes(with_home(path), TextError, SAY_TEXT, most=LARGEST_FILE)
    else:
        try:
            content = read_stream(sys.stdin.buffer, "stdin", TextError, SAY_TEXT, most=LARGEST_FILE)
        except (OSError, AttributeError):  # stdin is write-only or closed
            raise TextError("stdin can't be read.", "Redirect a text to it: attnlens inspect --text - < FILE") from None
    if b"\0" in content:
        raise TextError(f"{name} is a binary file, not a text.", SAY_TEXT)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f"{name} is not UTF-8: the byte at offset {error.start} can't be decoded.", SAY_TEXT) from None


PACKED = frozenset({"grid_thw", "image_grid_thw", "target_sizes"})
"""Inputs of models that read the patches of all images as one row; passes of these models get a single sequence."""
CHARACTERS = 128  # number of different random ids for a model that accepts any id (CANINE hashes characters)


def sequences_in(inputs: Mapping[str, Tensor]) -> int:
    """Return the number of sequences in a forward pass."""
    return 1 if not PACKED.isdisjoint(inputs) else len(next(iter(inputs.values())))


def first(inputs: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the inputs of the first `count` sequences."""
    if sequences_in(inputs) <= count:  # this includes inputs that pack all images in one row
        return dict(inputs)
    return {name: value[:count] for name, value in inputs.items()}


def token_tensors(
    rows: Sequence[Sequence[int]], pad: int
) -> tuple[Int[Tensor, "batch tokens"], Int[Tensor, "batch tokens"]]:
    """Return ids padded on the right to the longest row, and the mask: 1 for a token, 0 for padding."""
    ids = [torch.tensor(row) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    return pad_sequence(ids, batch_first=True, padding_value=pad), pad_sequence(mask, batch_first=True)


def text_inputs(
    model: PreTrainedModel, ids: Int[Tensor, "batch tokens"], mask: Int[Tensor, "batch tokens"], start: int = 0
) -> dict[str, Tensor]:
    """Return the model's keyword arguments for these ids; a separate decoder gets only the ids from index `start` on.

    If the encoder reads the text too, the decoder gets the text shifted right by one start token. If the encoder
    reads pixels or sound, the decoder gets the text unchanged, since its special tokens already begin with the start
    token.
    """
    inputs, parameters = dict[str, Tensor](), signature(model.forward).parameters
    if reads_ids(model):
        inputs |= {"input_ids" if "input_ids" in parameters else "inputs": ids, "attention_mask": mask}
    if decodes_text(model):
        text = ids[:, start:]
        decoder_ids = shift_right(model, text) if reads_ids(model) else text
        inputs |= {"decoder_input_ids": decoder_ids, "decoder_attention_mask": mask[:, start:]}
    return {name: tensor for name, tensor in inputs.items() if name in parameters}


def reads_ids(model: PreTrainedModel) -> bool:
    """Return True if the model, or its encoder, reads token ids (Perceiver names them `inputs`)."""
    parameters = signature(model.forward).parameters
    names_inputs = model.main_input_name == "inputs" and not model.config.is_encoder_decoder
    return "input_ids" in parameters or (names_inputs and "inputs" in parameters and vocabulary(model) is not None)


def decodes_text(model: PreTrainedModel) -> bool:
    """Return True if the model has an encoder, and a decoder that reads token ids (DETR's decoder does not)."""
    return bool(model.config.is_encoder_decoder) and "decoder_input_ids" in signature(model.forward).parameters


def vocabulary(model: PreTrainedModel) -> int | None:
    """Return the vocabulary size according to the config or, if absent, the input embedding; None if unknown."""
    size: int | None = getattr(text_config(model.config), "vocab_size", None)
    if size is None:
        with suppress(NotImplementedError):  # the model has no input embedding
            size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return size


def required_inputs(model: PreTrainedModel) -> list[str]:
    """Return the names of the forward pass's required parameters; if there are none, the names of its main inputs."""
    parameters = signature(model.forward).parameters.items()
    needed = [name for name, it in parameters if it.default is it.empty and it.kind is it.POSITIONAL_OR_KEYWORD]
    main = model.main_input_name
    return needed or (main if isinstance(main, list) else [main])


def describe_missing_inputs(model: PreTrainedModel, names: Sequence[str]) -> tuple[str, str]:
    """Return the problem and the remedy of the error for inputs that can't be generated."""
    return (
        f"attnlens cannot generate {' and '.join(names)} for {type(model).__name__}.",
        "Put preprocessor_config.json into the model's folder, or pass the inputs to attnlens.capture.",
    )


def shift_right(model: PreTrainedModel, ids: Int[Tensor, "batch tokens"]) -> Int[Tensor, "batch tokens"]:
    """Shift ids right for a decoder, with the model's own method or start token. Raises TextError if neither works."""
    method = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    names = ["decoder_start_token_id"]
    if method is None:
        names += ["bos_token_id", "pad_token_id"]
    else:  # T5 raises without a start token in its config; MusicGen generates no text
        with suppress(ValueError, TypeError, AttributeError, IndexError):
            shifted: Tensor = method(labels=ids)
            return shifted
    configs = model.config, getattr(model, "generation_config", None)
    starts = (getattr(config, name, None) for name in names for config in configs)
    start = next((id_ for id_ in starts if id_ is not None), None)
    if not isinstance(start, int) or not 0 <= start < (vocabulary(model) or start + 1):
        problem = "The model's config does not define a valid start token for the decoder."
        raise TextError(problem, "Set decoder_start_token_id in config.json.")
    return ids.roll(1, dims=1).index_fill(1, ids.new_zeros(1), start)


FOREIGN = 0.5  # by default, refuse a text with at least this share of unknown tokens: the model can read little of it
NOTABLE = 0.1  # smallest share of unknown tokens for which the report contains a note


def foreign_notes(shares: Mapping[str, float], least: float = NOTABLE) -> list[str]:
    """Return a warning for each text whose share of unknown tokens is at least `least`; `shares` is keyed by name."""
    return [
        f"{share:.0%} of the tokens of {name} are unknown to the tokenizer: "
        "the text may be in a language or domain that the model does not cover."
        for name, share in shares.items()
        if share >= least
    ]


def split_evenly(available: Sequence[int], wanted: int) -> list[int]:
    """Return the number of windows from each text: `wanted` in all, as equal as the `available` numbers allow."""
    turns = sorted((turn, text) for text, most in enumerate(available) for turn in range(min(most, wanted)))
    counts = Counter(text for _, text in turns[:wanted])
    return [counts[text] for text in range(len(available))]


def choose_windows(
    available: int, wanted: int, placement: Placement, seed: int, taken: Collection[int] = ()
) -> list[int]:
    """Choose k of the n windows 0 … `available` − 1 that are not `taken`; return their indices in ascending order.

    k is `wanted`, at most n. `spread` is systematic sampling: the windows ⌊(i + u)·n/k⌋ of the n for i = 0 … k − 1,
    where u in [0, 1) is drawn with `seed` (Cochran 1977, chapter 8); `random` samples k of n without replacement;
    `first` takes the first k.
    """
    free = [number for number in range(available) if number not in taken]
    count = min(wanted, len(free))
    draws = Random(seed)  # noqa: S311  # not for cryptography
    if placement == "first":
        return free[:count]
    if placement == "random":
        return sorted(draws.sample(free, count))
    start = draws.random()
    return [free[int((index + start) * len(free) / count)] for index in range(count)]


RANDOM_SPLITS = ("dropout", "alpha")  # settings that make a tokenizer split words at random: BPE-dropout, sampling
LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions")


def cut_windows(tokenizer: PreTrainedTokenizerBase, content: Content, *, tokens: int) -> list[Row]:
    """Cut the running text into consecutive windows of `tokens` ids, special tokens included; leave out the remainder.

    Raises TextError if the text is too short for one window, and UsageError if special tokens leave no room for text.
    """
    before, after = special_tokens(tokenizer, content, tokens)
    room = tokens - len(before) - len(after)
    ids = _ids(tokenizer, content, content.text, special=False)
    if len(ids) < room:
        problem = f"The text ({content.name}) has {format_count(len(ids), 'token')}, but one window needs {room}."
        raise TextError(problem, "Give a longer text, or a smaller --length.")
    starts = range(0, len(ids) - room + 1, room)
    # arrays need a tenth of the memory of lists
    return [Row(array("i", [*before, *ids[start : start + room], *after])) for start in starts]


def cut_lines(tokenizer: PreTrainedTokenizerBase, content: Content, *, tokens: int, pairs: bool) -> list[Row]:
    """Return the ids, with special tokens, of each line that has at least two; truncate lines to `tokens` ids.

    With `pairs`, each non-blank line must contain two texts separated by a tab, which the tokenizer joins. Raises
    TextError if no line is left or if a line is not such a pair, and UsageError if special tokens leave no room.
    """
    special_tokens(tokenizer, content, tokens)
    lines = [line.removesuffix("\r") for line in content.text.split("\n")]
    columns: list[list[str]] = [[], []] if pairs else [[]]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        texts = line.split("\t") if pairs else [line]
        if len(texts) != len(columns) or not all(map(str.strip, texts)):
            problem = f"Line {number} of {content.name} is not a pair: it must contain two texts separated by one tab."
            raise TextError(problem, "Write one pair per line: FIRST<tab>SECOND.")
        for column, text in zip(columns, texts, strict=True):
            column.append(text)
    with _tokenizing(tokenizer, content):
        encoded = tokenizer(*columns, truncation=True, max_length=tokens, return_token_type_ids=pairs)
    types = encoded.get("token_type_ids") if pairs else None
    rows = [
        Row(ids, types[number] if types else ()) for number, ids in enumerate(encoded["input_ids"]) if len(ids) >= 2
    ]
    if not rows:
        problem = f"No line of the text ({content.name}) has at least two tokens."
        raise TextError(problem, "Give a text with longer lines.")
    return rows


def special_tokens(tokenizer: PreTrainedTokenizerBase, content: Content, tokens: int) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after a sequence, found by tokenizing the beginning of the text.

    Raises TextError if the tokenizer returns no tokens or if adding special tokens changes them, and UsageError if
    `tokens` leaves no room for text.
    """
    sample = content.text.strip()[:40]
    bare, whole = (_ids(tokenizer, content, sample, special=special) for special in (False, True))
    starts = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
    if not bare or not starts:
        problem = f"The tokenizer returns no tokens for the text ({content.name})."
        if bare:
            problem = f"The tokenizer splits the text ({content.name}) differently when it adds special tokens."
        raise TextError(problem, "Give another text.")
    before, after = whole[: starts[0]], whole[starts[0] + len(bare) :]
    if tokens <= (special := len(before) + len(after)):
        problem = f"--length {tokens} leaves no room for text: special tokens need {special}."
        raise UsageError(problem, "Use a larger --length.")
    return before, after


def window_length(model: PreTrainedModel, tokens: int | None) -> int:
    """Return `tokens`; if None, 128 or, if smaller, the model's limit. Raises UsageError if `tokens` exceeds it."""
    limit = position_limit(model)
    length = tokens or max(2, min(LENGTH, limit or LENGTH))
    if limit is not None and length > limit:
        raise UsageError(f"The model accepts at most {limit} tokens, not {length}.", f"Use --length {limit} or less.")
    return length


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the maximum number of positions; None if unknown, or if positions are relative and unbounded (T5)."""
    config = text_config(model.config)
    if hasattr(config, "relative_attention_num_buckets"):
        return None
    limits = [limit for name in LIMITS if isinstance(limit := getattr(config, name, None), int) and limit > 0]
    for path, module in model.named_modules():
        # RoBERTa counts positions from padding_idx + 1 on
        if path.endswith("position_embeddings") and isinstance(module, Embedding) and module.padding_idx is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return min(limits, default=None)


def _ids(tokenizer: PreTrainedTokenizerBase, content: Content, text: str, *, special: bool) -> list[int]:
    """Return the ids of `text`, with special tokens if `special`."""
    with _tokenizing(tokenizer, content):
        ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


@contextmanager
def _tokenizing(tokenizer: PreTrainedTokenizerBase, content: Content) -> Iterator[None]:
    """Inside the `with`, turn off a tokenizer's random splits, meant for training; convert its errors to TextError."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    remedy = f"Put the tokenizer files into the model's folder, or {WITHOUT_TEXT}"
    with foreign(f"The tokenizer fails on the text ({content.name})", remedy, TextError), ExitStack() as undo:
        for name in RANDOM_SPLITS:
            if (value := getattr(model, name, None)) is not None:
                undo.callback(setattr, model, name, value)
                setattr(model, name, None)
        yield


RUN = 32
"""Minimum length in tokens (10 to 25 words) of a repeated run that is not a coincidence: the two halves of the demo's
text, a single book, share no run of 12 tokens."""
LEAST = 8  # minimum length of a line that counts as shared: those halves share 1 to 7 % of their runs of 8 tokens
MOST_SHARED = 0.1
"""Largest share of evaluated tokens that can occur in the calibration text for a measurement to count as held out. In
the worst case, the loss of shared tokens is 0. A tenth of the tokens then hides a tenth of the measured effect, which
is less than the confidence interval of a loss increase on 32 sequences."""

Ids = Sequence[int]


def shared_share(
    tokenizer: PreTrainedTokenizerBase | None, evaluated: Sequence[Ids], calibrated: Sequence[Ids]
) -> float:
    """Return the share, 0 to 1, of evaluated tokens in runs that also occur within a calibration passage.

    A run has RUN tokens, or fewer if all calibration passages are shorter; special tokens are left out. An evaluated
    passage of LEAST to RUN tokens counts if all of it occurs. If it has at least 2 · LEAST tokens, its first or last
    token can be missing, because the beginning of a text is tokenized differently from later repetitions. If there are
    no evaluated tokens, the share is 0.
    """
    evaluated, calibrated = (_remove_special_tokens(tokenizer, rows) for rows in (evaluated, calibrated))
    longest = min(RUN, max(map(len, calibrated), default=0))
    by_length = defaultdict[int, list[Ids]](list)
    for passage in evaluated:
        length = min(longest, len(passage) - (2 * LEAST <= len(passage) <= RUN))
        if length >= LEAST:
            by_length[length].append(passage)
    covered = 0
    for length, passages in by_length.items():
        wanted = {run for passage in passages for run in _list_runs(passage, length)}
        shared = {run for passage in calibrated for run in _list_runs(passage, length) if run in wanted}
        covered += _count_covered(passages, length, shared)
    return covered / max(1, sum(map(len, evaluated)))


def repeated_share(tokenizer: PreTrainedTokenizerBase | None, sequences: Sequence[Ids]) -> float:
    """Return the share, 0 to 1, of non-special tokens in runs of RUN tokens that occur in more than one sequence."""
    bare = _remove_special_tokens(tokenizer, sequences)
    counts = Counter(run for row in bare for run in set(_list_runs(row, RUN)))
    repeated = {run for run, count in counts.items() if count > 1}
    return _count_covered(bare, RUN, repeated) / max(1, sum(map(len, bare)))


def _remove_special_tokens(tokenizer: PreTrainedTokenizerBase | None, rows: Iterable[Ids]) -> list[list[int]]:
    """Return the rows without special tokens."""
    special = set(() if tokenizer is None else tokenizer.all_special_ids)
    return [[id_ for id_ in row if id_ not in special] for row in rows]


def _list_runs(passage: Ids, length: int) -> list[bytes]:
    """Return all runs of `length` ids as bytes, which hash faster than tuples and compare exactly."""
    ids = array("q", passage)
    return [ids[at : at + length].tobytes() for at in range(len(passage) - length + 1)]


def _count_covered(passages: Iterable[Ids], length: int, shared: Container[bytes]) -> int:
    """Count the tokens of `passages` that lie in at least one of the `shared` runs of `length` tokens."""
    covered = 0
    for passage in passages:
        starts = [start for start, run in enumerate(_list_runs(passage, length)) if run in shared]
        covered += len({start + offset for start in starts for offset in range(length)})
    return covered
