"""Fits γ of a hybrid, the weight of near keys against far ones, to each head's own attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens import hooks
from attnlens.attention import weights
from attnlens.attention.positions import positions
from attnlens.kernels import Kernel
from attnlens.kernels.modifiers import NEAR_WEIGHT
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Float

LARGEST, HALVINGS = 30.0, 50
"""|log γ| at most, and how often the interval is halved: to 5e-14."""


@dataclass
class NearShares:
    """log γ at which near keys have, on average over queries, as large a share of the weights as in the model itself.

    That is where Σ KL(own ‖ hybrid) over queries is least: its derivative is Σ γN/(γN + F) − Σ own share, which grows
    with log γ (N the weights of near keys under γ = 1, F those of far ones and of a sink, which is one more outcome).
    Queries that see near keys alone count for nothing.
    """

    kernel: Kernel
    """The hybrid with all that is fitted, and γ = 1."""
    own: list[Float[Tensor, "heads queries"]] = field(default_factory=list)
    """The share of near keys in the model itself, batch by batch."""
    odds: list[Float[Tensor, "heads queries"]] = field(default_factory=list)
    """log N/F."""

    def update(self, call: Call) -> None:
        """Take in a batch."""
        assert self.kernel.near is not None  # noqa: S101  # whoever fits γ has a hybrid
        every = slice(0, call.query.shape[2]), slice(0, call.key.shape[2])
        near = positions(call, self.kernel.near).kept(self.kernel.near, *every)
        own, new = (weights(call, kernel).double() for kernel in (hooks.OWN, self.kernel))
        self.own.append((own * near).sum(-1).transpose(0, 1).flatten(1).cpu())
        among, beyond = (new * near).sum(-1), (new * ~near).sum(-1)
        beyond = beyond if call.sinks is None else beyond + (1 - new.sum(-1)).clamp_min(0)
        self.odds.append((among.log() - beyond.log()).transpose(0, 1).flatten(1).cpu())

    def best(self) -> dict[str, Tensor]:
        """All that is fitted, with γ."""
        own, odds = torch.cat(self.own, -1), torch.cat(self.odds, -1)
        counts = odds.isfinite()
        low, high = (torch.full((len(own),), bound, dtype=torch.float64) for bound in (-LARGEST, LARGEST))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            more = ((odds + middle[:, None]).sigmoid() - own).masked_fill(~counts, 0.0).sum(-1) > 0
            low, high = torch.where(more, low, middle), torch.where(more, middle, high)
        found = torch.where(counts.any(-1), (low + high) / 2, 0.0)
        return {**self.kernel.fitted, NEAR_WEIGHT: found.to(self.kernel.fitted[NEAR_WEIGHT])}
