"""Names the work of a run of swap-kernel, of which each kernel is a unit, and reads it here or in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from attnlens import registry, requests
from attnlens.engines.readers import (
    OTHERS,
    EngineUnits,
    KeptUnits,
    UnitReader,
    can_keep,
    is_elsewhere,
    read_units,
    shard_of,
)
from attnlens.errors import ModelError, OutputError, UsageError
from attnlens.records import Report
from attnlens.requests.work_options import SharedRequest
from attnlens.run.fingerprint import code_of, content_of, versions
from attnlens.run.outcomes.agreement import Prompts
from attnlens.run.progress import Interrupted, telling
from attnlens.run.swap.candidate import Candidate
from attnlens.run.swap.healing.state import clear_state
from attnlens.run.swap.one_kernel import KernelInterrupted, KernelRun
from attnlens.run.swap.saved import UnsavedError
from attnlens.run.swap.session import Swapping
from attnlens.run.swap.units.parts import KeptParts
from attnlens.run.swap.units.readings import SUFFIX, KernelReading, KernelUnit, SwapFrame, packed, swap_report, unpacked
from attnlens.unit_files import Folder, Store, UnitFiles, key_of, store_of, work_root
from attnlens.wording import counted

APART = ("text", "pairs", "image", "audio", "adapter", "calibration", "prompts", "ranks", "save")
"""Options that name files whose content decides what is found, or what is written beside the report."""
PART, HEALING = ".part", "healing"
"""How the names of a kernel's parts end, and the folder beside them with the state of its healing."""
Words = tuple[str | None, requests.Words, Mapping[str, Any]]
"""Model, kernels and options, checked, as another process is told them; no model for one in memory, of which nothing is
kept."""


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
    ended: dict[KernelUnit, KernelReading] = field(default_factory=dict)
    """The kernel whose healing or sweep the user ended."""

    @cached_property
    def frame(self) -> SwapFrame:
        """What is known before the first kernel is read."""
        session, options = self.session, self.session.options
        left_out = {*requests.options(SharedRequest), *APART}
        read = [session.evaluated, session.calibrated, *(sample.batches for sample in session.samples)]
        own = registry.beside_sweeps()
        facts = {
            "fed": [content_of(session.loaded, (), one, own) for one in read],
            "prompts": _told(session.prompts),
            "form": options.form_named,
            "code": [code_of(kernel.info).hex() for kernel in options.kernels],
            "generation": str(getattr(session.loaded.model, "generation_config", None)),
            "plan": None if options.ranks is None else options.ranks.model_dump_json(),
        }
        heads = [session.heads_of[site] if its is None else len(its) for site, its in session.chosen.items()]
        return SwapFrame(
            versions=versions(),
            options={name: str(value) for name, value in sorted(self.given.items()) if name not in left_out},
            content=key_of(facts),
            kernels=[kernel.spelling for kernel in options.kernels],
            model=session.loaded.info,
            settings=session.settings,
            parts=list(session.evaluated.parts or ("",) * session.evaluated.sequences),
            sites=len(session.chosen),
            heads=sum(heads),
            idle=session.idle,
            identity_error=session.identity_error,
        )

    @property
    def given(self) -> Mapping[str, Any]:
        """The options, checked."""
        return self.words[2]

    @property
    def kept(self) -> bool:
        """Whether what is finished is kept."""
        return self.words[0] is not None and can_keep(self.given["work"])

    @property
    def _store(self) -> Store:
        return store_of(work_root(self.given["work"]))

    @cached_property
    def units(self) -> UnitReader[KernelUnit, KernelReading]:
        """Reads the kernels here or elsewhere. One that is to be saved is not kept: its weights are not in its unit."""
        if not self.kept or self.session.options.save is not None:
            return UnitReader(self.read_unit)
        if not is_elsewhere(self.given):
            return self.kept_units()
        return self.kept_units(partial(read_elsewhere, self.words, self.frame.key))

    def kept_units(self, elsewhere: Callable[[str], None] | None = None) -> KeptUnits[KernelUnit, KernelReading]:
        """Kernels that are read here and kept; or by other processes, which `elsewhere` is for."""
        files = UnitFiles(self._store, self.frame.key, SUFFIX)
        how = files, packed, unpacked, shard_of(self.given), self.given["resume"]
        if elsewhere is None:
            return KeptUnits(self.read_unit, *how)
        return EngineUnits(self.read_unit, *how, elsewhere=elsewhere, given=self.given)

    def run(self) -> Report:
        """Kernel by kernel. Raises Interrupted or UnsavedError, which hold the report of what was finished."""
        found: dict[KernelUnit, KernelReading] = {}
        mine = self.units.units(self.frame)
        if not mine:
            raise UsageError(
                f"The run has {counted(len(self.frame.kernels), 'kernel')}, and shard {self.given['shard']} none.",
                "Take no more shards than kernels.",
            )
        missing = dict.fromkeys(set(self.frame.units) - set(mine), OTHERS)
        more = telling(self.session.progress, "kernels", len(mine)) if len(mine) > 1 else None
        stopped = False

        def tell(unit: KernelUnit) -> None:
            if unit in found and isinstance(self.units, KeptUnits):
                self.drop(unit)
            if more is not None:
                more(1)

        try:
            read_units(self.units, self.frame, found, missing, tell)
        except KeyboardInterrupt:
            stopped = True
            found |= self.ended
            if not found:
                raise KeyboardInterrupt from None
        timings = self.session.timings | {"all": time.perf_counter() - self.start}
        report = swap_report(self.frame, found, timings, missing, self.units.part(self.frame))
        if stopped:
            raise Interrupted(report)
        if self.unsaved is not None:
            raise UnsavedError(self.unsaved, report)
        return report

    def read_unit(self, unit: KernelUnit) -> KernelReading:
        """Read one kernel. Of its sweep and its healing what is finished is kept until the whole kernel is."""
        kernel = next(one for one in self.session.options.kernels if one.spelling == unit.name)
        run = KernelRun(self.session, Candidate(kernel, {"swapped": self.session.swaps(kernel)}))
        if self.kept:
            parts = self._parts(unit)
            run.keep, run.state, run.resume = parts.kept, _state(parts), parts.resume
        try:
            return run.read()
        except KernelInterrupted as stop:
            self.ended[unit] = stop.reading
            raise
        finally:
            self.unsaved = run.unsaved

    def _parts(self, unit: KernelUnit) -> KeptParts:
        run = self._store.inside(self.frame.key)
        return KeptParts(UnitFiles(run, key_of({"kernel": unit.name}), PART), self.given["resume"])

    def drop(self, unit: KernelUnit) -> None:
        """Remove what was kept of a kernel while it was read."""
        parts = self._parts(unit)
        if (state := _state(parts)) is not None:
            clear_state(state)
        parts.clear()

    def clear(self) -> None:
        """Remove what is kept, when the report is written; of a kernel that failed it stays."""
        for unit in self.units.units(self.frame) if self.kept and not self.units.lacking else ():
            self.drop(unit)
        self.units.clear(self.frame)
        for empty in (self._store.inside(self.frame.key), self._store) if self.kept else ():
            empty.remove([])


def _told(prompts: Prompts | str) -> str:
    if isinstance(prompts, str):
        return prompts
    return f"{prompts.source} {prompts.ids.tolist()} {prompts.mask.tolist()}"


def _state(parts: KeptParts) -> Path | None:
    """The folder for the state of a kernel's healing; None where work is kept at an address, which is no folder."""
    store = parts.files.store
    return store.path / HEALING if isinstance(store, Folder) else None


_opened: dict[str, SwapWork] = {}
"""In another process: the run of which it reads kernels."""


def read_elsewhere(words: Words, run: str, name: str) -> None:
    """In another process: read the kernel of that name, and write its file.

    Raises ModelError where this process finds another model, text or program than the one that asked.
    """
    from attnlens.run.swap.pipeline import prepared  # a worker begins here, and the pipeline comes here too

    if run not in _opened:
        _opened.clear()
        _opened[run] = prepared(str(words[0]), *words[1:])
    work = _opened[run]
    if work.frame.key != run:
        raise ModelError(
            "A worker finds other files, texts or versions than the run that it works for.",
            "Give all of them the same.",
        )
    unit = KernelUnit(name)
    work.kept_units().finished(unit)
    work.drop(unit)
