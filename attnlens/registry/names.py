"""Check names: suggest the nearest one for an unknown one, and refuse a plug-in that would replace another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attnlens.errors import UsageError


def checked_name(what: str, name: str, known: Iterable[str]) -> str:
    """`name`, if it is known; else UsageError with «did you mean»."""
    options = list(known)
    if name in options:
        return name
    import difflib

    written = name[:60] if isinstance(name, str) else f"of type {type(name).__name__}"
    near = difflib.get_close_matches(written, options, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"There is no {what} {written!r}.", f"{hint}There are: {', '.join(options)}.")


def refuse_replacing(
    what: str,
    name: str,
    function: Callable[..., Any],
    present: Callable[..., Any],
    remedy: str = "Choose another name, or pass replace=True to the decorator.",
) -> None:
    """Raise UsageError if `present`, which has the name already, is of another module.

    A module may define its own functions again, as a notebook does, and a script that is imported too.
    """
    if _origin(function) == _origin(present) or _file(function) == _file(present):
        return
    owner = "built in" if is_built_in(present) else f"defined by {present.__module__}"
    raise UsageError(f"{function.__module__} defines the {what} {name!r}, which is already {owner}.", remedy)


def is_built_in(function: Callable[..., Any]) -> bool:
    """Return whether a function belongs to attnlens itself."""
    return function.__module__.partition(".")[0] == "attnlens"


def _origin(function: Callable[..., Any]) -> str:
    return "attnlens" if is_built_in(function) else function.__module__


def _file(function: Callable[..., Any]) -> object:
    return getattr(getattr(function, "__code__", None), "co_filename", function)
