"""What does attnlens do with a model? Each command is one function here: model → Report."""

from attnlens.run.doctor import doctor, sound
from attnlens.run.inspect.survey import inspect
from attnlens.run.progress import Interrupted
from attnlens.run.swap.pipeline import swap_kernel
from attnlens.run.swap.saved import Swapped, UnsavedError, load_swapped
from attnlens.run.training.converge import converge
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
