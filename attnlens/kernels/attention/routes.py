"""Choose the fastest exact route by which to compute an attention call, or say why no fused route is possible."""

from __future__ import annotations

from collections.abc import Callable
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
    """Compute softmax(log k(q, k) + bias, over the allowed keys) v; for signed kernels, Σ k v / Σ k.

    The kernel `primal` computes its output from scores instead. All routes for other kernels sum over the same keys and
    differ only by rounding. Queries that see no key have uniform weights on the routes "row tiles" and "banded tiles"
    in models without sinks, and zero weights otherwise. Raises UsageError if no route supports the call.
    """
    call, kernel = _prepare(call, kernel)
    return COMPUTED[route(call, kernel, path)](call, kernel).transpose(1, 2)


def route(call: Call, kernel: Kernel, path: Route = "auto") -> str:
    """Return the name of the route, a key of COMPUTED, by which `attend` computes the call.

    Raises UsageError in cross-attention for a tie, filter, hybrid or `primal`; for a tie or `primal` if queries and
    keys differ in number; for a signed kernel if the model has sinks; for a tie that needs whole sequences if a mask
    hides pairs or the model has sinks; and if path is "fused" but no fused route is exact for this call.
    """
    call, kernel = _prepare(call, kernel)
    if call.cross and (kernel.filter is not None or kernel.near is not None):
        raise position_error("this site attends to another sequence")
    if name := "primal" if kernel.info.form == "output" else kernel.tie:
        refuse_unpaired(name, call.query.shape[2], call.key.shape[2], cross=call.cross)
    if kernel.part is not None:
        refuse_hidden(call, kernel)
    if call.sinks is not None and kernel.signed:
        problem = f"{kernel.spelling} can be negative, but this model's attention sinks require a softmax."
        raise UsageError(problem, "Choose a positive kernel for this model.")

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
        obstacle = _find_obstacle(name, call, kernel)
        if obstacle is None:
            return name
        obstacles.append(obstacle)
    if path == "auto":
        return "row tiles"
    reason = next(filter(None, obstacles), f"{kernel.info.name} is computed in row tiles")
    problem = f"No fused implementation can compute {kernel.spelling} here: {reason}."
    raise UsageError(problem, "Use path='auto' or 'eager': both are exact.")


def _prepare(call: Call, kernel: Kernel) -> tuple[Call, Kernel]:
    # checked before `prepare_call`, so that the error contains the name that the user typed, not that of the tie
    if kernel.oracle and not call.cross and call.query.shape[2] == call.key.shape[2]:
        refuse_hidden(call, kernel)
    return kernel.prepare_call(call)


FUSED = ("sdpa", "running sums", "window and running sums", "flex attention", "banded tiles")  # fastest first
LONG, LONG_ON_GPU = 4096, ("flex attention", "banded tiles")
"""On a GPU, these routes are faster than row tiles only for at least LONG queries and keys: compiling FlexAttention
takes 5 to 15 s, and bands are many small operations (H100, torch 2.11)."""


def _find_obstacle(name: str, call: Call, kernel: Kernel) -> str | None:
    """Return the reason why a fused route cannot compute the call: "" for an unsuitable kernel; None if it can."""
    info, near, hidden = kernel.info, kernel.near, kernel.filter
    sums, flex = name.endswith("running sums"), name == "flex attention"
    applies = {
        "sdpa": info.dot is not None,
        "running sums": info.feature_map is not None and near is None,
        "window and running sums": info.feature_map is not None and near is not None,
        "flex attention": info.form == "score" and not kernel.signed,
        "banded tiles": hidden is not None,
    }
    if not applies[name]:
        return ""
    filter_name = "" if hidden is None else hidden.modifier.name
    if hidden is not None and name == "banded tiles":
        return f"the filter {filter_name} keeps keys at any distance" if hidden.reach is None else None
    cached = near is not None and call.query.shape[2] != call.key.shape[2]
    from_start = near is not None and near.modifier.from_start
    padded_left = from_start and call.allowed is not None and not bool(call.allowed[..., -1, 0].all())
    obstacles = {
        "hybrids with a key-value cache are computed in row tiles": cached,
        "in left-padded sequences the first tokens are not at position 0": padded_left,
        f"{info.name} is fused only by FlexAttention, which requires a GPU": flex and not call.query.is_cuda,
        f"the parameters of {info.name} are fitted per head": flex and bool(kernel.fitted),
        "the model caps its scores (softcap)": not flex and info.form == "score" and call.softcap is not None,
        f"running sums cannot apply the filter {filter_name}": sums and hidden is not None,
        f"SDPA cannot apply the filter {filter_name} by itself": name == "sdpa" and hidden is not None,
        "the model adds a bias to its scores, which running sums do not support": sums and call.bias is not None,
        "dropout acts on attention weights, which a fused path does not materialise": bool(call.dropout),
        "the model has attention sinks, which need explicit attention weights": call.sinks is not None,
        f"{kernel.tie} needs log k of the whole sequence at once": kernel.part is not None,
        f"{kernel.tie} needs log k and its transpose": kernel.tie == "symmetric",
        f"{info.name} picks a single key instead of summing over keys": info.hard,
    }
    if any(obstacles.values()):
        return next(reason for reason, present in obstacles.items() if present)
    unknown_reach = sums and find_reach(call) is None  # computed last, since it compares whole masks
    return "the mask hides keys that are neither padding nor later than the query" if unknown_reach else None


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
