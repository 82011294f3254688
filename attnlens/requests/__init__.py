"""What a run can be asked for, and whether it makes sense.

Nothing heavy is imported here, so that a mistake is answered at once.
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
