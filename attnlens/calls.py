"""Checks the words of a call from Python, and lets calls of several threads queue."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, signature
from itertools import islice
from threading import RLock
from typing import Any, ParamSpec, TypeVar

from attnlens.errors import UsageError
from attnlens.registry import checked_name

P = ParamSpec("P")
R = TypeVar("R")

MOST = 10_000
"""Items beyond which no list of layers, heads, names or texts goes; an iterable may have no end."""
LARGEST = 2**63 - 1
"""The largest whole number that a call takes."""

_ONE_AT_A_TIME = RLock()
"""Held while a model is loaded or used: attention is exchanged in the model itself, and torch's forward-mode
differentiation knows one level in the whole process."""


def public(function: Callable[P, R]) -> Callable[P, R]:
    """A function of the package's surface: of several threads one is in any of them at a time, the others wait.

    Raises UsageError, and never TypeError, for words that it does not take.
    """
    expected = signature(function)
    names = [name for name, given in expected.parameters.items() if given.kind is not Parameter.VAR_KEYWORD]
    open_ended = len(names) < len(expected.parameters)

    @wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        for name in given:
            if not open_ended:
                checked_name("option", name, names)
        try:
            expected.bind(*args, **given)
        except TypeError as error:
            raise UsageError(f"{function.__name__}: {error}.", f"It takes {', '.join(names)}.") from None
        if not callable(given.get("progress", print)):
            raise UsageError("progress is no function.", "Give one that takes (stage, steps done, steps in all).")
        with _ONE_AT_A_TIME:
            return function(*args, **given)

    return call


def word(what: str, given: Any) -> str:
    """`given`, if it is a string that a name or path can be; else UsageError."""
    if not isinstance(given, str):
        raise UsageError(f"{what}={shown(given)} is no string.", f"Give {what} as a string.")
    if "\0" in given or not given.strip():
        raise UsageError(f"{what}={shown(given)} is no name.", f"Give {what} as a string that says something.")
    return given


def path(what: str, given: Any) -> str:
    """The same for a string or a path object, as a string."""
    return word(what, os.fspath(given) if isinstance(given, os.PathLike) else given)


def switch(what: str, given: Any) -> bool:
    """`given`, if it is True or False; else UsageError."""
    if not isinstance(given, bool):
        raise UsageError(f"{what}={shown(given)} is neither True nor False.", f"Give {what}=True or {what}=False.")
    return given


def several(what: str, given: Iterable[Any]) -> list[Any]:
    """The items of an iterable; UsageError where there are more than MOST."""
    found = list(islice(given, MOST + 1))
    if len(found) > MOST:
        raise UsageError(f"{what} has more than {MOST} items.", "Give fewer.")
    return found


def shown(given: object) -> str:
    """As it would be written, on one line and not too long."""
    if isinstance(given, int) and abs(given) > LARGEST:
        return f"a number of {given.bit_length()} bits"  # whose digits Python may refuse to write
    try:
        line = " ".join(repr(given[:60] if isinstance(given, str | bytes | list | tuple) else given).split())
    except ValueError:  # such a number within something else
        line = f"a {type(given).__name__}"
    return line if len(line) <= 60 else f"{line[:57]}..."
