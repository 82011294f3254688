"""The state of a training run, kept at every look, from which the same run goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnlens.runs.work import Store

if TYPE_CHECKING:
    from torch import Tensor

STATE = "state"
"""The name of the state among the parts of a training run."""


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


def save_state(store: Store, state: RunState, model: nn.Module, optimiser: Any) -> None:
    """Keep everything that the rest of the run depends on."""
    value = {
        "facts": {name: getattr(state, name) for name in ("step", "curve", "watched", "seconds", "tokens")},
        "random": torch.get_rng_state(),
        "random of the GPU": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "model": _copied(model),
        "best": state.best,
        "moments": optimiser.state_dict()["state"],
    }
    store.keep(STATE, value)


def restored(store: Store, model: nn.Module, optimiser: Any) -> RunState | None:
    """Put the kept state in its place, and return how far it is; None if there is none."""
    value = store.load(STATE)
    if value is None:
        return None
    model.load_state_dict(value["model"])
    optimiser.load_state_dict({**optimiser.state_dict(), "state": value["moments"]})
    torch.set_rng_state(value["random"])
    if value["random of the GPU"] is not None:
        torch.cuda.set_rng_state(value["random of the GPU"])
    facts = value["facts"]
    curve = [(step, loss) for step, loss in facts["curve"]]
    return RunState(facts["step"], curve, value["best"], facts["watched"], facts["seconds"], facts["tokens"])
