"""Find hand-written attention in a running model: trace queries and keys to a softmax, and attention weights to values.

Hand-written attention is attention that a module computes with its own code, without transformers' interface.
"""

from attnlens.models.trace.mode import Refused, call_arguments, pair_heads, remove_hooks, trace_attention
from attnlens.models.trace.scores import NOT_FINITE, Keywords, tensors
