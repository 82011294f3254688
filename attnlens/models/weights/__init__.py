"""Read W_Q and W_K of each head, whatever the layout of the weights."""

from attnlens.models.weights.probe import nothing_to_read, used_weights
from attnlens.models.weights.query_key_maps import Turns, factors, frequencies, rebuilt, rotations
from attnlens.models.weights.rows import Factors, Traits
