"""List the tensors in weight files by their headers alone, and check that a loaded model has their numbers."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnlens.errors import ModelError
from attnlens.files import shorten_text
from attnlens.models.loading.configs import SAY_UNQUANTISED, refuse_mismatch
from attnlens.models.loading.gguf import OF_ATTENTION, SAY_SAFETENSORS, Settings, read_header
from attnlens.models.loading.locate import Location, readable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LoadingInfo = Mapping[str, set[Any]]
"""transformers' record of a load: names under missing_keys and unexpected_keys, with shapes under mismatched_keys."""
PACKED = ("qweight", "qzeros", "weight_packed", "SCB", "absmax", "quant_map")
"""Names of tensors that only quantised checkpoints have."""
SCALE = re.compile(r"(_scale|_scale_inv|_scales|_zero_point|\.scales?)$")
"""Suffixes of scales and zeros after the name of their weight."""


def check_loaded(
    place: Location, model: PreTrainedModel, stored: Mapping[str, Stored], loading_info: LoadingInfo
) -> None:
    """Raise ModelError if the loaded model differs from its files, by transformers' loading info.

    Without an error, transformers ignores an adapter's tensors, reads quantised codes as numbers, fills mismatched
    parameters at random, and picks either of two tensors for one parameter.
    """
    where, unused = place.folder / place.file, set(loading_info["unexpected_keys"])
    if low_rank := [name for name in sorted(unused) if re.search(r"(^|[._])lora_", name)]:
        problem = f"{where} contains an adapter that is not merged ({format_names(low_rank)})."
        raise ModelError(problem, "Merge it with merge_and_unload of the package peft, and save the merged model.")
    if codes := _codes(model, stored, unused):
        problem = (
            f"{where} stores {format_names(codes)} as {stored[codes[0]].type}, but nothing in config.json explains"
        )
        raise ModelError(f"{problem} what the codes mean.", SAY_UNQUANTISED)
    if scales := [name for name in sorted(unused) if _belongs_to_codes(name, stored)]:
        problem = f"{where} contains {format_names(scales)}, of weights that are stored as codes, but nothing in"
        raise ModelError(f"{problem} config.json explains the codes.", SAY_UNQUANTISED)
    refuse_mismatch(place, loading_info["mismatched_keys"])
    if place.gguf:
        if ignored := [name for name in sorted(unused) if OF_ATTENTION.search(name)]:
            problem = f"{where} contains {format_names(ignored)}; it affects attention, but transformers ignores it."
            raise ModelError(problem, SAY_SAFETENSORS)
        Settings(where).check_rotation(model)
    if twice := _twice(model, stored, unused):
        problem = f"{where} contains both {twice[0]} and {twice[1]}, which are the same tensor of the model."
        raise ModelError(problem, SAY_ONCE)
    if len(loading_info["missing_keys"]) >= len(list(model.parameters())):
        problem = f"None of the weights in {place.file} belongs to a {type(model).__name__}."
        raise ModelError(problem, "Check the model's config.json.")


def nonfinite_tensors(model: PreTrainedModel) -> list[str]:
    """Return the names of parameters with NaN or Inf, in the model's order; offloaded ones are loaded one by one."""
    from transformers.integrations.accelerate import load_offloaded_parameter

    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and not bool((load_offloaded_parameter(model, name) if parameter.is_meta else parameter).isfinite().all())
    ]


def _belongs_to_codes(name: str, stored: Mapping[str, Stored]) -> bool:
    """Return whether an unused tensor has a name of quantised codes, or is the scale or zero of a stored weight."""
    stem = SCALE.sub("", name)
    return _leaf(name) in PACKED or (stem != name and (stem in stored or f"{stem}.weight" in stored))


