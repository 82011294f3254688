"""What does attnlens do with a model? Each command is one function here: model → Report."""

from attnlens.run.converge import converge
from attnlens.run.doctor import doctor, sound
from attnlens.run.inspect import Interrupted, inspect
from attnlens.run.saved import Swapped, UnsavedError, load_swapped
from attnlens.run.swap import swap_kernel
from attnlens.run.verify import verify

__all__ = [
    "Interrupted",
    "Swapped",
    "UnsavedError",
    "converge",
    "doctor",
    "inspect",
    "load_swapped",
    "sound",
    "swap_kernel",
    "verify",
]
