"""Find the files of a model by name (`demo`, a folder, a weight file or a hub id), and check that they are readable."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from attnlens.errors import AttnlensError, ModelError, UsageError, is_memory
from attnlens.files import LARGEST, format_value, read_object, refuse_other_kinds, shorten_text, with_home
from attnlens.records.architectures import architectures

PATIENCE, ANSWER = 2.0, 8.0  # Seconds within which the hub must accept a connection, and answer the first request


@dataclass(frozen=True)
class Hub:
    """A model on the hub at one revision."""

    id: str  # `name` or `org/name`
    revision: str | None  # Branch, tag or commit; None means the default branch

    def fetch(self, select: Callable[[Collection[str]], list[str]], *, offline: bool = False) -> Path:
        """Download the files that `select` chooses by name, unless cached; return their folder, named after the commit.

        Without a connection, or with `offline`, the local cache is used. Raises ModelError if the model is unknown,
        gated or not reachable, if the revision does not exist, or if the server is not a hub (e.g. a log-in page).
        """
        from huggingface_hub import HfApi, constants, errors, is_offline_mode, snapshot_download

        if offline or is_offline_mode():
            return self._find_cached("--offline forbids the network" if offline else "HF_HUB_OFFLINE is set")
        if not reachable(constants.ENDPOINT):
            return self._find_cached("the hub can't be reached")
        try:
            info = HfApi().model_info(self.id, revision=self.revision, timeout=ANSWER)
            if not info.sha:
                raise ValueError("the response does not contain a commit")  # noqa: TRY301  # see the last handler
            names = [sibling.rfilename for sibling in info.siblings]  # type: ignore[union-attr]  # None: a TypeError
            return Path(snapshot_download(self.id, revision=self.revision, allow_patterns=select(names)))
        except errors.GatedRepoError as error:  # a subclass of RepositoryNotFoundError, so it comes first
            remedy = f"Request access on the hub page of {self.id}, then run `hf auth login`."
            raise ModelError(f"{self.id} is gated: its owner gives access on request.", remedy) from error
        except errors.RevisionNotFoundError as error:
            remedy = "Choose one of the model's branches or tags on the hub."
            raise ModelError(f"{self.id} has no revision {self.revision!r}.", remedy) from error
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            problem = f"{self.id} is neither a local folder nor a model on the hub that you can access."
            raise ModelError(problem, "Check the spelling; for a private model run `hf auth login`.") from error
        except errors.HfHubHTTPError as error:
            raise ModelError(f"The hub does not provide {self.id}: {first_line(error)}", "Try again later.") from error
        except errors.HTTPError:  # type: ignore[attr-defined]  # of httpx or httpx2
            return self._find_cached("the hub can't be reached")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            problem = f"The server at {constants.ENDPOINT} is not a model hub: {first_line(error)}"
            remedy = "Log in to the network, or correct HF_ENDPOINT; --offline uses the local cache."
            raise ModelError(problem, remedy) from None

    def _find_cached(self, reason: str) -> Path:
        """Return the model's folder in the local cache.

        Raises ModelError if the model is not cached; the message gives the `reason` why the hub is not used.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:  # request only the config, because other programs cache only the files that they need
            folder = snapshot_download(self.id, revision=self.revision, allow_patterns=CONFIG, local_files_only=True)
            return Path(folder)
        except (HFValidationError, LocalEntryNotFoundError):
            # `hf download` has the option --revision; it does not understand id@revision
            suffix, option = (f"@{self.revision}", f" --revision {self.revision}") if self.revision else ("", "")
            problem = f"{self.id}{suffix} is neither a local folder nor a model in the local cache; {reason}."
            remedy = f"Check the path of a folder, or run `hf download {self.id}{option}` with a network connection."
            if get_close_matches(self.id, ["demo"]):
                remedy = f"Did you mean `demo`? {remedy}"
            raise ModelError(problem, remedy) from None


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's text, shortened; two lines if the first ends with a colon.

    If the text is empty, return the error's type; for a KeyError, return type and key.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):  # the text of a KeyError is only the key
        return shorten_text(" ".join([type(error).__name__, *lines[:1]]))
    return shorten_text(" ".join(lines[:2]) if lines[0].endswith(":") else lines[0])


