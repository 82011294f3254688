"""What does attnlens do with a model? Each command is one function here: model → Report."""

from attnlens.run.converge import converge
from attnlens.run.doctor import doctor, sound
from attnlens.run.inspect import Interrupted, inspect
from attnlens.run.saved import Swapped, load_swapped
from attnlens.run.swap import swap_kernel
from attnlens.run.verify import verify

__all__ = [
    "Interrupted",
    "Swapped",
    "converge",
    "doctor",
    "inspect",
    "load_swapped",
    "sound",
    "swap_kernel",
    "verify",
]
