"""Train small transformers with any kernel, to rerun the papers' tables."""
