"""Import modules at their first use, so that listing kernels or measures loads neither torch nor scipy."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing here would double the time of `import attnlens`
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any  # attributes of a module that is not yet imported can have any type


def import_submodules(
    package: str, submodules: Collection[str], homes: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Build a package's `__getattr__`, which imports submodules at their first use.

    `homes` maps other names of the package to the submodules that define them.
    """

    def import_name(name: str) -> Any:
        from importlib import import_module

        if name in submodules:
            return import_module(f"{package}.{name}")
        if homes and name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return import_name


class LazyModule:
    """Placeholder for a module that is imported when one of its attributes is first read.

    The placeholder stores the module, because torch cannot compile a function that contains an import.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            from importlib import import_module

            self._module = import_module(self._name)
        return getattr(self._module, attribute)
