"""Queries and keys that come of latents which key heads share, and the rotation that is taken back for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnlens.errors import UsageError
from attnlens.kernels.spec import wide

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from attnlens.records import Call

    Tokens = Float[Tensor, "batch heads tokens head_dim"]


@dataclass(frozen=True)
class Turn:
    """RoPE as one frequency and one partner of each coordinate: x_c(p) = x_c cos ω_c p + x_π(c) sin ω_c p.

    Su et al. 2021 (RoFormer), Eq. 16; of a pair that turns by θ the first coordinate has ω = −θ, the second θ.
    """

    frequency: Float[Tensor, " head_dim"]
    """ω; 0 for a coordinate that stands still."""
    partner: Int[Tensor, " head_dim"]
    """π, the coordinate that each turns with; itself where it stands still."""

    def turned(self, x: Tokens, places: Int[Tensor, "#batch tokens"], *, back: bool = False) -> Tokens:
        """x at position 0 turned to its place, or `back` from it."""
        angles = places[:, None, :, None].double() * self.frequency.double().to(x.device)
        sine = -angles.sin() if back else angles.sin()
        found: Tensor = x * angles.cos().to(x) + x[..., self.partner.to(x.device)] * sine.to(x)
        return found


def shared_keys(
    call: Call,
    query_map: Float[Tensor, "heads head_dim size"],
    key_map: Float[Tensor, "heads members head_dim size"],
    members: Int[Tensor, "heads members"],
    offset: Float[Tensor, "heads head_dim"] | None = None,
    frequency: Float[Tensor, "heads head_dim"] | None = None,
    partner: Int[Tensor, "heads head_dim"] | None = None,
) -> Call:
    """The call whose exponential kernel is that of the latents: ⟨q A, z⟩, or ⟨q, k̂⟩ with k̂ = R(j)(z Aᵀ + offset).

    z = Σ_m k_m B_m of the latent's `members`, each named by a query head that reads it. Where the latent is of keys
    before the rotation (`frequency` is given), the keys are made of it again, and turned to their places.
    """
    import torch

    query, key = wide(call.query), wide(call.paired_key)
    turn = Turn(frequency[0], partner[0]) if frequency is not None and partner is not None else None
    if turn is not None:
        key = turn.turned(key, placed(call)[1], back=True)
    rows = members.tolist()
    distinct = [row for number, row in enumerate(rows) if row not in rows[:number]]
    leaders, which = [rows.index(row) for row in distinct], [distinct.index(row) for row in rows]
    stacked = key[:, distinct]
    latent = torch.einsum("bugnd,ugdw->bunw", stacked, key_map[leaders].to(key))[:, which]
    if turn is None or offset is None:
        query, key = query @ query_map.to(query), latent
    else:
        key = turn.turned(latent @ query_map.to(latent).mT + offset.to(latent)[:, None], placed(call)[1])
    return replace(call, query=query.to(call.query), key=key.to(call.query), value=call.paired_value)


def placed(call: Call) -> tuple[Int[Tensor, "#batch queries"], Int[Tensor, "#batch keys"]]:
    """The positions of queries and keys; with a key-value cache the keys before the first query's stand in a row.

    Raises UsageError where the model does not tell them.
    """
    import torch

    own = call.places
    if own is None or own.shape[-1] != call.query.shape[2] or call.cross:
        raise UsageError(
            "The model does not tell its attention the positions of the tokens, which keys are turned back by.",
            "Leave out rotation=before.",
        )
    more = call.key.shape[2] - own.shape[-1]
    if more <= 0:
        return own, own[..., : call.key.shape[2]]
    before = own[..., :1] + torch.arange(-more, 0, device=own.device)
    return own, torch.cat((before.clamp_min(0), own), -1)
