"""Does a config.json make sense, before transformers builds a model of it?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attnlens.errors import ModelError
from attnlens.models.places import CONFIG, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "head_dim", "d_kv")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads")
AT_LEAST_ONE = (*WIDTHS, *LAYERS, *HEADS, "encoder_attention_heads", "decoder_attention_heads", "vocab_size")
"""Sizes without which there is no attention to look at, by the names that transformers' families give them."""
SAY_MEND = "Mend the config, or download the model again."


def check_config(place: Place) -> None:
    """Raise ModelError, with the file and the field, for sizes below 1 and for names that are no names."""
    config, file = place.config, place.folder / CONFIG
    for path, size in sizes(config):
        if size < 1:
            raise ModelError(f"{file} says {path} = {size}, which must be at least 1.", SAY_MEND)
    kinds = (("model_type", str, "a string"), ("architectures", list, "a list of strings"), ("auto_map", dict, "a map"))
    for field, kind, words in kinds:
        value = config.get(field)
        inside = value if isinstance(value, list) else []
        if value is not None and (not isinstance(value, kind) or not all(isinstance(name, str) for name in inside)):
            raise ModelError(f"{file} says {field} = {value!r}, which must be {words}.", SAY_MEND)


def refuse_mismatch(place: Place, mismatched: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Raise ModelError where tensors of the checkpoint (name, its shape, the config's shape) don't have their size."""
    if not mismatched:
        return
    name, stored, wanted = sorted(mismatched)[0]
    more = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
    differing = {want for have, want in zip(stored, wanted, strict=False) if have != want}
    fields = [f"{path} = {value}" for path, value in sizes(place.config) if value in differing]
    because = f" ({', '.join(fields)})" if fields else ""
    raise ModelError(
        f"{place.folder / place.file} can't be loaded: {name}{more} is {_times(stored)} there and {_times(wanted)} by "
        f"config.json{because}.",
        "Give the weights their own config.",
    )


def sizes(config: dict[str, Any], above: str = "") -> Iterator[tuple[str, int]]:
    """The sizes of a config and of those nested in it (text_config.hidden_size), by dotted path."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from sizes(value, f"{above}{name}.")
        elif name == "head_dim" and "qk_nope_head_dim" in config:
            continue  # latent attention has head sizes of its own, and may say 0 here (GLM 5)
        elif name in AT_LEAST_ONE and isinstance(value, int) and not isinstance(value, bool):
            yield f"{above}{name}", value


def _times(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))
