"""Training of one model of the study: AdamW, warm-up and cosine, resumed from its last state, stopped on divergence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnlens.errors import UsageError
from attnlens.kernels.attention.primal_heads import PrimalHeads, regulariser
from attnlens.lab.study.tables import Scale
from attnlens.lab.study.tasks import NOTHING, cross_entropy, mean_loss
from attnlens.runs.store import Store

if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.lab.study.tasks import Examples, StudyTask


STATE = "state"  # name of the state among the stored parts of a training run


@dataclass(frozen=True)
class RunState:
    """Progress of a run."""

    step: int
    curve: list[tuple[int, float]]  # (step, validation loss)
    best: dict[str, Tensor] = field(repr=False)  # weights with the smallest validation loss so far
    watched: list[dict[str, float]]  # measures of the model at each step of the curve
    seconds: float = 0.0  # training time so far
    tokens: int = 0  # number of training tokens so far
    problem: str = ""  # reason for not converging; empty if it converged or is still running

    @classmethod
    def begun(cls, model: nn.Module, loss: float, read: dict[str, float]) -> RunState:
        """Return the state before the first step."""
        return cls(0, [(0, loss)], _copy_weights(model), [read])

    def looked(self, model: nn.Module, loss: float, read: dict[str, float], seconds: float) -> RunState:
        """Return the state updated with a validation loss and the measures read at it."""
        least = min((known for _, known in self.curve[1:]), default=math.inf)
        best = _copy_weights(model) if loss < least else self.best
        curve, watched = [*self.curve, (self.step, loss)], [*self.watched, read]
        return replace(self, curve=curve, best=best, watched=watched, seconds=seconds)


def _copy_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def save_state(store: Store, state: RunState, model: nn.Module, optimiser: Any) -> None:
    """Store everything the rest of the run depends on."""
    value = {
        "facts": {name: getattr(state, name) for name in ("step", "curve", "watched", "seconds", "tokens")},
        "random": torch.get_rng_state(),
        "random of the GPU": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "model": _copy_weights(model),
        "best": state.best,
        "moments": optimiser.state_dict()["state"],
    }
    store.keep(STATE, value)


def restored(store: Store, model: nn.Module, optimiser: Any) -> RunState | None:
    """Restore model, optimiser and random state from the store; return the run's progress, None if none is stored."""
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


DECAY, CLIPPED = 0.01, 1.0  # AdamW's weight decay, and the norm to which gradients are clipped
LAST = 0.05  # final share of the learning rate, at the end of the cosine


@dataclass(frozen=True)
class Run:
    """Settings that determine one training run, besides the model and the task."""

    rate: float  # peak learning rate
    steps: int
    seed: int  # of weights, data order and dropout
    eta: float = 0.0  # weight of the primal layers' regulariser


@dataclass(frozen=True)
class TrainedRun:
    """Result of a run."""

    curve: tuple[tuple[int, float], ...]  # (step, validation loss in nats), the first before any step
    watched: tuple[dict[str, float], ...]  # measures of the model at each of these steps
    problem: str  # reason for not converging; empty if it converged
    seconds: float  # in training steps only
    tokens: int  # number of tokens predicted or read in training

    @property
    def loss(self) -> float:
        """Smallest validation loss; infinite if the run did not converge."""
        return math.inf if self.problem else min(loss for _, loss in self.curve)


Watcher = Callable[[int], dict[str, float]]
"""Callback that measures the model after a number of steps; its result is stored with the loss."""