@contextmanager
def foreign(problem: str, remedy: str, kind: type[AttnlensError] = ModelError) -> Iterator[None]:
    """Convert every error of a library inside the context to `kind`, or to ModelError if there is not enough memory.

    Libraries raise arbitrary types for malformed files: the package `tokenizers` raises bare Exception, and its Rust
    panics derive only from BaseException.
    """
    try:
        yield
    except AttnlensError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if is_memory(error):
            raise ModelError(f"{problem}: there is not enough memory.", "Choose a smaller model or input.") from error
        remedy = "Install the missing package." if isinstance(error, ImportError) else remedy
        raise kind(f"{problem}: {first_line(error)}", remedy) from error


def check_endpoint() -> None:
    """Raise ModelError if HF_ENDPOINT is not a valid address, because importing huggingface_hub would then fail."""
    _address(os.environ.get("HF_ENDPOINT") or "", "HF_ENDPOINT")


def reachable(endpoint: str) -> bool:
    """Return True if a connection to `endpoint` or its proxy succeeds. Raises ModelError for an invalid address."""
    parts, _ = _address(endpoint, "HF_ENDPOINT")
    proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
    target, port = _address(proxy or endpoint, f"{parts.scheme}_proxy" if proxy else "HF_ENDPOINT")
    answers: list[bool] = []

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection((target.hostname or "", port), timeout=PATIENCE).close()
            answers.append(True)

    # resolving an unknown name can block for longer than any socket timeout, hence the thread
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return bool(answers)


def _address(text: str, variable: str) -> tuple[SplitResult, int]:
    """Parse an address; return its parts and its port. Raises ModelError, which names `variable`, if it is invalid."""
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        port = parts.port
    except ValueError:  # the message omits the address and the error's text, which can contain a password
        raise ModelError(f"{variable} is not a valid address.", f"Correct {variable}, or unset it.") from None
    return parts, port or (443 if parts.scheme == "https" else 80)


TOKENIZERS = (  # Name patterns of tokenizer files
    *("tokenizer*", "vocab*", "*vocab.json", "merges*", "dict.txt", "tekken*"),
    *("*.model", "*.spm", "*.codes", "*.tiktoken"),
)
READ_PATTERNS = (  # Name patterns of small files that transformers may open in addition to the weights
    *("config.json", "generation_config.json", "*processor_config.json", "*.index.json"),
    *("*tokens*.json", "*.jinja", "normalizer.json", *TOKENIZERS),
)
SMALL_FILES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
"""Suffixes of the files that are downloaded with the weights."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")
SAY_AGAIN = "Download the model again."
SAY_READABLE = "Make the file readable."
SAY_PATH = "Give a folder with config.json and weights, a .gguf or .safetensors file, a hub id, or `demo`."


@contextmanager
def readable(path: Path, remedy: str = SAY_READABLE) -> Iterator[None]:
    """Convert an OSError inside the context to a ModelError that names the unreadable file or folder."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{shorten_text(str(path))} can't be read: {error.strerror or error}.", remedy) from None


def is_there(path: Path, remedy: str = SAY_PATH) -> bool:
    """Return True if `path` exists. Raises ModelError if the system does not allow the check."""
    with readable(path, remedy):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: the name contains NUL
            return False
        return True


def names_in(folder: Path) -> set[str]:
    """Return the names of all entries of a folder. Raises ModelError if the folder can't be read."""
    with readable(folder, "Make the folder readable."):
        return set(os.listdir(folder))  # noqa: PTH208  # only names are needed


Json = dict[str, Any]  # JSON object in a model's file, whose values are checked where they are used


PLACEHOLDERS = {  # Beginning of a placeholder file → kind of the placeholder, and how to get the actual file
    b"version https://git-lfs": ("a Git LFS pointer", "Run `git lfs pull` in its folder, or use `hf download`."),
    b"/annex/objects": ("a git-annex pointer", "Run `git annex get` in its folder."),
    **dict.fromkeys((b"<!doctype", b"<html", b"<?xml"), ("a web page", "Download it again with `hf download`.")),
}


