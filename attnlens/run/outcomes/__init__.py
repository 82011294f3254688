"""Compares a changed model with the original on the same batches."""
