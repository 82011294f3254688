"""How is a running model's attention reached? Through transformers' own interface: watch it, or replace its kernel."""

from attnlens.hooks.call import Call, Kernel, attend, exponential
from attnlens.hooks.door import Door, implementation, is_attention, opened, replace, watch
from attnlens.hooks.survey import (
    IDENTITY_TOLERANCE,
    Reached,
    allow_float64,
    as_dtype,
    forward,
    identity_error,
    real_outputs,
    survey,
    unreached,
)

__all__ = [
    "IDENTITY_TOLERANCE",
    "Call",
    "Door",
    "Kernel",
    "Reached",
    "allow_float64",
    "as_dtype",
    "attend",
    "exponential",
    "forward",
    "identity_error",
    "implementation",
    "is_attention",
    "opened",
    "real_outputs",
    "replace",
    "survey",
    "unreached",
    "watch",
]