def describe_placeholder(path: Path) -> tuple[str, str] | None:
    """Return problem and remedy if a file contains a pointer or a web page instead of data; None for other files."""
    with readable(path):
        if not path.is_file():
            return None
        with path.open("rb") as file:
            start = file.read(64).strip().lower()
    for beginning, (kind, remedy) in PLACEHOLDERS.items():
        if start.startswith(beginning):
            return f"{shorten_text(str(path))} is {kind}, not the file itself.", remedy
    return None


def read_json(path: Path) -> Json:
    """Read the JSON object in a model's file. Raises ModelError if the file can't be read or is not a JSON object."""
    try:
        return read_object(path, ModelError, SAY_AGAIN)
    except ModelError:
        if placeholder := describe_placeholder(path):
            raise ModelError(*placeholder) from None
        raise


def shards_in(index: Path, suffix: str) -> tuple[str, ...]:
    """Return the sorted names of the weight files that an index lists.

    Raises ModelError if the index lists none, or if a name is a path or does not end in `suffix`.
    """
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelError(f"{index} does not name any weight files.", SAY_AGAIN)
    for name in table.values():
        is_bare = isinstance(name, str) and len(name) <= 255 and not any(sign in name for sign in "/\\\0")
        if not is_bare or not name.endswith(suffix):
            problem = f"{index} names {format_value(name)}, but an index must name {suffix} files in its folder."
            raise ModelError(problem, "Get the model from a source that you trust.")
    return tuple(sorted(set(table.values())))


def weight_file(folder: Path, name: str, *, may_lead_out: bool = False) -> Path:
    """Return a weight file's path. Raises ModelError unless the path is a readable regular file.

    Placeholders such as Git LFS pointers are refused. Links out of `folder` are refused unless `may_lead_out` is True.
    """
    path = folder / name
    if not is_there(path, SAY_READABLE):
        raise ModelError(f"The weight file {shorten_text(str(path))} is missing.", SAY_AGAIN)
    with readable(path):
        refuse_other_kinds(path.stat(), shorten_text(str(path)), ModelError, SAY_AGAIN)
    if placeholder := describe_placeholder(path):
        raise ModelError(*placeholder)
    if not may_lead_out:
        refuse_outside(folder, path)
    return path


def check_entries(folder: Path, names: Iterable[str], *, adapter_too: bool = False, gguf: bool = False) -> None:
    """Raise ModelError for files next to the weights that transformers must not open.

    Refused are a distributed checkpoint, an adapter (unless `adapter_too`) and, unless the weights are GGUF, files that
    are not regular, link out of the folder or are too large.
    """
    for name in sorted(names):
        path = folder / name
        if name in ADAPTERS and not adapter_too:
            problem = f"{folder} contains an adapter ({name}) in addition to the weights; specify whether to apply it."
            remedy = f"Add --adapter {shlex.quote(str(folder))}, or move the adapter's files into another folder."
            raise ModelError(problem, remedy)
        if fnmatch(name, "shard-[0-9]*-model-*"):  # transformers reads it instead of any other file
            problem = f"{folder} contains a distributed checkpoint ({shorten_text(name)}), which can't be read."
            raise ModelError(problem, "Save the model with save_pretrained into another folder.")
        if name == "additional_chat_templates" and os.path.isdir(path) and not gguf:  # noqa: PTH112  # never raises
            refuse_outside(folder, path)
            check_entries(folder, (f"{name}/{inside}" for inside in names_in(path)))
        is_read = any(fnmatch(name, pattern) for pattern in READ_PATTERNS)
        if gguf or not (is_read or name.endswith(SMALL_FILES)) or os.path.isdir(path):  # noqa: PTH112  # never raises
            continue
        status = path.stat() if is_there(path, SAY_READABLE) else None  # None: a dangling link
        if status:
            refuse_other_kinds(status, str(path), ModelError, SAY_AGAIN)
        if is_read:
            refuse_outside(folder, path)
        if is_read and status and status.st_size > LARGEST:
            raise ModelError(f"{path} is larger than {LARGEST // 2**20} MiB.", SAY_AGAIN)
        if name == "generation_config.json":  # transformers reads it without reporting errors
            read_json(path)


