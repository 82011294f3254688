"""Compares training with the max-margin solution: synthetic experiments, one head, or checkpoints."""
