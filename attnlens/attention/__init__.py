"""How is softmax(log k(q, k) + bias, over the keys allowed) v computed exactly, fast and in O(T · tile) memory?"""

from attnlens.attention.routes import Path, attend, route
from attnlens.attention.rows import weights

__all__ = ["Path", "attend", "route", "weights"]
