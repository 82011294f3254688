"""What a maker of inputs knows: the model, its configurations, and a stream of draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

from attnlens.errors import TextError
from attnlens.files import shortened

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

LARGEST_INPUT = 2**24
"""Numbers in one image or sound beyond which none is made: 2364 × 2364 pixels in colour, or 17 minutes at 16 kHz."""


@dataclass(frozen=True)
class Asked:
    """One input of one sequence."""

    model: PreTrainedModel
    generator: torch.Generator
    name: str
    """What the forward pass calls it."""
    width: int
    """Ids of the sequence that it stands beside; 0 where no tokens are fed."""

    @cached_property
    def parameters(self) -> frozenset[str]:
        """What the forward pass names."""
        return frozenset(signature(self.model.forward).parameters)

    def config(self, *parts: str) -> Any:
        """The first of the named configurations inside the model's own, inside each other in turn; else the model's."""
        return inside(self.model.config, parts)

    def said(self, *names: str, of: tuple[str, ...] = ()) -> Any:
        """The first of these that the configuration of a part says, or that of the model; None where neither does."""
        for config in (self.config(*of), self.model.config):
            for name in names:
                if (value := getattr(config, name, None)) is not None:
                    return value
        return None

    def draw(self, *shape: int) -> Tensor:
        """Standard normal numbers, as normalised images and sounds have; raises TextError for an endless shape."""
        import torch

        if not all(isinstance(size, int) and size > 0 for size in shape) or math.prod(shape) > LARGEST_INPUT:
            asked = " × ".join(shortened(str(size)) for size in shape)
            raise TextError(
                f"The config asks for {self.name} of {asked} numbers, which attnlens does not make up.",
                "Mend its sizes in config.json.",
            )
        return torch.randn(shape, generator=self.generator)[None]


def inside(config: Any, parts: tuple[str, ...]) -> Any:
    """The innermost configuration under these names: `thinker_config`, and in it `vision_config`."""
    found = next((one for name in parts if (one := getattr(config, name, None)) is not None), None)
    return config if found is None or isinstance(found, dict) else inside(found, parts)


def said(config: Any, *names: str) -> Any:
    """The first of these that the configuration says, or one inside it that is of several modalities."""
    within = [getattr(config, name, None) for name in ("thinker_config", "vlm_config")]
    values = (getattr(one, name, None) for one in (config, *within) for name in names)
    return next((value for value in values if value is not None), None)


def sides(size: Any) -> tuple[int, int]:
    """Height and width, of a number, a pair, or a map that names them."""
    if isinstance(size, dict):
        size = size.get("height", size.get("shortest_edge")), size.get("width", size.get("shortest_edge"))
    return (size[-2], size[-1]) if isinstance(size, list | tuple) else (size, size)


def values_of(result: Any) -> Iterator[Any]:
    """The tensors of a tower's features, however they are nested."""
    if hasattr(result, "shape"):
        yield result
    elif isinstance(result, list | tuple):
        for one in result:
            yield from values_of(one)
