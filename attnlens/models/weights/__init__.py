"""Read W_Q and W_K of each head, whatever the layout of the weights.

query_key_maps.py computes each site's maps from inputs x and y to queries (x W_Q + b_Q) R(i) and keys (y W_K + b_K)
R(i), with the rotation R(i) of position i. roles.py finds the rows of each role (query, key, value, output), and reads
a layer's tensors by role. probe.py calls a module outside of the model, and finds W_Q and W_K among the weights.
"""

from attnlens.models.weights.query_key_maps import Factors, Traits, Turns, factors, frequencies, rebuild, rotations
from attnlens.models.weights.roles import Roles, add_offset, block_path, locate_roles, norm_offsets, read_layer
