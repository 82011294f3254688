"""W_Q and W_K of each head, whatever the layout."""

from attnlens.weights.factors import Factors, Traits
from attnlens.weights.probe import nothing_to_read, used_weights
from attnlens.weights.query_key_maps import factors, rebuilt
from attnlens.weights.rope import Turns, frequencies, rotations

__all__ = [
    "Factors",
    "Traits",
    "Turns",
    "factors",
    "frequencies",
    "nothing_to_read",
    "rebuilt",
    "rotations",
    "used_weights",
]
