"""Factored matrices A Bᵀ in float64, analysed without forming them."""

from attnlens.linalg.attention import (
    Anatomy,
    anatomy,
    attention_rank,
    attention_singular_values,
    centred,
    definite,
    definite_kernel,
    entropy,
    even_weight,
    first_weight,
    max_weight,
)
from attnlens.linalg.changes import change, largest_angle
from attnlens.linalg.forms import Form, averaged, traces
from attnlens.linalg.spectra import (
    cumulative,
    decay_rate,
    effective_rank,
    in_pool,
    over_heads,
    product_singular_values,
    rank_at,
    singular_values,
    stable_rank,
)
from attnlens.linalg.symmetries import directionality, layer_symmetry, symmetry, symmetry_by_distance
from attnlens.linalg.truncations import feature_rank, gaussian_like, taylor_order
from attnlens.linalg.visible import VisibleShares, compares_all, seen, seen_rank, visible_shares

__all__ = [
    "Anatomy",
    "Form",
    "VisibleShares",
    "anatomy",
    "attention_rank",
    "attention_singular_values",
    "averaged",
    "centred",
    "change",
    "compares_all",
    "cumulative",
    "decay_rate",
    "definite",
    "definite_kernel",
    "directionality",
    "effective_rank",
    "entropy",
    "even_weight",
    "feature_rank",
    "first_weight",
    "gaussian_like",
    "in_pool",
    "largest_angle",
    "layer_symmetry",
    "max_weight",
    "over_heads",
    "product_singular_values",
    "rank_at",
    "seen",
    "seen_rank",
    "singular_values",
    "stable_rank",
    "symmetry",
    "symmetry_by_distance",
    "taylor_order",
    "traces",
    "visible_shares",
]
