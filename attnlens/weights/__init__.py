"""W_Q and W_K of each head, whatever the layout."""

from attnlens.weights.query_key_maps import Factors, factors
from attnlens.weights.rebuilt import rebuilt

__all__ = ["Factors", "factors", "rebuilt"]
