"""Writes what a unit of work found as one file, and reads it again: numbers exactly, and nothing but known types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from attnlens import registry
from attnlens.errors import FAILURES
from attnlens.records import AttentionRows, Measure, Null, Selection, Site
from attnlens.registry import Answer
from attnlens.registry.analysis import Named
from attnlens.run.inspect.sink import Handed, Unpacked
from attnlens.unit_files import refused
from attnlens.weights import Traits

FORM = "attnlens unit 1"
RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (Null, Measure, Selection, AttentionRows)}
PLAIN: dict[str, Any] = {kind.__name__: kind for kind in (Answer, Site, Traits)}
TAKEN: dict[str, tuple[Any, ...]] = {
    "add_values": (Site, str, list, list, int, Tensor),
    "add_curve": (Site, str, Tensor, Tensor),
    "add_weights": (Site, list, registry.Analyzer, dict, dict, dict | None),
    "add_layer": (int, float | None),
    "add_answers": (Site, registry.Gathering, dict),
    "add_shown": (list, list),
    "add_traits": (Traits,),
    "add_losses": (Tensor, Tensor, int),
    "skip": (str, str, list, str | None),
}
"""The methods of a sink that a file may name, and what each takes."""
SHOWN: tuple[type[Any], ...] = (Selection, AttentionRows)
"""What stands in the two lists of what is to be shown."""


def packed(calls: Sequence[Handed]) -> bytes:
    """The calls as a safetensors file: its tensors, and the rest as JSON among its metadata."""
    tensors: dict[str, Tensor] = {}
    told = json.dumps([[method, [_plain(part, tensors) for part in given]] for method, given in calls])
    return save(tensors, {FORM: told})


def unpacked(content: bytes, where: str) -> Unpacked:
    """The calls in a unit's file. Raises OutputError where it is cut off, or is none."""
    try:
        tensors = load(content)
        length = int.from_bytes(content[:8], "little")
        told = json.loads(content[8 : 8 + length])["__metadata__"]
        listed = json.loads(told[FORM])
        calls = [(str(method), tuple([_made(part, tensors) for part in given])) for method, given in listed]
        fitting = isinstance(listed, list) and all(_fits(*call) for call in calls)
    except (SafetensorError, *FAILURES, StopIteration):
        raise refused(where) from None
    if not fitting:
        raise refused(where)
    return Unpacked(calls, where)


def _fits(method: str, given: Sequence[Any]) -> bool:
    """Whether a sink has such a method, and takes that."""
    kinds = TAKEN.get(method)
    if kinds is None or len(kinds) != len(given):
        return False
    shown = zip(given, SHOWN, strict=True) if method == "add_shown" else ()
    return all(isinstance(part, kind) for part, kind in zip(given, kinds, strict=True)) and all(
        isinstance(one, kind) for listed, kind in shown for one in listed
    )


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; its tensors go into `tensors`."""
    if isinstance(value, Tensor):
        tensors[str(len(tensors))] = value.detach().cpu().contiguous().clone()
        return {"tensor": str(len(tensors) - 1)}
    for name, kind in RECORDS.items():
        if isinstance(value, kind):
            return {"record": name, "of": value.model_dump()}  # as JSON would round
    for name, kind in PLAIN.items():
        if isinstance(value, kind):
            return {"plain": name, "of": {one.name: _plain(getattr(value, one.name), tensors) for one in fields(kind)}}
    if isinstance(value, Named):
        return {"analyzer": value.name, "source": value.source}
    if isinstance(value, Mapping):
        return {"pairs": [[_plain(key, tensors), _plain(part, tensors)] for key, part in value.items()]}
    if isinstance(value, list | tuple | range):
        return [_plain(part, tensors) for part in value]
    return value


def _made(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value of which that is the JSON."""
    if isinstance(value, list):
        return [_made(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value))
    return MAKERS[kind](value, tensors)


def _pairs(value: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {_made(key, tensors): _made(part, tensors) for key, part in value["pairs"]}


def _analyzer(value: dict[str, Any], _: Mapping[str, Tensor]) -> Named:
    found = registry.every_analyzer()
    return next(one for one in found if (one.name, one.source) == (value["analyzer"], value["source"]))


MAKERS: dict[str, Callable[[dict[str, Any], Mapping[str, Tensor]], Any]] = {
    "tensor": lambda value, tensors: tensors[value["tensor"]],
    "record": lambda value, _: RECORDS[value["record"]].model_validate(value["of"]),
    "plain": lambda value, tensors: PLAIN[value["plain"]](
        **{name: _made(part, tensors) for name, part in value["of"].items()}
    ),
    "analyzer": _analyzer,
    "pairs": _pairs,
}
