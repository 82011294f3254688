"""Swap a kernel, train the swapped heads, and measure the model before and after the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from attnlens.arguments import Budget, public
from attnlens.choices import ETA
from attnlens.errors import UsageError
from attnlens.kernels import OWN
from attnlens.kernels.spelling import branches
from attnlens.lab.heal import descent
from attnlens.lab.heal.descent import STAGES
from attnlens.lab.heal.healer import Healer
from attnlens.lab.ranks.pipeline import RankSearch
from attnlens.maths.statistics import paired_difference
from attnlens.models import hooks, texts
from attnlens.records import Healing, HealingControl
from attnlens.report.report import Report
from attnlens.requests import HealRequest, takes
from attnlens.requests.swap import Amount, heal_kernels
from attnlens.runs.differences import mean_loss
from attnlens.runs.outputs import enough_memory, peak_of
from attnlens.runs.progress import Progress, silent
from attnlens.runs.store import key_of
from attnlens.runs.swap.kernel_run import NO_PEAK, ChangedModel, KernelRun, digests_of, map_kernels
from attnlens.runs.swap.pipeline import Model, SwapWork, check_work, prepare

LEAST_SEQUENCES, MOST_SEQUENCES = 512, 16384  # minimum and maximum number of calibration sequences


@public
@takes(HealRequest)
def heal(
    model: Model = "demo",
    kernel: str | Sequence[str] | None = None,
    *,
    progress: Progress = silent,
    request: HealRequest,
) -> Report:
    """Replace the kernel of a model's heads, train W_Q, W_K and the kernel's parameters, and measure both models.

    `kernel` is spelled as on the command line (default: `rbf`). If `model` is a name, finished work is stored, and the
    same call resumes from it. Raises UsageError, ModelError, TextError, OutputError, IdentityError, and Interrupted,
    which holds the finished results.
    """
    return heal_work(model, kernel, request, progress).finish()


def heal_work(
    model: Model, kernel: str | Sequence[str] | None, request: HealRequest, progress: Progress = silent
) -> SwapWork:
    """Prepare the work of `heal`."""
    check_work(model, request)
    kernels, plan, request = heal_kernels(kernel, request)
    step = None if plan is None else RankSearch(Budget(plan.unit, plan.budget), plan, request.intervals)
    regularised = kernels[0].info.form == "output" and request.eta is None
    train = partial(train_stages, options=request.with_options(eta=ETA) if regularised else request)
    sequences = partial(count_sequences, request.train)
    return prepare("heal", model, kernels, request, progress, ranks=step, train=train, sequences=sequences)


def count_sequences(amount: Amount, tokens: int) -> int:
    """Return the number of calibration sequences of this length needed for training, within bounds."""
    trained = {"steps": 0.0, "tokens": amount.number / max(1, tokens), "seconds": math.inf}[amount.unit]
    return int(min(MOST_SEQUENCES, max(LEAST_SEQUENCES, trained)))


def train_stages(run: KernelRun, calibrated: texts.Batches, options: HealRequest) -> None:
    """Train the last stage of a run and, if requested, the control; measure both and add the stage `healed`."""
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
    """Heal the last stage; with `control`, train the original model on the same batches for the same amount instead.

    The control skips attention transfer, since the original model is its own target there.
    """
    session, swaps, name = run.session, run.last.swaps, "heal"
    if options.learn == "text" and (session.task in ("hidden", "classification") or calibrated.made_up):
        problem = "--learn text: this model does not predict tokens."
        raise UsageError(problem, "Omit --learn to train on the original model's predictions.")
    if control:
        swaps, name = {site: hooks.Replacement(OWN, swap.heads) for site, swap in swaps.items()}, "control"
        options = options.with_options(eta=None)
    model = session.loaded.model
    healer = Healer(**vars(session.setup(swaps)), options=options)
    # facts that determine the result besides the model, texts and options of the run
    facts = [digests_of(swaps), [[swap.kernel.spelling, swap.heads] for swap in swaps.values()]]
    state = None if run.store is None else (run.store, f"{name} {key_of(facts)}")
    evaluate = partial(mean_loss, model, session.fed, session.task)
    tell, stages = run.teller(name, int(options.train.number)), STAGES[1:] if control else STAGES
    records: list[Healing] = []
    peak = peak_of(model, lambda: records.append(descent.heal(healer, calibrated, evaluate, tell, state, stages)))
    reasons = {} if peak is not None else {"peak_memory_bytes": NO_PEAK}
    return records[0].model_copy(update={"peak_memory_bytes": peak, "reasons": reasons}), healer


def compare_control(record: Healing, control: ChangedModel, healed: ChangedModel, seed: int) -> HealingControl | None:
    """Build the control's record; None if one of the two models has no finite loss."""
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
