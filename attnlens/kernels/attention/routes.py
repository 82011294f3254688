"""Choose the fastest exact route for a call, and explain why a faster one does not apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from attnlens.choices import Route
from attnlens.errors import UsageError
from attnlens.kernels.attention.rows import by_whole, in_tiles, position_error, refuse_hidden
from attnlens.kernels.attention.scores import by_scores
from attnlens.kernels.attention.sums import by_hybrid, by_primal, by_products, by_sums, find_reach
from attnlens.kernels.spec import Kernel, refuse_unpaired
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def attend(call: Call, kernel: Kernel, path: Route = "auto") -> Float[Tensor, "batch queries heads value_dim"]:
    """Compute softmax(log k(q, k) + bias, over the allowed keys) v, for signed kernels Σ k v / Σ k, in models' layout.

    All routes sum over the same keys without truncation and differ only by rounding. Rows that may see nothing have no
    such sum: they are uniform in row tiles and bands, zero elsewhere. Raises UsageError if no route supports the call.
    """
    call, kernel = _prepare(call, kernel)
    return COMPUTED[route(call, kernel, path)](call, kernel).transpose(1, 2)


def route(call: Call, kernel: Kernel, path: Route = "auto") -> str:
    """Return the route by which `attend` computes the call: a key of COMPUTED.

    Raises UsageError for a tie, filter or hybrid in cross-attention, for sinks with a signed kernel, for hidden pairs
    or sinks under a tie of whole sequences, and with path="fused" if no fused route is exact for this call.
    """
    call, kernel = _prepare(call, kernel)
    _refuse(call, kernel)
    if kernel.info.form == "output":
        return "primal scores"
    if kernel.part is not None and path != "fused":
        return "whole matrices"
    if path == "eager":
        return "row tiles"
    obstacles, lengths = [], (call.query.shape[2], call.key.shape[2])
    for name in FUSED:
        if path == "auto" and name in LONG_ON_GPU and call.query.is_cuda and min(lengths) < LONG:
            continue
        obstacle = next(_find_obstacles(name, call, kernel), None)
        if obstacle is None:
            return name
        obstacles.append(obstacle)
    if path == "auto":
        return "row tiles"
    reason = next(filter(None, obstacles), f"{kernel.info.name} is computed in row tiles")
    problem = f"{kernel.spelling} has no fused path here: {reason}."
    raise UsageError(problem, "Use path='auto' or 'eager': both are exact.")


def _prepare(call: Call, kernel: Kernel) -> tuple[Call, Kernel]:
    """Return the call and the kernel to compute; an analysis is refused by the name the user typed, not by its tie."""
    if kernel.oracle and not call.cross and call.query.shape[2] == call.key.shape[2]:
        refuse_hidden(call, kernel)
    return kernel.prepare_call(call)


def _refuse(call: Call, kernel: Kernel) -> None:
    """Raise UsageError for combinations that are not defined."""
    if call.cross and (kernel.filter is not None or kernel.near is not None):
        raise position_error("this site attends to another sequence")
    if name := "primal" if kernel.info.form == "output" else kernel.tie:
        refuse_unpaired(name, call.query.shape[2], call.key.shape[2], cross=call.cross)
    if kernel.part is not None:
        refuse_hidden(call, kernel)
    if call.sinks is not None and kernel.signed:
        problem = f"{kernel.spelling} can be negative, but this model's attention sinks require a softmax."
        raise UsageError(problem, "Choose a positive kernel for this model.")


FUSED = ("sdpa", "running sums", "window and running sums", "flex attention", "banded tiles")  # fastest first
LONG, LONG_ON_GPU = 4096, ("flex attention", "banded tiles")
"""Fewest queries and keys for which these routes beat row tiles on a GPU: FlexAttention is compiled for 5 to 15 s, and
bands are many small operations (H100, torch 2.11)."""


def _find_obstacles(name: str, call: Call, kernel: Kernel) -> Iterator[str]:
    """Yield why the fused route `name` cannot compute the call: "" if it is for other kernels."""
    info, near, hidden = kernel.info, kernel.near, kernel.filter
    sums = info.feature_map is not None
    applies = {
        "sdpa": info.dot is not None,
        "running sums": sums and near is None,
        "window and running sums": sums and near is not None,
        "flex attention": info.form == "score" and not kernel.signed,
        "banded tiles": hidden is not None,
    }
    if not applies[name]:
        yield ""
    if name == "banded tiles" and hidden is not None:
        if hidden.reach is None:
            yield f"the filter {hidden.modifier.name} keeps keys at any distance"
        return
    if near is not None:
        if call.query.shape[2] != call.key.shape[2]:
            yield "with a key-value cache, rows are computed as a whole"
        if near.modifier.from_start and call.allowed is not None and not bool(call.allowed[..., -1, 0].all()):
            yield "in left-padded sequences the first tokens are not at position 0"
    if name == "flex attention":
        if not call.query.is_cuda:
            yield f"{info.name} is fused only by FlexAttention, which requires a GPU"
        if kernel.fitted:
            yield "its parameters are fitted per head"
    else:
        if info.form == "score" and call.softcap is not None:
            yield "the model caps its scores (softcap)"
        if hidden is not None:
            what = "mask that SDPA computes by itself" if name == "sdpa" else "running sum"
            yield f"the filter {hidden.modifier.name} is not a {what}"
        if name != "sdpa" and call.bias is not None:
            yield "the model adds a bias to its scores, which running sums do not support"
    if call.dropout:
        yield "dropout acts on attention weights, which a fused path does not materialise"
    if call.sinks is not None:
        yield "the model has attention sinks, which need the full form"
    if kernel.part is not None:
        yield f"{kernel.tie} needs log k of the whole sequence at once"
    if kernel.tie == "symmetric":
        yield f"{kernel.tie} needs log k and its transpose"
    if info.hard:
        yield f"{info.name} picks a single key instead of summing over keys"
    if name.endswith("running sums") and find_reach(call) is None:
        yield "the mask is neither causal nor a mask of padded keys alone"


COMPUTED: dict[str, Callable[[Call, Kernel], Tensor]] = {
    "sdpa": by_products,
    "running sums": by_sums,
    "window and running sums": by_hybrid,
    "flex attention": by_scores,
    "banded tiles": partial(in_tiles, banded=True),
    "whole matrices": by_whole,
    "row tiles": partial(in_tiles, banded=False),
    "primal scores": by_primal,
}
