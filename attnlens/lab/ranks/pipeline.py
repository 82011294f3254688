"""Run a model with the kernel `rank`, whose ranks a search finds within a budget, or a plan gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from attnlens.arguments import public
from attnlens.choices import Intervals
from attnlens.lab.ranks import plans, search
from attnlens.lab.ranks.search import Budgeting, Choice, Sample
from attnlens.models import hooks, texts
from attnlens.models.hooks import SiteCall
from attnlens.models.texts.targets import check_input
from attnlens.records import ModelInfo, Plan, Report
from attnlens.requests import RanksRequest, takes
from attnlens.requests.swap import RankOptions, rank_options
from attnlens.runs.progress import Progress, silent, telling_at_most
from attnlens.runs.swap.kernel_run import KernelRun
from attnlens.runs.swap.pipeline import Model, SwapWork, check_work, prepare
from attnlens.runs.swap.session import SwapSession


@public
@takes(RanksRequest)
def find_ranks(model: Model = "demo", *, progress: Progress = silent, request: RanksRequest) -> Report:
    """Find the smallest rank of each key head within a budget of loss, and measure the model with these ranks.

    The report's `plan` has the ranks, what they save, and the estimated rise. If `model` is a name, finished work is
    stored, and the same call resumes from it. Raises UsageError, ModelError, TextError, OutputError, IdentityError, and
    Interrupted, which holds the finished results.
    """
    return rank_work(model, request, progress).finish()


def rank_work(model: Model, request: RanksRequest, progress: Progress = silent) -> SwapWork:
    """Prepare the work of `find_ranks`."""
    check_work(model, request)
    options, ranks = rank_options(request)
    step = RankSearch(ranks, request.intervals)
    return prepare("ranks", model, options, request.with_options(**ranks.selection), progress, ranks=step)


@dataclass
class RankSearch:
    """The step of a run that chooses the ranks, by a search or from a plan."""

    options: RankOptions
    intervals: Intervals | None
    samples: tuple[Sample, ...] = ()
    """Parts of the calibration text to fit on, choose ranks by and estimate the rise on; only the first for a plan."""
    choice: Choice | None = None

    def cut(self, session: SwapSession, contents: Sequence[texts.Content], cut: texts.Cut) -> Sequence[texts.Batches]:
        """Cut the calibration text, and return its parts. Raise UsageError if the model has no loss on it."""
        search.check_task(session.task)
        check_input(session.evaluated)
        cut = replace(cut, sequences=search.count_windows(contents))
        count = search.PARTS if self.options.plan is None else 1
        self.samples = search.cut_samples(session.loaded, contents, cut, session.evaluated, self.intervals, count)
        return [sample.batches for sample in self.samples]

    def check_model(self, reached: Sequence[SiteCall]) -> None:
        """Raise UsageError if a plan does not fit the model's sites."""
        if self.options.plan is not None:
            plans.check_fits(self.options.plan, reached)

    def choose(self, run: KernelRun) -> hooks.Swaps:
        """Search the ranks, or fit the maps for those of a plan; return the swap with them."""
        session, form_named = run.session, self.options.latents is not None
        how = session.task, session.options.path, session.seed
        start = partial(Budgeting, session.loaded, session.sites, run.last, *how, form_named=form_named, keep=run.keep)
        if self.options.plan is not None:
            (fitting,) = self.samples
            budgeting = start(run.teller("fit rank", fitting.batches.sequences))
            self.choice = plans.fit_plan(budgeting, fitting, self.options.plan)
        else:
            fitting, choosing, promising = self.samples
            work = search.budget_work(fitting, choosing, promising, form_named=form_named)
            with telling_at_most(session.progress, "budget", work) as tell:
                self.choice = start(tell).choose(fitting, choosing, promising, self.options.budget)
        return self.choice.swaps

    def plan(self, run: KernelRun) -> Plan:
        """Return the record of the choice, with the rises that the stages of the run have on the evaluated text."""
        assert self.choice is not None  # noqa: S101  # `choose` ran before
        session = run.session
        settings = session.settings.model_copy(update={"notes": [*session.settings.notes, *run.notes]})
        inputs, measured = session.fed[0].inputs, run.measured
        return plans.build_plan(
            session.loaded, self.choice, self.options.budget, settings, inputs, measured, self.samples
        )

    def notes(self, model: ModelInfo) -> list[str]:
        """Return a note if a plan was made for another model or other weights."""
        return [] if self.options.plan is None else plans.origin(self.options.plan, model)

    @property
    def facts(self) -> dict[str, Any]:
        """The plan, and whether the form of the latents was named, so that the search does not choose it."""
        plan = self.options.plan
        return {"plan": None if plan is None else plan.model_dump_json(), "named": self.options.latents is not None}
