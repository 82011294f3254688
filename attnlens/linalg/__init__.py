"""What can be said about factored matrices A Bᵀ without forming them? Pure maths on tensors, in float64."""

from attnlens.linalg.anatomy import Anatomy, anatomy
from attnlens.linalg.attention import attention_singular_values, centred, entropy, max_weight
from attnlens.linalg.definite import definite
from attnlens.linalg.forms import Form
from attnlens.linalg.parallel import in_pool, over_heads
from attnlens.linalg.rotation import averaged, traces
from attnlens.linalg.spectra import (
    cumulative,
    decay_law,
    effective_rank,
    product_singular_values,
    rank_at,
    singular_values,
    stable_rank,
)
from attnlens.linalg.symmetries import directionality, layer_symmetry, symmetry, symmetry_by_distance

__all__ = [
    "Anatomy",
    "Form",
    "anatomy",
    "attention_singular_values",
    "averaged",
    "centred",
    "cumulative",
    "decay_law",
    "definite",
    "directionality",
    "effective_rank",
    "entropy",
    "in_pool",
    "layer_symmetry",
    "max_weight",
    "over_heads",
    "product_singular_values",
    "rank_at",
    "singular_values",
    "stable_rank",
    "symmetry",
    "symmetry_by_distance",
    "traces",
]
