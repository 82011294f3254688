"""Reads single weights out of safetensors files in which they are codes with scales: fp8, GPTQ, AWQ and their like."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from attnlens.models.deferred.reading import SafetensorsFiles
from attnlens.models.quantised import CodedWeight
from attnlens.models.stored import Stored
from attnlens.records import FileInParts

if TYPE_CHECKING:
    from torch import Tensor

DECODED_TO = "F32"
"""The type of a decoded weight, as safetensors calls it."""


@dataclass
class CodedFiles:
    """The tensors of safetensors files, those that are codes under the names of the weights that they stand for."""

    files: SafetensorsFiles
    """The tensors as they lie."""
    coded: Mapping[str, CodedWeight]
    """The weights that are codes."""

    @property
    def headers(self) -> list[FileInParts]:
        """What stands for the files in a report."""
        return self.files.headers

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        return self.shapes.keys()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, decoded. Raises ModelError where the files don't say it."""
        stored = self.files.shapes
        used = {name for weight in self.coded.values() for name in weight.parts.values()}
        plain = {name: shape for name, shape in stored.items() if name not in used}
        return plain | {name: self._shape(weight, stored) for name, weight in self.coded.items()}

    def _shape(self, weight: CodedWeight, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        def read(part: str) -> Tensor:
            (found,) = self.files.read([weight.parts[part]]).values()
            return found

        return weight.shape({part: stored[name] for part, name in weight.parts.items()}, read)

    def table(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """How the tensors would lie in files that hold them decoded."""
        types = self.files.table(stored)
        return {
            name: Stored(shape, DECODED_TO) if name in self.coded else types[name]
            for name, shape in self.shapes.items()
        }

    def size(self, names: Iterable[str]) -> int:
        """How many bytes are read for these."""
        return self.files.size(stored for name in names for stored in self._stored(name))

    def sample(self, names: Iterable[str]) -> bytes:
        """A few bytes of what each of these is made of, where the file's stamp says nothing of it."""
        return self.files.sample(stored for name in names for stored in self._stored(name))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors, decoded.

        Raises ModelError where one can't be, or a file is gone, cut off, or has changed since it was opened.
        """
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        found = self.files.read(self._stored(name))
        if name not in self.coded:
            return found[name]
        weight = self.coded[name]
        return weight.decoded({part: found[stored] for part, stored in weight.parts.items()})

    def _stored(self, name: str) -> Collection[str]:
        """The tensors of the files that one is made of."""
        return self.coded[name].parts.values() if name in self.coded else [name]
