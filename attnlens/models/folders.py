"""Finds which files of a model's folder may be read: those that lie in it, links followed, and are files at all."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from attnlens.errors import ModelError
from attnlens.files import LARGEST, read_object, refuse_other_kinds, shortened, written
from attnlens.records import FileInParts

TOKENIZERS = (
    *("tokenizer*", "vocab*", "*vocab.json", "merges*", "dict.txt", "tekken*"),
    *("*.model", "*.spm", "*.codes", "*.tiktoken"),
)
"""Names of the files in which tokenizers are kept."""
READ = (
    "config.json",
    "generation_config.json",
    "*tokens*.json",
    "*processor_config.json",
    "*.index.json",
    "*.jinja",
    "normalizer.json",
    *TOKENIZERS,
)
"""Names of the small files beside the weights that transformers may open."""
TEMPLATES = "additional_chat_templates"
"""A folder in the model's folder, of which transformers reads every template."""
SMALL_FILES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
"""How the names of what is downloaded with the weights end."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")
DISTRIBUTED = "shard-[0-9]*-model-*"
"""Names by which transformers recognises a distributed checkpoint, which it reads in the place of any other file."""
SAY_AGAIN = "Download the model again."
SAY_UNCHANGED = "Run it again when nothing writes to the file any more."


class WatchedFile:
    """A weight file of which parts are read, and which must stay as it was when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = self._stamp()

    def in_report(self, digest: str) -> FileInParts:
        """Return what stands for the file in a report, with the hash of its header."""
        changed, size, _ = self._seen
        return FileInParts(name=self.path.name, bytes=size, header_sha256=digest, stamp=str(changed))

    def check(self) -> None:
        """Raise ModelError if the file is gone or has changed since it was opened."""
        if self._stamp() != self._seen:
            raise ModelError(f"{self.path} changed while it was read.", SAY_UNCHANGED)

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = self.path.stat()
        except OSError as error:
            problem = f"{self.path} can't be read: {error.strerror or error}."
            raise ModelError(problem, "Make the file readable.") from None
        return found.st_mtime_ns, found.st_size, found.st_ino


def names_in(folder: Path) -> set[str]:
    """The names of what lies in a folder; raises ModelError where it can't be looked into."""
    try:
        return set(os.listdir(folder))  # noqa: PTH208  # names alone are wanted
    except OSError as error:
        raise ModelError(f"{folder} can't be read: {error.strerror}.", "Make the folder readable.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a model's file; raises ModelError where it can't be read or holds something else."""
    return read_object(path, ModelError, SAY_AGAIN)


def shards_in(index: Path, suffix: str) -> tuple[str, ...]:
    """The names of the weight files that an index names.

    Raises ModelError where one is no bare name ending in `suffix`, by which it would be opened as something else.
    """
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelError(f"{index} names no weight files.", SAY_AGAIN)
    for name in table.values():
        is_bare = isinstance(name, str) and len(name) <= 255 and not any(sign in name for sign in "/\\\0")
        if not is_bare or not name.endswith(suffix):
            raise ModelError(
                f"{index} names {written(name)} as a weight file, which is no name of a {suffix} file in its folder.",
                "Get the model from a source that you trust.",
            )
    return tuple(sorted(set(table.values())))


def weight_file(folder: Path, name: str, *, may_lead_out: bool = False) -> Path:
    """The weight file of that name in the folder.

    Raises ModelError where it is missing, no file or unreadable, or leads out of the folder and must not.
    """
    path = folder / name
    try:
        found = path.stat()
        refuse_other_kinds(found, shortened(str(path)), ModelError, SAY_AGAIN)
        path.open("rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"The weight file {shortened(str(path))} is missing.", SAY_AGAIN) from None
    except OSError as error:
        problem = f"{shortened(str(path))} can't be read: {error.strerror}."
        raise ModelError(problem, "Make the file readable.") from None
    if not may_lead_out:
        refuse_outside(folder, path)
    return path


def check_small(folder: Path, names: Iterable[str]) -> None:
    """Raise ModelError for what transformers would open beside the weights, and should not.

    That is what is no file (a named pipe would be waited for), leads out of the folder, or is too large.
    """
    for name in sorted(names):
        path = folder / name
        if name == TEMPLATES and os.path.isdir(path):  # noqa: PTH112  # which never raises
            refuse_outside(folder, path)
            check_small(folder, (f"{name}/{inside}" for inside in names_in(path)))
        read = any(fnmatch(name, pattern) for pattern in READ)
        if not (read or name.endswith(SMALL_FILES)) or os.path.isdir(path):  # noqa: PTH112  # which never raises
            continue
        size = _size(path)
        if read:
            refuse_outside(folder, path)
        if read and size > LARGEST:
            raise ModelError(f"{path} holds more than {LARGEST // 2**20} MiB.", SAY_AGAIN)
        if name == "generation_config.json":  # which transformers reads without a word on what is wrong in it
            read_json(path)


def refuse_other_forms(folder: Path, names: Iterable[str], *, adapter_too: bool = False) -> None:
    """Raise ModelError where weights lie in the folder of which attnlens would read a part, or something else.

    `adapter_too`: an adapter that lies there is the one that was asked for.
    """
    for name in sorted(names):
        if name in ADAPTERS and not adapter_too:
            raise ModelError(
                f"{folder} holds an adapter ({name}) beside the weights, and nothing says whether it is to be applied.",
                f"Add --adapter {shlex.quote(str(folder))}, or move the adapter's files into another folder.",
            )
        if fnmatch(name, DISTRIBUTED):
            raise ModelError(
                f"{folder} holds a distributed checkpoint ({shortened(name)}), which attnlens does not read.",
                "Save the model with save_pretrained into another folder.",
            )


def _size(path: Path) -> int:
    """Bytes of a small file; raises ModelError for what is none, but not for a link to nothing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}.", "Make the file readable.") from None
    refuse_other_kinds(found, str(path), ModelError, SAY_AGAIN)
    return found.st_size


def refuse_outside(folder: Path, path: Path) -> None:
    """Raise ModelError where links lead out of the folder; the hub's cache keeps the files themselves in `blobs`."""
    real = Path(os.path.realpath(path))
    homes = [Path(os.path.realpath(folder))]
    if folder.parent.name == "snapshots":
        homes.append(Path(os.path.realpath(folder.parent.parent)) / "blobs")  # itself no link
    if not any(real.is_relative_to(home) for home in homes):
        raise ModelError(
            f"{path} leads out of its folder, to {shortened(str(real))}.", "Put the file itself in its place."
        )
