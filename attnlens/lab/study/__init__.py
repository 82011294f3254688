"""Train small transformers with different kernels, to reproduce the papers' tables."""
