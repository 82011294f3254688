"""Options of runs, and checks of their values.

Nothing heavy is imported here, so that errors are reported immediately.
"""

from attnlens.requests.fields import (
    Request,
    Words,
    alternatives,
    details,
    folder,
    head,
    literals,
    numbers,
    one_head,
    takes,
    whole,
    words,
)
from attnlens.requests.run_options import (
    OUTPUT,
    CheckpointsRequest,
    CompareRequest,
    DoctorRequest,
    Feeding,
    InspectRequest,
    Loading,
    ModelRequest,
    SpreadRequest,
)
from attnlens.requests.swap import HealRequest, RanksRequest, SwapRequest
