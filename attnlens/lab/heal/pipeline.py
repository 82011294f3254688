"""Swap a kernel, train the swapped heads site by site and then end to end, and measure the model before and after."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from attnlens.arguments import Budget, public
from attnlens.choices import ETA, HealingGoal, HealingStage
from attnlens.errors import ModelError, TextError, UsageError
from attnlens.kernels import OWN
from attnlens.kernels.spelling import branches
from attnlens.lab.heal.healer import (
    SLOWER,
    STEPS,
    Distances,
    Healer,
    adamw,
    choose_rate,
    descend,
    measure_distances,
    set_values,
)
from attnlens.lab.ranks.pipeline import RankSearch
from attnlens.maths.statistics import paired_difference
from attnlens.models import hooks, texts
from attnlens.models.texts.sequences import choose_windows
from attnlens.models.texts.targets import Fed, feed
from attnlens.records import Healing, HealingControl, HealingStep, HealingTraining
from attnlens.report.report import Report
from attnlens.requests import HealRequest, takes
from attnlens.requests.swap import Amount, heal_kernels
from attnlens.runs.differences import mean_loss
from attnlens.runs.outputs import enough_memory, measure_peak, tokens_in
from attnlens.runs.progress import AddSteps, Progress, silent
from attnlens.runs.store import Store, hash_json
from attnlens.runs.swap.kernel_run import (
    NO_PEAK,
    ChangedModel,
    KernelRun,
    changed_weights,
    hash_parameters,
    map_kernels,
)
from attnlens.runs.swap.pipeline import Model, SwapWork, check_work, prepare

LEAST_SEQUENCES, MOST_SEQUENCES = 512, 16384  # minimum and maximum number of calibration sequences
SHARE, MOST, PER_HELD_OUT = 0.125, 4, 40  # held-out batches: share of all, maximum, training batches per held-out batch
STAGES: tuple[HealingStage, ...] = ("transfer", "whole")  # stages, in the order of training
TRANSFER: dict[HealingGoal, float] = {"teacher": 0.9, "text": 0.25}
"""Maximum share of the work spent on attention transfer, by goal (tuned on `demo`). Per token, transfer gains more than
end-to-end training, but transfer cannot learn a new text."""
WARM_UP = 20  # warm-up steps of the learning rate, at most a tenth of the stage's steps
LOWEST = 0.02  # share of the learning rate at the end of the cosine decay
STATE = (
    *("stage", "begun", "rate", "within", "step", "tokens", "order"),
    *("best", "least", "ended", "values", "curve", "trainings"),
)
"""Fields of a `Descent` that are stored without conversion."""
CHECKS, FEW, MOST_CHECKS = 10, 5, 100  # held-out checks: default, minimum for few steps, maximum for many
NEAR, APART = 4, 50  # approximate minimum and maximum number of steps between two checks
PATIENCE, FEWEST = 0.3, 3
"""A stage ends once its distance is not significantly below the distance at an earlier check, which must lie back at
least FEWEST checks and the share PATIENCE of the stage's work."""
STEPS_WANTED = 400  # number of steps to aim at if the amount is in tokens; on `demo`, 800 gain little more than 400
DRAWN = (0.0, 0.05, 0.15, 0.35, 0.65, 1.0)  # shares of the work at which the figure shows the evaluation loss
ROUNDING = 1e-9  # tolerance of comparisons of shares of the work


@public
@takes(HealRequest)
def heal(
    model: Model = "demo",
    kernel: str | Sequence[str] | None = None,
    *,
    progress: Progress = silent,
    request: HealRequest,
) -> Report:
    """Replace the kernel of a model's heads, train W_Q, W_K and kernel parameters, and measure the resulting models.

    `kernel` is spelled as on the command line (default: `rbf`). If `model` is a name, finished work is stored, and a
    repeated call resumes from this work. Raises UsageError, ModelError, TextError, OutputError, IdentityError, and
    Interrupted, which contains the finished results.
    """
    return heal_work(model, kernel, request, progress).finish()


