"""Writes what others than attnlens would into a unit's file, with a seal that fits."""

from __future__ import annotations

from pathlib import Path

from attnlens.unit_files import RUN, SEAL, UnitFiles, sealed, store_of

from attnlens.run.inspect.assembly import Frame
from attnlens.run.training.trajectories import SeriesFrame


def unit_of(path: Path, kind: type[Frame | SeriesFrame] = Frame) -> str:
    """The name of the unit whose file this is."""
    frame = kind.model_validate_json((path.parent / RUN).read_bytes())
    files = UnitFiles(store_of(str(path.parent)), frame.key, path.suffix)
    [name] = [unit.name for unit in frame.units if files.name(unit.name) == path.name]
    return name


def unsealed(content: bytes) -> bytes:
    """What a unit found, without looking at the seal."""
    return content[:-SEAL]


def seal(path: Path, content: bytes, kind: type[Frame | SeriesFrame] = Frame) -> None:
    """Write this as what the unit of the file found."""
    path.write_bytes(sealed(path.parent.name, unit_of(path, kind), content))


def flipped(content: bytes, place: int) -> bytes:
    """The same with one other bit."""
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
