"""List the tensors of weight files from their headers, and read byte ranges of files on this machine or on a hub."""

from __future__ import annotations

import json
import pickle
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attnlens.errors import ModelError
from attnlens.files import shorten_text
from attnlens.models.loading.locate import SAY_AGAIN, first_line, foreign, readable
from attnlens.records import FileInParts

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
"""safetensors' names for the floating-point types of unquantised weights, keyed by torch's names."""
TYPE = re.compile(r"BOOL|C64|(BF|[FIU])(4|6|8|16|32|64)(_E\dM\d\w{0,8})?")  # types of the safetensors library
LENGTH = 8  # Number of bytes that precede a safetensors header and contain its length
LONGEST = 100 * 2**20  # Maximum size of a header in bytes, as in the safetensors library
MOST_DIMENSIONS = 8  # Maximum number of a tensor's dimensions: the product of millions of sizes would take hours
SAMPLE = 4096  # Number of bytes sampled at each of three places in a tensor: beginning, middle and end
ATTEMPTS = 5  # Maximum number of requests for a range; later ones request only the bytes that have not arrived
WAIT = 0.5  # Seconds before the second attempt, doubled before each later attempt
PATIENCE = 30.0  # Seconds without a byte after which a connection counts as dropped
SAY_LATER = "Run the command again; finished work is kept."


class Stored(NamedTuple):
    """Shape, type and position of a tensor in a file."""

    shape: tuple[int, ...]
    type: str  # Name of the type in safetensors; F32 for all tensors of a GGUF file, since they are decoded
    start: int = 0  # Offset of its data in a safetensors file, in bytes

    @property
    def bytes(self) -> int:
        """Size in bytes, computed from the number of bits in the type's name; BOOL takes one byte."""
        bits = re.search(r"\d+", self.type)
        return prod(self.shape) * (int(bits[0]) if bits else 8) // 8

    @property
    def encoded(self) -> bool:
        """True if the values are codes, integers or Booleans instead of plain floating-point numbers."""
        return self.type not in FLOATS.values()


def count_numbers(tensors: Mapping[str, Stored]) -> int:
    """Return the total number of values in these tensors."""
    return sum(prod(tensor.shape) for tensor in tensors.values())


def format_names(names: Iterable[str]) -> str:
    """Format names as `a`, or `a and 3 more`."""
    first, *more = map(shorten_text, names)
    return f"{first} and {len(more)} more" if more else first


# --- files -----------------------------------------------------------------------------------------------------------


