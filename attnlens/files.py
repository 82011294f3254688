"""Read untrusted files with size limits, and write files atomically."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import secrets
import shlex
import stat
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from attnlens.errors import AttnlensError, OutputError, UsageError

LARGEST = 2**28  # Largest file that is read as a whole, in bytes; the largest tokenizer files are a tenth of this size
PART = 2**20  # Bytes read per step, so that a file above the limit does not fill memory
DEEPEST = 100  # Maximum nesting of JSON: configs have five levels, and parsers fail near 300
WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0)  # Open named pipes without blocking; 0 on Windows, which lacks it
format_value = reprlib.repr  # Format a value from a file for a message; shortens long values
OPEN_FILES = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")  # Paths of open files, such as a shell's `<(…)`


def read_bytes(path: str | Path, error: type[AttnlensError], remedy: str, *, most: int = LARGEST) -> bytes:
    """Read a regular file of at most `most` bytes, or a pipe that the shell has opened for this process.

    Raise `error` with `remedy` for larger files, folders, and devices or named pipes, which may never end.
    """
    name = shorten_text(str(path))
    try:
        # opening a named pipe must not wait for a writer
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | WITHOUT_WAITING)) as file:
            if WITHOUT_WAITING:
                os.set_blocking(file.fileno(), True)
            if not str(path).startswith(OPEN_FILES):
                refuse_other_kinds(os.fstat(file.fileno()), name, error, remedy)
            return read_stream(file, name, error, remedy, most=most)
    except (OSError, ValueError) as problem:  # a name with a NUL is a ValueError
        raise error(f"{name} can't be read: {getattr(problem, 'strerror', problem)}.", remedy) from None


def refuse_other_kinds(status: os.stat_result, name: str, error: type[AttnlensError], remedy: str) -> None:
    """Raise `error` with `remedy` unless `status` describes a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise error(f"{name} can't be read: it is {kind}, not a file.", remedy)


