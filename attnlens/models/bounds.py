"""Stops a model from being built that is far larger than the files its weights come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from threading import get_ident
from typing import TYPE_CHECKING

from attnlens.errors import ModelError
from attnlens.files import shortened, written
from attnlens.models.configs import fields
from attnlens.models.locate import CONFIG, Location
from attnlens.models.stored import Stored, numbers_in

if TYPE_CHECKING:
    from torch import Tensor, nn

TIMES, PARTS_TIMES = 8, 16
"""A model may have so many times the numbers of its files (tied weights are stored once), and times their tensors."""
SPARE, SPARE_BUFFERS, SPARE_PARTS = 2**24, 2**28, 2**12
"""What a model may have beside: numbers, numbers in tables of positions and masks, modules and tensors."""


@contextmanager
def bounded(place: Location, stored: Mapping[str, Stored]) -> Iterator[None]:
    """Inside, a model that outgrows its files is given up while it is built, when its tensors take no memory yet.

    Raises ModelError there, with the largest size in the config.
    """
    from torch.nn.modules import module

    limits = {"numbers": TIMES * numbers_in(stored) + SPARE, "parts": PARTS_TIMES * len(stored) + SPARE_PARTS}
    limits["buffers"] = limits["numbers"] + SPARE_BUFFERS
    counts = dict.fromkeys(limits, 0)
    thread = get_ident()  # the hooks are torch's own and see what every thread builds

    def count(kind: str, numbers: int) -> None:
        counts[kind] += numbers
        counts["parts"] += 1
        for what in (kind, "parts"):
            if counts[what] > limits[what]:
                raise _outgrown(place, stored)

    def parameter(_owner: nn.Module, _name: str, tensor: Tensor | None) -> None:
        if get_ident() == thread and tensor is not None and tensor.is_meta:
            count("numbers", prod(tensor.shape))

    def buffer(_owner: nn.Module, _name: str, tensor: Tensor | None) -> None:
        if get_ident() == thread and tensor is not None and tensor.is_meta:
            count("buffers", prod(tensor.shape))

    def part(_owner: nn.Module, _name: str, _part: nn.Module | None) -> None:
        if get_ident() == thread:
            count("parts", 0)

    with ExitStack() as stack:
        for register, hook in (
            (module.register_module_parameter_registration_hook, parameter),
            (module.register_module_buffer_registration_hook, buffer),
            (module.register_module_module_registration_hook, part),
        ):
            stack.callback(register(hook).remove)
        yield


def _outgrown(place: Location, stored: Mapping[str, Stored]) -> ModelError:
    counts = [(value, path) for path, value in fields(place.config) if isinstance(value, int) and value > 1]
    size, path = max(counts, default=(0, ""))
    largest = f" (the largest number in it is {shortened(path)} = {written(size)})" if counts else ""
    where = place.folder / (place.file if place.form == "gguf" else CONFIG)
    return ModelError(
        f"{where} describes a far larger model{largest} than the {numbers_in(stored)} numbers of its weight files.",
        "Give the weights their own config.",
    )