class LocalFile:
    """A weight file on this machine that is read in parts and must not change once it is open."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self._status = changed, self.size, _ = self._read_status()
        self.stamp = str(changed)

    def read(self, start: int, count: int) -> bytes:
        """Read `count` bytes from offset `start`. Raises ModelError if the file is missing or has changed."""
        with readable(self.path), self.path.open("rb") as file:
            file.seek(start)
            content = file.read(count)
        if self._read_status() != self._status:
            problem = f"{self.path} changed while it was being read."
            raise ModelError(problem, "Run the command again when the file is complete.")
        return content

    def sample(self, start: int, count: int) -> bytes:
        """Read samples of a range of bytes, to detect changes that the file's modification time does not show."""
        last = max(0, count - SAMPLE)
        return b"".join(self.read(start + offset, min(SAMPLE, count)) for offset in (0, last // 2, last))

    def _read_status(self) -> tuple[int, int, int]:
        with readable(self.path):
            status = self.path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino


class RemoteFile:
    """A weight file in a hub repository at one commit, read by ranges; its stamp (ETag) identifies its content.

    huggingface_hub's range readers are not used: they load a response of any length, even if a server sends the whole
    file, and request the full range again if the connection drops.
    """

    def __init__(self, name: str, url: str) -> None:
        from huggingface_hub import get_hf_file_metadata

        self.name, self._url = name, url
        with foreign(f"{name} can't be read from the hub", SAY_LATER):
            metadata = get_hf_file_metadata(url)
        if metadata.size is None:
            raise ModelError(f"The hub does not report the size of {name}.", "Download the model, and give its folder.")
        self.size, self.stamp = metadata.size, metadata.etag or ""

    def read(self, start: int, count: int) -> bytes:
        """Read `count` bytes from offset `start`. Raises ModelError if all attempts fail or a response is invalid."""
        from huggingface_hub.errors import HTTPError as ConnectionFailure  # type: ignore[attr-defined]
        from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

        content, problem, last = bytearray(), "", start + count - 1
        for attempt in range(ATTEMPTS):
            time.sleep(WAIT * 2**attempt * (attempt > 0))
            first = start + len(content)
            headers = build_hf_headers() | {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
            try:
                with get_session().stream(
                    "GET", self._url, follow_redirects=True, headers=headers, timeout=PATIENCE
                ) as answer:
                    if answer.status_code in (429, 500, 502, 503, 504):  # the server is busy
                        continue
                    sent = answer.headers.get("Content-Range", "")
                    if answer.status_code != 206 or not sent.startswith(f"bytes {first}-"):
                        problem = f"The hub answered {answer.status_code} {sent} to a request for part of {self.name}."
                        raise ModelError(problem, SAY_LATER)
                    for part in answer.iter_raw():
                        content += part[: count - len(content)]
            except ConnectionFailure as error:
                problem = first_line(error)
            if len(content) == count:
                return bytes(content)
        problem = problem or f"only {len(content)} of {count} bytes arrived"
        raise ModelError(f"{self.name} can't be read from the hub: {problem}.", SAY_LATER)


class TensorFiles(ABC):
    """The tensors of weight files, each read and decoded only on request."""

    headers: list[FileInParts]  # Records of the files for a report
    stored: Mapping[str, Stored]
    """Shape and type (F32 for decoded tensors) of each tensor; tensors of a GGUF file have the model's names."""
    ignored: Sequence[str] = ()  # Tensors left out because the model lacks them

    @abstractmethod
    def spans(self, names: Iterable[str]) -> list[tuple[LocalFile | RemoteFile, int, int]]:
        """Return (file, offset, size in bytes) of each stored part of these tensors."""

    @abstractmethod
    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read and decode these tensors. Raises ModelError if that fails, or if a file changed since it was opened."""

    def size(self, names: Iterable[str]) -> int:
        """Return the stored size of these tensors in bytes."""
        return sum(size for _, _, size in self.spans(names))

    def sample(self, names: Iterable[str]) -> bytes:
        """Return some bytes of each tensor in local files, to detect changes to the weights.

        Remote files are left out, because their stamps change with their content.
        """
        spans = self.spans(names)
        return b"".join(file.sample(start, size) for file, start, size in spans if isinstance(file, LocalFile))


def record(file: LocalFile | RemoteFile, header: bytes) -> FileInParts:
    """Return the record of a file and its header for a report."""
    digest = sha256(header).hexdigest()
    return FileInParts(name=Path(file.name).name, bytes=file.size, header_sha256=digest, stamp=file.stamp)


# --- headers ---------------------------------------------------------------------------------------------------------


def read_header(file: LocalFile | RemoteFile) -> tuple[dict[str, Stored], FileInParts]:
    """Return {name: Stored} for a safetensors file, and the file's record. Raises ModelError for an invalid file."""
    length = int.from_bytes(file.read(0, LENGTH), "little") if file.size >= LENGTH else 0
    if not 0 < length <= min(LONGEST, file.size - LENGTH):
        raise ModelError(f"{file.name} is truncated or not a safetensors file.", SAY_AGAIN)
    header = file.read(LENGTH, length)
    return parse_header(file.name, header, file.size), record(file, header)


def parse_header(file: str, header: bytes, size: int) -> dict[str, Stored]:
    """Return {name: Stored} for a safetensors header. Raises ModelError unless it fits a file of `size` bytes."""
    begin, tensors = LENGTH + len(header), dict[str, Stored]()
    with foreign(f"{file} is truncated or not a safetensors file", SAY_AGAIN):
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            start, end = (begin + int(edge) for edge in entry["data_offsets"])
            tensors[name] = tensor = Stored(tuple(map(int, entry["shape"])), str(entry["dtype"]), start)
            is_known = len(tensor.shape) <= MOST_DIMENSIONS and min(tensor.shape, default=0) >= 0
            if not (is_known and TYPE.fullmatch(tensor.type) and end - start == tensor.bytes):
                raise ValueError(f"its header gives an invalid type, shape or size of {shorten_text(name)}")
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.bytes)):
            if tensor.start != begin:
                raise ValueError("its tensors overlap, or leave a gap")
            begin += tensor.bytes
        if begin != size:
            raise ValueError("its tensors do not fill the file")
    return tensors


def read_pickle(file: Path) -> dict[str, Stored]:
    """Return {name: Stored} for a pickle. Raises ModelError unless torch can load it safely as a dict of tensors."""
    import torch

    try:
        content = torch.load(file, map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError):
        # torch's own message advises loading the file anyway
        problem = f"{file} contains objects other than tensors, or is truncated; loading such a pickle could run code."
        raise ModelError(problem, "Get the model as safetensors.") from None
    if not isinstance(content, Mapping):
        raise ModelError(f"{file} does not contain a dict of tensors.", "Save the model's state_dict.")
    tensors = {
        str(name): Stored(tuple(value.shape), FLOATS.get(str(value.dtype), str(value.dtype).removeprefix("torch.")))
        for name, value in content.items()
        if isinstance(value, torch.Tensor)
    }
    inner = [str(name) for name, value in content.items() if isinstance(value, Mapping)]
    if inner and not tensors:
        problem = f"{file} contains {format_names(inner)} instead of tensors: it is a checkpoint of a training run."
        raise ModelError(problem, "Save only the model's state_dict.")
    return tensors
