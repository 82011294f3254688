"""The commands as functions: a model and a request give a Report."""

from attnlens.run.compare.pipeline import compare
from attnlens.run.doctor import doctor, recompute
from attnlens.run.in_memory import capture
from attnlens.run.inspect.pipeline import inspect, inspected
from attnlens.run.series import converge_checkpoints, followed
from attnlens.run.swap.pipeline import swap_kernel, swapped
from attnlens.run.swap.saved import Swapped, UnsavedError, load_swapped
from attnlens.run.swap.sites import replaced
from attnlens.run.verify import converge_head, converge_synthetic, study, verify
from attnlens.runs.progress import Interrupted
