"""What is known of a tensor in a running pass: the scores that it carries, and whether it depends on the inputs."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from attnlens.tracer.scores import Standins, TracedScores

STEPS_END = frozenset(
    {F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm, F.embedding}
    | {torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d, F.log_softmax, torch.log_softmax}
    | {torch.layer_norm, torch.group_norm, torch.batch_norm, Tensor.log_softmax}
    | {torch.max, torch.amax, Tensor.max, Tensor.amax, torch.logsumexp, Tensor.logsumexp}
)
"""Functions behind which a tensor is no longer the scores of a head, or its weights; nor is a row's largest score."""
LARGER = frozenset({torch.max, Tensor.max})
"""Functions that give the largest of one tensor, or the larger of two."""
MULTIPLYING = frozenset(
    {torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide, torch.pow, torch.addcmul, torch.addcdiv}
    | {getattr(Tensor, name) for name in ("pow", "pow_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "__pow__")}
    | {getattr(Tensor, name) for name in ("mul", "mul_", "div", "div_", "__mul__", "__rmul__", "__imul__")}
    | {getattr(Tensor, name) for name in ("multiply", "divide", "true_divide", "__truediv__", "__itruediv__")}
)
"""Functions that multiply a tensor by another one."""


@dataclass
class Provenance:
    """What is known of the tensors of one forward pass; none of them is kept alive."""

    scores: MutableMapping[Tensor, dict[TracedScores, Standins]] = field(default_factory=WeakIdKeyDictionary)
    """Tensor → what it is for other products, by product."""
    inputs: MutableMapping[Tensor, bool] = field(default_factory=WeakIdKeyDictionary)
    """The tensors that depend on the model's inputs, masks and positions apart."""
    weights: MutableMapping[Tensor, Any] = field(default_factory=WeakIdKeyDictionary)
    """Tensor → the softmax whose weights it holds."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result, with what is known of it."""
        given = list(tensors((args, kwargs)))
        carried: dict[TracedScores, None] = {}
        ends = _ends(function, given)
        if not ends:
            for tensor in given:
                carried.update(dict.fromkeys(self.scores.get(tensor, ())))
        steps = {scores: self._step(scores, function, args, kwargs, given) for scores in carried}
        result = function(*args, **kwargs)
        target = args[0] if function is Tensor.__setitem__ else result
        for scores, standins in steps.items():
            self._keep(scores, standins, target)
        dependent = any(tensor in self.inputs for tensor in given) and not _shape_alone(function)
        weighing = next((self.weights[tensor] for tensor in given if tensor in self.weights), None)
        for tensor in tensors(target):
            if dependent and tensor.dtype != torch.bool:
                self.inputs[tensor] = True
            if weighing is not None and not ends:
                self.weights[tensor] = weighing
        return result

    def _step(
        self, scores: TracedScores, function: Any, args: Any, kwargs: Any, given: list[Tensor]
    ) -> list[Any] | None:
        """The function's results on the three stand-ins; None where it can't be executed on them."""
        others = [tensor for tensor in given if scores not in self.scores.get(tensor, ())]
        if function in MULTIPLYING and any(tensor in self.inputs for tensor in others):
            scores.scaled_by_inputs = True

        def substituted(name: str) -> Any:
            def other(value: Any) -> Any:
                known = self.scores.get(value, {}).get(scores) if isinstance(value, Tensor) else None
                if known is not None:
                    return getattr(known, name)
                # what a step changes in place is changed once, by the model itself
                return value.clone() if isinstance(value, Tensor) and in_place and value is given[0] else value

            new_args, new_kwargs = tree_map(other, (args, kwargs))
            found = function(*new_args, **new_kwargs)
            return new_args[0] if function is Tensor.__setitem__ else found

        in_place = _in_place(function)
        known = next(self.scores[tensor][scores] for tensor in given if scores in self.scores.get(tensor, ()))
        try:
            return known.map(substituted)
        except RuntimeError:  # somebody's function, on numbers of another type than it was made for
            return None

    def _keep(self, scores: TracedScores, steps: list[Any] | None, target: Any) -> None:
        """Note the stand-ins of every tensor of a result."""
        if steps is None:
            return
        parts = [list(tensors(step)) for step in steps]
        for index, tensor in enumerate(tensors(target)):
            if tensor.is_floating_point():
                found = Standins(parts[0][index], parts[1][index], parts[2][index] if parts[2] else None)
                self.scores[tensor] = {**self.scores.get(tensor, {}), scores: found}


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)


def _ends(function: Any, given: Sequence[Tensor]) -> bool:
    """Whether scores end at the function; the larger of two tensors, element by element, is a step like others."""
    return function in STEPS_END and not (function in LARGER and len(given) == 2)


def _in_place(function: Any) -> bool:
    """Whether a function of torch changes its first argument: `add_`, `__iadd__`, `__setitem__`."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _shape_alone(function: Any) -> bool:
    """Whether a function looks at nothing but its argument's shape: `zeros_like`, `new_ones`."""
    name = getattr(function, "__name__", "")
    return name.endswith("_like") or name.startswith("new_")