def refuse_outside(folder: Path, path: Path) -> None:
    """Raise ModelError if `path` links out of the folder; links into the hub cache's folder `blobs` are allowed."""
    real = Path(os.path.realpath(path))
    homes = [Path(os.path.realpath(folder))]
    if folder.parent.name == "snapshots":
        homes.append(Path(os.path.realpath(folder.parent.parent)) / "blobs")  # not resolved: it must not be a link
    if not any(real.is_relative_to(home) for home in homes):
        problem = f"{path} links to a file outside its folder, {shorten_text(str(real))}."
        raise ModelError(problem, "Replace the link with the file itself.")


Storage = Literal["safetensors", "pickle", "gguf"]

DEMO = Path(__file__).parent.parent / "demo"
CONFIG = "config.json"
SINGLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
SUFFIXES: dict[Storage, str] = {"safetensors": ".safetensors", "pickle": ".bin", "gguf": ".gguf"}
SHARD = re.compile(r"-\d{5}-of-(\d{5})\.(safetensors|bin|gguf)$")  # End of the name of a part of a model
FORMATS = (  # Weights that attnlens does not read: patterns of file names, description, and remedy for error messages
    (
        ("zero_to_fp32.py", "global_step*", "*_states.pt"),
        "a DeepSpeed checkpoint",
        "Run `python zero_to_fp32.py . . --safe_serialization` in the folder of zero_to_fp32.py.",
    ),
    (
        ("*.distcp", "pytorch_model_fsdp_*"),
        "a distributed checkpoint of FSDP",
        "Merge it with `accelerate merge-weights FOLDER OUTPUT`.",
    ),
    (
        ("*.onnx", "onnx", "openvino*", "*.tflite", "*.mlpackage", "*.engine"),
        "a model exported for inference",
        "Give the model that was exported: an export can't be converted back.",
    ),
    (
        ("*.h5", "*.ckpt.index", "*.ckpt.data-*", "saved_model*", "*.msgpack"),
        "TensorFlow or Flax weights",
        "Convert them with transformers 4: from_pretrained(FOLDER, from_tf=True) or from_flax=True; save_pretrained.",
    ),
    (
        ("optimizer*", "scheduler.pt", "training_args.bin", "rng_state*", "scaler.pt"),
        "the state of a training run, without the model's weights",
        "Give the folder in which the training saved the model.",
    ),
    (
        ("*.pt", "*.pth", "*.ckpt", "*.bin", "*.npz", "*.ot", "*.nemo", "mp_rank_*", "iter_*"),
        "weights that are not in transformers' format",
        "Load them into the transformers model in Python, and call its save_pretrained(OUTPUT).",
    ),
)


def say_merge(first: str) -> str:
    """Return the remedy for a split GGUF model: the command that merges its parts. `first` can name any part."""
    first = re.sub(r"-\d{5}-of-", "-00001-of-", first)
    return f"Merge the parts with llama.cpp: `llama-gguf-split --merge {shlex.quote(first)} merged.gguf`."


