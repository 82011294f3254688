"""Read W_Q and W_K of each head, whatever the layout of the weights.

query_key_maps.py: `factors` yields each site's maps q = (x W_Q + b_Q) R(i) and k = (y W_K + b_K) R(i), or the error
that says why there are none; `rotations` fits the position encoding R(i) alone. probe.py calls a module on its own, and
finds the maps of its heads among its weights. Inputs: a model and its sites as `models/hooks` lists them. Outputs:
`Factors` in float64, whose `query_key` analyzers read. Imported by `runs/` and `lab/ranks`.
"""

from attnlens.models.weights.query_key_maps import Factors, Traits, Turns, factors, frequencies, rebuild, rotations
