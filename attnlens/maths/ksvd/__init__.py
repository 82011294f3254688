"""Attention as an asymmetric kernel machine: kernel SVD, dual and primal (Chen et al. 2023).

All functions take plain tensors (…, tokens, features) and work in float64 over all leading axes, without a model. They
return tensors, or a frozen `Dual`, `Primal` or `Nystrom`. Importers: as for `attnlens.maths`.

>>> import torch
>>> from attnlens.maths import ksvd
>>> falling = torch.logspace(0, -2, 16)
>>> query, key = torch.randn(2, 4, 200, 16, generator=torch.Generator().manual_seed(0)) * falling
>>> queries, keys = ksvd.cosine_features(query), ksvd.cosine_features(key)
>>> solution = ksvd.dual(queries, keys, s=8)
>>> solution.e.shape, bool((ksvd.residual(solution, queries, keys) < 1e-12).all())
(torch.Size([4, 200, 8]), True)
>>> weights = ksvd.primal(solution, queries, keys)
>>> torch.allclose(weights.e_scores(queries), solution.e)
True

Three functions handle long sequences. No command uses the last two: they are for your own programs.

- `dual`, for a kernel with finitely many features (cosine, random features): exact, O(tokens · features²), without K.
- `truncated`, for a dense K that fits in memory, such as attention over more than a thousand tokens: only the s leading
  components, each to rounding.
- `nystrom`, for any kernel function if K does not fit: from K's columns at a few keys and its rows at a few queries. An
  approximation, more stable if s is half their number, because it divides by the block's smallest σ.

>>> def kernel(query, key):
...     return (0.25 * query.double() @ key.double().mT).exp()
>>> exact = ksvd.truncated(kernel(query, key), s=8)
>>> few_queries, few_keys = ksvd.sampled_rows(query, 80), ksvd.sampled_rows(key, 80)
>>> maps = ksvd.nystrom(kernel(few_queries, few_keys), s=40)
>>> wide_queries, wide_keys = maps.query_features(kernel(query, few_keys)), maps.key_features(kernel(few_queries, key))
>>> near = ksvd.dual(wide_queries, wide_keys, s=8)
>>> bool((near.values / exact.values - 1).abs().max() < 0.1)
True
"""

from attnlens.choices import ETA, Convention
from attnlens.maths.ksvd.dual import (
    Dual,
    Nystrom,
    Primal,
    centre_rows,
    cosine_features,
    dual,
    evenly_spaced,
    matrix_dual,
    matrix_residual,
    mean_angle,
    nystrom,
    objective,
    primal,
    principal_angles,
    random_features,
    regulariser,
    residual,
    sampled_rows,
    share_inside,
    truncated,
    unit,
)
