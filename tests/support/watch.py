"""Checks the shapes and types of every call in the maths rooms by their annotations, while tests run."""

import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from importlib import import_module
from pkgutil import walk_packages
from typing import Any
from unittest.mock import patch
from weakref import ref

import jaxtyping
import numpy
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import Bool, Float, Int, jaxtyped

import attnlens.records
from attnlens.records.tensors import Rotation

FILES = ("lowrank", "pair_weights", "primal", "products", "registry", "spec", "spelling")
FILES += ("attention.routes", "attention.rows", "attention.sums")
"""Those of attnlens.kernels but `attention.scores`, since FlexAttention counts the parameters of its functions, which
checks hide, and `attention.primal_heads`, whose warnings name the line of their caller."""
ROOMS = ("analyzers", *(f"kernels.{file}" for file in FILES), "maths")
OTHERS = ("beartype.door", "numpy.typing", "scipy.optimize", "scipy.sparse.csgraph", "scipy.sparse.linalg")
"""What the rooms and their checks import of other packages, which are not to see the switch below."""
NOUNS = (Rotation, attnlens.records.QueryKey, attnlens.records.Call)
"""What the rooms are called with, beside tensors."""
NAMES = {"Bool": Bool, "Float": Float, "Int": Int, "Rotation": Rotation, "Tensor": torch.Tensor, "nn": torch.nn}
"""Names in their annotations, which they import for type checkers only."""

PLAIN = {bool, float, int, type(None)}
"""Classes of whose objects the checks see nothing more."""

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""As mypy does, it takes a whole number where a float is asked for."""


seen: set[tuple] = set()
"""What was checked in the test that runs: functions, each with its tensors' shapes and types and its other arguments.

Checking every step of a solver's loop again would double the time of its tests.
"""
_known: dict[int, tuple[ref[object], int]] = {}
"""What was read of frozen dataclasses, by their ids: they are handed from call to call and never change."""
_numbers: dict[object, int] = {}
"""What was read → its number, the same for two that say the same, and sooner hashed."""


def begin() -> None:
    """Forget what other tests checked."""
    for held in (seen, _known, _numbers):
        held.clear()


def once(*, typechecker: Callable) -> Callable:
    """In the place of `jaxtyped`, by which the hook decorates: a call like one before it in a test is not checked."""

    def decorated(function: Callable) -> Callable:
        if isinstance(function, type):
            if is_dataclass(function) and "__init__" in vars(function):
                function.__init__ = checking(function.__init__, unread=1)  # of `self` there is nothing yet
            return function
        return checking(function)

    def checking(function: Callable, unread: int = 0) -> Callable:
        slow = cache(lambda: jaxtyped(function, typechecker=typechecker))  # made when it is first called

        @wraps(function)
        def fast(*args: object, **options: object) -> object:
            if torch.compiler.is_compiling():  # torch compiles no checks
                return function(*args, **options)
            key = (id(function.__code__), *map(_kind, args[unread:]), *options, *map(_kind, options.values()))
            if jaxtyping.config.jaxtyping_disable or key in seen:
                return function(*args, **options)
            found = slow()(*args, **options)
            seen.add(key)
            return found

        return fast

    return decorated


def _kind(given: object) -> object:
    """What of an argument the checks see: shapes, types, words and classes; which one a long collection is."""
    kind = type(given)
    return kind if kind in PLAIN else _reader(kind)(given)


@cache
def _reader(kind: type) -> Callable[[Any], object]:
    """How the arguments of a class are read; found once, since every call in the rooms asks for it."""
    if issubclass(kind, torch.Tensor | numpy.ndarray):
        return lambda given: (given.shape, given.dtype)
    if issubclass(kind, str | type):
        return lambda given: given
    if issubclass(kind, tuple | list):
        return lambda given: (kind, *map(_kind, given)) if len(given) <= 8 else id(given)
    if issubclass(kind, Mapping):
        return lambda given: (kind, *given, *map(_kind, given.values())) if len(given) <= 8 else id(given)
    if is_dataclass(kind):
        names = [field.name for field in fields(kind)]

        def read(given: object) -> object:
            return kind, *[_kind(getattr(given, name)) for name in names]

        return _once_each(read) if kind.__dataclass_params__.frozen else read
    return id if issubclass(kind, Iterable) else lambda _: kind


def _once_each(read: Callable[[Any], object]) -> Callable[[Any], object]:
    """The same reader, which reads an object once, and gives a number."""

    def number(given: Any) -> int:
        held = _known.get(id(given))
        if held is None or held[0]() is not given:
            held = _known[id(given)] = ref(given), _numbers.setdefault(read(given), len(_numbers))
        return held[1]

    return number


def import_rooms() -> None:
    """Import the rooms with every function and dataclass checked; nothing else may have imported them before."""
    for name in OTHERS:
        import_module(name)
    for name in attnlens.records._HOMES:
        getattr(attnlens.records, name)  # each file is imported by its first use
    for noun in NOUNS:
        vars(sys.modules[noun.__module__]).update(NAMES)
        once(typechecker=checked)(noun)
    rooms = [f"attnlens.{room}" for room in ROOMS]
    typing.TYPE_CHECKING = True  # annotations are strings whose names the rooms import for type checkers only
    try:
        hook = jaxtyping.install_import_hook(rooms, "watch.checked")
        with hook, patch.object(jaxtyping, "jaxtyped", once):
            for room in rooms:
                found = import_module(room)
                for each in walk_packages(getattr(found, "__path__", ()), f"{room}."):
                    import_module(each.name)  # also what a room imports late
    finally:
        typing.TYPE_CHECKING = False


@contextmanager
def unwatched() -> Iterator[None]:
    """Without the checks, as in a user's program: for what attnlens itself says of wrong input."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
