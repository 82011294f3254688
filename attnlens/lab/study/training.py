"""Training of one model of the study: AdamW, warm-up and cosine, resumed from its last state, stopped on divergence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
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
Weights = dict[str, "Tensor"]


@dataclass(frozen=True)
class RunOutcome:
    """Result of a training run, or of its steps so far."""

    curve: list[tuple[int, float]]  # (step, validation loss in nats), the first before any step
    watched: list[dict[str, float]]  # medians over heads at these steps, by measure; empty if heads were not measured
    problem: str = ""  # reason for not converging; empty if the run converged
    scores: dict[str, float] = field(default_factory=dict)  # on the test set; empty if not tested or not converged
    parameters: int = 0  # number of parameters of the model
    kernel_parameters: int = 0  # number of parameters in projections of queries, keys and positions, over all layers
    tokens: int = 0  # number of training tokens
    seconds: float = 0.0  # seconds spent in training steps

    @property
    def loss(self) -> float:
        """Smallest validation loss; infinite if the run did not converge."""
        return math.inf if self.problem else min(loss for _, loss in self.curve)


def _copy_weights(model: nn.Module) -> Weights:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def _save_state(
    store: Store, outcome: RunOutcome, best: Weights, model: nn.Module, optimiser: torch.optim.Optimizer
) -> None:
    """Store everything that the remaining steps depend on."""
    value = {
        "outcome": asdict(outcome),
        "random": torch.get_rng_state(),
        "random of the GPU": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "model": _copy_weights(model),
        "best": best,
        "moments": optimiser.state_dict()["state"],
    }
    store.keep(STATE, value)


def _restore_state(
    store: Store, model: nn.Module, optimiser: torch.optim.Optimizer
) -> tuple[RunOutcome, Weights] | None:
    """Restore model, optimiser and random state from the store; return the outcome so far, and the best weights."""
    value = store.load(STATE)
    if value is None:
        return None
    model.load_state_dict(value["model"])
    optimiser.load_state_dict({**optimiser.state_dict(), "state": value["moments"]})
    torch.set_rng_state(value["random"])
    if value["random of the GPU"] is not None:
        torch.cuda.set_rng_state(value["random of the GPU"])
    return RunOutcome(**value["outcome"]), value["best"]


DECAY, CLIPPED = 0.01, 1.0  # AdamW's weight decay, and the norm to which gradients are clipped
LAST = 0.05  # final share of the learning rate, at the end of the cosine


@dataclass(frozen=True)
class Run:
    """Settings that determine one training run, besides the model and the task."""

    rate: float  # peak learning rate
    steps: int
    seed: int  # of weights, data order and dropout
    eta: float = 0.0  # weight of the primal layers' regulariser


def train(
    model: nn.Module,
    task: StudyTask,
    scale: Scale,
    run: Run,
    state: Store | None = None,
    watch: Callable[[int], dict[str, float]] = lambda _step: {},
) -> RunOutcome:
    """Minimise the task's loss; `model` ends with the weights of the smallest validation loss.

    At every evaluation the weights, AdamW's moments and the random state are saved to the store `state`, and `watch`
    measures the model, given the step. The same call resumes from the state, so a killed run gives the same result as
    an uninterrupted one. A run has not converged if its loss is not finite (it then stops) or never falls below the
    loss before the first step. Deterministic on a CPU with one thread.
    """
    accelerator = build_accelerator()
    optimiser = torch.optim.AdamW(model.parameters(), lr=run.rate, weight_decay=DECAY)
    looks = {round(run.steps * (number + 1) / scale.looks) for number in range(scale.looks)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        restored = None if state is None else _restore_state(state, model, optimiser)
        if restored is None:
            loss = mean_loss(task, model, "validation", scale.batch)
            restored = RunOutcome([(0, loss)], [watch(0)]), _copy_weights(model)
        outcome, best = restored
        model, optimiser = accelerator.prepare(model, optimiser)
        done, start = outcome.curve[-1][0], time.perf_counter()
        batches = islice(task.training(scale.batch, run.seed), done, None)
        for step in range(done + 1, run.steps + 1):
            for group in optimiser.param_groups:
                group["lr"] = run.rate * _rate_factor(step, run.steps, scale.warmup)
            loss, tokens = take_step(accelerator, model, optimiser, next(batches), run)
            outcome = replace(outcome, tokens=outcome.tokens + tokens)
            if not math.isfinite(loss):
                outcome = replace(outcome, problem=f"its loss was not finite at step {step}")
                break
            if step not in looks:
                continue
            seconds = outcome.seconds + time.perf_counter() - start
            loss = mean_loss(task, model, "validation", scale.batch)
            if not math.isfinite(loss):
                outcome = replace(outcome, problem=f"its validation loss was not finite at step {step}")
                break
            watched = [*outcome.watched, watch(step)]
            if loss < min((known for _, known in outcome.curve[1:]), default=math.inf):
                best = _copy_weights(model)
            outcome = replace(outcome, curve=[*outcome.curve, (step, loss)], watched=watched, seconds=seconds)
            if state is not None:
                _save_state(state, outcome, best, model, optimiser)
            start = time.perf_counter()
    model.load_state_dict(best)
    (_, first), *later = outcome.curve
    if not outcome.problem and not min(loss for _, loss in later) < first:
        outcome = replace(outcome, problem="it never predicts better than before training")
    return outcome


def build_accelerator() -> Accelerator:
    """Create the Accelerator that places models on their device; raises UsageError if accelerate is missing."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise UsageError(
            "Training a study requires accelerate, which is not installed.", 'Run: pip install "attnlens[study]"'
        ) from None
    return Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")


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


def _rate_factor(step: int, steps: int, warmup: float) -> float:
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
