"""Watch a running model's attention, or replace its kernel, through transformers' attention interface."""

from attnlens.kernels import OWN
from attnlens.models.hooks.identity import (
    IDENTITY_TOLERANCE,
    Precise,
    allow_float64,
    as_dtype,
    blocks,
    difference,
    handed_out,
    identity_error,
    recorded,
    repeat_error,
    resumed,
)
from attnlens.models.hooks.interface import (
    CallCounter,
    Replacement,
    Swaps,
    implementation,
    install,
    is_answered,
    is_attention,
    opened,
    replace,
    swapped,
    watch,
)
from attnlens.models.hooks.survey import (
    UNTRACED,
    Reached,
    Surveyed,
    as_sequences,
    at_real_tokens,
    forward,
    inputs_of,
    real_outputs,
    real_tokens,
    survey,
    surveyed,
    without_cache,
)
