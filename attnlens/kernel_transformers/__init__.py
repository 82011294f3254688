"""Small transformers whose attention has any kernel, positions and value function (Tsai et al. 2019)."""

from attnlens.kernel_transformers.forms import EVERYWHERE, Form, Place, Positions
from attnlens.kernel_transformers.models import KernelTransformer, KernelTransformerConfig, made, named

__all__ = ["EVERYWHERE", "Form", "KernelTransformer", "KernelTransformerConfig", "Place", "Positions", "made", "named"]
