"""Keeps parts of a unit that takes long, until the unit itself is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from attnlens.errors import FAILURES
from attnlens.unit_files import UnitFiles, refused

Tensors = Mapping[str, Tensor]
Keep = Callable[[str, Callable[[], Tensors]], Tensors]
"""Gives what is known of the part of that name, or what the function makes of it."""


def made_anew(_name: str, make: Callable[[], Tensors]) -> Tensors:
    """The part as it is made: nothing is kept."""
    return make()


@dataclass(frozen=True)
class KeptParts:
    """Parts of one unit, each in a file of a folder of its own."""

    files: UnitFiles
    resume: bool
    """Whether to go on from those that are there."""

    def kept(self, name: str, make: Callable[[], Tensors]) -> Tensors:
        """The part of that name: from its file where there is one, else made and written.

        Raises OutputError where its file is damaged, or it can't be written.
        """
        content = self.files.read(name) if self.resume else None
        if content is not None:
            return _tensors(content, self.files.where(name))
        found = make()
        self.files.write(name, save({one: part.contiguous() for one, part in found.items()}))
        return found

    def clear(self) -> None:
        """Remove them all: the unit is kept, or the report is written."""
        there = self.files.store.names()
        self.files.store.remove([name for name in there if name.endswith(self.files.suffix)])


def _tensors(content: bytes, where: str) -> Tensors:
    try:
        return load(content)
    except (SafetensorError, *FAILURES):
        raise refused(where) from None
