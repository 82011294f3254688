"""How is softmax(log k(q, k) + bias, over the keys allowed) v computed exactly, fast and in O(T · tile) memory?"""

from attnlens.attention.routes import Route, attend, route
from attnlens.attention.rows import weights

__all__ = ["Route", "attend", "route", "weights"]
