"""Train swapped heads with AdamW, first per site and then end to end, and keep the step with the smallest distance."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from attnlens.choices import HealingStage
from attnlens.errors import ModelError
from attnlens.lab.heal.course import (
    SLOWER,
    STAGES,
    STEPS,
    Course,
    Distances,
    choose_rate,
    cut_parts,
    measure_distances,
    set_values,
    split,
)
from attnlens.lab.heal.healer import Healer
from attnlens.models import hooks
from attnlens.models.texts import Batches, sequences_in
from attnlens.models.texts.targets import Fed
from attnlens.records import Healing, HealingStep, HealingTraining
from attnlens.requests.swap import HealOptions
from attnlens.runs.progress import Tell
from attnlens.runs.store import Store
from attnlens.runs.swap.session import changed_weights

COURSE = ("stage", "begun", "rate", "within", "step", "tokens", "order")
"""Fields of a `Course` that are stored without conversion."""
CHECKS, FEW, MOST_CHECKS = 10, 5, 100
"""Number of held-out checks during a healing: the default, the minimum for few steps, and the maximum for many."""
NEAR, APART = 4, 50
"""Approximate minimum and maximum number of steps between two checks."""
PATIENCE, FEWEST = 0.3, 3
"""Early stopping: share of a stage's work, and number of checks, within which the distance must fall significantly."""
STEPS_WANTED = 400
"""Number of steps to divide a token amount into, if batches are large enough. On `demo`, 200 k tokens gain more in 400
steps than in 200, and little more in 800."""
DRAWN = (0.0, 0.05, 0.15, 0.35, 0.65, 1.0)
"""Shares of the total work at which the loss on the evaluation text is measured for the figure."""
Evaluate = Callable[[], float | None]
"""Function that returns the current model's loss on the evaluation text."""


def heal(
    healer: Healer,
    batches: Batches,
    options: HealOptions,
    seed: int,
    evaluate: Evaluate,
    progress: Tell,
    state: tuple[Store, str] | None = None,
    stages: tuple[HealingStage, ...] = STAGES,
) -> Healing:
    """Train for the requested amount, stage by stage, and end with the parameters of the smallest held-out distance.

    While no check of a stage improves on its start, the stage restarts with smaller steps. It ends early if checks no
    longer improve significantly. With `state`, each check stores the state, from which a killed healing resumes. After
    the first checked step, Ctrl-C ends the healing early and sets `healer.interrupted`. Raises TextError for fewer than
    two batches, ModelError if the initial distance is not finite.
    """
    size = sequences_in(batches.batches[0].inputs)
    train, held_out = split(healer, batches, seed, _estimate_batches(options, size, batches.tokens))
    healer.prepare(batches.batches[0])
    batch = options.batch  # sequences per step; None: a batch
    if batch is None and options.amount.unit == "tokens" and batches.tokens:
        batch = int(max(1, min(size, options.amount.number / batches.tokens / STEPS_WANTED)))
    parts, per_step = cut_parts(train, batch)
    course = Course(healer, parts, per_step, options.amount, torch.Generator().manual_seed(seed))
    work = Descent(course, held_out, evaluate, progress, state, patient=options.control)
    saved = None if state is None or not state[0].resume else state[0].load(state[1])
    try:
        if saved is None:
            work.check(0)
        else:
            work.restore(saved)
            stages = stages[stages.index(course.stage) :]
        for stage in stages:
            work.train(stage)
    except KeyboardInterrupt:
        if len(work.curve) < 2:
            raise
        healer.interrupted = True
    return work.finish(options, sequences_in(parts[0].inputs) * per_step)


