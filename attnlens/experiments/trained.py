"""Queries and keys of a trained model on real text, and the share of each kernel's first singular value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlens import hooks, ksvd, linalg, models, texts
from attnlens.attention.primal_scores import running

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel

    from attnlens.records import Call, QueryKey


DEMO, TEXT = "demo", "King James passages"
"""What experiments on a trained model read, as their records name it."""
SHARE = "share of Σσ"
"""What their curves show."""


def demo() -> models.Loaded:
    """The model that ships, on the processor that every machine has."""
    return models.load(DEMO, device="cpu")


def sample(loaded: models.Loaded, tokens: int, sequences: int) -> Int[Tensor, "sequences tokens"]:
    """Windows spread over the built-in passages, which demo was not trained on; fewer where they have no more."""
    found = texts.batches(loaded, texts.sample(DEMO), texts.Cut(tokens=tokens, sequences=sequences))
    return torch.cat([batch.inputs["input_ids"] for batch in found])


def calls(model: PreTrainedModel, ids: Int[Tensor, "sequences tokens"]) -> list[tuple[Call, QueryKey]]:
    """What every layer's attention is asked for, layer by layer, in one pass.

    Layers below a primal one are the model's own; a primal one is asked with its own queries and keys too.
    """
    return [(found.call, found.call.query_key(found.site)) for found in hooks.survey(model, {"input_ids": ids})]


def attention_curve(query_key: QueryKey) -> Float[Tensor, "sequences heads steps"]:
    """(σ₁ + … + σₖ)/Σσ of the attention matrix P (Chen et al. 2023, Figure 1)."""
    return linalg.cumulative(linalg.attention_singular_values(query_key))


def cosine_curve(call: Call, *, averaged: bool = False) -> Float[Tensor, "sequences heads steps"]:
    """The same of K_ij = cos(q_i, k_j); `averaged`, of the running means of q and k, as causal primal attention has."""
    sides = (call.query.double(), call.paired_key.double())
    queries, keys = (ksvd.cosine_features(running(side) if averaged else side) for side in sides)
    return linalg.cumulative(linalg.product_singular_values(queries, keys))
