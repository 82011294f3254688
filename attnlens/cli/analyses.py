"""Functions behind the commands, which turn a model and its options into a Report. Importing them loads torch."""

from attnlens.lab.reproduce import converge_head, converge_synthetic, study, verify
from attnlens.runs.compare.pipeline import compare
from attnlens.runs.doctor import doctor, recompute
from attnlens.runs.inspect.pipeline import inspect, inspected
from attnlens.runs.progress import Interrupted
from attnlens.runs.series import followed
from attnlens.runs.swap.pipeline import swapped
from attnlens.runs.swap.saved import UnsavedError