@dataclass
class Descent:
    """A healing in progress: its course, its checks and its records."""

    course: Course
    held_out: Sequence[Fed]  # batches on which distances are measured
    evaluate: Evaluate
    progress: Tell
    state: tuple[Store, str] | None  # the store of the state, and its name there
    best: int = 0  # step with the smallest distance so far
    least: float = math.inf  # its distance
    values: list[Tensor] = field(default_factory=list)  # values of the leaves at that step
    curve: list[HealingStep] = field(default_factory=list)
    trainings: list[HealingTraining] = field(default_factory=list)  # one per started stage
    history: list[tuple[float, Distances]] = field(default_factory=list)
    """Checks of the current stage: share of the total work, and the distances."""
    resumed: bool = False
    ended: bool = False  # True if the stage is over
    patient: bool = False  # True: no stage ends early or is skipped, so that a control trains equally long
    reported: int = 0  # amount reported to `progress` so far

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a state that `_store` has saved."""
        course, leaves = self.course, self.course.healer.leaves
        for name in COURSE:
            setattr(course, name, saved["course"][name])
        course.spent = saved["seconds"]
        course.generator.set_state(saved["generator"])
        set_values(leaves, saved["now"])
        self.best, self.least, values = saved["best"]
        self.values = [value.to(leaf.device) for value, leaf in zip(values, leaves, strict=True)]
        course.optimiser.load_state_dict({**course.optimiser.state_dict(), "state": saved["moments"]})
        self.history = [(share, Distances(each, counts)) for share, each, counts in saved["history"]]
        self.curve = [HealingStep.model_validate(step) for step in saved["curve"]]
        self.trainings = [HealingTraining.model_validate(training) for training in saved["trainings"]]
        self.ended, self.resumed = saved["ended"], True
        self._report_progress()

    def _store(self, store: Store, name: str) -> None:
        value = {
            "course": {name: getattr(self.course, name) for name in COURSE},
            "seconds": self.course.seconds,
            "generator": self.course.generator.get_state(),
            "now": self.course.healer.leaves,
            "moments": self.course.optimiser.state_dict()["state"],
            "best": [self.best, self.least, self.values],
            "history": [[share, distances.each, distances.counts] for share, distances in self.history],
            "curve": [step.model_dump() for step in self.curve],
            "trainings": [training.model_dump() for training in self.trainings],
            "ended": self.ended,
        }
        store.keep(name, value)

    def train(self, stage: HealingStage) -> None:
        """Run a stage to its end, with a check whenever one is due."""
        course = self.course
        if not self.resumed:
            course.stage, course.begun = stage, course.share
            if course.over:
                return
            self._start(stage)
        self.resumed = False
        while not (self.ended or (course.over and course.step)):  # at least one step, even if the time is over
            started = time.monotonic()
            tokens = course.advance()
            training = self.trainings[-1]
            tokens, seconds = training.tokens + tokens, training.seconds + time.monotonic() - started
            speed = tokens / seconds if seconds > 0 else None
            self._update_training(steps=training.steps + 1, tokens=tokens, seconds=seconds, tokens_per_second=speed)
            self._report_progress()
            if self._is_due() or course.over:
                self._run_check()

    def _start(self, stage: HealingStage) -> None:
        """Start a stage from the best parameters so far, with the learning rate that a range test chooses."""
        course, leaves = self.course, self.course.healer.leaves
        set_values(leaves, self.values)
        planned = 1 / course.one_step if course.one_step else 1e9  # a time does not bound the steps
        count = max(1, min(STEPS, round(planned / 10)))
        endless = cycle(course.train)  # batches in order, repeated, grouped by step
        steps = [list(islice(endless, course.per_step)) for _ in range(count)]
        rate, tried = choose_rate(course.healer, stage, steps, self.held_out[:1])
        if not rate and self.patient:
            rate = min(trial.rate for trial in tried)
        course.begin(stage, rate)
        self.history = [(course.share, measure_distances(course.healer, self.held_out, stage))]
        self.ended = rate == 0
        training = HealingTraining(stage=stage, steps=0, tokens=0, seconds=0.0, learning_rate=rate, rates=tried)
        self.trainings.append(training.model_copy(update={"stopped": self.ended}))

    def _run_check(self) -> None:
        """Run a check: keep the best parameters, decide whether the stage continues, and save the state."""
        course = self.course
        whole = self.check(course.step)
        distances = whole if course.stage == "whole" else measure_distances(course.healer, self.held_out, course.stage)
        self.history.append((course.share, distances))
        improved = any(distances.mean < self.history[0][1].mean for _, distances in self.history)
        if not improved and not course.over:  # restart the stage with smaller steps
            set_values(course.healer.leaves, self.values)
            first_rate = self.trainings[-1].lowered_from or course.rate
            course.begin(course.stage, course.rate * SLOWER)
            self._update_training(learning_rate=course.rate, lowered_from=first_rate)
        # end the stage if the distance has not fallen significantly within its last PATIENCE
        since = self.history[-1][0] - PATIENCE * (course.end - course.begun)
        before = [distances for at, distances in self.history[:-FEWEST] if at <= since]
        self.ended = not self.patient and bool(before) and not self.history[-1][1].falls_from(before[-1])
        if self.ended and not course.over:
            self._update_training(stopped=True)
        if self.state is not None:
            self._store(*self.state)

    def check(self, step: int) -> Distances:
        """Measure the distance, keep the best parameters, extend the curve; raise ModelError if step 0 diverges."""
        course = self.course
        distances = measure_distances(course.healer, self.held_out)
        if step == 0 and not distances.finite:
            raise ModelError(
                "The training loss of the swapped model is not finite, so it cannot be healed.",
                "Try --fit, or fewer layers.",
            )
        if distances.mean < self.least:  # strict: keeps the first of equal steps
            self.best, self.least = step, distances.mean
            self.values = [leaf.detach().clone() for leaf in course.healer.leaves]
        share, points = course.share, sum(step.loss is not None for step in self.curve)
        due = points < len(DRAWN) and share >= DRAWN[points] - 1e-9  # 1e-9: rounding of shares
        drawn = not self.curve or due or share >= 1
        point = HealingStep(
            step=step,
            validation=distances.mean if distances.finite else None,
            loss=self._evaluation_loss() if drawn else None,
            tokens=course.tokens,
            stage=course.stage if step else None,
        )
        self.curve.append(point)
        return distances

    def _is_due(self) -> bool:
        """Check whether a check is due: in the middle of equal parts of the work (0.05, 0.15, … for 10 checks)."""
        course = self.course
        planned = 1 / course.one_step if course.one_step else course.amount.number
        checks = max(FEW, min(CHECKS, int(planned // NEAR)), min(MOST_CHECKS, int(planned // APART)))
        last = self.history[-1][0]  # 1e-9 below: rounding of shares
        return int(course.share * checks + 0.5 + 1e-9) > int(last * checks + 0.5 + 1e-9)

    def _evaluation_loss(self) -> float | None:
        healer = self.course.healer
        with (
            changed_weights(healer.loaded.model, healer.values()),
            hooks.replace(healer.loaded.model, healer.sites, healer.healed_swaps(), healer.path),
        ):
            return self.evaluate()

    def _update_training(self, **changed: float | None) -> None:
        self.trainings[-1] = self.trainings[-1].model_copy(update=changed)

    def _report_progress(self) -> None:
        done = int(min(self.course.done, self.course.amount.number))
        self.progress(done - self.reported)
        self.reported = done

    def finish(self, options: HealOptions, batch: int) -> Healing:
        """Restore the best parameters and build the record."""
        course, healer = self.course, self.course.healer
        set_values(healer.leaves, self.values)
        for index, point in enumerate(self.curve):
            if point.step == self.best and point.loss is None:
                self.curve[index] = point.model_copy(update={"loss": self._evaluation_loss()})
        rates = [training.learning_rate for training in self.trainings if training.steps]
        return Healing(
            steps=int(options.amount.number) if options.amount.unit == "steps" else course.step,
            best=self.best,
            parameters=healer.count,
            learning_rate=rates[-1] if rates else 0.0,
            curve=self.curve,
            amount=str(options.amount),
            goal=healer.goal,
            rank=options.rank,
            batch=batch,
            tokens=course.tokens,
            seconds=course.seconds,
            stages=self.trainings,
            interrupted=healer.interrupted,
            **{} if healer.eta is None else {"eta": healer.eta, "ksvd_convention": healer.convention},
        )


def _estimate_batches(options: HealOptions, size: int, tokens: int) -> float:
    """Estimate the number of training batches of `size` sequences; MOST_CHECKS steps if the amount is a time."""
    number, unit = options.amount.number, options.amount.unit
    if unit == "tokens":
        return number / max(1, size * tokens)
    return (number if unit == "steps" else MOST_CHECKS) * max(1.0, (options.batch or size) / size)