@dataclass(frozen=True)
class Location:
    """Location of a model on this machine, and the format of its weights."""

    id: str  # The name that the user gave, without the revision
    folder: Path  # The folder of config, tokenizer and weights
    form: Storage  # Storage format of the weights
    file: str  # Name of the weight file in that folder, or of the index of its shards
    revision: str | None = None  # The commit of a hub model; None for local files
    trusts_link: bool = False  # True if the user named the weight file itself; a symlink is then trusted
    urls: tuple[tuple[str, str], ...] = ()
    """(name, URL) of each weight file of a hub model whose weights were not downloaded."""
    trusts_code: bool = False  # True if the user allows the model's own Python code to run

    @property
    def weights(self) -> tuple[Path, ...]:
        """Path of the single weight file, or paths of the index's shards. Raises ModelError if a file is invalid."""
        if not self.file.endswith(".json"):
            return (weight_file(self.folder, self.file, may_lead_out=self.trusts_link),)
        shards = shards_in(self.folder / self.file, SUFFIXES[self.form])
        return tuple(weight_file(self.folder, name) for name in shards)

    @property
    def notes(self) -> list[str]:
        """[note] if the folder has weights that were not read; else, for remote weights and if `trusts_link`, []."""
        if self.trusts_link or self.urls:
            return []
        read = {self.file, *(file.name for file in self.weights)}
        unread = sorted(
            name
            for name in names_in(self.folder) - read
            if name in (SINGLE, SHARDED, *PICKLES)
            or _is_gguf(name)
            or (self.file == SHARDED and name.endswith(SUFFIXES["safetensors"]) and SHARD.search(name))
        )
        others = f"other weights in this folder were not read: {', '.join(unread)}"
        return [f"The weights were read from {shorten_text(str(self.folder / self.file))}; {others}."] if unread else []

    @property
    def config_file(self) -> Path:
        """Path of the file that describes the model: config.json, or the GGUF file itself."""
        return self.folder / (self.file if self.gguf else CONFIG)

    @property
    def config(self) -> Json:
        """Content of config.json; empty for a GGUF file, which includes its own config."""
        return {} if self.form == "gguf" else read_json(self.folder / CONFIG)

    @property
    def gguf(self) -> dict[str, str]:
        """Keyword argument that makes transformers read a GGUF file; empty for other formats."""
        return {"gguf_file": self.file} if self.form == "gguf" else {}


def find(
    name: str, revision: str | None, *, offline: bool, allow_pickle: bool, leave_weights: bool = False
) -> Location:
    """Locate the model `name`: `demo`, a path, or a hub id (`org/name@revision`), tried in this order.

    With `leave_weights`, safetensors weights on the hub are not downloaded, but cached weights are used. Raises
    ModelError if no such model exists, or if it has no readable weights. Raises UsageError for a revision of `demo` or
    of a path, and for two different revisions.
    """
    path = DEMO if name == "demo" else with_home(name)
    if name.startswith("demo@"):
        raise UsageError("`demo` is part of attnlens and has no revisions.", "Write `demo` without a revision.")
    if not is_there(path):
        return _locate_on_hub(name, revision, offline=offline, allow_pickle=allow_pickle, leave_weights=leave_weights)
    if revision is not None:
        raise UsageError(f"{name} is a local path, which cannot have a revision ({revision!r}).", "Omit the revision.")
    return _locate_folder(name, path, allow_pickle) if path.is_dir() else _locate_file(name, path)


def _locate_folder(name: str, folder: Path, allow_pickle: bool, revision: str | None = None) -> Location:
    names = names_in(folder)
    if _is_adapter(names):
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") if ADAPTER_CONFIG in names else None
        base = shlex.quote(shorten_text(base)) if isinstance(base, str) and base.strip() else "BASE"
        command = f"attnlens inspect {base} --adapter {shlex.quote(name)}"
        raise ModelError(f"{name} contains an adapter, not a model.", f"Give the adapter's base model: {command}")
    # read before all other checks, so that an error in the config is reported first
    model_type = read_json(folder / CONFIG).get("model_type") if CONFIG in names else None
    try:
        form, file = _select_weights(names, str(folder), allow_pickle)
    except ModelError as error:
        reasons = [each.reason for each in architectures()[1] if each.model_type == model_type]
        if not reasons or "has no softmax attention" not in reasons[0]:
            raise
        problem = f"{reasons[0]} Besides, {error.problem}"
        remedy = "Choose another model: `attnlens list architectures` lists the supported model types."
        raise ModelError(problem, remedy) from None
    if form != "gguf" and CONFIG not in names:
        raise ModelError(f"{folder} has no config.json.", SAY_PATH)
    return Location(name, folder, form, file, revision)


def _is_adapter(names: Collection[str]) -> bool:
    """Return True if files with these names include an adapter, but no model weights."""
    weights = (*SUFFIXES.values(), ".index.json")
    return not set(ADAPTERS).isdisjoint(names) and not any(name.endswith(weights) for name in {*names} - {*ADAPTERS})


