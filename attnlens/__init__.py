"""attnlens looks at the attention of pretrained transformers as kernel machines.

    >>> import attnlens
    >>> report = attnlens.inspect("demo")
    >>> report.heads[0].measures["weights.symmetry"].value

`inspect`, `compare`, `swap_kernel`, `converge_synthetic`, `converge_head`, `converge_checkpoints`, `study`, `verify`
and `doctor` return a `Report`; `check` holds one against rules; `read_report` reads one back, and `read_plan` a plan of
ranks; `load` keeps a model for several calls, and `load_swapped` brings back one that was saved with another kernel.
`capture` and `replaced` work on a model that your own code holds in memory. `analyzer`, `kernel`, `MeasureInfo` and
`KernelParameter` define measures and kernels of your own.

The submodules `analyzers`, `attsvm`, `kernels`, `ksvd`, `linalg`, `primal`, `records` and `statistics` are imported
when they are first used, as in `attnlens.ksvd.dual`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own costs as long as all else that the program does before it can be interrupted
if TYPE_CHECKING:
    from typing import Any

    from attnlens import analyzers as analyzers
    from attnlens import attsvm as attsvm
    from attnlens import kernels as kernels
    from attnlens import ksvd as ksvd
    from attnlens import linalg as linalg
    from attnlens import primal as primal
    from attnlens import records as records
    from attnlens import statistics as statistics
    from attnlens.errors import AttnlensError as AttnlensError
    from attnlens.models import load as load
    from attnlens.records import QueryKey as QueryKey
    from attnlens.records import Report as Report
    from attnlens.records import read_plan as read_plan
    from attnlens.records import read_report as read_report
    from attnlens.registry import KernelParameter as KernelParameter
    from attnlens.registry import MeasureInfo as MeasureInfo
    from attnlens.registry import analyzer as analyzer
    from attnlens.registry import kernel as kernel
    from attnlens.rules import check as check
    from attnlens.run.compare.pipeline import compare as compare
    from attnlens.run.doctor import doctor as doctor
    from attnlens.run.in_memory import capture as capture
    from attnlens.run.inspect.pipeline import inspect as inspect
    from attnlens.run.series import converge_checkpoints as converge_checkpoints
    from attnlens.run.swap.pipeline import swap_kernel as swap_kernel
    from attnlens.run.swap.saved import load_swapped as load_swapped
    from attnlens.run.swap.sites import replaced as replaced
    from attnlens.run.verify import converge_head as converge_head
    from attnlens.run.verify import converge_synthetic as converge_synthetic
    from attnlens.run.verify import study as study
    from attnlens.run.verify import verify as verify

__version__ = "0.1.0"

_SUBMODULES = ("analyzers", "attsvm", "kernels", "ksvd", "linalg", "primal", "records", "statistics")
_ROOMS = {
    "errors": ("AttnlensError",),
    "models": ("load",),
    "records": ("QueryKey", "Report", "read_plan", "read_report"),
    "registry": ("MeasureInfo", "KernelParameter", "analyzer", "kernel"),
    "rules": ("check",),
    "run": (
        *("capture", "compare", "converge_checkpoints", "converge_head", "converge_synthetic", "doctor", "inspect"),
        *("load_swapped", "replaced", "study", "swap_kernel", "verify"),
    ),
}
_HOMES = {name: f"attnlens.{room}" for room, names in _ROOMS.items() for name in names}

__all__ = sorted([*_SUBMODULES, *_HOMES, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """The public names load what they need when they are first used, so that importing attnlens loads no torch."""
    if name in _SUBMODULES or name in _HOMES:
        from importlib import import_module

        return import_module(f"attnlens.{name}") if name in _SUBMODULES else getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'attnlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