def heal_work(
    model: Model, kernel: str | Sequence[str] | None, request: HealRequest, progress: Progress = silent
) -> SwapWork:
    """Check the options, load the model, and prepare the work of `heal` without starting it."""
    check_work(model, request)
    kernels, plan, request = heal_kernels(kernel, request)
    step = None if plan is None else RankSearch(Budget(plan.unit, plan.budget), plan, request.intervals)
    regularised = kernels[0].info.form == "output" and request.eta is None
    add_stage = partial(add_healed_stage, options=request.with_options(eta=ETA) if regularised else request)
    sequences = partial(count_sequences, request.train)
    return prepare("heal", model, kernels, request, progress, ranks=step, train=add_stage, sequences=sequences)


def count_sequences(amount: Amount, tokens: int) -> int:
    """Return how many calibration sequences of `tokens` tokens the training needs, within bounds."""
    trained = {"steps": 0.0, "tokens": amount.number / max(1, tokens), "seconds": math.inf}[amount.unit]
    return int(min(MOST_SEQUENCES, max(LEAST_SEQUENCES, trained)))


def add_healed_stage(run: KernelRun, calibrated: texts.Batches, options: HealRequest) -> None:
    """Heal the last stage of a run and, if requested, train the control; measure the trained models."""
    shapes = run.session.shapes
    with enough_memory(calibrated.batches[0].inputs, "to train on"):
        healing, healer = train_swap(run, options, calibrated)
        wanted = options.control and not healer.interrupted
        controls = [train_swap(run, options, calibrated, control=True)] if wanted else []
    run.interrupted = healer.interrupted or any(each.interrupted for _, each in controls)
    healed = run.stages["healed"] = ChangedModel(healer.healed_swaps(), healer.values())
    if run.session.options.controls and all(swap.kernel.near for swap in healed.swaps.values()):  # a hybrid
        far = map_kernels("far part, healed", healed.swaps, shapes, lambda kernel: branches(kernel)[1], healed.weights)
        run.controls.append(far)
    trained = [ChangedModel(each.healed_swaps(), each.values()) for _, each in controls]
    run.measure([healed, *run.control_models, *trained])
    for (record, _), control in zip(controls, trained, strict=True):
        comparison = compare_control(record, control, healed, run.session.seed)
        reasons = healing.reasons if comparison else {**healing.reasons, "control": "a model diverged"}
        healing = healing.model_copy(update={"control": comparison, "reasons": reasons})
    run.healing = healing


def train_swap(
    run: KernelRun, options: HealRequest, calibrated: texts.Batches, *, control: bool = False
) -> tuple[Healing, Healer]:
    """Heal the last stage or, with `control`, train the original model end to end on the same batches.

    Return the record and the trained healer. Raises UsageError for the goal `text` if the model predicts no tokens or
    reads noise.
    """
    session, swaps, name = run.session, run.last.swaps, "heal"
    if options.learn == "text" and (session.task in ("hidden", "classification") or calibrated.made_up):
        reason = "its input is random noise generated by attnlens" if calibrated.made_up else "it predicts no tokens"
        remedy = "Omit --learn to train on the original model's predictions."
        raise UsageError(f"This model cannot be trained with --learn text: {reason}.", remedy)
    if control:
        swaps, name = {site: hooks.Replacement(OWN, swap.heads) for site, swap in swaps.items()}, "control"
        options = options.with_options(eta=None)
    model = session.loaded.model
    healer = Healer(**vars(session.setup(swaps)), options=options)
    # facts that determine the result besides the model, texts and options of the run
    facts = [hash_parameters(swaps), [[swap.kernel.spelling, swap.heads] for swap in swaps.values()]]
    state = None if run.store is None else (run.store, f"{name} {hash_json(facts)}")
    evaluate = partial(mean_loss, model, session.fed, session.task)
    add_steps, stages = run.start_stage(name, int(options.train.number)), STAGES[1:] if control else STAGES
    records: list[Healing] = []
    training = partial(run_training, healer, calibrated, evaluate, add_steps, state, stages)
    peak = measure_peak(model, lambda: records.append(training()))
    reasons = {} if peak is not None else {"peak_memory_bytes": NO_PEAK}
    return records[0].model_copy(update={"peak_memory_bytes": peak, "reasons": reasons}), healer


