"""Plants W_Q = ±W_K in a model's own parameters and reads weights.definiteness, which must be ±1."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.analyzers import registry
from attnlens.errors import FAILURES, ModelError, UnreadableError
from attnlens.models import hooks, weights
from attnlens.runs import checks

PAIRS = (
    *(("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"), ("q", "k"), ("query_proj", "key_proj")),
    *(("q_linear", "k_linear"), ("linear_q", "linear_k"), ("to_q", "to_k"), ("wq", "wk"), ("query_net", "key_net")),
)
"""What modules call the maps of their queries and keys, where they have one for each."""
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("q_ln", "k_ln"), ("query_layernorm", "key_layernorm"))
"""The same of the norms of queries and keys."""
TOLERANCE = 1e-4
Rows = dict[int, tuple[tuple[Tensor, Any], tuple[Tensor, Any]]]
"""Head → the matrix and its rows that make the head's query, and those that make its key."""


def read(loaded: Any, inputs: Mapping[str, Tensor]) -> str | None:
    """`±1` where the first head of every site that could be planted reads 1 and the last −1, else what they read.

    A lone head is the last. None where no site could be planted, or its weights can't be read.
    """
    model = copy.deepcopy(loaded.model)
    reached = hooks.survey(model, inputs)
    planted = {found.site: found for found in reached if found.site.part != "cross" and _plant(model, inputs, found)}
    if not planted:
        return None
    many = hooks.survey(model, inputs)
    one = checks.of_one_token(replace(loaded, model=model), many, 0)
    definiteness = next(
        found for found in registry.select_analyzers(["symmetry"]) if found.source == "weights"
    ).function
    wrong, right = [], 0
    for found in weights.factors(model, one, many):
        if isinstance(found, UnreadableError) or found.site not in planted:
            continue
        values = definiteness(found.query_key)["weights.definiteness"]
        error = float(torch.stack([(values[0] - 1) * (len(values) > 1), values[-1] + 1]).abs().max())
        right += error <= TOLERANCE
        wrong += [f"{values[0]:.3f} and {values[-1]:.3f}"] * (not error <= TOLERANCE)
    return wrong[0] if wrong else "±1" if right else None


def _plant(model: Any, inputs: Mapping[str, Tensor], found: hooks.SiteCall) -> bool:
    """Whether the first head's W_Q is its W_K now, and the last one's −W_K, in the maps that the module has."""
    rows = _of_its_own_maps(found) or _of_one_map(model, inputs, found)
    if rows is None:
        return False
    with torch.no_grad():
        for head, sign in ((0, 1), (-1, -1)):
            (query, its), (key, others) = rows[head]
            query[its] = sign * key[others]
        size = found.call.query.shape[-1]
        for names in NORMS:
            gains = [getattr(getattr(found.module, name, None), "weight", None) for name in names]
            if all(isinstance(gain, Tensor) for gain in gains):
                query_gain, key_gain = (gain.view(-1) for gain in gains)  # one for all heads, or one after the other
                query_gain[:size], query_gain[-size:] = key_gain[:size], key_gain[-size:]
    return True


def _of_its_own_maps(found: hooks.SiteCall) -> Rows | None:
    """W_Q and W_K where each is a matrix of its own, its heads one behind the other."""
    maps = [[getattr(found.module, name, None) for name in pair] for pair in PAIRS]
    both = next((pair for pair in maps if all(isinstance(part, nn.Linear) for part in pair)), None)
    if both is None:
        return None
    query, key = (part.weight for part in both)
    heads, key_heads = found.call.query.shape[1], found.call.key.shape[1]
    size = found.call.query.shape[-1]
    if query.shape[0] != heads * size or key.shape[0] != key_heads * size or query.shape[1] != key.shape[1]:
        return None
    first, last = slice(size), slice(-size, None)
    return {0: ((query, first), (key, first)), -1: ((query, last), (key, last))}


def _of_one_map(model: Any, inputs: Mapping[str, Tensor], found: hooks.SiteCall) -> Rows | None:
    """W_Q and W_K inside one matrix: its outputs are numbered, and the first token's query and key hold the numbers."""
    for part in found.module.modules():
        conv = type(part).__name__ == "Conv1D"
        if not conv and not isinstance(part, nn.Linear):
            continue
        weight = part.weight.mT if conv else part.weight
        numbers = torch.arange(float(weight.shape[0]))
        hook = part.register_forward_hook(lambda _part, _args, given, numbers=numbers: 0 * given + numbers)
        try:
            again = next((one for one in hooks.survey(model, inputs) if one.site == found.site), None)
        except (ModelError, *FAILURES):  # its outputs are inputs of what follows
            again = None
        finally:
            hook.remove()
        if again is None:
            continue
        query, key = again.call.query[0, :, 0], again.call.key[0, :, 0]
        both = torch.stack([query[[0, -1]], key[[0, -1]]], 1)
        rows = both.long().clamp(0, len(numbers) - 1)
        if numbers[rows].equal(both) and rows[0].unique().numel() == rows[0].numel():
            return {head: ((weight, rows[head, 0]), (weight, rows[head, 1])) for head in (0, -1)}
    return None
