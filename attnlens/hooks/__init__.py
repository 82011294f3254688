"""How is a running model's attention reached? Through transformers' own interface: watch it, or replace its kernel."""

from attnlens.hooks.call import Call, Kernel, attend, exponential
from attnlens.hooks.door import Door, opened, replace, watch
from attnlens.hooks.survey import IDENTITY_TOLERANCE, Reached, as_dtype, forward, identity_error, survey, unreached

__all__ = [
    "IDENTITY_TOLERANCE",
    "Call",
    "Door",
    "Kernel",
    "Reached",
    "as_dtype",
    "attend",
    "exponential",
    "forward",
    "identity_error",
    "opened",
    "replace",
    "survey",
    "unreached",
    "watch",
]
