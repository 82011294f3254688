"""Rebuilds a site's queries and keys from the inputs of its module and the weights that were read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from attnlens.hooks import Reached
from attnlens.records import QueryKey
from attnlens.weights.query_key_maps import Factors


def rebuilt(found: Reached, factors: Factors) -> QueryKey:
    """The site's queries and keys rebuilt as (x W_Q + b_Q) R(i) from the module's inputs x.

    Under QK-norm the per-token length, which W_Q does not carry, is taken from the captured queries and keys.
    """
    captured = found.call.query_key(found.site)
    x = found.arguments[found.input_name].double().flatten(1, -2)
    y = x if found.other is None else found.arguments[found.other].double().flatten(1, -2)
    sides = []
    for inputs, factor, bias, seen in (
        (x, factors.maps.query, factors.maps.query_bias, captured.query),
        (y, factors.maps.key, factors.maps.key_bias, captured.key),
    ):
        part = torch.einsum("btd,hdk->bhtk", inputs, factor) + bias[:, None]
        if factors.rotation is not None:
            part = factors.rotation.turned(part)
        if factors.qk_norm:
            part = nn.functional.normalize(part, dim=-1) * seen.norm(dim=-1, keepdim=True)
        sides.append(part)
    return replace(captured, query=sides[0], key=sides[1])
