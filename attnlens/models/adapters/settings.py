"""Checks an adapter's settings field by field; what would change the merged weights and is not known is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlens.errors import ModelError
from attnlens.files import shortened, written
from attnlens.models.folders import read_json

READ = {
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "use_dora", "bias", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    "modules_to_save",
}
"""Fields that say what the merged weights are."""
WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "inference_mode", "revision", "lora_dropout", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
    "fan_in_fan_out",  # which way round a weight lies is its layer's matter, as in peft
}
"""Fields that concern training, or belong to a way of starting it that init_lora_weights names."""
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""How A and B may have been started: other ways (PiSSA, OLoRA, LoftQ …) change the base's weights, too."""
SAY_MERGE = "Merge it with merge_and_unload of the package peft, save that model, and give its folder as MODEL."
SAY_AGAIN = "Get the adapter again."


@dataclass(frozen=True)
class AdapterSettings:
    """What adapter_config.json says, checked."""

    file: Path
    base: str | None
    """The model that it was trained over."""
    rank: int
    alpha: float
    rank_stabilised: bool
    """Whether s = α/√r (rsLoRA; Kalajdzievski 2023), and not α/r (Hu et al. 2021)."""
    magnitudes: bool
    """Whether rows have a magnitude of their own (DoRA; Liu et al. 2024)."""
    targets: str | tuple[str, ...] | None
    """An expression for the paths of adapted modules, or their ends; None: peft's choice for the architecture."""
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    """Numbers of the layers to which the ends in `targets` are limited."""
    layers_pattern: tuple[str, ...]
    """What the list of layers is called."""
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    saved: tuple[str, ...]
    """Modules that are stored whole."""

    def scale(self, rank: int, alpha: float) -> float:
        """s in W + s·BA."""
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    @property
    def say_base(self) -> str:
        """What to do where the model is another one."""
        base = "the model that it was trained over" if self.base is None else shortened(self.base)
        return f"Give its base as MODEL: {base}."

    @property
    def kind(self) -> str:
        """LoRA, rsLoRA, DoRA, or both together."""
        kind = "DoRA" if self.magnitudes else "LoRA"
        return f"rs{kind}" if self.rank_stabilised else kind


def read_settings(file: Path) -> AdapterSettings:
    """The settings in that file. Raises ModelError where they are none, or ask for what attnlens does not apply."""
    found = read_json(file)
    _refuse_others(file, found)
    fields = _Fields(file, found)
    layers = fields.get("layers_to_transform", (int, list), "a number or a list of numbers", None)
    numbers = [layers] if isinstance(layers, int) else layers or None
    if numbers is not None and not all(isinstance(number, int) for number in numbers):
        raise fields.wrong("layers_to_transform", "a list of numbers")
    return AdapterSettings(
        file=file,
        base=fields.get("base_model_name_or_path", (str,), "a string", None),
        rank=fields.rank(fields.get("r", (int,), "a whole number", 8), "r"),
        alpha=fields.finite(fields.get("lora_alpha", (int, float), "a number", 8), "lora_alpha"),
        rank_stabilised=fields.get("use_rslora", (bool,), "true or false", default=False),
        magnitudes=fields.get("use_dora", (bool,), "true or false", default=False),
        targets=None if found.get("target_modules") in (None, "all-linear") else fields.names("target_modules"),
        excluded=fields.names("exclude_modules"),
        layers=None if numbers is None else tuple(numbers),
        layers_pattern=fields.list("layers_pattern"),
        rank_pattern={name: fields.rank(rank, "rank_pattern") for name, rank in fields.map("rank_pattern").items()},
        alpha_pattern={name: fields.finite(a, "alpha_pattern") for name, a in fields.map("alpha_pattern").items()},
        saved=fields.list("modules_to_save"),
    )


def _refuse_others(file: Path, found: dict[str, Any]) -> None:
    """Raise ModelError for another kind of adapter, and for settings that would change the weights unseen."""
    kind = found.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"{file} says peft_type = {written(kind)}; attnlens applies LORA (LoRA, rsLoRA, DoRA) alone.", SAY_MERGE
        )
    if found.get("bias", "none") != "none":
        raise ModelError(f"{file} says bias = {written(found['bias'])}; attnlens merges no trained biases.", SAY_MERGE)
    start = found.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise ModelError(
            f"{file} says init_lora_weights = {written(start)}, by which the base's own weights were changed as well.",
            SAY_MERGE,
        )
    others = sorted(name for name, value in found.items() if value and name not in READ | WITHOUT_EFFECT)
    if others:
        raise ModelError(
            f"{file} sets {shortened(', '.join(others))}, which attnlens does not apply to the weights.", SAY_MERGE
        )


@dataclass(frozen=True)
class _Fields:
    """The fields of one file, each checked for its type."""

    file: Path
    found: dict[str, Any]

    def get(self, name: str, kinds: tuple[type, ...], words: str, default: Any) -> Any:
        value = self.found.get(name)
        if value is None:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.wrong(name, words)
        return value

    def names(self, name: str) -> str | tuple[str, ...]:
        value = self.get(name, (str, list), "a string or a list of strings", [])
        if isinstance(value, list) and not all(isinstance(one, str) for one in value):
            raise self.wrong(name, "a string or a list of strings")
        return value if isinstance(value, str) else tuple(value)

    def list(self, name: str) -> tuple[str, ...]:
        found = self.names(name)
        return (found,) if isinstance(found, str) else found

    def map(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(name, (dict,), "a map", {})
        return found

    def rank(self, value: Any, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "whole numbers from 1 on" if name == "rank_pattern" else "a whole number from 1 on")
        return value

    def finite(self, value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(name, "finite numbers" if name == "alpha_pattern" else "a finite number")
        return float(value)

    def wrong(self, name: str, words: str) -> ModelError:
        return ModelError(
            f"{self.file} says {name} = {written(self.found.get(name))}, which must be {words}.", SAY_AGAIN
        )
