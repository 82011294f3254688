"""Attention softmax(log k(q, k) + bias) v over the allowed keys, exact, in O(tokens · tile) memory."""

from attnlens.choices import Route
from attnlens.kernels.attention.routes import attend, route
from attnlens.kernels.attention.rows import weights

__all__ = ["Route", "attend", "route", "weights"]