def train(
    model: nn.Module,
    task: StudyTask,
    scale: Scale,
    run: Run,
    state: Store | None = None,
    watch: Watcher = lambda _step: {},
) -> TrainedRun:
    """Minimise the task's loss; `model` ends with the weights of the smallest validation loss.

    At every evaluation the weights, AdamW's moments and the random state are saved to the store `state`. The same call
    resumes from them, so a killed run gives the same result as an uninterrupted one. A run has not converged if its
    loss is not finite (it then stops) or never falls below the loss before the first step. Deterministic on a CPU
    with one thread.
    """
    accelerator = accelerator_of()
    optimiser = torch.optim.AdamW(model.parameters(), lr=run.rate, weight_decay=DECAY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        latest = restored(state, model, optimiser) if state is not None else None
        if latest is None:
            latest = RunState.begun(model, mean_loss(task, model, "validation", scale.batch), watch(0))
        model, optimiser = accelerator.prepare(model, optimiser)
        batches = islice(task.training(scale.batch, run.seed), latest.step, None)
        latest = _descend(accelerator, model, optimiser, batches, run, scale, task, latest, state, watch)
    model.load_state_dict(latest.best)
    return TrainedRun(tuple(latest.curve), tuple(latest.watched), latest.problem, latest.seconds, latest.tokens)


def accelerator_of() -> Any:
    """Create the Accelerator that places models on their device; raises UsageError if accelerate is missing."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise UsageError(
            "study trains with accelerate, which is not installed.", 'Run: pip install "attnlens[study]"'
        ) from None
    return Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")


def _descend(
    accelerator: Any,
    model: nn.Module,
    optimiser: Any,
    batches: Iterator[Examples],
    run: Run,
    scale: Scale,
    task: StudyTask,
    found: RunState,
    state: Store | None,
    watch: Watcher,
) -> RunState:
    """Run the remaining steps from the state; return the final state."""
    looks = {round(run.steps * (number + 1) / scale.looks) for number in range(scale.looks)}
    start, before = time.perf_counter(), found.seconds
    for step in range(found.step + 1, run.steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = run.rate * shape(step, run.steps, scale.warmup)
        loss, tokens = step_of(accelerator, model, optimiser, next(batches), run)
        found = replace(found, step=step, tokens=found.tokens + tokens)
        if not math.isfinite(loss):
            return replace(found, problem=f"its loss was no finite number at step {step}")
        if step not in looks:
            continue
        seconds = before + time.perf_counter() - start
        validation = mean_loss(task, model, "validation", scale.batch)
        if not math.isfinite(validation):
            return replace(found, problem=f"its validation loss was no finite number at step {step}")
        found = found.looked(model, validation, watch(step), seconds)
        if state is not None:
            save_state(state, found, model, optimiser)
        start, before = time.perf_counter(), found.seconds
    first, *others = (loss for _, loss in found.curve)
    if not min(others) < first:
        found = replace(found, problem="it never predicts better than before its first step")
    return found


def step_of(accelerator: Any, model: nn.Module, optimiser: Any, batch: Examples, run: Run) -> tuple[float, int]:
    """Run one step; return its loss and number of training tokens (for classification: tokens of the sequences)."""
    model.train()
    moved = batch.to(accelerator.device)
    with accelerator.autocast():
        loss = loss_of(model, moved)
        whole = (
            loss + run.eta * regulariser(model)
            if run.eta and any(isinstance(part, PrimalHeads) for part in model.modules())
            else loss
        )
    accelerator.backward(whole)
    accelerator.clip_grad_norm_(model.parameters(), CLIPPED)
    optimiser.step()
    optimiser.zero_grad()
    return float(loss.detach()), count_of(batch)


def shape(step: int, steps: int, warmup: float) -> float:
    """Compute the learning rate's factor at a step: linear warm-up, then half a cosine down to LAST."""
    rise = max(1, round(warmup * steps))
    if step <= rise:
        return step / rise
    done = (step - rise) / max(1, steps - rise)
    return LAST + (1 - LAST) * (1 + math.cos(math.pi * done)) / 2


def loss_of(model: nn.Module, batch: Examples) -> Tensor:
    """Compute the mean cross-entropy in nats over targets other than NOTHING."""
    logits = model(inputs=batch.inputs, kept=batch.kept, given=batch.given)
    return cross_entropy(logits, batch.targets) / (batch.targets != NOTHING).sum().clamp_min(1)


def count_of(batch: Examples) -> int:
    """Count the tokens of a batch: targets of a sequence, or input tokens for classification."""
    if batch.targets.dim() > 1:
        return int((batch.targets != NOTHING).sum())
    return int(batch.kept.sum()) if batch.kept is not None else batch.inputs.shape[0] * batch.inputs.shape[1]
