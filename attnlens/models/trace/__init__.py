"""Find hand-written attention in a model: trace each softmax back to its queries, keys and values."""

from attnlens.models.trace.mode import Refused, hooked, tracing
