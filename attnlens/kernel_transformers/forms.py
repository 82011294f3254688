"""Which attention a model of the study has: kernel, symmetry, positions, value function (Tsai et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Placing = Literal["none", "sum", "table", "product", "symmetric product"]
"""How attention reads positions t beside features f: not at all; k(f + t, f' + t') (Eq. 4); L(t − t', f)·k(f, f') with
a learned table (Eq. 6); k(f, f')·k_f(t, t') with an asymmetric kernel (Eq. 5); or k_F(f, f')·k_T(t, t') with symmetric
ones (Eq. 9)."""
Place = Literal["encoder", "decoder", "cross"]
"""Which attention of a model: the self-attention of its encoder, that of its decoder, or that between them."""
EVERYWHERE: tuple[Place, ...] = ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class AttentionForm:
    """Attention by Definition 1 of Tsai et al.: Σ_j k(x_i, x_j)/Σ k · v(x_j) over the keys that the filter allows."""

    kernel: str = "exponential"
    """As it can be typed: `rbf:gamma=1`; of features, or of features and positions under "sum"."""
    symmetric: bool = False
    """Whether queries and keys are one projection, W_Q = W_K."""
    positions: Placing = "none"
    """How positions enter."""
    places: tuple[Place, ...] = EVERYWHERE
    """Which attentions read positions."""
    in_value: bool = False
    """Whether values hold positions, v(x) = (f + t)W_V (Eq. 7), or not, v(x) = f W_V (Eq. 8)."""
    primal: Literal["none", "last", "all"] = "none"
    """Which layers attend by Primal-Attention (Chen et al. 2023) in the place of a kernel."""
    scores: int = 0
    """s, the scores of each primal head."""
    eta: float = 0.0
    """Weight η of the primal layers' regulariser ΣJ² in the loss."""

    @property
    def shares_projection(self) -> bool:
        """Whether queries and keys are one projection: where asked for, and in Eq. 9, whose kernels are symmetric."""
        return self.symmetric or self.positions == "symmetric product"
