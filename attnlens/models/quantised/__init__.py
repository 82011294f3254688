"""Decodes checkpoints whose weights are codes with scales: fp8, GPTQ, AWQ, compressed-tensors, bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from attnlens.errors import ModelError
from attnlens.files import shortened
from attnlens.models.configs import DECODED, settings_of
from attnlens.models.locate import CONFIG, Location
from attnlens.models.stored import FLOATS, Stored, type_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnlens.models.quantised.schemes import Scheme

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

    from attnlens.models.quantised.schemes import SCHEMES, CodesError

    found = settings_of(place.config)
    settings: dict[str, Any] = found[1] if found else {}
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in place.weights]
        homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118  # it is no dict
        tensors: dict[str, Tensor] = {}
        used = set()
        for scheme, stem, names in _groups(SCHEMES[method], homes):
            parts = {part: homes[name].get_tensor(name) for part, name in names.items()}
            try:
                values = scheme.decode(parts, settings)
            except CodesError as error:
                problem = f"{place.folder} stores {shortened(stem + scheme.target)} by {method}: {error}."
                raise ModelError(problem, SAY_UNQUANTISED) from None
            tensors[stem + scheme.target] = values.to(dtype if isinstance(dtype, torch.dtype) else torch.float32)
            used |= set(names.values())
        if not used:
            problem = f"{place.folder / CONFIG} says that the weights are quantised by {method}, and none is stored so."
            raise ModelError(problem, "Take quantization_config out of it, if they are plain numbers.")
        return tensors | {name: file.get_tensor(name) for name, file in homes.items() if name not in used}


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
