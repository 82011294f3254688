"""Trains small transformers of any kernel and reruns the papers' tables."""
