"""The state of a training run in one safetensors file, written whole or not at all."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from attnlens.errors import OutputError
from attnlens.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

RANDOM, CUDA, MODEL, BEST, MOMENTS = "random", "random of the GPU", "model.", "best.", "moments."


@dataclass(frozen=True)
class RunState:
    """How far a run is."""

    step: int
    """Steps done."""
    curve: list[tuple[int, float]]
    """(step, validation loss)."""
    best: dict[str, Tensor] = field(repr=False)
    """The weights of the least validation loss so far."""
    watched: list[dict[str, float]]
    """What was read of the model at each step of the curve."""
    seconds: float = 0.0
    """In training so far."""
    tokens: int = 0
    """That it was trained on so far."""
    problem: str = ""
    """Why it did not converge; empty where it did, or is not over."""

    @classmethod
    def begun(cls, model: nn.Module, loss: float, read: dict[str, float]) -> RunState:
        """The state before the first step."""
        return cls(0, [(0, loss)], _copied(model), [read])

    def looked(self, model: nn.Module, loss: float, read: dict[str, float], seconds: float) -> RunState:
        """The state after a look at the validation loss."""
        least = min((known for _, known in self.curve[1:]), default=math.inf)
        best = _copied(model) if loss < least else self.best
        curve, watched = [*self.curve, (self.step, loss)], [*self.watched, read]
        return replace(self, curve=curve, best=best, watched=watched, seconds=seconds)


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def write_state(path: Path, state: RunState, model: nn.Module, optimiser: Any) -> None:
    """Write everything that the rest of the run depends on."""
    moments = optimiser.state_dict()["state"]
    tensors = {RANDOM: torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors[CUDA] = torch.cuda.get_rng_state()
    tensors |= {MODEL + name: value for name, value in _copied(model).items()}
    tensors |= {BEST + name: value for name, value in state.best.items()}
    tensors |= {f"{MOMENTS}{i}.{name}": part.cpu() for i, parts in moments.items() for name, part in parts.items()}
    names = ("step", "curve", "watched", "seconds", "tokens")
    facts = {name: getattr(state, name) for name in names}
    write_atomically(path, save({k: v.contiguous() for k, v in tensors.items()}, {"state": json.dumps(facts)}))


def read_state(path: Path, model: nn.Module, optimiser: Any) -> RunState | None:
    """Put the state in its place, and say how far it is; None where there is none."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as stored:
            facts = json.loads(stored.metadata()["state"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # no dictionary
        return _put(facts, tensors, model, optimiser)
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        raise OutputError(f"{path} is no state of this training run.", "Remove it: the run begins anew.") from None


def _put(facts: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module, optimiser: Any) -> RunState:
    """The state, its tensors in their places; raises what any of its parts does that is not as it was written."""
    best = _under(BEST, tensors)
    model.load_state_dict(best)
    model.load_state_dict(_under(MODEL, tensors))
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in _under(MOMENTS, tensors).items():
        number, part = name.split(".", 1)
        moments.setdefault(int(number), {})[part] = value
    sizes = [each["exp_avg"].shape for _, each in sorted(moments.items())]
    if sizes != [each["exp_avg_sq"].shape for _, each in sorted(moments.items())] or sizes != _sizes(optimiser):
        raise ValueError("moments of other weights")
    optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})
    torch.set_rng_state(tensors[RANDOM])
    if CUDA in tensors:
        torch.cuda.set_rng_state(tensors[CUDA])
    curve = [(int(step), float(loss)) for step, loss in facts["curve"]]
    if not curve:
        raise ValueError("no look")
    return RunState(int(facts["step"]), curve, best, list(facts["watched"]), facts["seconds"], int(facts["tokens"]))


def _sizes(optimiser: Any) -> list[torch.Size]:
    return [weight.shape for group in optimiser.param_groups for weight in group["params"]]


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
