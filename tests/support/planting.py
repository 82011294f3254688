"""Plant W_Q = ±W_K in a model's parameters and read weights.definiteness, which must be ±1."""

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
"""Names of the query and key maps in modules with separate maps."""
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("q_ln", "k_ln"), ("query_layernorm", "key_layernorm"))
"""Names of the norms of queries and keys."""
TOLERANCE = 1e-4
Rows = dict[int, tuple[tuple[Tensor, Any], tuple[Tensor, Any]]]
"""Head → matrix and rows that make its query, and those that make its key."""


def read(loaded: Any, inputs: Mapping[str, Tensor]) -> str | None:
    """Return `±1` if the first head of every planted site has 1 and the last (or only) one −1, else their values.

    Return None if no site could be planted, or its weights can't be read.
    """
    model = copy.deepcopy(loaded.model)
    sites = [found for found in hooks.survey(model, inputs) if found.site.part != "cross"]
    planted = {found.site for found in sites if _plant(model, inputs, found)}
    if not planted:
        return None
    many = hooks.survey(model, inputs)
    one = checks.survey_ids(replace(loaded, model=model), many, 1, 0)
    analyzer = next(each for each in registry.select_analyzers(["symmetry"]) if each.source == "weights")
    wrong, right = [], 0
    for found in weights.factors(model, one, many):
        if isinstance(found, UnreadableError) or found.site not in planted:
            continue
        values = analyzer.function(found.query_key)["weights.definiteness"]
        error = float(torch.stack([(values[0] - 1) * (len(values) > 1), values[-1] + 1]).abs().max())
        right += error <= TOLERANCE
        wrong += [f"{values[0]:.3f} and {values[-1]:.3f}"] * (not error <= TOLERANCE)
    return wrong[0] if wrong else "±1" if right else None


def _plant(model: Any, inputs: Mapping[str, Tensor], site: hooks.SiteCall) -> bool:
    """Set the first head's W_Q to its W_K and the last one's to −W_K; return False if their rows are unknown."""
    rows = _of_separate_maps(site) or _of_one_map(model, inputs, site)
    if rows is None:
        return False
    with torch.no_grad():
        for head, sign in ((0, 1), (-1, -1)):
            (query, its), (key, others) = rows[head]
            query[its] = sign * key[others]
        size = site.call.query.shape[-1]
        for names in NORMS:
            gains = [getattr(getattr(site.module, name, None), "weight", None) for name in names]
            if all(isinstance(gain, Tensor) for gain in gains):
                query_gain, key_gain = (gain.view(-1) for gain in gains)  # one for all heads, or one after the other
                query_gain[:size], query_gain[-size:] = key_gain[:size], key_gain[-size:]
    return True


def _of_separate_maps(site: hooks.SiteCall) -> Rows | None:
    """Return the rows if W_Q and W_K are separate matrices, with the heads in order."""
    maps = [[getattr(site.module, name, None) for name in pair] for pair in PAIRS]
    both = next((pair for pair in maps if all(isinstance(part, nn.Linear) for part in pair)), None)
    if both is None:
        return None
    (query, key), size = (part.weight for part in both), site.call.query.shape[-1]
    heads = site.call.query.shape[1], site.call.key.shape[1]
    if (query.shape[0], key.shape[0]) != (heads[0] * size, heads[1] * size) or query.shape[1] != key.shape[1]:
        return None
    return {head: ((query, part), (key, part)) for head, part in ((0, slice(size)), (-1, slice(-size, None)))}


def _of_one_map(model: Any, inputs: Mapping[str, Tensor], site: hooks.SiteCall) -> Rows | None:
    """Return the rows if one matrix makes both: number its outputs, and read them from the first query and key."""
    for part in site.module.modules():
        conv = type(part).__name__ == "Conv1D"
        if not conv and not isinstance(part, nn.Linear):
            continue
        weight = part.weight.mT if conv else part.weight
        numbers = torch.arange(float(weight.shape[0]))
        hook = part.register_forward_hook(lambda _part, _args, given, numbers=numbers: 0 * given + numbers)
        try:
            again = next((one for one in hooks.survey(model, inputs) if one.site == site.site), None)
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
