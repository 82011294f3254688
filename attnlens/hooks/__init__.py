"""Watches a running model's attention, or replaces its kernel, through transformers' own interface."""

from attnlens.hooks.blocks import blocks, recorded, resumed
from attnlens.hooks.eager import handed_out
from attnlens.hooks.identity import (
    IDENTITY_TOLERANCE,
    Precise,
    allow_float64,
    as_dtype,
    difference,
    identity_error,
    repeat_error,
)
from attnlens.hooks.implementations import implementation, is_attention
from attnlens.hooks.inputs import inputs_of
from attnlens.hooks.interface import (
    CallCounter,
    Replacement,
    Swaps,
    install,
    is_answered,
    opened,
    replace,
    swapped,
    watch,
)
from attnlens.hooks.survey import (
    UNTRACED,
    Reached,
    Surveyed,
    as_sequences,
    at_real_tokens,
    forward,
    real_outputs,
    real_tokens,
    survey,
    surveyed,
    without_cache,
)
from attnlens.kernels import OWN

__all__ = [
    "IDENTITY_TOLERANCE",
    "OWN",
    "UNTRACED",
    "CallCounter",
    "Precise",
    "Reached",
    "Replacement",
    "Surveyed",
    "Swaps",
    "allow_float64",
    "as_dtype",
    "as_sequences",
    "at_real_tokens",
    "blocks",
    "difference",
    "forward",
    "handed_out",
    "identity_error",
    "implementation",
    "inputs_of",
    "install",
    "is_answered",
    "is_attention",
    "opened",
    "real_outputs",
    "real_tokens",
    "recorded",
    "repeat_error",
    "replace",
    "resumed",
    "survey",
    "surveyed",
    "swapped",
    "watch",
    "without_cache",
]
