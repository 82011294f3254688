"""Nearest forms: logits made symmetric or positive definite, or rid of their key gate; entered as a kernel."""

from attnlens.kernels.nearest.fitted import nearest as nearest
