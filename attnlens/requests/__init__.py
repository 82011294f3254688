"""What a run can be asked for, and whether it makes sense.

Nothing heavy is imported here, so that a mistake is answered at once.
"""

from attnlens.requests.kinds import (
    OUTPUT,
    Convention,
    Feeding,
    InspectRequest,
    Loading,
    ModelRequest,
    Part,
    Route,
    SwapRequest,
    Sweep,
)
from attnlens.requests.option import Option, alternatives, checked, options, value_of
from attnlens.requests.values import Numbers, Words, head, numbers, whole, words

__all__ = [
    "OUTPUT",
    "Convention",
    "Feeding",
    "InspectRequest",
    "Loading",
    "ModelRequest",
    "Numbers",
    "Option",
    "Part",
    "Route",
    "SwapRequest",
    "Sweep",
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
