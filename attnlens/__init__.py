"""attnlens analyses the attention of pretrained transformers as kernel machines.

    >>> import attnlens
    >>> report = attnlens.inspect("demo")
    >>> report.heads[0].measures["weights.symmetry"].value

`inspect`, `compare`, `swap_kernel`, `find_ranks`, `heal`, `converge_synthetic`, `converge_head`,
`converge_checkpoints`, `reproduce` and `doctor` return a `Report`; `check` checks one against rules. `read_report`
reads a report from its file, and `read_plan` a plan of ranks. `load` loads a model for several calls, and
`load_swapped` one that was saved with another kernel. `Lens` wraps a model and offers these analyses as methods.
`capture` and `replaced` work on a model that is already in memory. `analyzer`, `kernel`, `MeasureInfo` and
`KernelParameter` define measures and kernels of your own.

The packages `analyzers`, `kernels`, `lab`, `maths` and `records` are imported at their first use, as in
`attnlens.maths.ksvd.dual`.
"""

from __future__ import annotations

from attnlens.lazy import import_submodules

TYPE_CHECKING = False  # importing typing takes as long as everything else that happens before Ctrl-C is handled
if TYPE_CHECKING:
    from attnlens import analyzers as analyzers
    from attnlens import kernels as kernels
    from attnlens import lab as lab
    from attnlens import maths as maths
    from attnlens import records as records
    from attnlens.analyzers.registry import MeasureInfo as MeasureInfo
    from attnlens.analyzers.registry import analyzer as analyzer
    from attnlens.checks import check as check
    from attnlens.errors import AttnlensError as AttnlensError
    from attnlens.kernels.registry import KernelParameter as KernelParameter
    from attnlens.kernels.registry import kernel as kernel
    from attnlens.lab.heal.pipeline import heal as heal
    from attnlens.lab.ranks.pipeline import find_ranks as find_ranks
    from attnlens.lab.reproduce import converge_head as converge_head
    from attnlens.lab.reproduce import converge_synthetic as converge_synthetic
    from attnlens.lab.reproduce import reproduce as reproduce
    from attnlens.models.loading import load as load
    from attnlens.records import QueryKey as QueryKey
    from attnlens.records import Report as Report
    from attnlens.records import read_plan as read_plan
    from attnlens.records import read_report as read_report
    from attnlens.runs.compare.pipeline import compare as compare
    from attnlens.runs.doctor import doctor as doctor
    from attnlens.runs.in_memory import capture as capture
    from attnlens.runs.inspect.pipeline import inspect as inspect
    from attnlens.runs.lens import Lens as Lens
    from attnlens.runs.series import converge_checkpoints as converge_checkpoints
    from attnlens.runs.swap.pipeline import swap_kernel as swap_kernel
    from attnlens.runs.swap.saved import load_swapped as load_swapped
    from attnlens.runs.swap.sites import replaced as replaced

__version__ = "0.1.0"

_PACKAGES = ("analyzers", "kernels", "lab", "maths", "records")
_NAMES = {
    "analyzers.registry": ("MeasureInfo", "analyzer"),
    "errors": ("AttnlensError",),
    "checks": ("check",),
    "kernels.registry": ("KernelParameter", "kernel"),
    "models.loading": ("load",),
    "records": ("QueryKey", "Report", "read_plan", "read_report"),
    "lab.heal.pipeline": ("heal",),
    "lab.ranks.pipeline": ("find_ranks",),
    "lab.reproduce": ("converge_head", "converge_synthetic", "reproduce"),
    "runs.compare.pipeline": ("compare",),
    "runs.doctor": ("doctor",),
    "runs.in_memory": ("capture",),
    "runs.inspect.pipeline": ("inspect",),
    "runs.lens": ("Lens",),
    "runs.series": ("converge_checkpoints",),
    "runs.swap.pipeline": ("swap_kernel",),
    "runs.swap.saved": ("load_swapped",),
    "runs.swap.sites": ("replaced",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_PACKAGES, *_HOMES, "__version__"])  # noqa: PLE0605


__getattr__ = import_submodules(__name__, _PACKAGES, _HOMES)  # importing attnlens must not load torch


def __dir__() -> list[str]:
    return __all__
