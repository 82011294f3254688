"""Primal-Attention as a torch module: e- and r-scores of every token, a linear map of both, and the objective J."""

from __future__ import annotations

import sys
import warnings
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import nn

from attnlens.errors import UsageError
from attnlens.kernels.attention.sums import cosine_features, objectives
from attnlens.maths import ksvd

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.kernels.attention.sums import Real
    from attnlens.kernels.registry import Tokens
    from attnlens.maths.ksvd import Convention


class PrimalHeads(nn.Module):
    """The Primal-Attention heads of one layer: o_i = W_c[e_i; r_i] + b, computed from projected queries and keys.

    e_i = W_eᵀFφ(q_i) and r_i = W_rᵀFφ(k_i) with φ(x) = x/‖x‖ (Chen et al. 2023, Eq. 6); there are no values. Time and
    memory are O(T·s). As in the published code, the heads share W_c and b. Initially, different heads' W_e are
    orthogonal (as are their W_r), Λ is uniform in (0, 1), and W_c has the initial values of torch's Linear. The module
    stores log Λ, which keeps Λ positive (the published code squares Λ). `samples` is the number of evenly spaced rows
    of F = X' (0: F = I). head_dim and `samples` bound the rank.
    """

    def __init__(self, heads: int, head_dim: int, scores: int, value_dim: int | None = None, samples: int = 0) -> None:
        """Build the module; warn if `scores` exceeds the bound on the rank; raise UsageError for invalid counts."""
        super().__init__()
        for name, count in {"heads": heads, "head_dim": head_dim, "scores": scores, "samples": samples}.items():
            least = 0 if name == "samples" else 1
            if not isinstance(count, Integral) or count < least:
                problem = f"{name} must be a whole number of at least {least}, not {count!r}."
                raise UsageError(problem, f"Give an int, {least} or more.")
        bound, what = min((head_dim, "head_dim"), (samples or head_dim, "the number of samples"))
        if scores > bound:
            text = f"Of {scores} scores, {scores - bound} have no effect, because {what} limits the rank to {bound}."
            warnings.warn(text, UserWarning, stacklevel=_callers_level())
        self.samples = samples
        size = (heads, samples or head_dim, scores)
        self.query_map = nn.Parameter(nn.init.orthogonal_(torch.empty(size)))
        self.key_map = nn.Parameter(nn.init.orthogonal_(torch.empty(size)))
        # torch.rand can return 0, whose logarithm is not finite
        self.log_multipliers = nn.Parameter(torch.rand(heads, scores).clamp_min(1e-4).log())
        self.output = nn.Linear(2 * scores, value_dim or head_dim)
        # e, r and `real` of the last forward pass; in training with their autograd graph, until `regulariser` is called
        self.last: tuple[Tensor, Tensor, Tensor | None] | None = None

    def forward(
        self, query: Tokens, key: Tokens, *, causal: bool = False, real: Real = None, rows: Tokens | None = None
    ) -> Float[Tensor, "batch heads tokens value_dim"]:
        """Compute the output; `real` marks tokens that are not padding, and F = X' is sampled from the inputs `rows`.

        If `causal`, means over the tokens 0 … i replace queries and keys. If `samples` > 0, raises UsageError if `rows`
        is missing or `causal` is true.
        """
        if self.samples and rows is None:
            raise UsageError("Primal attention with samples > 0 needs inputs to sample from.", "Pass rows=inputs.")
        query, key = cosine_features(query, key, real, causal=causal, samples=self.samples, rows=rows)
        e, r = query @ self.query_map.to(query), key @ self.key_map.to(key)
        self.last = (e, r, real) if self.training else (e.detach(), r.detach(), real)
        return self.output(torch.cat([e, r], -1).to(self.output.weight.dtype))  # type: ignore[no-any-return]

    def objectives(self, convention: Convention = "paper") -> Float[Tensor, "batch heads"]:
        """Compute the objective J of the last forward pass for each sequence and head.

        Raises UsageError if no forward pass is stored (in training, `regulariser` deletes it), or if the pass recorded
        no gradients although gradients are enabled now.
        """
        if self.last is None:
            problem = (
                "The KSVD objective J needs a forward pass, but none is stored; `regulariser` deletes the last one."
            )
            raise UsageError(problem, "Run the model before computing J.")
        e, r, real = self.last
        if torch.is_grad_enabled() and self.query_map.requires_grad and not e.requires_grad:
            problem = "The last forward pass recorded no gradients (eval mode, no_grad or reentrant checkpointing)."
            remedy = "Run the model in training mode (with use_reentrant=False), or compute J under torch.no_grad()."
            raise UsageError(problem, remedy)
        maps = self.query_map.to(e), self.key_map.to(e), self.log_multipliers.to(e).exp()
        return objectives(e, r, *maps, real, convention)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "last": None}  # the autograd graph of the scores cannot be copied or pickled


