"""Linear layers of inputs whose tokens repeat one token, or mix a few: computed of these few alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Mixture:
    """Tokens that are linear combinations of a few."""

    few: Float[Tensor, "few d_model"]
    """These."""
    shares: Float[Tensor, "*tokens few"]
    """How much of each is in every token."""

    @cached_property
    def tokens(self) -> Float[Tensor, "*tokens d_model"]:
        """All of them, one and the same tensor whoever asks."""
        return self.shares @ self.few

    def is_made(self, tokens: Tensor) -> bool:
        """Whether these are its tokens, seen with other axes in front or not."""
        own = self.tokens
        if own._version:  # a module has changed them in place
            return False
        same = tokens.data_ptr() == own.data_ptr() and tokens.dtype == own.dtype and tokens.is_contiguous()
        return same and tokens.shape[-1:] == own.shape[-1:] and tokens.numel() == own.numel()


class FewTokens(TorchFunctionMode):
    """Inside, a linear layer of tokens that repeat one, or of these mixtures, multiplies its weights by a few alone."""

    def __init__(self, mixtures: Sequence[Mixture] = ()) -> None:
        super().__init__()
        self.mixtures = mixtures

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        if function is F.linear and not kwargs and len(args) in (2, 3) and type(args[0]) is Tensor:
            return self._linear(*args)
        return function(*args, **kwargs or {})

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        for mixture in self.mixtures:
            if mixture.is_made(x):
                shares = mixture.shares.reshape(*x.shape[:-1], -1)
                mixed = shares @ F.linear(mixture.few, weight)
                return mixed if bias is None else mixed + bias
        steps = x.stride()
        if any(step == 0 and size > 1 for step, size in zip(steps[:-1], x.shape[:-1], strict=True)):
            one = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in steps[:-1])]
            found = F.linear(one, weight, bias)
            return found.expand(*x.shape[:-1], -1).contiguous()  # modules may change it in place
        return F.linear(x, weight, bias)
