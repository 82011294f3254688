"""Store the result of each unit of a run in a safetensors file, which a later run can reuse.

A unit's value is a nested list or dictionary of tensors, records and JSON values, stored as
`<work>/<key>/<name>.safetensors`. The key is a hash of the facts that determine the run's numbers, so that only
an equivalent run reuses the file. torch is imported inside functions, because the command line imports this module at
startup.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from attnlens.errors import AttnlensError, OutputError, reason_of
from attnlens.files import sha256 as sha256_of
from attnlens.files import write_atomically
from attnlens.wording import clean, format_count, shorten_line

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
LOG = logging.getLogger("attnlens")
RUN = "run.json"  # file in a run's folder with the facts that its key hashes
SUFFIX = ".safetensors"
# units' files, folders of their parts, and temporary files of killed processes (see `write_atomically`)
OWN_NAME = re.compile(r".*-[0-9a-f]{8}(\.safetensors)?|\.attnlens\.[0-9a-f]{16}")
OTHER_WORK = "Choose another folder with --work."
PACKAGE = Path(__file__).parents[1]


class Keep(Protocol):
    """Function that returns a stored partial result of a unit, or computes it with `make` and stores it."""

    def __call__(self, name: str, make: Callable[[], T], /) -> T: ...  # noqa: D102


def keep_nothing(_name: str, make: Callable[[], T]) -> T:
    """Compute and return a partial result of a unit without storing it."""
    return make()


def versions() -> dict[str, str | None]:
    """Return the versions of libraries (None if not installed) and a hash of attnlens's code."""
    libraries = ("attnlens", "torch", "transformers", "peft", "gguf")
    return {"code": hash_code()} | {name: _version(name) for name in libraries}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def hash_code() -> str:
    """Return a hash of the paths and contents of all modules and JSON tables of attnlens."""
    files = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.json")])
    return hash_json([[str(path.relative_to(PACKAGE)), sha256_of(path)] for path in files])[:16]


def hash_json(value: object) -> str:
    """Return the first 32 hex digits of the SHA-256 of a value's JSON."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Store:
    """Files of one run, which several processes and machines can share."""

    folder: Path  # folder as a path, or a `UPath`, which has the same methods
    facts: Mapping[str, object]  # facts that determine the numbers of the run, as JSON
    resume: bool = True  # True if files of an earlier run are reused

    def path(self, name: str) -> Path:
        """Return the path of a unit's file."""
        return self.folder / (file_stem(name) + SUFFIX)

    def inside(self, name: str) -> Store:
        """Return a store for the partial results of a unit, in a folder next to the unit's file."""
        return Store(self.folder / file_stem(name), {"run": hash_json(self.facts), "unit": name}, self.resume)

    def load(self, name: str) -> Any:
        """Return a unit's stored value; None if there is no usable file. Raise OutputError if the file can't be read.

        A damaged file, or the file of a different unit, is renamed, and a warning is logged.
        """
        path = self.path(name)
        with convert_output_errors(path, "read"), suppress(FileNotFoundError, NotADirectoryError):
            try:
                # do not open a folder, or a pipe, which may never end
                other = isinstance(path, Path) and path.exists() and not path.is_file()
                return _parse(b"" if other else path.read_bytes(), self._stamp(name))
            except ValueError:
                _rename_damaged(path, name)
        return None

    def save(self, name: str, value: object) -> None:
        """Write a unit's value atomically. Raise OutputError if it cannot be written."""
        _write(self.path(name), _serialise(value, self._stamp(name)))
        self.begin()

    def begin(self) -> None:
        """Write the run's facts to run.json unless it exists. Raise OutputError if the folder can't be written."""
        with convert_output_errors(self.folder / RUN, "read"):
            known = (self.folder / RUN).exists()
        if not known:
            _write(self.folder / RUN, json.dumps(self.facts, indent=1).encode())

    def compute(self, name: str, make: Callable[[], T]) -> T:
        """Return a unit's stored value; if there is none or `resume` is False, call `make` and store the result."""
        value: T | None = self.load(name) if self.resume else None
        if value is None:
            value = make()
            self.keep(name, value)
        return value

    def keep(self, name: str, value: object) -> None:
        """Write a unit's value; if writing fails, log a warning, because the run can continue."""
        try:
            self.save(name, value)
        except OutputError as error:
            LOG.warning("The result of %s is not stored. %s", clean(name), error.problem)

    def clear(self) -> None:
        """Remove the run's files, and the folder if it is then empty."""
        with suppress(OSError):  # another process may clear the folder at the same time
            for path in list(self.folder.iterdir()):
                if path.name != RUN and not OWN_NAME.fullmatch(path.name):
                    continue
                if path.is_dir() and not path.is_symlink():
                    Store(path, {}).clear()
                else:
                    path.unlink(missing_ok=True)
            if isinstance(self.folder, Path):  # `UPath.rmdir` removes the folder's content too
                self.folder.rmdir()

    def report_others(self) -> None:
        """Log each stored run of this command that has different facts: a difference, and how many units finished."""
        files: list[Path] = []
        with suppress(OSError):  # a remote folder may be readable, but not listed
            files = sorted(self.folder.parent.glob(f"*/{RUN}"))
        for file in files:
            with suppress(OSError, ValueError, AttributeError, RecursionError):  # the file may come from anywhere
                facts = json.loads(file.read_text())
                reason = difference(facts, self.facts)
                if facts.get("command") == self.facts.get("command") and reason:
                    count = format_count(len(list(file.parent.glob(f"*{SUFFIX}"))), "finished unit")
                    LOG.warning("%s contains %s of a different run: %s.", file.parent, count, clean(reason))

    def _stamp(self, name: str) -> str:
        return f"{hash_json(self.facts)} {name}"


