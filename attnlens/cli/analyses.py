"""Functions behind the commands, which turn a model and its options into a Report. Importing them loads torch."""

from attnlens.lab.reproduce import converge_head, converge_synthetic, reproduce
from attnlens.runs.compare.pipeline import compare
from attnlens.runs.doctor import doctor, recompute
from attnlens.runs.inspect.pipeline import inspect, run_inspect
from attnlens.runs.progress import Interrupted
from attnlens.runs.series import follow
from attnlens.runs.swap.pipeline import run_swap
from attnlens.runs.swap.saved import UnsavedError
