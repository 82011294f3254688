"""attnlens looks at the attention of pretrained transformers as kernel machines.

    >>> import attnlens
    >>> report = attnlens.inspect("demo")
    >>> report.heads[0].measures["weights.symmetry"].value

`inspect`, `swap_kernel`, `converge`, `verify` and `doctor` return a `Report`; `read_report` reads one back, and
`read_plan` a plan of ranks; `load` keeps a model for several calls, and `load_swapped` brings back one that was saved
with another kernel.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own costs as long as all else that the program does before it can be interrupted
if TYPE_CHECKING:
    from typing import Any

    from attnlens.errors import AttnlensError as AttnlensError
    from attnlens.models import load as load
    from attnlens.records import Report as Report
    from attnlens.records import read_plan as read_plan
    from attnlens.records import read_report as read_report
    from attnlens.run.doctor import doctor as doctor
    from attnlens.run.inspect.survey import inspect as inspect
    from attnlens.run.swap.pipeline import swap_kernel as swap_kernel
    from attnlens.run.swap.saved import load_swapped as load_swapped
    from attnlens.run.training.converge import converge as converge
    from attnlens.run.verify import verify as verify

__version__ = "0.1.0"

_HOMES = {
    "AttnlensError": "attnlens.errors",
    "Report": "attnlens.records",
    "converge": "attnlens.run",
    "doctor": "attnlens.run",
    "inspect": "attnlens.run",
    "load": "attnlens.models",
    "load_swapped": "attnlens.run",
    "read_plan": "attnlens.records",
    "read_report": "attnlens.records",
    "swap_kernel": "attnlens.run",
    "verify": "attnlens.run",
}

__all__ = [
    "AttnlensError",
    "Report",
    "__version__",
    "converge",
    "doctor",
    "inspect",
    "load",
    "load_swapped",
    "read_plan",
    "read_report",
    "swap_kernel",
    "verify",
]


def __getattr__(name: str) -> Any:
    """The public names load what they need when they are first used, so that importing attnlens loads no torch."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'attnlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
