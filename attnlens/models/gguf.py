"""Reads the header of a GGUF file within bounds, before a library is handed the file, which then reads it once."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from attnlens.errors import ModelError
from attnlens.files import shortened

VERSIONS = (2, 3)
MOST_ITEMS = 2**21
"""Fields, tensors, and entries of lists in a header, all together; the largest vocabularies have half of it."""
MOST_DIMENSIONS = 8
FORMATS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", "", "", "<Q", "<q", "<d")
"""How the value of a field is packed, by the number of its type; texts and lists have none."""
TEXT, LIST = 8, 9
SAY_AGAIN = "Download it again."


class Entry(NamedTuple):
    """One line of the table of tensors."""

    name: str
    shape: tuple[int, ...]
    """In torch's order."""
    type: int
    """ggml's number of how it is stored."""
    offset: int
    """Where its data begin, from the beginning of all data."""


class Header(NamedTuple):
    """What a GGUF file says of itself."""

    numbers: dict[str, int]
    """The fields that are whole numbers, such as `llama.block_count`."""
    tensors: list[Entry]
    """The table of tensors."""


def read_header(path: Path) -> Header:
    """The header of a GGUF file whose data are all there.

    Raises ModelError where the file is none, is cut off, or has counts that no model has.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelError(f"{path} is an empty file.", SAY_AGAIN) from None
    with data:
        reader = _Reader(path, data)
        try:
            header = reader.header()
        except (struct.error, UnicodeDecodeError) as error:
            what = "is cut off in its header" if isinstance(error, struct.error) else "has names that are no UTF-8"
            raise ModelError(f"{path} {what}.", SAY_AGAIN) from None
        _check_layers(path, header)
        _check_data(path, header, reader.at, len(data))
    return header


@contextmanager
def read_once() -> Iterator[None]:
    """Inside, transformers reads a header once, and makes gguf's table of names once: most of loading would go there.

    It reads the file for the config, the weights and the tokenizer, and makes the table for every module of the model.
    """
    library: Any = import_module("gguf")
    own = {name: getattr(library, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        library.GGUFReader = cache(_plain(library.GGUFReader))
        library.get_tensor_name_map = cache(library.get_tensor_name_map)
        with _whole_texts():
            yield
    finally:
        for name, function in own.items():
            setattr(library, name, function)


def _plain(reader: Any) -> Any:
    """A reader whose slices of the file are plain arrays: numpy's memmap takes ten times as long for each."""

    class Plain(reader):  # type: ignore[misc]  # a class of a package that ships no types
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, numpy.asarray(value) if name == "data" else value)

    return Plain


@contextmanager
def _whole_texts() -> Iterator[None]:
    """Inside, transformers takes a text of the header as a whole; it would go through each of its bytes."""
    module: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    own = getattr(module, "_gguf_parse_value", None)
    if own is None:  # another version of transformers
        yield
        return

    def parsed(value: Any, kinds: Any) -> Any:
        if isinstance(kinds, list) and kinds and kinds[-1] == TEXT:
            return value.tobytes().decode()
        return own(value, kinds)

    module._gguf_parse_value = parsed
    try:
        yield
    finally:
        module._gguf_parse_value = own


class _Reader:
    """A place in a GGUF file, and what is read from there on; struct.error where the file ends before."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data
        self.at = 0
        self.items = 0

    def header(self) -> Header:
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is no GGUF file.", "Give a file that a converter to GGUF wrote.")
        self.at = 4
        version, tensors, fields = self.unpacked("<IQQ")
        if version not in VERSIONS:
            raise ModelError(f"{self.path} is GGUF of version {version}, which can't be read.", "Convert it again.")
        numbers = {}
        for _ in self.counted(fields):
            name, value = self.text(), self.value(*self.unpacked("<I"))
            if isinstance(value, int):
                numbers[name] = value
        return Header(numbers, [self.entry() for _ in self.counted(tensors)])

    def counted(self, count: int) -> Iterator[int]:
        """So many steps; raises ModelError where they are more than a header can have."""
        self.items += count
        if self.items > MOST_ITEMS:
            raise ModelError(f"{self.path} announces {self.items} entries in its header.", SAY_AGAIN)
        return iter(range(count))

    def unpacked(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def text(self) -> str:
        (length,) = self.unpacked("<Q")
        return bytes(self.unpacked(f"{self.within(length)}s")[0]).decode()

    def within(self, length: int) -> int:
        """The length of what lies within the file; a longer one is none that `struct` could be asked for."""
        if length > len(self.data) - self.at:
            raise struct.error
        return length

    def value(self, kind: int) -> object:
        """One value of that type; of lists and texts None, since nothing hangs on them."""
        if kind == TEXT:
            (length,) = self.unpacked("<Q")
            self.at += self.within(length)
            return None
        if kind == LIST:
            inner, count = self.unpacked("<IQ")
            if inner == LIST:
                raise ModelError(f"{self.path} has lists of lists in its header.", "Convert it again.")
            for _ in self.counted(count):
                self.value(inner)
            return None
        if kind >= len(FORMATS):
            raise ModelError(f"{self.path} has a field of the unknown type {kind}.", "Convert it again.")
        return self.unpacked(FORMATS[kind])[0]

    def entry(self) -> Entry:
        name, (dimensions,) = self.text(), self.unpacked("<I")
        if dimensions > MOST_DIMENSIONS:
            raise ModelError(f"{self.path} has a tensor of {dimensions} dimensions.", SAY_AGAIN)
        shape = self.unpacked(f"<{dimensions}Q")
        kind, offset = self.unpacked("<IQ")
        return Entry(name, tuple(reversed(shape)), kind, offset)


def _check_layers(path: Path, header: Header) -> None:
    """Raise ModelError for more layers than tensors: the config's lists grow with the layers."""
    for name, number in header.numbers.items():
        if name.endswith(".block_count") and number > len(header.tensors):
            raise ModelError(
                f"{path} says {shortened(name)} = {number}, and has {len(header.tensors)} tensors.", SAY_AGAIN
            )


def _check_data(path: Path, header: Header, end: int, size: int) -> None:
    """Raise ModelError where a tensor's data are not all there, or can't be of its shape."""
    alignment = header.numbers.get("general.alignment", 32)
    if alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path} says general.alignment = {alignment}, which is no power of two.", "Convert it again.")
    start = -(-end // alignment) * alignment
    blocks: dict[int, tuple[int, int]] = import_module("gguf").GGML_QUANT_SIZES
    for entry in header.tensors:
        if entry.type not in blocks or prod(entry.shape) % blocks[entry.type][0]:
            raise ModelError(f"{path} has {shortened(entry.name)}, stored in an unknown way.", "Convert it again.")
        numbers, stored = blocks[entry.type]
        last = start + entry.offset + prod(entry.shape) // numbers * stored
        if last > size:
            raise ModelError(
                f"{path} is cut off: the data of {shortened(entry.name)} end at byte {last}, and the file has {size}.",
                SAY_AGAIN,
            )
