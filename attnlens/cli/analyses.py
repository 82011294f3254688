"""Functions that the commands call to make reports. Importing this module loads torch."""

from attnlens.lab.heal.pipeline import heal_work
from attnlens.lab.ranks.pipeline import rank_work
from attnlens.lab.reproduce import converge_head, converge_synthetic, reproduce
from attnlens.runs.compare.pipeline import compare
from attnlens.runs.doctor import doctor, recompute
from attnlens.runs.inspect.pipeline import inspect, run_inspect
from attnlens.runs.progress import Interrupted
from attnlens.runs.series import run_series
from attnlens.runs.swap.pipeline import swap_work
from attnlens.runs.swap.saved import UnsavedError
