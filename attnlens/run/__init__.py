"""The commands as functions: a model and a request give a Report."""

from attnlens.run.compare.pipeline import compare
from attnlens.run.doctor import doctor, sound
from attnlens.run.inspect.capture import capture
from attnlens.run.inspect.pipeline import inspect, inspected
from attnlens.run.recompute import recompute
from attnlens.run.study import study
from attnlens.run.swap.pipeline import swap_kernel, swapped
from attnlens.run.swap.saved import Swapped, UnsavedError, load_swapped
from attnlens.run.swap.sites import replaced
from attnlens.run.training.one_head import converge_head
from attnlens.run.training.series import converge_checkpoints, followed
from attnlens.run.training.synthetic import converge_synthetic
from attnlens.run.verify import verify
from attnlens.runs.progress import Interrupted

__all__ = [
    "Interrupted",
    "Swapped",
    "UnsavedError",
    "capture",
    "compare",
    "converge_checkpoints",
    "converge_head",
    "converge_synthetic",
    "doctor",
    "followed",
    "inspect",
    "inspected",
    "load_swapped",
    "recompute",
    "replaced",
    "sound",
    "study",
    "swap_kernel",
    "swapped",
    "verify",
]
