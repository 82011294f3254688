"""Finds attention that a model computes by hand: from each softmax back to its queries, keys and values."""

from attnlens.models.trace.mode import Refused, hooked, tracing
