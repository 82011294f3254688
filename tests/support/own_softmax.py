"""Every softmax of a model's own eager pass, against what attnlens captures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnlens.errors import FAILURES, ModelError
from attnlens.models import hooks

SOFTMAXES = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax)


class _Recording(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if function in SOFTMAXES and result.dim() >= 3:
            self.found.append(result.detach())
        return result


def softmaxes(model: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Every softmax of three or more axes in the model's pass under transformers' eager attention."""
    with torch.no_grad(), hooks.implementation(model, "eager"), _Recording() as mode:
        try:
            hooks.forward(model, inputs)
        except FAILURES as error:
            raise ModelError(f"It does not run under transformers' eager attention: {error}", "") from error
    return mode.found


def difference(model: Any, inputs: Mapping[str, Tensor]) -> float | None:
    """‖P − P_own‖ / ‖P_own‖ at the worst site, P_own the nearest softmax of its shape; None where a site has none."""
    own = softmaxes(model, inputs)
    worst: list[float | None] = []
    for found in hooks.survey(model, inputs):
        query_key = found.call.query_key(found.site)
        ours = query_key.attention
        seeing = ours.sum(-1, keepdim=True) > 0
        near = [other for one in own for other in _alike(one, ours) if bool(other.isfinite().all())]
        errors = [float((seeing * (ours - one)).norm() / (seeing * one).norm()) for one in near]
        worst.append(min(errors, default=None))
    return None if None in worst or not worst else max(worst)


def _alike(one: Tensor, ours: Tensor) -> Iterator[Tensor]:
    """The softmax in the shape of ours, without the column of a sink; with windows either side of the heads."""
    for matrix in (one, one[..., :-1]):
        if matrix.shape[-2:] == ours.shape[-2:] and matrix.numel() == ours.numel():
            for axis in range(1, max(2, matrix.dim() - 2)):
                yield (
                    matrix.movedim(axis, -3).double().reshape(ours.shape)
                    if matrix.dim() > 4
                    else (matrix.double().reshape(ours.shape))
                )
