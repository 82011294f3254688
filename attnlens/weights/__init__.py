"""W_Q and W_K of each head, whatever the layout."""

from attnlens.weights.factors import Factors, Maps
from attnlens.weights.query_key_maps import factors

__all__ = ["Factors", "Maps", "factors"]
