"""Load the kernels and analyzers of other packages, and refuse those that take the name of a registered one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import metadata

from attnlens.errors import UsageError


@cache
def load_plugins(group: str) -> None:
    """Import the modules that installed packages offer under an entry-point group, once per process."""
    for entry in metadata.entry_points(group=group):
        entry.load()


def refuse_replacing(
    what: str,
    name: str,
    function: Callable[..., object],
    present: Callable[..., object],
    remedy: str = "Choose another name, or pass replace=True to the decorator.",
) -> None:
    """Raise UsageError if `present`, which already has the name, belongs to another module.

    A module may define its own functions again: a notebook does, and so does a script that is also imported.
    """
    origins = ["attnlens" if is_built_in(each) else each.__module__ for each in (function, present)]
    files = [getattr(getattr(each, "__code__", None), "co_filename", each) for each in (function, present)]
    if origins[0] == origins[1] or files[0] == files[1]:
        return
    owner = "built in" if is_built_in(present) else f"defined by {present.__module__}"
    raise UsageError(f"{function.__module__} defines the {what} {name!r}, which is already {owner}.", remedy)


def is_built_in(function: Callable[..., object]) -> bool:
    """Return whether a function belongs to attnlens itself."""
    return function.__module__.partition(".")[0] == "attnlens"
