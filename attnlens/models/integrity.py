"""Checks that a loaded model has the numbers of its files, and that they are finite."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnlens.errors import ModelError
from attnlens.models.configs import refuse_mismatch
from attnlens.models.gguf import OF_ATTENTION, SAY_SAFETENSORS, Settings, read_header
from attnlens.models.locate import Location
from attnlens.models.stored import SAY_ONCE, Stored, named

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKED = ("qweight", "qzeros", "weight_packed", "SCB", "absmax", "quant_map")
"""What quantised checkpoints call their codes, and what these alone have."""
SCALE = re.compile(r"(_scale|_scale_inv|_scales|_zero_point|\.scales?)$")
"""How the names of scales and zeros end, behind the name of their weight."""
LOW_RANK = re.compile(r"(^|[._])lora_")
"""What marks the tensors of an adapter of low rank."""


def check_loaded(
    place: Location, model: PreTrainedModel, stored: Mapping[str, Stored], found: Mapping[str, Any]
) -> None:
    """Raise ModelError where transformers loaded a model that its files don't hold, as `found` tells of the loading.

    It leaves an adapter's tensors out, takes codes for numbers, fills at random what does not fit, and takes either of
    two tensors that stand for one.
    """
    where = place.folder / place.file
    if low_rank := [name for name in sorted(found["unexpected_keys"]) if LOW_RANK.search(name)]:
        raise ModelError(
            f"{where} holds an adapter that is not merged ({named(low_rank)}).",
            "Merge it first, with merge_and_unload of the package peft, and save the merged model.",
        )
    if codes := _codes(model, stored, set(found["unexpected_keys"])):
        raise ModelError(
            f"{where} stores {named(codes)} as {stored[codes[0]].type}, and nothing in config.json says what the codes "
            "stand for.",
            "Get the model unquantised, or as GGUF.",
        )
    if left := [name for name in sorted(found["unexpected_keys"]) if _of_codes(name, stored)]:
        raise ModelError(
            f"{where} holds {named(left)}, of weights that are stored as codes, and nothing in config.json says how.",
            "Get the model unquantised, or as GGUF.",
        )
    refuse_mismatch(place, found["mismatched_keys"])
    if place.gguf:
        if ignored := [name for name in sorted(found["unexpected_keys"]) if OF_ATTENTION.search(name)]:
            problem = f"{where} holds {named(ignored)}, which changes attention and has no place in the model."
            raise ModelError(problem, SAY_SAFETENSORS)
        Settings(where, read_header(where)).check_rotation(model)
    if twice := _twice(model, stored, set(found["unexpected_keys"])):
        raise ModelError(f"{where} holds both {twice[0]} and {twice[1]}, which are one tensor of the model.", SAY_ONCE)
    if len(found["missing_keys"]) >= len(list(model.parameters())):
        raise ModelError(
            f"None of the weights in {place.file} belongs to a {type(model).__name__}.",
            "Check the model's config.json.",
        )


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
    if _leaf(name) in PACKED:
        return True
    stem = SCALE.sub("", name)
    return stem != name and (stem in stored or f"{stem}.weight" in stored)


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
        if own is None or name in unexpected:
            continue
        if own in taken:
            return taken[own], name
        taken[own] = name
    return None


def names_in_model(name: str, prefix: str) -> tuple[str, ...]:
    """What a tensor may be called in the model: as it is, with and without the name of the model within the model."""
    return name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")
