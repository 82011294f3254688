"""Attention softmax(log k(q, k) + bias) v over the allowed keys, exact, in O(tokens · tile) memory."""

from attnlens.attention.routes import attend, route
from attnlens.attention.rows import weights
from attnlens.choices import Route

__all__ = ["Route", "attend", "route", "weights"]