def _locate_file(name: str, path: Path) -> Location:
    """Locate a weight file, or an index of shards; the config of safetensors files must be in the same folder."""
    if path.suffix == ".gguf":
        return Location(name, path.parent, "gguf", path.name, trusts_link=True)
    if path.suffix != ".safetensors" and path.name != SHARDED:
        kind, _, remedy = next(_match_formats([path.name]), ("", "", SAY_PATH))
        problem = f"{path} is neither a .gguf nor a .safetensors file{f'; it contains {kind}' if kind else ''}."
        raise ModelError(problem, remedy)
    if not (path.parent / CONFIG).is_file():
        raise ModelError(f"The folder of {path} has no config.json.", "Put the model's config.json into that folder.")
    index = path.parent / SHARDED
    if index.is_file() and path.name in (SHARDED, *shards_in(index, SUFFIXES["safetensors"])):
        return Location(name, path.parent, "safetensors", SHARDED)
    _refuse_lone_shards([path.name], str(path.parent))
    return Location(name, path.parent, "safetensors", path.name, trusts_link=True)


def _locate_on_hub(
    name: str, revision: str | None, *, offline: bool, allow_pickle: bool, leave_weights: bool
) -> Location:
    from huggingface_hub import hf_hub_url

    hub = parse_hub_id(name, revision)
    id_, chosen = hub.id, set[str]()

    def select_files(names: Collection[str]) -> list[str]:
        if _is_adapter(names):
            return [ADAPTER_CONFIG]
        form, file = _select_weights(names, id_, allow_pickle)
        chosen.add(file)
        top_level = [name for name in names if "/" not in name]
        small = [name for name in top_level if name.endswith(SMALL_FILES)]
        if leave_weights and form == "safetensors":
            return small
        stem, suffix = file.partition(".")[0], SUFFIXES[form]
        shards = [name for name in top_level if name.startswith(stem) and name.endswith(suffix)]
        return [*small, file, *(shards if file.endswith(".index.json") else ())]

    folder = hub.fetch(select_files, offline=offline)
    names, index = names_in(folder), folder / SHARDED
    is_sharded = index.is_file() and SINGLE not in chosen | names  # if both exist, the single file is read
    shards = shards_in(index, SUFFIXES["safetensors"]) if leave_weights and is_sharded else ()
    has_weights = any(name.endswith(tuple(SUFFIXES.values())) for name in names)
    if shards:
        has_weights = all((folder / name).is_file() for name in shards)
    if offline or not leave_weights or has_weights:
        return _locate_folder(id_, folder, allow_pickle, revision=folder.name)
    urls = tuple((name, hf_hub_url(id_, name, revision=folder.name)) for name in shards or (SINGLE,))
    return Location(id_, folder, "safetensors", SHARDED if shards else SINGLE, folder.name, urls=urls)


def parse_hub_id(name: str, revision: str | None = None, remedy: str = SAY_PATH) -> Hub:
    """Parse a hub id and revision. Raises ModelError for a path, and UsageError for no id or differing revisions."""
    id_, _, suffix = name.partition("@")
    if not id_:
        raise UsageError(f"{shorten_text(name)} does not name a model.", "Write the model as org/name@revision.")
    if suffix and revision is not None and suffix != revision:
        raise UsageError(f"{name} and the revision {revision!r} contradict each other.", "Give only one revision.")
    is_file = id_.endswith((".gguf", ".safetensors"))
    if is_file or id_.startswith((".", "/", "~")) or id_.endswith("/") or "\\" in id_ or id_.count("/") > 1:
        kind = "file" if is_file else "folder"
        raise ModelError(f"There is no such {kind}: {shorten_text(name)}.", remedy)
    return Hub(id_, revision or suffix or None)


