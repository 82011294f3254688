"""How do tests hand a tiny model to `swap_kernel`? As what `load` would return, with a tokenizer of single letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import families
import tiny
import torch

from attnlens import hooks, models
from attnlens.models.heads import kind_of
from attnlens.records import ModelInfo, Part, Site

SMALL: dict[str, Any] = {"sequences": 4, "tokens": 16, "batch_size": 2}


def loaded(model: Any, tokenizer: Any = None) -> models.Loaded:
    """That model with that tokenizer; without one, with BERT's of letters, whose ids every family knows."""
    info = ModelInfo(id="tiny", architecture=type(model).__name__, parameters=0)
    return models.Loaded(model, tokenizer or tiny.tokenizer("bert"), "", info, kind_of(model))


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
