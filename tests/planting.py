"""Plants W_Q = ±W_K in a model's own parameters and reads weights.definiteness, which must be ±1."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlens import hooks, registry, weights
from attnlens.errors import UnreadableError
from attnlens.run import checks

PAIRS = (
    *(("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"), ("q", "k"), ("query_proj", "key_proj")),
    *(("q_linear", "k_linear"), ("linear_q", "linear_k"), ("to_q", "to_k"), ("wq", "wk"), ("query_net", "key_net")),
)
"""What modules call the maps of their queries and keys, where they have one for each."""
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("q_ln", "k_ln"), ("query_layernorm", "key_layernorm"))
"""The same of the norms of queries and keys."""
TOLERANCE = 1e-4


def read(loaded: Any, inputs: Mapping[str, Tensor]) -> str | None:
    """`±1` where the first head of every site with maps of its own reads 1 and the last one −1, else what they read.

    None where no site has a map for queries and one for keys, or its weights can't be read.
    """
    model = copy.deepcopy(loaded.model)
    reached = hooks.survey(model, inputs)
    planted = {found.site: found for found in reached if found.site.part != "cross" and _plant(found)}
    if not planted:
        return None
    many = hooks.survey(model, inputs)
    one = checks.of_one_token(replace(loaded, model=model), many, 0)
    definiteness = next(found for found in registry.analyzers(["symmetry"]) if found.source == "weights").function
    wrong, right = [], 0
    for found in weights.factors(model, one, many):
        if isinstance(found, UnreadableError) or found.site not in planted:
            continue
        values = definiteness(found.query_key)["weights.definiteness"]
        error = float((torch.stack([values[0] - 1, values[-1] + 1])).abs().max())
        right += error <= TOLERANCE
        wrong += [f"{values[0]:.3f} and {values[-1]:.3f}"] * (not error <= TOLERANCE)
    return wrong[0] if wrong else "±1" if right else None


def _plant(found: hooks.Reached) -> bool:
    """Whether the module has a map each, in which the first head's W_Q is now its W_K, and the last one's −W_K."""
    maps = [[getattr(found.module, name, None) for name in pair] for pair in PAIRS]
    both = next((pair for pair in maps if all(isinstance(part, nn.Linear) for part in pair)), None)
    if both is None:
        return False
    query, key = (part.weight for part in both)
    heads, key_heads = found.call.query.shape[1], found.call.key.shape[1]
    size = found.call.query.shape[-1]
    if query.shape[0] != heads * size or key.shape[0] != key_heads * size or query.shape[1] != key.shape[1]:
        return False
    with torch.no_grad():
        query[:size] = key[:size]
        query[-size:] = -key[-size:]
        for names in NORMS:
            gains = [getattr(getattr(found.module, name, None), "weight", None) for name in names]
            if all(isinstance(gain, Tensor) for gain in gains):
                query_gain, key_gain = (gain.view(-1) for gain in gains)  # one for all heads, or one after the other
                query_gain[:size], query_gain[-size:] = key_gain[:size], key_gain[-size:]
    return True
