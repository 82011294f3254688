"""How much of the tokens read a kernel keeps, in numbers a head, and the sink-window that keeps as much."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnlens.kernels.loading import kernels
from attnlens.kernels.modifiers import FILTERS, KeyFilter
from attnlens.kernels.spec import Kernel

ONE_KEY, FLOOR = "hard", "uniform"
"""The kernels between which all others lie: all weight on one key, and on all keys alike."""
SINKS, WIDTH = 4, 64
"""First tokens and nearest ones of the sink-window beside a kernel whose state grows with the text."""


@dataclass(frozen=True)
class HeadShape:
    """What the state of a site's heads depends on."""

    heads: int
    """How many of its query heads have the kernel."""
    head_dim: int
    value_dim: int
    tokens: int
    """How many keys the last query meets."""
    causal: bool
    """Whether no query sees a key behind it."""

    @property
    def token(self) -> int:
        """Numbers that a cache keeps of a token: its key and its value."""
        return self.head_dim + self.value_dim


def state_numbers(kernel: Kernel, shape: HeadShape) -> float | None:
    """Numbers that a head keeps when it has read `tokens` tokens; None where it keeps them all whole.

    A filter keeps the keys and values that one query may see; running sums over m features keep m·(value_dim + 1); keys
    of r numbers keep tokens·(r + value_dim). A hybrid keeps sums and the keys of its window.
    """
    cached = cached_numbers(kernel)
    token = shape.token if cached is None else cached + shape.value_dim
    if kernel.filter is not None:
        return float(kept_keys(kernel.filter, shape) * token)
    if cached is not None:
        return shape.tokens * token
    features = feature_count(kernel, shape)
    if features is None:
        return None
    near = 0 if kernel.near is None else kept_keys(kernel.near, shape) * token
    return float(features * (shape.value_dim + 1) + near)


def kept_keys(found: KeyFilter, shape: HeadShape) -> int:
    """The most keys that any of `tokens` queries sees through the filter."""
    import torch

    places = torch.arange(shape.tokens)
    most = 0
    for start in range(0, shape.tokens, 1024):  # rows of a long text, a part at a time
        kept = found.keeps(places[start : start + 1024], places)
        kept = kept & (places[start : start + 1024, None] >= places) if shape.causal else kept
        most = max(most, int(kept.sum(-1).max()))
    return most


def cached_numbers(kernel: Kernel) -> float | None:
    """Numbers that a cache keeps of a token's key, mean over heads, where a fitted map shortens keys; else None.

    Of a latent that key heads share, each has its part.
    """
    import torch

    key_map = kernel.fitted.get("key_map") if kernel.info.form == "score" else None
    if key_map is None:
        return None
    # a head of a smaller rank than the others has columns of zeros
    kept = (key_map != 0).flatten(1, -2).any(-2).sum(-1).double()
    members = kernel.fitted.get("members")
    sharing = 1.0 if members is None else torch.tensor([float(len(row.unique())) for row in members])
    return float((kept / sharing).mean())


def feature_count(kernel: Kernel, shape: HeadShape) -> int | None:
    """The length of φ(k), for kernels that are computed by running sums; else None."""
    import torch

    if kernel.info.feature_map is None:
        return None
    key = torch.zeros(1, shape.heads, 1, shape.head_dim)
    here = kernel.with_fitted({name: part.cpu() for name, part in kernel.fitted.items()})
    return int(here.phi(key, shape.head_dim**-0.5, "key").shape[-1])


def sink_window(state: float | None, shape: HeadShape) -> Kernel | None:
    """The model's own kernel over ⌊state/(head_dim + value_dim)⌋ keys: first tokens and the nearest; None: over all.

    4 of them are first tokens, at most half; of a state without bound 4 beside 64. Where both directions are seen,
    |i − j| < w holds 2w − 1 keys: then one first token less, if need be, makes their number exact.
    """
    keys = SINKS + WIDTH if state is None else int(state // shape.token)
    assert keys  # noqa: S101  # whoever asks has a state of one token at least
    if keys >= shape.tokens:
        return None
    sinks = min(SINKS, keys // 2)
    if not shape.causal:
        sinks -= (keys - sinks) % 2 == 0
    near = keys - sinks
    width = near if shape.causal else (near + 1) // 2
    return filtered("sink-window", sinks=sinks, width=width) if sinks else filtered("window", width=width)


def filtered(name: str, **parameters: int) -> Kernel:
    """The model's own kernel behind that filter."""
    return Kernel(kernels()["exponential"], filter=KeyFilter(FILTERS[name], parameters))


def branches(kernel: Kernel) -> tuple[Kernel, Kernel]:
    """What a kernel behind a filter, or a hybrid, is made of: that window with the model's own kernel, and the kernel
    without it.
    """
    near = kernel.filter
    if kernel.near is not None:
        keeps = kernel.near.modifier.keeps
        near = KeyFilter(next(one for one in FILTERS.values() if one.keeps is keeps), kernel.near.parameters)
    return Kernel(kernels()["exponential"], filter=near), replace(
        kernel, filter=None, near=None, fitted=kernel.own_fitted
    )