def compare_control(record: Healing, control: ChangedModel, healed: ChangedModel, seed: int) -> HealingControl | None:
    """Build the control's record; None if the loss of the control or of the healed model is not finite."""
    trained, swapped = control.differences, healed.differences
    assert trained is not None and swapped is not None  # noqa: S101, PT018  # both are measured
    of_control, of_healed = trained.outcome(seed, []), swapped.outcome(seed, [])
    if of_control.loss is None or of_control.perplexity is None or of_healed.perplexity is None:
        return None
    first, second, counts = torch.cat(trained.after), torch.cat(swapped.after), torch.cat(swapped.counts)
    delta, low, high = paired_difference(first, second, swapped.sampled, weights=counts, seed=seed)
    return HealingControl(
        best=record.best,
        tokens=record.tokens or 0,
        learning_rate=record.learning_rate,
        loss=of_control.loss,
        perplexity=of_control.perplexity,
        ratio=math.exp(delta),
        ratio_ci95=None if math.isnan(low) else (math.exp(low), math.exp(high)),
    )


def run_training(
    healer: Healer,
    batches: texts.Batches,
    evaluate: Callable[[], float | None],
    progress: AddSteps,
    state: tuple[Store, str] | None = None,
    stages: tuple[HealingStage, ...] = STAGES,
) -> Healing:
    """Train for the requested amount, stage by stage; keep the parameters with the smallest held-out distance.

    A stage restarts at a lower rate until a check improves on the stage's start, and ends once checks no longer
    improve significantly. `evaluate` returns the loss on the evaluation text. With `state`, each check stores the
    training state, from which a killed run resumes. After the first checked step, Ctrl-C ends the training early.
    """
    amount, size = healer.options.train, texts.sequences_in(batches.batches[0].inputs)
    train, held_out = split(healer, batches)
    healer.prepare(batches.batches[0])
    batch = healer.options.batch  # sequences per step; None: as many as in a batch of the text
    if batch is None and amount.unit == "tokens" and batches.tokens:
        batch = int(max(1, min(size, amount.number / batches.tokens / STEPS_WANTED)))
    work = Descent(healer, *cut_parts(train, batch), held_out, evaluate, progress, state)
    saved = None if state is None or not state[0].resume else state[0].load(state[1])
    try:
        if saved is None:
            work.check()
        else:
            work.restore(saved)
            stages = stages[stages.index(work.stage) :]
        for stage in stages:
            work.run_stage(stage)
    except KeyboardInterrupt:
        if len(work.curve) < 2:
            raise
        healer.interrupted = True
    return work.finish()


def split(healer: Healer, batches: texts.Batches) -> tuple[list[Fed], list[Fed]]:
    """Return training batches, and held-out batches spread over the texts; raise TextError for a single batch."""
    if len(batches) < 2:
        needed = "two batches of calibration text: one to train on, and one to choose the best step"
        remedy = "Give a longer text with --calibration, or a smaller --batch-size."
        raise TextError(f"Healing needs at least {needed}.", remedy)
    if healer.options.learn == "text":
        fed = feed(healer.loaded, batches, healer.task, healer.seed)
    else:
        fed = [Fed(batch.inputs, None) for batch in batches]
    amount, size = healer.options.train, texts.sequences_in(batches.batches[0].inputs)
    if amount.unit == "tokens":
        trained = amount.number / max(1, size * batches.tokens)  # number of training batches
    else:  # if the amount is a time, assume MOST_CHECKS steps
        steps = amount.number if amount.unit == "steps" else MOST_CHECKS
        trained = steps * max(1.0, (healer.options.batch or size) / size)
    count = max(1, round(min(MOST, len(batches) * SHARE, trained / PER_HELD_OUT)))
    held_out = choose_windows(len(batches), count, "spread", seed=0)
    return [batch for number, batch in enumerate(fed) if number not in held_out], [fed[number] for number in held_out]


