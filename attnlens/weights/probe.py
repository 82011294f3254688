"""What does one attention module make of tokens of our choice? It is called alone, with its weights in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from attnlens.errors import NotBilinearError
from attnlens.hooks import Reached, opened
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Float

TOLERANCE = 1e-4
"""Largest relative difference between a module and what is said of it; norms and cos, sin are mostly float32."""


@dataclass(frozen=True)
class Probe:
    """A module that is called on its own, on tokens of our choice."""

    model: PreTrainedModel
    """The model around it."""
    reached: Reached
    """The module, and the arguments it was last called with."""
    weights: Mapping[str, Tensor]
    """The module's parameters and buffers in float64, which stand in for its own during a call."""

    def __call__(
        self, hidden: Float[Tensor, "batch tokens d_model"], other: Float[Tensor, "batch tokens d_other"]
    ) -> Call:
        """What the module asks for on these inputs (`other`: the other sequence, used by cross-attention alone).

        What it would do with an answer is not computed. Raises NotBilinearError where the module can't be called alone.
        """

        def answer(call: Call) -> Tensor:
            raise _Asked(call)

        arguments = {**self.arguments, self.reached.input_name: hidden}
        if self.reached.other is not None:
            arguments[self.reached.other] = other
        with opened(self.model, answer):
            try:
                functional_call(self.reached.module, dict(self.weights), kwargs=arguments)
            except _Asked as asked:
                return asked.call
            except (
                RuntimeError,
                TypeError,
                ValueError,
                IndexError,
                AttributeError,
            ) as error:  # somebody's module on inputs it never met
                first = str(error).splitlines()[0]
                raise not_bilinear(f"its attention module can't be called on its own ({first})") from error
        raise not_bilinear("its attention module, called on its own, asks for no attention")

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the module's last call in float64, without a mask that was made for several sequences.

        It says which keys are used and not what they are, and doesn't go with other tokens (Swin's windows).
        """
        arguments = {name: _in_float64(value) for name, value in self.reached.arguments.items()}
        mask = arguments.get("attention_mask")
        return arguments | ({"attention_mask": None} if isinstance(mask, Tensor) and len(mask) > 1 else {})

    def random(self, batch: int, tokens: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Seeded standard normal inputs, each the same at every position; one and the same for self-attention."""
        generator = torch.Generator().manual_seed(seed)
        likes: list[Tensor] = [self.arguments[name] for name in (self.reached.input_name, self.reached.other) if name]
        draws = [torch.randn(batch, 1, like.shape[-1], generator=generator).to(like) for like in likes]
        return draws[0].repeat(1, tokens, 1), draws[-1].repeat(1, tokens, 1)


class _Asked(BaseException):  # no Exception, which a module might catch
    """A module has asked for an attention computation."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


def float64_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of one module in float64; those that hold no such numbers as they are."""
    with torch.no_grad():
        return {name: _in_float64(part) for name, part in (*module.named_parameters(), *module.named_buffers())}


def _in_float64(value: Any) -> Any:
    """The tensors of floating-point or complex numbers in it, in double precision."""
    if isinstance(value, Tensor):
        wide = torch.complex128 if value.is_complex() else torch.float64
        return value.to(wide) if value.is_complex() or value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_in_float64(part) for part in value)
    return value


def not_bilinear(reason: str) -> NotBilinearError:
    """The error for a site without a bilinear form."""
    return NotBilinearError(
        f"not bilinear: {reason}", "The tokens.* measures of this site stand; weights.* do not exist."
    )
