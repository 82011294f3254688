"""Options of runs, and checks of their values.

Nothing heavy is imported here, so that errors are reported immediately.
"""

from attnlens.requests.fields import (
    Option,
    Words,
    alternatives,
    checked,
    folder,
    head,
    numbers,
    one_head,
    options,
    value_of,
    whole,
    words,
)
from attnlens.requests.run_options import (
    OUTPUT,
    CheckpointsRequest,
    CompareRequest,
    Feeding,
    InspectRequest,
    Loading,
    ModelRequest,
    SpreadRequest,
    SwapRequest,
)
