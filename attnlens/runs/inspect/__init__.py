"""Measure a model's attention heads from their weights and from real text."""
