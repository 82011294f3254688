"""Calls of attention on random tensors: masks, biases, grouped heads, caches."""

import math
from functools import partial

import torch
from torch import Tensor

from attnlens.kernels import Kernel, parsed
from attnlens.kernels.registry import Fit
from attnlens.records import Call

HEADS, DIM = 4, 8


def call(queries=150, keys=None, *, batch=2, kv_heads=HEADS, value_dim=DIM, dtype=torch.float64, **more) -> Call:
    """Draw a call whose scores have a standard deviation of about 3, so that attention is far from uniform."""
    draw = torch.Generator().manual_seed(queries + 7 * (keys or 0) + 31 * value_dim)
    keys = queries if keys is None else keys
    shapes = (HEADS, queries, DIM), (kv_heads, keys, DIM), (kv_heads, keys, value_dim)
    q, k, v = (torch.randn(batch, *shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return Call((1.7 * q).to(dtype), (1.7 * k).to(dtype), v.to(dtype), DIM**-0.5, **more)


def fitted(words: str, *calls: Call, **settings: object) -> Kernel:
    """Return the kernel, fitted to these calls by a fit with these attributes."""
    kernel = parsed(words)
    fit = kernel.info.fit(**kernel.parameters)
    assert isinstance(fit, Fit)
    for name, value in settings.items():
        setattr(fit, name, value)
    for each in calls:
        fit.update(each)
    return kernel.with_fitted(fit.solve())


def tril(queries: int, keys: int) -> Tensor:
    """Return the mask of a chunk at the end of a cache, whose last query sees all keys."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]


def left_padded(tokens: int) -> Tensor:
    mask = tril(tokens, tokens).repeat(2, 1, 1, 1)
    mask[1, ..., :70] = False
    return mask


def right_padded(tokens: int) -> Tensor:
    mask = torch.ones(2, 1, tokens, tokens, dtype=torch.bool)
    mask[1, ..., 90:] = False
    return mask


def sliding(tokens: int) -> Tensor:
    return tril(tokens, tokens) & torch.ones(tokens, tokens, dtype=torch.bool).triu(-20)


def bias(tokens: int) -> Tensor:
    place = torch.arange(tokens, dtype=torch.float64)
    return (-(place[:, None] - place).abs() / 5 * torch.linspace(0, 1, HEADS).double()[:, None, None])[None]


CASES = {
    "all": call,
    "causal": partial(call, causal=True),
    "left padding, causal": partial(call, allowed=left_padded(150)),
    "right padding": partial(call, allowed=right_padded(150)),
    "sliding window": partial(call, allowed=sliding(150)),
    "bias": partial(call, bias=bias(150), causal=True),
    "grouped heads": partial(call, kv_heads=2, causal=True),
    "wider values": partial(call, value_dim=20, causal=True),
    "narrower values": partial(call, value_dim=3, causal=True),
    "cross": partial(call, 30, 150, cross=True),
    "cross, more queries": partial(call, 150, 30, cross=True),
    "decoding": partial(call, 1, 150),
    "chunk of a cache": partial(call, 40, 150, allowed=tril(40, 150)),
    "empty static cache": partial(call, 40, 150, causal=True),
}


def apart(output: Tensor, expected: Tensor) -> float:
    """Return ‖output − expected‖ / ‖expected‖ over the rows that see a key; all rows must be finite."""
    assert bool(torch.isfinite(output).all())
    seen = torch.isfinite(expected)
    return float((output.double() - expected)[seen].norm() / expected[seen].norm())


def dense(case: Call, kernel: Kernel) -> Tensor:
    """Compute Σ_j k_j exp(b_j) v_j / Σ_j k_j exp(b_j) over the allowed keys in float64; NaN if no key is allowed."""
    q, k, v = (x.double() for x in (case.query, case.paired_key, case.paired_value))
    log_k = kernel.log(q, k, case.scale, softcap=case.softcap)
    sign = kernel.sign(q, k, case.scale, softcap=case.softcap) if kernel.signed else torch.ones_like(log_k)
    added, seen = 0.0 if case.bias is None else case.bias.double(), case.visible()
    seen = torch.ones_like(log_k, dtype=torch.bool) if seen is None else seen.expand_as(log_k)
    kept = seen & keys_kept(case, kernel, seen) if kernel.filter or kernel.near else seen
    if kernel.near:
        gamma = kernel.fitted.get("near_log_weight", torch.zeros(q.shape[1])).double()[:, None, None]
        own = q @ k.mT * case.scale + added
        largest = torch.where(kept, own, -1e9).amax(-1, keepdim=True)
        mass = torch.where(kept, (gamma + own - largest).exp(), (log_k + added).exp()) * seen
    elif kernel.info.hard:
        best = (log_k + added).masked_fill(~kept, -math.inf).argmax(-1)
        mass = kept * torch.nn.functional.one_hot(best, log_k.shape[-1]).double()
    else:
        log_k = (log_k + added).masked_fill(~kept, -math.inf)
        mass = torch.where(kept, sign * (log_k - log_k.amax(-1, keepdim=True)).exp(), 0.0)
    return (mass @ v / mass.sum(-1, keepdim=True)).transpose(1, 2)


def keys_kept(case: Call, kernel: Kernel, seen: Tensor) -> Tensor:
    """Compute the filter or window by its formula, from positions; the first visible key has position 0."""
    key_filter = kernel.filter or kernel.near
    queries, keys, numbers = case.query.shape[2], case.key.shape[2], key_filter.parameters
    i, j = torch.arange(queries)[:, None] + (0 if case.causal else keys - queries), torch.arange(keys)
    near = (i - j).abs() < numbers.get("width", numbers.get("stride", 0))
    if key_filter.modifier.name == "strided":
        return near | ((i - j) % numbers["stride"] == 0)
    return near | (j - seen.any(2).int().argmax(-1)[..., None, None] < numbers.get("sinks", 0))
