"""Trains swapped heads towards the original model, or on text: W_Q, W_K and the kernel's own parameters."""

from attnlens.run.swap.healing.descent import heal
from attnlens.run.swap.healing.healer import Healer
from attnlens.run.swap.healing.procedure import Procedure, control_of, digest_of
from attnlens.run.swap.healing.trained import changed_weights

__all__ = ["Healer", "Procedure", "changed_weights", "control_of", "digest_of", "heal"]
