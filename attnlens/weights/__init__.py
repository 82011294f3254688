"""W_Q and W_K of each head, whatever the layout."""

from attnlens.weights.factors import Factors
from attnlens.weights.query_key_maps import factors
from attnlens.weights.rebuilt import rebuilt
from attnlens.weights.rope import frequencies, rotations

__all__ = ["Factors", "factors", "frequencies", "rebuilt", "rotations"]