def _select_weights(names: Collection[str], where: str, allow_pickle: bool) -> tuple[Storage, str]:
    """Return the format of the weights and the name of their file or index. Raises ModelError if none can be read."""
    for file in (SINGLE, SHARDED):
        if file in names:
            return "safetensors", file
    top_level = sorted(name for name in names if "/" not in name)
    say_path = "Give the path of a file in this folder:"
    if not os.path.isdir(where):  # noqa: PTH112  # a hub id
        say_path = f"Run `hf download {where}`, and give the path of a file in the folder that it prints:"
    ggufs = list(filter(_is_gguf, top_level))
    whole = [name for name in ggufs if not SHARD.search(name)]
    if len(whole) == 1:
        return "gguf", whole[0]
    if whole:
        raise ModelError(f"{where} has {len(whole)} GGUF files.", f"{say_path} {whole[0]}, for example.")
    if ggufs:
        raise ModelError(f"{where} contains a split GGUF model ({len(ggufs)} parts).", say_merge(f"{where}/{ggufs[0]}"))
    if pickles := [file for file in PICKLES if file in names]:
        if allow_pickle:
            return "pickle", pickles[0]
        problem = f"{where} has only a pickled checkpoint ({pickles[0]}), which can run code when it is opened."
        raise ModelError(problem, "Convert the checkpoint to safetensors or, if you trust it, add --allow-pickle.")
    others = [name for name in top_level if name.endswith(SUFFIXES["safetensors"])]
    _refuse_lone_shards(top_level, where)
    if CONFIG in names and others:
        raise ModelError(f"{where} contains {others[0]} instead of {SINGLE}.", f"{say_path} {others[0]}.")
    lacking = "config.json" if CONFIG not in names else f"weights: neither {SINGLE} nor {SHARDED}"
    if folders := folders_below(names, where):
        listed = f"{', '.join(folders[:4])}{f' and {len(folders) - 4} more' if len(folders) > 4 else ''}"
        problem = f"{where} has no {lacking}, but folders inside it contain models: {listed}."
        if os.path.isdir(where):  # noqa: PTH112
            raise ModelError(problem, f"Give the path of a model, such as {shlex.quote(f'{where}/{folders[-1]}')}")
        path = f"give the path of a model in the folder that it prints, such as {folders[-1]}"
        raise ModelError(problem, f"Run `hf download {where}`, and {path}.")
    for kind, file, remedy in _match_formats(sorted({name.partition("/")[0] for name in names})):
        raise ModelError(f"{where} contains {kind} ({shorten_text(file)}), which attnlens does not read.", remedy)
    remedy = "Choose a model with safetensors or GGUF weights; if files are missing, download them again."
    raise ModelError(f"{where} has no {lacking}.", remedy if CONFIG in names else SAY_PATH)


def _is_gguf(name: str) -> bool:
    """Return True for a GGUF file other than a vision model's projector, which llama.cpp names mmproj….gguf."""
    return name.endswith(".gguf") and not name.startswith("mmproj")


def _refuse_lone_shards(names: Iterable[str], where: str) -> None:
    """Raise ModelError if one of these files is a shard; the caller has checked that no index lists it."""
    for name in names:
        if (match := SHARD.search(name)) and int(match[1]) > 1:
            index = SHARDED if match[2] == "safetensors" else PICKLES[1]
            problem = f"{where} contains {shorten_text(name)}, a part of a model, but no {index} that lists it."
            raise ModelError(problem, f"Download all parts, and {index}.")


def _match_formats(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, file, remedy) for each name that matches a pattern in FORMATS, in the order of FORMATS."""
    for patterns, kind, remedy in FORMATS:
        for name in names:
            if any(fnmatch(name, pattern) for pattern in patterns):
                yield kind, name, remedy


def folders_below(names: Collection[str], where: str) -> list[str]:
    """Return the paths, relative to `where`, of folders with a model or an adapter; shorter paths come first."""
    folder, inside = Path(where), [*names]
    if folder.is_dir():
        below = chain(folder.glob("*/*"), folder.glob("snapshots/*/*"))
        inside = [path.relative_to(folder).as_posix() for path in below]
    weights = {name.rpartition("/")[0] for name in inside if name.endswith((*SUFFIXES.values(), ".index.json"))}
    configs = {name.rpartition("/")[0] for name in inside if name.endswith((f"/{CONFIG}", f"/{ADAPTER_CONFIG}"))}
    return sorted(weights & configs, key=lambda name: (len(name), name))
