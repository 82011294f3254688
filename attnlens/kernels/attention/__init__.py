"""Exact attention, softmax(log k(q, k) + bias) v over the allowed keys, in O(tokens · tile) memory.

Ties that need whole sequences take O(tokens²) memory.

Contents: `routes` (attend: choose the fastest exact route), `rows` (row tiles, whole matrices, masks, positions),
`sums` (SDPA, running sums, hybrids, Primal-Attention), `scores` (FlexAttention), `primal_heads` (Primal-Attention as a
torch module).
Inputs: a `records.Call` and a `Kernel`. Outputs: (batch, queries, heads, value_dim), or the attention weights.
Imported by `models`, `runs` and `lab`. Importing this package loads torch, unlike the other modules of `kernels`.
"""

from attnlens.choices import Route
from attnlens.kernels.attention.routes import attend, route
from attnlens.kernels.attention.rows import weights

__all__ = ["Route", "attend", "route", "weights"]
