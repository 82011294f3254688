"""Decodes checkpoints whose weights are codes with scales: fp8, mxfp4, GPTQ, AWQ, compressed-tensors, bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from attnlens.errors import ModelError
from attnlens.files import shortened
from attnlens.models.configs import DECODED, settings_of
from attnlens.models.locate import CONFIG, Location
from attnlens.models.stored import FLOATS, Stored, type_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnlens.models.quantised.schemes import Scheme

Returned = TypeVar("Returned")
SAY_UNQUANTISED = "Get the model unquantised, or as GGUF."


def method_of(place: Location) -> str | None:
    """By which method the weights are quantised, if attnlens is to decode them; None for plain numbers and others.

    Raises ModelError where they lie in a pickle, or the method has a form that is not decoded.
    """
    settings = settings_of(place.config)
    if settings is None or settings[0] not in DECODED:
        return None
    method, found = settings
    from attnlens.models.quantised.schemes import refusal

    reason = "are a pickle" if place.form == "pickle" else refusal(method, found)
    if reason is not None:
        raise ModelError(f"The weights of {place.folder} are quantised by {method} and {reason}.", SAY_UNQUANTISED)
    return method


def decoded(place: Location, method: str, dtype: torch.dtype | str | None) -> dict[str, Tensor]:
    """All tensors of the weight files by name, codes and scales replaced by the weights that they stand for.

    Those are computed in float32 and have that `dtype`, if it is one; codes without scales, and scales without codes,
    stay as they are. Raises ModelError where a weight can't be decoded, or none is stored so.
    """
    import torch
    from safetensors import safe_open

    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in place.weights]
        homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118  # it is no dict
        tensors: dict[str, Tensor] = {}
        used = set()
        for name, coded in coded_weights(place, method, homes).items():
            parts = {part: homes[stored].get_tensor(stored) for part, stored in coded.parts.items()}
            tensors[name] = coded.decoded(parts).to(dtype if isinstance(dtype, torch.dtype) else torch.float32)
            used |= set(coded.parts.values())
        return tensors | {name: file.get_tensor(name) for name, file in homes.items() if name not in used}


@dataclass(frozen=True)
class CodedWeight:
    """A weight that is stored as codes: which tensors it is made of, and how."""

    name: str
    scheme: Scheme
    parts: Mapping[str, str]
    """End of a name → the tensor of the files that is called so; the codes under the empty end."""
    settings: dict[str, Any]
    """What the config says of the codes."""
    where: str
    """The method and the place, for errors."""

    def decoded(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight in float32, of the tensors by the ends of their names. Raises ModelError where it can't be had."""
        return self._tried(self.scheme.decode, parts)

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> tuple[int, ...]:
        """Its shape, by those of its parts; `read` gives one of the tensors that say it, by the end of its name.

        Raises ModelError where they don't say it.
        """
        return self._tried(self.scheme.shape, shapes, read)

    def _tried(self, function: Callable[..., Returned], *arguments: object) -> Returned:
        from attnlens.models.quantised.parts import CodesError

        try:
            return function(*arguments, self.settings)
        except CodesError as error:
            problem = f"{self.where} stores {shortened(self.name)} as codes: {error}."
            raise ModelError(problem, SAY_UNQUANTISED) from None


def coded_weights(place: Location, method: str, names: Mapping[str, object]) -> dict[str, CodedWeight]:
    """The weights that are stored as codes, by name, among the tensors of such names. Raises ModelError for none."""
    from attnlens.models.quantised.schemes import SCHEMES

    found = settings_of(place.config)
    settings: dict[str, Any] = found[1] if found else {}
    where = f"{place.folder} ({method})"
    weights = [
        CodedWeight(stem + scheme.target, scheme, parts, settings, where)
        for scheme, stem, parts in _groups(SCHEMES[method], names)
    ]
    if not weights:
        problem = f"{place.folder / CONFIG} says that the weights are quantised by {method}, and none is stored so."
        raise ModelError(problem, "Take quantization_config out of it, if they are plain numbers.")
    return {weight.name: weight for weight in weights}


def _groups(schemes: tuple[Scheme, ...], names: Mapping[str, object]) -> Iterator[tuple[Scheme, str, dict[str, str]]]:
    """Each coded weight: its scheme, its stem, and the tensors that it is made of by their part."""
    for scheme in schemes:
        for name in names:
            stem = name.removesuffix(scheme.code)
            parts = {part: stem + part for part in scheme.companions if stem + part in names}
            if name.endswith(scheme.code) and parts:
                yield scheme, stem, {"": name} | parts


def table(tensors: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """How the decoded tensors would lie in a file, and the others do."""
    types = {name: type_of(tensor.dtype) for name, tensor in tensors.items()}
    return {
        name: Stored(tuple(tensors[name].shape), kind) if kind in FLOATS else stored[name]
        for name, kind in types.items()
    }
