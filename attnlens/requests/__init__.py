"""Options of runs, and checks of their values; torch is not imported, so that errors are reported immediately.

`fields` defines the base class `Request` and types of options; `run_options`, `swap` and `experiments` define one class
per kind of run; `reading` derives settings and analyzers from options.
"""

from attnlens.requests.fields import (
    Request,
    Words,
    alternatives,
    details,
    head,
    layer_list,
    numbers,
    one_head,
    takes,
    words,
)
from attnlens.requests.run_options import (
    CheckpointsRequest,
    CompareRequest,
    DoctorRequest,
    Feeding,
    InspectRequest,
    Loading,
    SpreadRequest,
)
from attnlens.requests.swap import HealRequest, RanksRequest, SwapRequest
