"""Trains swapped heads towards the original model: W_Q, W_K and the kernel's own parameters."""

from attnlens.run.swap.healing.descent import heal
from attnlens.run.swap.healing.healer import Healer, changed_weights

__all__ = ["Healer", "changed_weights", "heal"]