def check_readable(path: Path, name: str, error: type[AttnlensError], remedy: str) -> None:
    """Raise `error` unless `path` is a readable regular file or an open file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise error(f"{name} can't be read: No such file or directory.", "Check the path.") from None
    except (OSError, ValueError) as problem:
        raise error(f"{name} can't be read: {getattr(problem, 'strerror', problem)}.", remedy) from None
    if not os.access(path, os.R_OK):
        raise error(f"{name} can't be read: Permission denied.", remedy)
    if not str(path).startswith(OPEN_FILES):
        refuse_other_kinds(status, name, error, remedy)


def read_stream(file: BinaryIO, name: str, error: type[AttnlensError], remedy: str, *, most: int = LARGEST) -> bytes:
    """Read the rest of `file`. Raise `error` with `remedy` if it is longer than `most` bytes."""
    content = bytearray()
    while part := file.read(PART):
        content += part
        if len(content) > most:
            raise error(f"{name} can't be read: it is larger than {most // 2**20} MiB.", remedy)
    return bytes(content)


def read_object(path: str | Path, error: type[AttnlensError], remedy: str) -> dict[str, Any]:
    """Read a JSON object from an untrusted file. Raise `error` if the file can't be read or contains anything else."""
    content = read_bytes(path, error, remedy)
    if content.startswith(BOM_UTF8):  # transformers can't parse such a file
        raise error(f"{path} begins with a byte order mark.", "Save the file as UTF-8 without a byte order mark.")
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise error(f"{path} is not a JSON object.", remedy)
    level: list[object] = [value]  # level by level, because recursion is limited
    for _ in range(DEEPEST + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = list(chain.from_iterable(inner))
    if level:
        raise error(f"{path} is nested more than {DEEPEST} levels deep.", remedy)
    return value


def read_toml(path: Path, tables: Iterable[Sequence[str]], remedy: str) -> dict[str, object]:
    """Return the first non-empty table of `tables` in an untrusted TOML file, or {}. Raise UsageError if invalid."""
    import tomllib

    try:
        document = tomllib.loads(read_bytes(path, UsageError, remedy, most=PART).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, and numbers of thousands of digits
        raise UsageError(f"{path} is not valid TOML: {error}.", remedy) from None
    for names in tables:
        table: dict[str, object] = document
        for depth, name in enumerate(names, 1):
            inner = table.get(name, {})
            if not isinstance(inner, dict):
                where = ".".join(names[:depth])
                raise UsageError(f"{path}: {where} must be a table.", f"Write the table's header as [{where}].")
            table = inner
        if table:
            return table
    return {}


def local_path(path: object, name: str = "path") -> Path:
    """Return the path of a local file or folder. Raise UsageError for an address (`s3://…`) or a non-path."""
    if not isinstance(path, str | Path):
        raise UsageError(f"{reprlib.repr(path)} is not a path.", "Give a string or a path object.")
    if "://" in str(path):
        raise UsageError(f"{name} must be a path on this machine, not {path}.", "Give a local path.")
    return Path(path)


def with_home(path: str) -> Path:
    """Expand `~` to the home folder; like a shell, leave the path unchanged if the user does not exist."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  # pathlib raises for an unknown user


def shorten_text(text: str) -> str:
    """Format a text on one line; if it is longer than 300 characters, omit the middle."""
    line = " ".join(text.splitlines())
    return line if len(line) <= 300 else f"{line[:150]}…{line[-149:]}"


def sha256(path: Path) -> str:
    """Compute the SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(path: Path, *, may_be_folder: bool = False) -> None:
    """Raise OutputError if `path` can't be written as a file or, with `may_be_folder`, as a folder of files."""
    with _as_output_error(path):
        status = _status(path)
    if status is not None and stat.S_ISDIR(status.st_mode) and not may_be_folder:
        raise OutputError(f"{path} can't be written: it is a folder.", "Give the path of a file.")
    place = path  # a stream's resolved path may not exist: /dev/stdout leads to `pipe:[…]`
    if status is None or not _is_stream(status):
        real = Path(os.path.realpath(path))
        place = real if real.is_dir() else real.parent
        if not place.is_dir():
            remedy = f"Run: mkdir -p {shlex.quote(str(place))}"
            raise OutputError(f"{path} can't be written: the folder {place} does not exist.", remedy)
    if not os.access(place, os.W_OK):
        raise OutputError(f"{path} can't be written: Permission denied.", "Choose a writable path.")


def check_folder(folder: Path) -> None:
    """Raise OutputError unless `folder` is an empty folder, or does not exist and can be created."""
    real = Path(os.path.realpath(folder))
    try:
        if real.exists() and (not real.is_dir() or any(real.iterdir())):
            raise OutputError(f"{folder} is not an empty folder.", "Give the path of a new folder.")
        nearest = next(parent for parent in real.parents if parent.exists())
        if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
            raise unwritten_folder(folder, f"no folder can be created in {nearest}")
    except OSError as error:
        raise unwritten_folder(folder, error.strerror) from None


def unwritten_folder(folder: Path, why: str | None) -> OutputError:
    """Return the error for a folder in which a model can't be saved."""
    return OutputError(f"{folder} can't be written: {why}.", "Give a writable path with enough space for the model.")


def make_folder(path: Path) -> None:
    """Create a folder if it does not exist. Raise OutputError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"The folder {path} can't be created: {error.strerror}.", "Give a writable folder.") from None


def caption_file(picture: Path) -> Path:
    """Return the file for the caption of a picture: `heads.pdf.txt` for `heads.pdf`."""
    return picture.with_name(f"{picture.name}.txt")


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a temporary file and rename the file to `path`, so that no partial file is left.

    A symbolic link is followed and kept. An existing file keeps its mode; the umask determines the mode of a new file.
    A device, a pipe, or this process's stdout or stderr is written to directly.
    Raise OutputError if the folder does not exist or can't be written.
    """
    with _as_output_error(path):
        status = _status(path)
        if status is not None and _is_stream(status):
            descriptor = _own_stream(status)  # reopening a redirected file would overwrite its start
            with path.open("wb") if descriptor is None else os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(content)
            return
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".attnlens.{secrets.token_hex(8)}")
        try:
            with temporary.open("xb") as file:
                if status is not None:  # before writing, because the content may be private
                    temporary.chmod(stat.S_IMODE(status.st_mode))
                file.write(content)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _is_stream(status: os.stat_result) -> bool:
    """Return True if a file is written as a stream: a device, a pipe, or this process's stdout or stderr."""
    return not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)) or _own_stream(status) is not None


def _own_stream(status: os.stat_result) -> int | None:
    """Return the descriptor of stdout (1) or stderr (2) if it refers to the file with this status; else None."""
    for descriptor in (1, 2):
        with suppress(OSError):  # a closed descriptor
            if os.path.samestat(os.fstat(descriptor), status):
                return descriptor
    return None


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a file, following links, or None if there is no file. Raise OSError for other failures."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.stat()
    return None


@contextmanager
def _as_output_error(path: Path) -> Iterator[None]:
    """Convert an OSError or ValueError that is raised inside the block to an OutputError about `path`."""
    try:
        yield
    except OSError as error:
        remedy = "Choose a path in a writable folder with free space."
        raise OutputError(f"{path} can't be written: {error.strerror}.", remedy) from None
    except ValueError as error:  # a NUL, or characters that file names can't contain
        raise OutputError(f"{str(path)!r} can't be written: {error}.", "Choose another path.") from None
