"""Check the shapes and types of every call in the maths packages by their annotations, while tests run."""

import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from importlib import import_module
from itertools import islice
from pkgutil import walk_packages
from typing import Any
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
"""Modules of kernels/ that are checked: all except `attention.scores`, because FlexAttention counts the parameters of
its functions, which checks hide, and `attention.primal_heads`, whose warnings name the line of their caller."""
ROOMS = ("analyzers", *(f"kernels.{file}" for file in FILES), "maths")
OTHERS = ("beartype.door", "numpy.typing", "scipy.optimize", "scipy.sparse.csgraph", "scipy.sparse.linalg")
"""Libraries that are imported before TYPE_CHECKING is switched on, because it breaks them."""
NOUNS = (Rotation, attnlens.records.QueryKey, attnlens.records.Call)
"""Dataclasses of other packages that these packages take as arguments."""
NAMES = {"Bool": Bool, "Float": Float, "Int": Int, "Rotation": Rotation, "Tensor": torch.Tensor, "nn": torch.nn}
"""Names in annotations that are imported for type checkers only."""
PLAIN = {bool, float, int, type(None)}
"""Classes whose check depends on the class only."""

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""Check types; as in mypy, an int passes as a float."""
seen: set[tuple] = set()
"""Calls that were checked: functions with the shapes and types of their arguments. Checking equal calls again, as in a
solver's loop, would double the time of the tests."""
_known: dict[int, tuple[ref[object], int]] = {}
"""Frozen dataclasses by id, each with the number of its contents."""
_numbers: dict[object, int] = {}
"""Contents → a number, which is faster to hash."""


def once(*, typechecker: Callable) -> Callable:
    """Replace `jaxtyped`, the decorator of the import hook, so that a call like an earlier one is not checked."""

    def decorated(function: Callable) -> Callable:
        if not isinstance(function, type):
            return checking(function)
        if is_dataclass(function) and "__init__" in vars(function):
            function.__init__ = checking(function.__init__, unread=1)  # `self` is still empty
        return function

    def checking(function: Callable, unread: int = 0) -> Callable:
        slow = cache(lambda: jaxtyped(function, typechecker=typechecker))  # made when it is first called

        @wraps(function)
        def fast(*args: object, **options: object) -> object:
            if torch.compiler.is_compiling():  # torch compiles no checks
                return function(*args, **options)
            key = (id(function.__code__), *map(_kind, args[unread:]), *options, *map(_kind, options.values()))
            if jaxtyping.config.jaxtyping_disable or key in seen:
                return function(*args, **options)
            result = slow()(*args, **options)
            seen.add(key)
            return result

        return fast

    return decorated


def _kind(value: object) -> object:
    """Return what checks depend on: shapes, types, strings, classes, and the first eight entries of collections."""
    kind = type(value)
    return kind if kind in PLAIN else _reader(kind)(value)


@cache
def _reader(kind: type) -> Callable[[Any], object]:
    """Return the function that reads arguments of a class."""
    if issubclass(kind, torch.Tensor | numpy.ndarray):
        return lambda value: (value.shape, value.dtype)
    if issubclass(kind, str | type):
        return lambda value: value
    if issubclass(kind, tuple | list):
        return lambda value: (kind, len(value), *map(_kind, value[:8]))
    if issubclass(kind, Mapping):
        return lambda value: (kind, len(value), *[(key, _kind(each)) for key, each in islice(value.items(), 8)])
    if not is_dataclass(kind):
        return lambda _: kind
    names = [field.name for field in fields(kind)]

    def read(value: object) -> object:
        return kind, *[_kind(getattr(value, name)) for name in names]

    def number(value: Any) -> int:  # a frozen object is read once
        known = _known.get(id(value))
        if known is None or known[0]() is not value:
            known = _known[id(value)] = ref(value), _numbers.setdefault(read(value), len(_numbers))
        return known[1]

    return number if kind.__dataclass_params__.frozen else read


def import_rooms() -> None:
    """Import the packages with every function and dataclass checked; they must not have been imported before."""
    for name in OTHERS:
        import_module(name)
    for name in attnlens.records._HOMES:
        getattr(attnlens.records, name)  # each file is imported by its first use
    for noun in NOUNS:
        vars(sys.modules[noun.__module__]).update(NAMES)
        once(typechecker=checked)(noun)
    rooms = [f"attnlens.{room}" for room in ROOMS]
    jaxtyping.jaxtyped = once  # for good: functions inside functions are decorated whenever the outer one is called
    typing.TYPE_CHECKING = True  # annotations are strings whose names are imported for type checkers only
    try:
        with jaxtyping.install_import_hook(rooms, "watch.checked"):
            for room in rooms:
                for each in walk_packages(getattr(import_module(room), "__path__", ()), f"{room}."):
                    import_module(each.name)  # also what a package imports late
    finally:
        typing.TYPE_CHECKING = False


@contextmanager
def unwatched() -> Iterator[None]:
    """Switch the checks off, for tests of attnlens' own messages on wrong input."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
