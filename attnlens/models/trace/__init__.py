"""Find hand-written attention in a model: trace each softmax back to its queries, keys and values.

Input: a running model. Output: `trace_attention` passes each attention computation as a `Call` to a function whose
result replaces it, and lists unreadable modules. Imported by the other packages of `models/`, `runs/` and `lab/heal`.
"""

from attnlens.models.trace.mode import Refused, call_arguments, pair_heads, remove_hooks, trace_attention
from attnlens.models.trace.scores import Keywords, tensors
