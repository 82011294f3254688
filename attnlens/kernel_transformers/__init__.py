"""Small transformers whose attention has any kernel, positions and value function (Tsai et al. 2019)."""

from attnlens.kernel_transformers.attention import EVERYWHERE, AttentionForm, Place, Placing
from attnlens.kernel_transformers.models import KernelTransformer, KernelTransformerConfig, made

__all__ = ["EVERYWHERE", "AttentionForm", "KernelTransformer", "KernelTransformerConfig", "Place", "Placing", "made"]
