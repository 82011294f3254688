"""Checks a name, and suggests the nearest one for an unknown one."""

from __future__ import annotations

from collections.abc import Iterable

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
