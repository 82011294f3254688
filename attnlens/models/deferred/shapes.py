"""Builds a model from the shapes of its tensors alone, by transformers' own loading, without reading one of them."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from torch import Tensor

ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""Under this name transformers is told to place tensors one after the other: its threads would share one mode."""
EXPERTS = "batched_mm"
"""The form of a mixture of experts in which no shape depends on which expert a token chose."""


class ShapesAlone(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Computes with shapes; two tensors are never equal there, so that transformers keeps those apart that it may tie.

    Checkpoints that hold a tied weight under both of its names make it compare them.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch calls for each operation."""
        return False if func is torch.ops.aten.equal.default else super().dispatch(func, types, args, kwargs)


class Announced:
    """A tensor of a file as transformers takes it from there: its shape is known, its numbers are not read."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, mode: FakeTensorMode) -> None:
        self.shape, self.dtype, self.mode = shape, dtype, mode

    def __getitem__(self, _: object) -> Tensor:
        with self.mode:
            return torch.empty(self.shape, dtype=self.dtype)


def announced(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Any]:
    """Tensors of these shapes by name, which take part in computations as shapes."""
    mode = ShapesAlone(allow_non_fake_inputs=True)
    return {name: Announced(shape, dtype, mode) for name, shape in shapes.items()}


def is_announced(tensor: Tensor) -> bool:
    """Whether it has a shape and no numbers."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, transformers places tensors one after the other."""
    before = os.environ.get(ONE_THREAD)
    os.environ[ONE_THREAD] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ONE_THREAD]
        else:
            os.environ[ONE_THREAD] = before


def without_choices(model: PreTrainedModel) -> None:
    """Let mixtures of experts compute so that no shape depends on numbers."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            module.set_experts_implementation(EXPERTS)


def widen(model: PreTrainedModel) -> None:
    """Make the model's tensors float64, those that are shapes and those that have numbers; tied ones stay tied."""
    wide: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, part in module._parameters.items():
            if part is not None and part.is_floating_point():
                if part not in wide:
                    wide[part] = nn.Parameter(part.detach().double(), requires_grad=False)
                module._parameters[name] = wide[part]
        for name, table in module._buffers.items():
            if table is not None and table.is_floating_point():
                module._buffers[name] = table.double()


@contextmanager
def unspoken() -> Iterator[None]:
    """Inside, torch does not tell on stderr which computations of shapes want numbers; they are refused in words."""
    told = logging.getLogger("torch._subclasses.fake_tensor")
    level = told.level
    told.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        told.setLevel(level)