def cut_parts(fed: Sequence[Fed], size: int | None) -> tuple[list[Fed], int]:
    """Return the batches cut into parts of at most `size` sequences (None: uncut), and the number of parts per step."""
    whole = texts.sequences_in(fed[0].inputs)
    if size is None or size >= whole:
        return list(fed), -(-(size or whole) // whole)
    parts = []
    for batch in fed:
        count = texts.sequences_in(batch.inputs)
        parts += [batch] if count == 1 else [batch.rows(start, start + size) for start in range(0, count, size)]
    return parts, 1


@dataclass
class Descent:
    """Training of a Healer: learning-rate schedule, held-out checks and records."""

    healer: Healer
    train: Sequence[Fed]  # parts of the training text, each run as one batch
    per_step: int  # parts per step
    held_out: Sequence[Fed]  # batches on which distances are measured
    evaluate: Callable[[], float | None]
    progress: AddSteps
    state: tuple[Store, str] | None  # store of the training state, and the state's name in the store
    order: list[int] = field(default_factory=list)  # indices of the parts to come in this epoch, last part first
    stage: HealingStage = "transfer"
    begun: float = 0.0  # share of the total work that was finished when the stage started
    step: int = 0
    tokens: int = 0
    spent: float = 0.0  # training time of previous sessions, in seconds
    within: int = 0  # steps of this stage at the current rate
    rate: float = 0.0
    best: int = 0  # step with the smallest distance so far
    least: float = math.inf  # distance at step `best`
    values: list[Tensor] = field(default_factory=list)  # values of the trained tensors at step `best`
    curve: list[HealingStep] = field(default_factory=list)
    trainings: list[HealingTraining] = field(default_factory=list)  # one per started stage
    history: list[tuple[float, Distances]] = field(default_factory=list)  # (share of work, distances) of this stage
    resumed: bool = False
    ended: bool = False  # True if the stage is over
    reported: int = 0  # amount reported to `progress` so far

    def __post_init__(self) -> None:
        """Create the optimiser, and estimate the share of the work that one step does (0 if the amount is a time)."""
        self.start, self.amount = time.monotonic(), self.healer.options.train
        self.generator = torch.Generator().manual_seed(self.healer.seed)  # draws the order of the batches
        self.optimiser = adamw(self.healer.leaves, self.rate)
        step_tokens = sum(map(tokens_in, self.train)) / len(self.train) * self.per_step
        self.one_step = {"steps": 1.0, "tokens": step_tokens, "seconds": 0.0}[self.amount.unit] / self.amount.number
        self.planned = 1 / self.one_step if self.one_step else 1e9  # planned steps; not limited if the amount is a time

    @property
    def seconds(self) -> float:
        """Seconds of healing, over all sessions."""
        return self.spent + time.monotonic() - self.start

    @property
    def done(self) -> float:
        """Training done so far, in the unit of the requested amount: steps, tokens or seconds."""
        return {"steps": self.step, "tokens": self.tokens, "seconds": self.seconds}[self.amount.unit]

    @property
    def share(self) -> float:
        """Share of the total work that is finished, at most 1."""
        return min(1.0, self.done / self.amount.number)

    @property
    def end(self) -> float:
        """Share of the total work at which the stage ends at the latest."""
        return TRANSFER[self.healer.options.learn] if self.stage == "transfer" else 1.0

    @property
    def over(self) -> bool:
        """True if the stage has used its share of the work; attention transfer leaves one step for the next stage."""
        if self.stage == "whole":
            return self.share >= 1
        return self.share + self.one_step > self.end + ROUNDING or self.share >= self.end

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resume from a state saved by `_store_state`."""
        for name, value in saved["fields"].items():
            setattr(self, name, value)
        self.spent, self.resumed = saved["seconds"], True
        self.generator.set_state(saved["generator"])
        set_values(self.healer.leaves, saved["now"])
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": saved["moments"]})
        self.history = [(share, Distances(each, counts)) for share, each, counts in saved["history"]]
        self._report_progress()

    def _store_state(self, store: Store, name: str) -> None:
        value = {
            "fields": {name: getattr(self, name) for name in STATE},
            "seconds": self.seconds,
            "generator": self.generator.get_state(),
            "now": self.healer.leaves,
            "moments": self.optimiser.state_dict()["state"],
            "history": [[share, distances.each, distances.counts] for share, distances in self.history],
        }
        store.keep(name, value)

    def run_stage(self, stage: HealingStage) -> None:
        """Run a stage to its end, including the checks that are due."""
        if not self.resumed:
            self.stage, self.begun = stage, self.share
            if self.over:
                return
            self._start_stage()
        self.resumed = False
        while not (self.ended or (self.over and self.step)):  # at least one step, even if the time is over
            started = time.monotonic()
            tokens = self.advance()
            training = self.trainings[-1]
            tokens, seconds = training.tokens + tokens, training.seconds + time.monotonic() - started
            speed = tokens / seconds if seconds > 0 else None
            self._update_training(steps=training.steps + 1, tokens=tokens, seconds=seconds, tokens_per_second=speed)
            self._report_progress()
            if self._is_due() or self.over:
                self._run_check()

    def _start_stage(self) -> None:
        """Start the stage from the best parameters so far, at a rate chosen by a range test."""
        set_values(self.healer.leaves, self.values)
        count = max(1, min(STEPS, round(self.planned / 10)))
        repeated = cycle(self.train)
        steps = [list(islice(repeated, self.per_step)) for _ in range(count)]
        rate, tried = choose_rate(self.healer, self.stage, steps, self.held_out[:1])
        if not rate and self.healer.options.control:
            rate = min(trial.rate for trial in tried)
        self._restart(rate)
        self.history = [(self.share, measure_distances(self.healer, self.held_out, self.stage))]
        self.ended = rate == 0
        training = HealingTraining(stage=self.stage, steps=0, tokens=0, seconds=0.0, learning_rate=rate, rates=tried)
        self.trainings.append(training.model_copy(update={"stopped": self.ended}))

    def _restart(self, rate: float) -> None:
        """Start or restart the stage from the current parameters, at this rate and with a new optimiser."""
        self.begun, self.rate, self.within = self.share, rate, 0
        self.optimiser = adamw(self.healer.leaves, rate)

    def advance(self) -> int:
        """Take one training step and return its number of tokens."""
        parts = []
        for _ in range(self.per_step):
            self.order = self.order or torch.randperm(len(self.train), generator=self.generator).tolist()
            parts.append(self.train[self.order.pop()])
        length = self.end - self.begun
        steps = length / self.one_step if self.one_step else math.inf
        factor = shape(self.within, (self.share - self.begun) / length if length > 0 else 1.0, steps)
        descend(self.healer, self.optimiser, parts, self.stage, self.rate * factor)
        tokens = sum(map(tokens_in, parts))
        self.step, self.within, self.tokens = self.step + 1, self.within + 1, self.tokens + tokens
        return tokens

    def _run_check(self) -> None:
        """Run a check: keep the best parameters, decide whether the stage continues, and save the state."""
        distances = self.check()
        if self.stage == "transfer":
            distances = measure_distances(self.healer, self.held_out, self.stage)
        self.history.append((self.share, distances))
        improved = any(distances.mean < self.history[0][1].mean for _, distances in self.history)
        if not improved and not self.over:  # restart the stage with smaller steps
            set_values(self.healer.leaves, self.values)
            first_rate = self.trainings[-1].lowered_from or self.rate
            self._restart(self.rate * SLOWER)
            self._update_training(learning_rate=self.rate, lowered_from=first_rate)
        # end the stage if its distance has stopped falling; with a control, both models train equally long
        since = self.history[-1][0] - PATIENCE * (self.end - self.begun)
        before = [distances for at, distances in self.history[:-FEWEST] if at <= since]
        patient = self.healer.options.control
        self.ended = not patient and bool(before) and not self.history[-1][1].falls_from(before[-1])
        if self.ended and not self.over:
            self._update_training(stopped=True)
        if self.state is not None:
            self._store_state(*self.state)

    def check(self) -> Distances:
        """Measure the distance, keep the best parameters, and extend the curve.

        Raise ModelError if the distance is not finite before the first step.
        """
        distances = measure_distances(self.healer, self.held_out)
        if self.step == 0 and not distances.finite:
            problem = "The training loss of the swapped model is not finite, so the model cannot be healed."
            raise ModelError(problem, "Swap fewer layers (--layers), or try --fit if the kernel has free parameters.")
        if distances.mean < self.least:  # strict: keeps the first of equal steps
            self.best, self.least = self.step, distances.mean
            self.values = [leaf.detach().clone() for leaf in self.healer.leaves]
        points = sum(step.loss is not None for step in self.curve)
        due = points < len(DRAWN) and self.share >= DRAWN[points] - ROUNDING
        loss = self._evaluation_loss() if due or not self.curve or self.share >= 1 else None
        validation, stage = distances.mean if distances.finite else None, self.stage if self.step else None
        point = HealingStep(step=self.step, validation=validation, loss=loss, tokens=self.tokens, stage=stage)
        self.curve.append(point)
        return distances

    def _is_due(self) -> bool:
        """Return True if the work, cut into equal parts, has passed the middle of a part since the last check."""
        planned = self.planned if self.one_step else self.amount.number
        checks = max(FEW, min(CHECKS, int(planned // NEAR)), min(MOST_CHECKS, int(planned // APART)))
        now, last = (int(share * checks + 0.5 + ROUNDING) for share in (self.share, self.history[-1][0]))
        return now > last

    def _evaluation_loss(self) -> float | None:
        healer, model = self.healer, self.healer.loaded.model
        replaced = hooks.replace(model, healer.sites, healer.healed_swaps(), healer.path)
        with changed_weights(model, healer.values()), replaced:
            return self.evaluate()

    def _update_training(self, **changed: float | None) -> None:
        self.trainings[-1] = self.trainings[-1].model_copy(update=changed)

    def _report_progress(self) -> None:
        done = int(min(self.done, self.amount.number))
        self.progress(done - self.reported)
        self.reported = done

    def finish(self) -> Healing:
        """Restore the best parameters and build the record."""
        healer, options = self.healer, self.healer.options
        set_values(healer.leaves, self.values)
        for index, point in enumerate(self.curve):
            if point.step == self.best and point.loss is None:
                self.curve[index] = point.model_copy(update={"loss": self._evaluation_loss()})
        rates = [training.learning_rate for training in self.trainings if training.steps]
        return Healing(
            steps=int(self.amount.number) if self.amount.unit == "steps" else self.step,
            best=self.best,
            parameters=healer.count,
            learning_rate=rates[-1] if rates else 0.0,
            curve=self.curve,
            amount=str(self.amount),
            goal=options.learn,
            rank=options.rank,
            batch=texts.sequences_in(self.train[0].inputs) * self.per_step,
            tokens=self.tokens,
            seconds=self.seconds,
            stages=self.trainings,
            interrupted=healer.interrupted,
            **{} if options.eta is None else {"eta": options.eta, "ksvd_convention": options.ksvd_convention},
        )


def shape(step: int, share: float, steps: float) -> float:
    """Return the factor of the learning rate at step `step` of a stage of `steps` steps.

    The factor is a linear warm-up times a cosine that falls from 1 to LOWEST as `share` rises from 0 to 1.
    """
    warm = min(WARM_UP, max(1, steps // 10))
    fall = (1 + math.cos(math.pi * min(1.0, max(0.0, share)))) / 2
    return min(1.0, (step + 1) / warm) * (LOWEST + (1 - LOWEST) * fall)
