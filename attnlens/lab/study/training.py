"""Training of one model of the study: AdamW, warm-up and cosine, resumed from its last state, stopped on divergence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import nn

from attnlens.errors import UsageError
from attnlens.kernels.attention.primal_heads import PrimalHeads, regulariser
from attnlens.lab.study.tables import Scale
from attnlens.lab.study.tasks import NOTHING, cross_entropy, mean_loss
from attnlens.runs.store import Store

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from attnlens.lab.study.tasks import Examples, StudyTask


STATE = "state"  # name of the state among the stored parts of a training run


@dataclass(frozen=True)
class RunState:
    """Progress of a run; at its end, its result."""

    step: int
    curve: list[tuple[int, float]]  # (step, validation loss in nats), the first before any step
    best: dict[str, Tensor] = field(repr=False)  # weights with the smallest validation loss after a step
    watched: list[dict[str, float]]  # measures of the model at each step of the curve
    seconds: float = 0.0  # in training steps only
    tokens: int = 0  # number of tokens predicted or read in training
    problem: str = ""  # reason for not converging; empty if it converged or is still running

    @property
    def loss(self) -> float:
        """Smallest validation loss; infinite if the run did not converge."""
        return math.inf if self.problem else min(loss for _, loss in self.curve)

    def with_evaluation(self, model: nn.Module, loss: float, measures: dict[str, float], seconds: float) -> RunState:
        """Return the state updated with a validation loss and the measures of the model at this step."""
        least = min((known for _, known in self.curve[1:]), default=math.inf)
        best = _copy_weights(model) if loss < least else self.best
        curve, watched = [*self.curve, (self.step, loss)], [*self.watched, measures]
        return replace(self, curve=curve, best=best, watched=watched, seconds=seconds)


def _copy_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def save_state(store: Store, state: RunState, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
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


def restore_state(store: Store, model: nn.Module, optimiser: torch.optim.Optimizer) -> RunState | None:
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


Watcher = Callable[[int], dict[str, float]]
"""Callback that measures the model after a number of steps; its result is stored with the loss."""


def train(
    model: nn.Module,
    task: StudyTask,
    scale: Scale,
    run: Run,
    state: Store | None = None,
    watch: Watcher = lambda _step: {},
) -> RunState:
    """Minimise the task's loss; `model` ends with the weights of the smallest validation loss.

    At every evaluation the weights, AdamW's moments and the random state are saved to the store `state`. The same call
    resumes from them, so a killed run gives the same result as an uninterrupted one. A run has not converged if its
    loss is not finite (it then stops) or never falls below the loss before the first step. Deterministic on a CPU
    with one thread.
    """
    accelerator = build_accelerator()
    optimiser = torch.optim.AdamW(model.parameters(), lr=run.rate, weight_decay=DECAY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        latest = restore_state(state, model, optimiser) if state is not None else None
        if latest is None:
            loss = mean_loss(task, model, "validation", scale.batch)
            latest = RunState(0, [(0, loss)], _copy_weights(model), [watch(0)])
        model, optimiser = accelerator.prepare(model, optimiser)
        batches = islice(task.training(scale.batch, run.seed), latest.step, None)
        latest = _descend(accelerator, model, optimiser, batches, run, scale, task, latest, state, watch)
    model.load_state_dict(latest.best)
    return latest


def build_accelerator() -> Accelerator:
    """Create the Accelerator that places models on their device; raises UsageError if accelerate is missing."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise UsageError(
            "Training a study requires accelerate, which is not installed.", 'Run: pip install "attnlens[study]"'
        ) from None
    return Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")


def _descend(
    accelerator: Accelerator,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    batches: Iterator[Examples],
    run: Run,
    scale: Scale,
    task: StudyTask,
    latest: RunState,
    state: Store | None,
    watch: Watcher,
) -> RunState:
    """Run the remaining steps from the latest state; return the final state."""
    looks = {round(run.steps * (number + 1) / scale.looks) for number in range(scale.looks)}
    start, before = time.perf_counter(), latest.seconds
    for step in range(latest.step + 1, run.steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = run.rate * rate_factor(step, run.steps, scale.warmup)
        loss, tokens = take_step(accelerator, model, optimiser, next(batches), run)
        latest = replace(latest, step=step, tokens=latest.tokens + tokens)
        if not math.isfinite(loss):
            return replace(latest, problem=f"its loss was not finite at step {step}")
        if step not in looks:
            continue
        seconds = before + time.perf_counter() - start
        validation = mean_loss(task, model, "validation", scale.batch)
        if not math.isfinite(validation):
            return replace(latest, problem=f"its validation loss was not finite at step {step}")
        latest = latest.with_evaluation(model, validation, watch(step), seconds)
        if state is not None:
            save_state(state, latest, model, optimiser)
        start, before = time.perf_counter(), latest.seconds
    first, *others = (loss for _, loss in latest.curve)
    if not min(others) < first:
        latest = replace(latest, problem="it never predicts better than before training")
    return latest


def take_step(
    accelerator: Accelerator, model: nn.Module, optimiser: torch.optim.Optimizer, batch: Examples, run: Run
) -> tuple[float, int]:
    """Run one step; return its loss and number of training tokens (for classification: tokens of the sequences)."""
    model.train()
    examples = batch.to(accelerator.device)
    with accelerator.autocast():
        logits = model(inputs=examples.inputs, mask=examples.mask, decoder_inputs=examples.decoder_inputs)
        loss = cross_entropy(logits, examples.targets) / (examples.targets != NOTHING).sum().clamp_min(1)
        objective = loss
        if run.eta and any(isinstance(part, PrimalHeads) for part in model.modules()):
            objective = loss + run.eta * regulariser(model)
    accelerator.backward(objective)
    accelerator.clip_grad_norm_(model.parameters(), CLIPPED)
    optimiser.step()
    optimiser.zero_grad()
    return float(loss.detach()), count_tokens(batch)


def rate_factor(step: int, steps: int, warmup: float) -> float:
    """Compute the learning rate's factor at a step: linear warm-up, then half a cosine down to LAST."""
    rise = max(1, round(warmup * steps))
    if step <= rise:
        return step / rise
    done = (step - rise) / max(1, steps - rise)
    return LAST + (1 - LAST) * (1 + math.cos(math.pi * done)) / 2


def count_tokens(batch: Examples) -> int:
    """Count the tokens of a batch: targets of a sequence, or input tokens for classification."""
    if batch.targets.dim() > 1:
        return int((batch.targets != NOTHING).sum())
    return int(batch.mask.sum()) if batch.mask is not None else batch.inputs.shape[0] * batch.inputs.shape[1]
