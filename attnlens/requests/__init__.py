"""Options of runs, and checks of their values.

Contents: `fields` (base class `Request`, field types), `run_options`, `swap` and `experiments` (the requests, one class
per kind of run), `reading` (options → settings and analyzers).
Inputs: options as keywords. Outputs: frozen requests, or UsageError. Imports `analyzers`, `kernels` and
`records`. Importers: `models`, `runs`, `lab` and `cli`.

Nothing heavy is imported here, so that errors are reported immediately.
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
