"""Swap a kernel, train the swapped heads, and measure the model before and after the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attnlens.arguments import public
from attnlens.lab.heal.descent import compare_control, train_swap
from attnlens.lab.ranks.pipeline import RankSearch
from attnlens.models import texts
from attnlens.records import Report
from attnlens.requests import HealRequest, takes
from attnlens.requests.swap import HealOptions, heal_options
from attnlens.runs.outputs import Variant, enough_memory
from attnlens.runs.progress import Progress, silent
from attnlens.runs.swap.controls import healed_far_part
from attnlens.runs.swap.kernel_run import EXACT, KernelRun
from attnlens.runs.swap.pipeline import Model, SwapWork, check_work, prepare

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
        session, model = run.session, run.session.loaded.model
        work = session, run.last, self.options, calibrated, run.teller, run.store
        with enough_memory(model, calibrated.batches[0].inputs, None):
            healing, healer = train_swap(*work)
            control = train_swap(*work, control=True) if self.options.control and not healer.interrupted else None
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