def _callers_level() -> int:
    """Return the `stacklevel` at which `warnings.warn` attributes a warning to the caller outside attnlens."""
    frame, level = sys._getframe(1), 1  # private by name only: documented, and much cheaper than inspect.stack()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("attnlens."):
        frame, level = frame.f_back, level + 1
    return level


class PrimalAttention(nn.Module):
    """Multi-head Primal-Attention layer with projections for queries, keys and output, usable in any model.

    With `samples` > 0, F = X' consists of each head's slice of that many evenly spaced input rows, as in the paper.
    Causal heads require `samples` = 0.
    """

    def __init__(self, d_model: int, heads: int, scores: int, *, causal: bool = False, samples: int = 0) -> None:
        """Build the layer; warn if `scores` exceeds the bound on the rank; raise UsageError for invalid sizes."""
        super().__init__()
        if heads < 1 or d_model % heads:
            problem = f"heads must be a positive divisor of d_model={d_model}, not {heads}."
            raise UsageError(problem, "Choose another number of heads.")
        if causal and samples:
            raise UsageError("Causal primal attention cannot sample rows: future tokens would leak.", "Use samples=0.")
        self.count, self.causal = heads, causal
        self.query, self.key, self.out = (nn.Linear(d_model, d_model) for _ in range(3))
        self.heads = PrimalHeads(heads, d_model // heads, scores, samples=samples)

    def forward(
        self, inputs: Float[Tensor, "batch tokens d_model"], real: Bool[Tensor, "batch tokens"] | None = None
    ) -> Float[Tensor, "batch tokens d_model"]:
        """Compute the layer's output; `real` is False at padded tokens, where every head returns zero."""
        rows = self._split(inputs) if self.heads.samples else None
        mask = None if real is None else real[:, None]
        query, key = self._split(self.query(inputs)), self._split(self.key(inputs))
        output = self.heads(query, key, causal=self.causal, real=mask, rows=rows)
        output = output if mask is None else output.masked_fill(~mask[..., None], 0.0)
        return self.out(output.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Float[Tensor, "batch tokens d_model"]) -> Float[Tensor, "batch heads tokens head_dim"]:
        return x.reshape(*x.shape[:-1], self.count, -1).transpose(1, 2)


def regulariser(model: nn.Module, convention: Convention = "paper") -> Float[Tensor, ""]:
    """Compute the regulariser ΣJ² of the loss L + η·ΣJ² from the last forward pass of all primal layers.

    With the convention "paper", the regulariser is Σ_layers Σ_heads J², where J is a sum over the tokens of a sequence;
    with "code", it is mean_layers (mean_heads J)², where J is a mean over tokens and uses Λ². Both are averaged over
    sequences. After a training pass, the result has a gradient, and the layers delete the pass with its autograd graph.
    After an eval pass, call this function under torch.no_grad. Raises UsageError for a model without primal attention
    and in the cases of `PrimalHeads.objectives`.
    """
    layers = [part for part in model.modules() if isinstance(part, PrimalHeads)]
    if not layers:
        raise UsageError("This model has no primal attention.", "Build a model with attnlens.lab.primal.build.")
    objectives = [layer.objectives(convention)[:, None] for layer in layers]
    total = torch.stack([ksvd.regulariser(objective, convention).mean() for objective in objectives])
    for layer in layers:
        if layer.last is not None and layer.last[0].requires_grad:  # the graph keeps the whole model's activations
            layer.last = None
    return total.sum() if convention == "paper" else total.mean()
