"""The run of swap-kernel as work: each kernel is a unit, of which the parts that take long are kept as well."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attnlens import registry, requests
from attnlens.errors import OutputError
from attnlens.records import Report
from attnlens.requests.work_options import SharedRequest
from attnlens.run.outcomes.agreement import Prompts
from attnlens.run.provenance import code_of, content_of, versions
from attnlens.run.swap.candidate import Candidate
from attnlens.run.swap.one_kernel import KernelInterrupted, KernelRun
from attnlens.run.swap.readings import swap_report
from attnlens.run.swap.saved import UnsavedError
from attnlens.run.swap.session import Swapping
from attnlens.runs.progress import Interrupted, telling
from attnlens.runs.work import Compute, Stopped, Store, WorkPlan, key_of, run_units

APART = ("text", "pairs", "image", "audio", "adapter", "calibration", "prompts", "ranks", "save")
"""Options that name files whose content decides what is found, or what is written beside the report."""
Words = tuple[str | None, requests.Words, Mapping[str, Any]]
"""Model, kernels and options, checked, for other processes; no model for one in memory, of which nothing is kept."""


@dataclass
class SwapWork:
    """The kernels of one run."""

    session: Swapping
    words: Words
    """What was asked for."""
    start: float
    """When the run began."""
    unsaved: OutputError | None = None
    """Why the changed model could not be saved."""

    @cached_property
    def facts(self) -> dict[str, Any]:
        """All that determines what its units find."""
        session, options = self.session, self.session.options
        left_out = {*requests.options(SharedRequest), *APART}
        read = [session.evaluated, session.calibrated, *(sample.batches for sample in session.samples)]
        own = registry.beside_sweeps()
        content = {
            "fed": [content_of(session.loaded, (), one, own) for one in read],
            "prompts": _named(session.prompts),
            "form": options.form_named,
            "code": [code_of(kernel.info).hex() for kernel in options.kernels],
            "generation": str(getattr(session.loaded.model, "generation_config", None)),
            "plan": None if options.ranks is None else options.ranks.model_dump_json(),
            "sites": [[site.name, chosen] for site, chosen in session.chosen.items()],
        }
        return {
            "command": "swap-kernel",
            "versions": versions(),
            "model": session.loaded.info.model_dump(mode="json", exclude={"id"}),
            "settings": session.settings.model_dump(mode="json", exclude={"notes"}),
            "options": {name: str(value) for name, value in sorted(self.given.items()) if name not in left_out},
            "kernels": self.names,
            "parts": list(session.evaluated.parts or ()),
            "content": key_of(content),
        }

    @property
    def given(self) -> Mapping[str, Any]:
        """The options, checked."""
        return self.words[2]

    @property
    def names(self) -> list[str]:
        """The kernels' spellings, by which their units are named."""
        return [kernel.spelling for kernel in self.session.options.kernels]

    @cached_property
    def store(self) -> Store | None:
        """Where units are kept; None for a model in memory."""
        return None if self.words[0] is None else WorkPlan.of(self.given).store(self.facts)

    def run(self) -> tuple[Report, Callable[[], None]]:
        """Return the report, and what removes the finished units once it is written.

        Raises Interrupted or UnsavedError, which hold the report of what was finished.
        """
        plan, count = WorkPlan.of(self.given), len(self.names)
        more = telling(self.session.progress, "kernels", count) if count > 1 and plan.shard is None else None
        # a kernel that is to be saved is computed again: the model that it makes is not in its unit
        store = None if self.session.options.save is not None else self.store
        outcome = run_units(
            self.names,
            self.read_unit,
            plan,
            store,
            elsewhere=(opened, self.words),
            tell=lambda _name: more(1) if more is not None else None,
        )
        if not outcome.values:
            raise KeyboardInterrupt
        timings = self.session.timings | {"all": time.perf_counter() - self.start}
        report = swap_report(self.session, outcome.values, outcome.missing, timings)
        if outcome.stopped:
            raise Interrupted(report)
        if self.unsaved is not None:
            raise UnsavedError(self.unsaved, report)
        return report, self.store.clear if self.store is not None and not outcome.missing else lambda: None

    def read_unit(self, name: str) -> dict[str, Any]:
        """Read one kernel. Of its fit, sweep and healing what is finished is kept until the whole kernel is."""
        kernel = next(one for one in self.session.options.kernels if one.spelling == name)
        parts = None if self.store is None else self.store.inside(name)
        run = KernelRun(self.session, Candidate(kernel, {"swapped": self.session.swaps(kernel)}), parts)
        try:
            return run.read().value
        except KernelInterrupted as stop:
            raise Stopped(name, stop.reading.value) from None
        finally:
            self.unsaved = run.unsaved


def _named(prompts: Prompts | str) -> str:
    if isinstance(prompts, str):
        return prompts
    return f"{prompts.source} {prompts.ids.tolist()} {prompts.mask.tolist()}"


def opened(*words: Any) -> tuple[Mapping[str, Any], Compute]:
    """Prepare the same run in another process: its facts, and what reads its units."""
    from attnlens.run.swap.pipeline import prepared  # a worker begins here, and the pipeline comes here too

    work = prepared(*words)
    return work.facts, work.read_unit
