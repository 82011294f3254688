"""Lists the tensors in weight files by their headers alone: names, shapes, and how their numbers are stored."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attnlens.errors import ModelError
from attnlens.files import shortened
from attnlens.models.gguf import read_header

if TYPE_CHECKING:
    from attnlens.models.locate import Location

FLOATS = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the types in which a number is stored as itself."""
SAY_ONCE = "Save the model again, so that each of its tensors is stored once."
DECODED = "GGUF"
"""Stands for the types of a GGUF file, all of which are decoded."""


class Stored(NamedTuple):
    """How one tensor lies in a file."""

    shape: tuple[int, ...]
    type: str
    """In safetensors' spelling, or DECODED."""

    @property
    def bytes(self) -> int:
        """How many it has, by the number in the name of its type (BF16, F8_E4M3; BOOL takes a byte)."""
        bits = re.search(r"\d+", self.type)
        return prod(self.shape) * (int(bits[0]) if bits else 8) // 8

    @property
    def encoded(self) -> bool:
        """Whether what is stored are codes, or truth values, and not the numbers themselves."""
        return self.type not in (*FLOATS, DECODED)


def tensors_in(place: Location) -> dict[str, Stored]:
    """All tensors of the weight files.

    Raises ModelError where one can't be read, is cut off or something else, and where two hold a tensor of one name: of
    these transformers takes the last, whatever the index says.
    """
    reading = {"safetensors": safetensors_header, "pickle": pickled_header, "gguf": _gguf}[place.form]
    found: dict[str, Stored] = {}
    for file in place.weights:
        try:
            content = reading(file)
        except OSError as error:
            raise ModelError(f"{file} can't be read: {error.strerror or error}.", "Make the file readable.") from None
        if twice := sorted(found.keys() & content.keys()):
            raise ModelError(f"{file} holds {named(twice)}, and so does another of the weight files.", SAY_ONCE)
        found |= content
    if not found:
        raise ModelError(f"{place.folder / place.file} holds no tensors.", "Download the model again.")
    return found


def numbers_in(tensors: Mapping[str, Stored]) -> int:
    """How many numbers they have, all together."""
    return sum(prod(tensor.shape) for tensor in tensors.values())


def safetensors_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file; raises ModelError where it is cut off or something else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  # it is no dict
            return {name: Stored(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        problem = f"{file} is cut off or no safetensors file: {shortened(str(error))}."
        raise ModelError(problem, "Download it again.") from None


def pickled_header(file: Path) -> dict[str, Stored]:
    """The same of a pickle, which was allowed; torch builds tensors from it and nothing else."""
    import torch

    try:
        content = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError:
        raise ModelError(
            f"{file} holds more than tensors, or is no pickle of torch: opening it could run code.",
            "Get the model as safetensors.",
        ) from None
    except (RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{file} is cut off or no pickle of torch: {shortened(str(error))}.", "Download it again."
        ) from None
    if not isinstance(content, Mapping):
        raise ModelError(f"{file} holds no table of tensors.", "Save the model's state_dict.")
    return {
        str(name): Stored(tuple(value.shape), type_of(value.dtype))
        for name, value in content.items()
        if isinstance(value, torch.Tensor)
    }


def type_of(dtype: object) -> str:
    """torch's type in safetensors' spelling, as far as FLOATS has it."""
    import torch

    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))  # type: ignore[call-overload,no-any-return]


def _gguf(file: Path) -> dict[str, Stored]:
    return {entry.name: Stored(entry.shape, DECODED) for entry in read_header(file).tensors}


def named(names: Iterable[str]) -> str:
    """`a`, or `a and 3 more`."""
    first, *more = map(shortened, names)
    return f"{first} and {len(more)} more" if more else first
