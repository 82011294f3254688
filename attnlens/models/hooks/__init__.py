"""Watch a running model's attention, or replace its kernel, through transformers' attention interface.

`survey` lists the attention sites of one forward pass. Inside a `with`, `watch` observes the attention of sites, and
`replace` computes it with another kernel. `identity_error` measures how much the model's outputs change when attnlens
recomputes the attention.
"""

from attnlens.kernels import OWN
from attnlens.models.hooks.interface import (
    CallCounter,
    Replacement,
    Swaps,
    answer_calls,
    attend_swapped,
    implementation,
    install,
    is_answered,
    is_attention,
    replace,
    watch,
)
from attnlens.models.hooks.survey import (
    IDENTITY_TOLERANCE,
    UNTRACED,
    Precise,
    SiteCall,
    Survey,
    allow_float64,
    as_dtype,
    as_float64,
    at_real_tokens,
    blocks,
    collect_weights,
    difference,
    forward,
    identity_error,
    place_of,
    real_outputs,
    real_tokens,
    record_inputs,
    record_outputs,
    repeat_error,
    replay_outputs,
    run_survey,
    survey,
    without_cache,
    without_logits,
)
