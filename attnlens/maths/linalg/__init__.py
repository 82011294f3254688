"""Linear algebra of factored matrices A Bᵀ in float64; most functions do not form the products.

- `forms`: the bilinear form M = W_Q W_Kᵀ of a head, with or without RoPE: symmetry, spectrum, change, angles.
- `attention`: measures of attention weights, the parts of the scores, definiteness of the kernel.
- `visible`: ranks of the scores on visible pairs (those that the mask does not hide), and shares of their variance.
- `spectra`: singular values, ranks, the number of features that attention needs, the thread pool over heads.
- `long`: leading singular values and sums of scores for long sequences, whose matrices are computed in tiles.

Inputs are a `QueryKey`, its `Form`, or stacks of matrices; outputs are mostly tensors with one value or curve per head.
Imported by the packages that import `attnlens.maths`, and by `maths.ksvd`.
"""

from attnlens.maths.linalg.attention import (
    Anatomy,
    anatomy,
    attention_rank,
    attention_singular_values,
    definite,
    definite_kernel,
    entropy,
    even_weight,
    first_weight,
    max_weight,
    remove_row_sums,
)
from attnlens.maths.linalg.forms import (
    Form,
    average_rotations,
    change,
    directionality,
    largest_angle,
    layer_symmetry,
    relative_change,
    rotation_traces,
    symmetry,
    symmetry_by_distance,
)
from attnlens.maths.linalg.spectra import (
    cumulative,
    decay_rate,
    effective_rank,
    feature_rank,
    gaussian_like,
    map_in_pool,
    over_heads,
    product_singular_values,
    rank_at,
    singular_values,
    stable_rank,
    taylor_order,
)
from attnlens.maths.linalg.visible import VisibleShares, compares_all, visible_rank, visible_scores, visible_shares
