"""Att-SVM measures: how near a head's token selection comes to its max-margin SVM."""

from __future__ import annotations

from attnlens.analyzers.selection.measures import MEASURES
from attnlens.registry import Gatherer, GatheringPlace, gathering


@gathering("selection", source="tokens", measures=MEASURES, by_default=False, needs_inputs=True)
def selector(place: GatheringPlace) -> Gatherer:
    """Does a head select tokens as its max-margin SVM does, and with what margin?

    Margins and cosine are those of M′ = M − W_fin; W_fin, the least form with M's own score differences inside the
    selected sets, is 0 where sets hold one token. M scores what it selects above the rest, so that margins are then
    above 0; what is left of it in sets of several (`top-p`) need not, and they can be below.

    Where the logits are bilinear in the module's inputs, the problem is posed on these and, under names with
    `projected_`, on queries and keys with W = s·I; elsewhere (RoPE, QK-norm, cross-attention) on queries and keys
    alone. Each space has its own null, and its numbers are compared within it only.
    """
    from attnlens.analyzers.selection.gatherer import Selector

    return Selector(place)
