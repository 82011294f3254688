"""Train small transformers with any kernel, to reproduce the papers' tables."""
