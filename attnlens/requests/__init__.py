"""What a run can be asked for, and whether it makes sense.

Nothing heavy is imported here, so that a mistake is answered at once.
"""

from attnlens.requests.fields import Option, alternatives, checked, options, value_of
from attnlens.requests.run_options import (
    OUTPUT,
    Feeding,
    InspectRequest,
    Loading,
    ModelRequest,
    SwapRequest,
)
from attnlens.requests.values import Words, head, numbers, whole, words

__all__ = [
    "OUTPUT",
    "Feeding",
    "InspectRequest",
    "Loading",
    "ModelRequest",
    "Option",
    "SwapRequest",
    "Words",
    "alternatives",
    "checked",
    "head",
    "numbers",
    "options",
    "value_of",
    "whole",
    "words",
]