def _rename_damaged(path: Path, name: str) -> None:
    renamed = path.with_name(path.name + ".damaged")
    action = f"the file is renamed to {renamed.name}, and the unit is computed again"
    try:
        path.rename(renamed)
    except FileNotFoundError:  # another process has renamed it
        return
    except OSError as error:
        action = f"the file cannot be renamed: {error.strerror or error}"
    LOG.warning("%s is damaged or does not contain the unit %s: %s.", path, clean(name), action)


def _write(path: Path, content: bytes) -> None:
    """Write a file; retry if another run removes the folder at the same time."""
    for attempt in range(8):
        try:
            with convert_output_errors(path, "written"):
                path.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(path, Path):
                    write_atomically(path, content)
                else:  # an object store writes objects atomically
                    path.write_bytes(content)
        except OutputError:
            if attempt == 7 or not isinstance(path, Path):
                raise
        else:
            return


@contextmanager
def convert_output_errors(path: Path, action: str) -> Iterator[None]:
    """Context manager: convert errors of the system, or of a remote store's library, to OutputError."""
    try:
        yield
    except AttnlensError:
        raise
    except Exception as error:
        if isinstance(path, Path) and not isinstance(error, OSError):
            raise
        message = getattr(error, "strerror", None) or reason_of(error)
        raise OutputError(f"{path} cannot be {action}: {message}.", OTHER_WORK) from None


def file_stem(name: str) -> str:
    """Return a readable and unique file name for a unit, without suffix."""
    readable = re.sub(r"[^A-Za-z0-9.=]+", "-", name)[:80].strip("-.")
    return f"{readable}-{sha256(name.encode()).hexdigest()[:8]}"


def difference(first: object, second: object, where: str = "") -> str | None:
    """Describe the first difference between nested values (`seed is 1 instead of 0`); return None if there is none."""
    if isinstance(first, dict) and isinstance(second, dict):
        inner = (difference(first.get(name), second.get(name), f"{where}.{name}") for name in first | second)
        return next(filter(None, inner), None)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        return difference(dict(enumerate(first)), dict(enumerate(second)), where)
    if first == second:
        return None
    return f"{where.removeprefix('.')} is {shorten_line(str(first), 60)} instead of {shorten_line(str(second), 60)}"


def _serialise(value: object, stamp: str) -> bytes:
    """Serialise a value as safetensors: its tensors, and the rest as JSON in the metadata, with a hash of both."""
    from safetensors.torch import save
    from torch import Tensor

    tensors: dict[str, Tensor] = {}

    def encode(part: object) -> dict[str, object]:
        if not isinstance(part, Tensor):
            return {"record": type(part).__name__, "fields": _list_pairs(vars(part))}
        tensors[str(len(tensors))] = part.detach().cpu().contiguous().clone()
        return {"tensor": str(len(tensors) - 1)}

    text = json.dumps([stamp, _list_pairs(value)], default=encode)
    return save(tensors, {"attnlens": f"{_digest(text, tensors)} {text}"})  # one entry: safetensors keeps no order


def _list_pairs(value: object) -> object:
    """Convert the dictionaries in a value to lists of pairs, because keys in JSON can only be strings."""
    if isinstance(value, Mapping):
        return {"pairs": [[_list_pairs(key), _list_pairs(part)] for key, part in value.items()]}
    return [_list_pairs(part) for part in value] if isinstance(value, list | tuple | range) else value


def _parse(content: bytes, stamp: str) -> object:
    """Parse the value in a file. Raise ValueError if the file is truncated, damaged or belongs to another unit."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    def restore(fields: dict[str, Any]) -> object:
        if "tensor" in fields:
            return tensors[fields["tensor"]]
        if "record" in fields:
            return _build_record(fields["record"], fields["fields"])
        return {_hashable(key): part for key, part in fields["pairs"]}

    try:
        tensors = load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        digest, _, text = metadata["attnlens"].partition(" ")
        written_stamp, value = json.loads(text, object_hook=restore)
        whole = digest == _digest(text, tensors) and written_stamp == stamp
    except (SafetensorError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(stamp) from error
    if not whole:
        raise ValueError(stamp)
    return value


def _build_record(name: str, fields: Mapping[str, Any]) -> object:
    """Build the record of type `name`. Raise TypeError or AttributeError if attnlens has no such record type."""
    from attnlens import records
    from attnlens.analyzers.registry import Answer

    kind = Answer if name == "Answer" else getattr(records, name)
    if not issubclass(kind, records.Record | Answer):
        raise TypeError(name)
    return kind(**fields)


def _hashable(key: object) -> object:
    return tuple(map(_hashable, key)) if isinstance(key, list) else key


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    from safetensors.torch import save

    return sha256(text.encode() + save(tensors)).hexdigest()