def _codes(model: PreTrainedModel, stored: Mapping[str, Stored], unexpected: set[str]) -> list[str]:
    """Return the encoded tensors that were loaded as numbers: all except buffers, unexpected and ignored tensors."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    others = {name for name, _ in model.named_buffers()} | unexpected
    # transformers can store a buffer under another path, so that only its last name component is compared
    counters = {_leaf(name) for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    counters -= set(map(_leaf, parameters))
    # private in transformers, which does not load tensors that match these patterns; (?!) matches nothing
    ignored = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ["(?!)"]))

    def is_loaded(name: str) -> bool:
        names = set(names_in_model(name, model.base_model_prefix))
        is_apart = bool(names & others) or _leaf(name) in counters or ignored.search(name) is not None
        return bool(names & parameters) or not is_apart

    return [name for name, tensor in stored.items() if tensor.encoded and is_loaded(name)]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _twice(model: PreTrainedModel, stored: Mapping[str, Stored], unexpected: set[str]) -> tuple[str, str] | None:
    """Return the first two stored tensors of one parameter, with and without the base model's prefix; else None."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    sources: dict[str, str] = {}
    for name in stored:
        aliases = names_in_model(name, model.base_model_prefix)
        parameter = next((alias for alias in aliases if alias in parameters), None)
        if parameter is not None and name not in unexpected and sources.setdefault(parameter, name) != name:
            return sources[parameter], name
    return None


def names_in_model(name: str, prefix: str) -> tuple[str, ...]:
    """Return the possible names of a tensor in the model: unchanged, with, and without the base model's prefix."""
    return name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")


FLOATS = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the floating-point types of unquantised weights."""
SAY_ONCE = "Save the model again with each tensor stored once."
DECODED = "GGUF"
"""Type recorded for every tensor of a GGUF file, since all its types are decoded."""


class Stored(NamedTuple):
    """Shape and type of a tensor in a file."""

    shape: tuple[int, ...]
    type: str
    """Name of the type in safetensors, or DECODED."""

    @property
    def bytes(self) -> int:
        """Size in bytes, by the number of bits in the name of its type (BF16, F8_E4M3; BOOL takes a byte)."""
        bits = re.search(r"\d+", self.type)
        return prod(self.shape) * (int(bits[0]) if bits else 8) // 8

    @property
    def encoded(self) -> bool:
        """True if the values are codes, integers or truth values instead of floating-point numbers."""
        return self.type not in (*FLOATS, DECODED)


def tensors_in(place: Location) -> dict[str, Stored]:
    """Return all tensors of the weight files, keyed by name.

    Raises ModelError if a file can't be read, is truncated or in another format, and if two files have a tensor of the
    same name, since transformers then takes the last one, regardless of the index.
    """
    read = {"safetensors": safetensors_header, "pickle": pickled_header, "gguf": _gguf_header}[place.form]
    tensors: dict[str, Stored] = {}
    for file in place.weights:
        with readable(file):
            content = read(file)
        if twice := sorted(tensors.keys() & content.keys()):
            raise ModelError(f"{file} and another weight file both contain {format_names(twice)}.", SAY_ONCE)
        tensors |= content
    if not tensors:
        raise ModelError(f"{place.folder / place.file} contains no tensors.", "Download the model again.")
    return tensors


def numbers_in(tensors: Mapping[str, Stored]) -> int:
    """Return the total number of values in these tensors."""
    return sum(prod(tensor.shape) for tensor in tensors.values())


def safetensors_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file. Raises ModelError if it is truncated or in another format."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  # content is not a dict
            return {name: Stored(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        problem = f"{file} is truncated or not a safetensors file: {shorten_text(str(error))}."
        raise ModelError(problem, "Download it again.") from None


def pickled_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of an allowed pickle; weights_only builds only those. Raises ModelError for other content."""
    import torch

    try:
        content = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError:
        problem = f"{file} contains objects other than tensors, or is not a pickle of torch: opening it could run code."
        raise ModelError(problem, "Get the model as safetensors.") from None
    except (RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        problem = f"{file} is truncated or not a pickle of torch: {shorten_text(str(error))}."
        raise ModelError(problem, "Download it again.") from None
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if not isinstance(content, Mapping):
        raise ModelError(f"{file} does not contain a dict of tensors.", "Save the model's state_dict.")
    return {
        str(name): Stored(tuple(value.shape), names.get(value.dtype, str(value.dtype).removeprefix("torch.")))
        for name, value in content.items()
        if isinstance(value, torch.Tensor)
    }


def _gguf_header(file: Path) -> dict[str, Stored]:
    return {entry.name: Stored(entry.shape, DECODED) for entry in read_header(file).tensors}


def format_names(names: Iterable[str]) -> str:
    """Format names as `a`, or `a and 3 more`."""
    first, *more = map(shorten_text, names)
    return f"{first} and {len(more)} more" if more else first
