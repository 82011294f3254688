"""Lists the tensors in weight files by their headers alone, and checks that a loaded model has their numbers."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnlens.errors import ModelError
from attnlens.files import shortened
from attnlens.models.loading.configs import refuse_mismatch
from attnlens.models.loading.gguf import OF_ATTENTION, SAY_SAFETENSORS, Settings, read_header
from attnlens.models.loading.locate import Location, readable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PACKED = ("qweight", "qzeros", "weight_packed", "SCB", "absmax", "quant_map")
"""What quantised checkpoints call their codes, and what these alone have."""
SCALE = re.compile(r"(_scale|_scale_inv|_scales|_zero_point|\.scales?)$")
"""How the names of scales and zeros end, behind the name of their weight."""


def check_loaded(
    place: Location, model: PreTrainedModel, stored: Mapping[str, Stored], found: Mapping[str, Any]
) -> None:
    """Raise ModelError where transformers loaded a model that its files don't hold, as `found` tells of the loading.

    It leaves an adapter's tensors out, takes codes for numbers, fills at random what does not fit, and takes either of
    two tensors that stand for one.
    """
    where = place.folder / place.file
    if low_rank := [name for name in sorted(found["unexpected_keys"]) if re.search(r"(^|[._])lora_", name)]:
        raise ModelError(
            f"{where} holds an adapter that is not merged ({named(low_rank)}).",
            "Merge it first, with merge_and_unload of the package peft, and save the merged model.",
        )
    say_plain = "Get the model unquantised, or as GGUF."
    if codes := _codes(model, stored, set(found["unexpected_keys"])):
        problem = f"{where} stores {named(codes)} as {stored[codes[0]].type}, and nothing in config.json says what the"
        raise ModelError(f"{problem} codes stand for.", say_plain)
    if left := [name for name in sorted(found["unexpected_keys"]) if _of_codes(name, stored)]:
        problem = f"{where} holds {named(left)}, of weights that are stored as codes, and nothing in config.json says"
        raise ModelError(f"{problem} how.", say_plain)
    refuse_mismatch(place, found["mismatched_keys"])
    if place.gguf:
        if ignored := [name for name in sorted(found["unexpected_keys"]) if OF_ATTENTION.search(name)]:
            problem = f"{where} holds {named(ignored)}, which changes attention and has no place in the model."
            raise ModelError(problem, SAY_SAFETENSORS)
        Settings(where, read_header(where)).check_rotation(model)
    if twice := _twice(model, stored, set(found["unexpected_keys"])):
        raise ModelError(f"{where} holds both {twice[0]} and {twice[1]}, which are one tensor of the model.", SAY_ONCE)
    if len(found["missing_keys"]) >= len(list(model.parameters())):
        problem = f"None of the weights in {place.file} belongs to a {type(model).__name__}."
        raise ModelError(problem, "Check the model's config.json.")


def nonfinite_tensors(model: PreTrainedModel) -> list[str]:
    """Names of the parameters with NaN or Inf in them, in the model's order; those on disk are read one by one."""
    from transformers.integrations.accelerate import load_offloaded_parameter

    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and not bool((load_offloaded_parameter(model, name) if parameter.is_meta else parameter).isfinite().all())
    ]


def _of_codes(name: str, stored: Mapping[str, Stored]) -> bool:
    """Whether a tensor without a place is codes, or the scale or zero of a weight that is stored."""
    stem = SCALE.sub("", name)
    return _leaf(name) in PACKED or (stem != name and (stem in stored or f"{stem}.weight" in stored))


def _codes(model: PreTrainedModel, stored: Mapping[str, Stored], unexpected: set[str]) -> list[str]:
    """The tensors whose codes were taken for numbers: all that are no buffers, and are not left out."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    others = {name for name, _ in model.named_buffers()} | unexpected
    # transformers may store a buffer under another path; its own name stays
    counters = {_leaf(name) for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    counters -= set(map(_leaf, parameters))
    ignored = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ["(?!)"]))

    def taken(name: str) -> bool:
        names = set(names_in_model(name, model.base_model_prefix))
        is_apart = bool(names & others) or _leaf(name) in counters or ignored.search(name) is not None
        return bool(names & parameters) or not is_apart

    return [name for name, tensor in stored.items() if tensor.encoded and taken(name)]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _twice(model: PreTrainedModel, stored: Mapping[str, Stored], unexpected: set[str]) -> tuple[str, str] | None:
    """The first two tensors that are the same parameter, one with and one without the name of the model within."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    taken: dict[str, str] = {}
    for name in stored:
        own = next((each for each in names_in_model(name, model.base_model_prefix) if each in parameters), None)
        if own is not None and name not in unexpected:
            if own in taken:
                return taken[own], name
            taken[own] = name
    return None


def names_in_model(name: str, prefix: str) -> tuple[str, ...]:
    """What a tensor may be called in the model: as it is, with and without the name of the model within the model."""
    return name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")


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
        with readable(file):
            content = reading(file)
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
        problem = f"{file} holds more than tensors, or is no pickle of torch: opening it could run code."
        raise ModelError(problem, "Get the model as safetensors.") from None
    except (RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        problem = f"{file} is cut off or no pickle of torch: {shortened(str(error))}."
        raise ModelError(problem, "Download it again.") from None
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if not isinstance(content, Mapping):
        raise ModelError(f"{file} holds no table of tensors.", "Save the model's state_dict.")
    return {
        str(name): Stored(tuple(value.shape), names.get(value.dtype, str(value.dtype).removeprefix("torch.")))
        for name, value in content.items()
        if isinstance(value, torch.Tensor)
    }


def _gguf(file: Path) -> dict[str, Stored]:
    return {entry.name: Stored(entry.shape, DECODED) for entry in read_header(file).tensors}


def named(names: Iterable[str]) -> str:
    """`a`, or `a and 3 more`."""
    first, *more = map(shortened, names)
    return f"{first} and {len(more)} more" if more else first
