"""Reads single tensors out of safetensors files, on this machine or a hub's, byte range by byte range."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from attnlens.errors import ModelError
from attnlens.files import shortened
from attnlens.models.stored import Stored
from attnlens.records import FileInParts

if TYPE_CHECKING:
    from torch import Tensor

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""safetensors' names of the types that attention is stored in, as itself or as codes."""
LENGTH = 8
"""Bytes in front of a header, which say how long it is."""
LONGEST = 100 * 2**20
"""Bytes of a header beyond which it is refused, as the safetensors library does."""
SAMPLE = 4096
"""Bytes of each part of a tensor that stand for it."""
SAY_AGAIN = "Run it again when nothing writes to the file any more."


class ByteSource(Protocol):
    """A file of which ranges can be read."""

    @property
    def name(self) -> str:
        """Its name, without the folder."""

    @property
    def size(self) -> int:
        """Its bytes."""

    @property
    def stamp(self) -> str:
        """What is another where its content is."""

    @property
    def is_hashed(self) -> bool:
        """Whether the stamp is made of the content, and not a time that may be set."""

    def read(self, start: int, count: int) -> bytearray:
        """So many bytes from there on. Raises ModelError where they can't be had, or the file has changed."""


@dataclass
class LocalFile:
    """A file of this machine, whose size and time of change must stay as they were when it was opened."""

    path: Path
    seen: tuple[int, int, int] = field(init=False)
    is_hashed = False

    def __post_init__(self) -> None:
        self.seen = self._stamp()

    @property
    def name(self) -> str:
        """Its name, without the folder."""
        return self.path.name

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.seen[1]

    @property
    def stamp(self) -> str:
        """Its time of change, in nanoseconds."""
        return str(self.seen[0])

    def read(self, start: int, count: int) -> bytearray:
        """So many bytes from there on, past the page cache's mapping, so that they are counted once in memory."""
        data = bytearray(count)
        with self._guarded(), self.path.open("rb", buffering=0) as file:
            file.seek(start)
            view, at = memoryview(data), 0
            while at < count and (got := file.readinto(view[at:])):
                at += got
        if at < count or self._stamp() != self.seen:
            raise ModelError(f"{self.path} changed while it was read.", SAY_AGAIN)
        return data

    def _stamp(self) -> tuple[int, int, int]:
        with self._guarded():
            found = self.path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _guarded(self) -> _Guard:
        return _Guard(self.path)


class _Guard:
    """Inside, what the operating system refuses becomes a ModelError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError):
            raise ModelError(
                f"{self.path} can't be read: {error.strerror or error}.", "Make the file readable."
            ) from None


class TensorSpan(NamedTuple):
    """Where a tensor lies."""

    source: ByteSource
    start: int
    type: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How many it has."""
        return prod(self.shape) * TYPES[self.type].itemsize


@dataclass
class SafetensorsFiles:
    """The tensors of one or several safetensors files, none of which is read before it is asked for."""

    sources: tuple[ByteSource, ...]
    """The files."""
    headers: list[FileInParts] = field(default_factory=list)
    """What stands for them in a report: name, size, SHA-256 of the header."""
    places: dict[str, TensorSpan] = field(default_factory=dict)
    """Where each tensor lies."""

    def __post_init__(self) -> None:
        for source in self.sources:
            written = _header(source)
            digest = sha256(written).hexdigest()
            file = FileInParts(name=source.name, bytes=source.size, header_sha256=digest, stamp=source.stamp)
            self.headers.append(file)
            self.places |= _places(source, written)

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        return self.places.keys()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors."""
        return {name: place.shape for name, place in self.places.items()}

    def table(self, _stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """How the tensors lie in the files."""
        return {name: Stored(place.shape, place.type) for name, place in self.places.items()}

    def size(self, names: Iterable[str]) -> int:
        """How many bytes these tensors have."""
        return sum(self.places[name].bytes for name in names)

    def sample(self, names: Iterable[str]) -> bytes:
        """A few bytes of each of these tensors, where the file's stamp says nothing of them."""
        places = [self.places[name] for name in names]
        return b"".join(sampled(one.source, one.start, one.bytes) for one in places if not one.source.is_hashed)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors. Raises ModelError where a file is gone, cut off, or has changed since it was opened."""
        found = {}
        for name in names:
            place = self.places[name]
            data = place.source.read(place.start, place.bytes)
            plain = torch.frombuffer(data, dtype=TYPES[place.type]) if data else torch.empty(0, dtype=TYPES[place.type])
            found[name] = plain.reshape(place.shape)
        return found


def sampled(source: ByteSource, start: int, count: int) -> bytes:
    """The first, middle and last bytes of a part of a file."""
    size = min(SAMPLE, count)
    return b"".join(source.read(start + place, size) for place in (0, (count - size) // 2, count - size))


def _header(source: ByteSource) -> bytes:
    """The header of a file. Raises ModelError where it is none."""
    length = int.from_bytes(source.read(0, LENGTH), "little") if source.size >= LENGTH else LONGEST + 1
    if not 0 < length <= min(LONGEST, source.size - LENGTH):
        raise ModelError(f"{source.name} is cut off or no safetensors file.", "Download it again.")
    return bytes(source.read(LENGTH, length))


def _places(source: ByteSource, written: bytes) -> dict[str, TensorSpan]:
    """Where the tensors of a file lie, by its header. Raises ModelError for one that no safetensors file has."""
    begin, found = LENGTH + len(written), {}
    try:
        entries: Mapping[str, Mapping[str, object]] = json.loads(written)
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            start, end = (int(edge) for edge in entry["data_offsets"])  # type: ignore[attr-defined]
            place = TensorSpan(source, begin + start, str(entry["dtype"]), tuple(entry["shape"]))  # type: ignore[arg-type]
            whole = 0 <= start <= end and begin + end <= source.size
            if not whole or (place.type in TYPES and place.bytes != end - start):
                raise ModelError(
                    f"{source.name} is cut off, or says another size of {shortened(name)} than it has.",
                    "Download it again.",
                )
            found[name] = place
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ModelError(f"{source.name} has no header of a safetensors file.", "Download it again.") from None
    return found


def local(paths: Iterable[Path]) -> SafetensorsFiles:
    """The tensors of these files. Raises ModelError where one can't be read."""
    return SafetensorsFiles(tuple(LocalFile(Path(os.fspath(path))) for path in paths))
