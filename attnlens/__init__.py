"""attnlens analyses the attention of pretrained transformers as kernel machines.

    >>> import attnlens
    >>> report = attnlens.inspect("demo")
    >>> report.heads[0].measures["weights.symmetry"].value

`inspect`, `compare`, `swap_kernel`, `find_ranks`, `heal`, `converge_synthetic`, `converge_head`,
`converge_checkpoints`, `reproduce` and `doctor` return a `Report`; `check` checks a report against rules. `read_report`
reads a report from its file, and `read_plan` reads a plan of ranks. `load` loads a model once for several calls, and
`load_swapped` loads a model saved with a different kernel. `Lens` wraps a model and offers these analyses as methods.
For a model in memory, `capture` returns the queries and keys, and `replaced` replaces the kernel temporarily.
With `analyzer`, `kernel`, `MeasureInfo` and `KernelParameter`, you define your own measures and kernels.

The packages `analyzers`, `kernels`, `lab`, `maths` and `records` are imported at first use, as in
`attnlens.maths.ksvd.dual`. Type checkers and editors read the types of all names from `__init__.pyi`.
"""

from __future__ import annotations

from attnlens.lazy import import_submodules

__version__ = "0.1.0"

_PACKAGES = ("analyzers", "kernels", "lab", "maths", "records")
_NAMES = {
    "analyzers.registry": ("MeasureInfo", "analyzer"),
    "errors": ("AttnlensError",),
    "checks": ("check",),
    "kernels.registry": ("KernelParameter", "kernel"),
    "models.loading": ("load",),
    "records": ("QueryKey", "read_plan"),
    "report.report": ("Report", "read_report"),
    "lab.heal.pipeline": ("heal",),
    "lab.ranks.pipeline": ("find_ranks",),
    "lab.lens": ("Lens",),
    "lab.reproduce": ("converge_head", "converge_synthetic", "reproduce"),
    "runs.compare.pipeline": ("compare",),
    "runs.doctor": ("doctor",),
    "runs.inspect.pipeline": ("inspect",),
    "runs.capture": ("capture",),
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
