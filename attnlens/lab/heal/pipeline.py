"""Swap a kernel, train the swapped heads, and measure the model before and after the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from attnlens.arguments import public
from attnlens.errors import UsageError
from attnlens.kernels import OWN
from attnlens.lab.heal import descent
from attnlens.lab.heal.course import STAGES
from attnlens.lab.heal.healer import Healer
from attnlens.lab.ranks.pipeline import RankSearch
from attnlens.maths.statistics import paired_difference
from attnlens.models import hooks, texts
from attnlens.records import Healing, HealingControl
from attnlens.report.report import Report
from attnlens.requests import HealRequest, takes
from attnlens.requests.swap import HealOptions, heal_options
from attnlens.runs.differences import Differences, mean_loss
from attnlens.runs.outputs import Variant, enough_memory, peak_of
from attnlens.runs.progress import Progress, silent
from attnlens.runs.store import key_of
from attnlens.runs.swap.kernel_run import EXACT, NO_PEAK, KernelRun, healed_far_part
from attnlens.runs.swap.pipeline import Model, SwapWork, check_work, prepare
from attnlens.runs.swap.session import digest_of

LEAST_SEQUENCES, MOST_SEQUENCES = 512, 16384
"""Minimum and maximum number of calibration sequences."""


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
    options, training, ranks = heal_options(kernel, request)
    step = None if ranks is None else RankSearch(ranks, request.intervals)
    request = request if ranks is None else request.with_options(**ranks.selection)
    return prepare("heal", model, options, request, progress, ranks=step, training=Training(training))


@dataclass(frozen=True)
class Training:
    """The step of a run that trains the swapped heads."""

    options: HealOptions

    def sequences(self, tokens: int) -> int:
        """Return the number of calibration sequences of this length needed for training, within bounds."""
        amount = self.options.amount
        trained = {"steps": 0.0, "tokens": amount.number / max(1, tokens), "seconds": math.inf}[amount.unit]
        return int(min(MOST_SEQUENCES, max(LEAST_SEQUENCES, trained)))

    def train(self, run: KernelRun, calibrated: texts.Batches) -> None:
        """Train the last stage and, if requested, the control; and measure them."""
        session = run.session
        with enough_memory(calibrated.batches[0].inputs, "to train on"):
            healing, healer = train_swap(run, self.options, calibrated)
            wanted = self.options.control and not healer.interrupted
            control = train_swap(run, self.options, calibrated, control=True) if wanted else None
        run.interrupted = healer.interrupted or (control is not None and control[1].interrupted)
        run.weights, run.stages["healed"] = healer.values(), healer.healed_swaps()
        variants: dict[object, Variant] = {"healed": session.variant(run.last, run.weights)}
        far = healed_far_part(run.last, run.weights, session.shapes) if session.options.controls else None
        if far is not None:
            run.controls.append(far)
            variants[far.key] = session.variant(far.swaps, far.weights, EXACT)
        if control is not None:
            variants["control"] = session.variant(control[1].healed_swaps(), control[1].values())
        differences = run.compare_variants(variants)
        run.measured["healed"] = differences["healed"]
        if far is not None:
            run.measured_controls[far.key] = differences[far.key]
        if control is not None:
            record = compare_control(control[0], differences["control"], differences["healed"], session.seed)
            reasons = healing.reasons if record else {**healing.reasons, "control": "a model diverged"}
            healing = healing.model_copy(update={"control": record, "reasons": reasons})
        run.healing = healing


def train_swap(
    run: KernelRun, options: HealOptions, calibrated: texts.Batches, *, control: bool = False
) -> tuple[Healing, Healer]:
    """Heal the last stage; with `control`, train the original model on the same batches for the same amount instead.

    The control skips attention transfer, since the original model is its own target there. Raises UsageError for the
    goal `text` if the model predicts no token of a text.
    """
    session, swaps, name = run.session, run.last, "heal"
    if options.goal == "text" and (session.task in ("hidden", "classification") or calibrated.made_up):
        raise UsageError(
            "--learn text: this model does not predict tokens.",
            "Omit --learn to train on the original model's predictions.",
        )
    if control:
        swaps, name = {site: hooks.Replacement(OWN, swap.heads) for site, swap in swaps.items()}, "control"
    healer = Healer(
        session.loaded,
        session.sites,
        swaps,
        session.task,
        session.options.path,
        None if control else options.eta,
        options.convention,
        goal=options.goal,
        rank=options.rank,
        seed=session.seed,
        recompute=options.checkpointing,
    )
    # facts that determine the result besides the model, texts and options of the run
    facts = [
        [site.name, swap.kernel.spelling, swap.heads, digest_of(dict(swap.kernel.fitted))]
        for site, swap in swaps.items()
    ]
    state = None if run.store is None else (run.store, f"{name} {key_of(facts)}")
    model, tell = session.loaded.model, run.teller(name, int(options.amount.number))
    evaluate = partial(mean_loss, model, session.fed, session.task)
    work = calibrated, options, session.seed, evaluate, tell, state, STAGES[1:] if control else STAGES
    records: list[Healing] = []
    peak = peak_of(model, lambda: records.append(descent.heal(healer, *work)))
    reasons = {} if peak is not None else {"peak_memory_bytes": NO_PEAK}
    return records[0].model_copy(update={"peak_memory_bytes": peak, "reasons": reasons}), healer


def compare_control(record: Healing, control: Differences, healed: Differences, seed: int) -> HealingControl | None:
    """Build the control's record; None if one of the two models has no finite loss."""
    of_control, of_healed = control.outcome(seed, []), healed.outcome(seed, [])
    if of_control.loss is None or of_control.perplexity is None or of_healed.perplexity is None:
        return None
    first, second, counts = torch.cat(control.after), torch.cat(healed.after), torch.cat(healed.counts)
    delta, low, high = paired_difference(first, second, healed.sampled, weights=counts, seed=seed)
    return HealingControl(
        best=record.best,
        tokens=record.tokens or 0,
        learning_rate=record.learning_rate,
        loss=of_control.loss,
        perplexity=of_control.perplexity,
        ratio=math.exp(delta),
        ratio_ci95=None if math.isnan(low) else (math.exp(low), math.exp(high)),
    )
