"""A table's cells: the search for each one's learning rate, its runs over seeds, and its speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch

from attnlens.errors import ModelError
from attnlens.kernel_transformers import AttentionForm
from attnlens.runs.work import Compute, Store, WorkPlan, run_units
from attnlens.studies.scales import Scale
from attnlens.studies.tables import PaperCell
from attnlens.studies.tasks import Examples, StudyTask, TaskForm
from attnlens.studies.training import Run, accelerator_of, count_of, step_of
from attnlens.studies.units import RunOutcome, TrainingUnit, digest_of, model_of, trained

ROUNDS = 12
"""Steps that are timed, after one that is not."""
STANDARD = AttentionForm(positions="sum", in_value=True)
"""The transformer of Vaswani et al. 2017."""


@dataclass(frozen=True)
class Speed:
    """Of training steps."""

    tokens_per_second: float
    """The median over steps."""
    beside_sdpa: float
    """That over the standard transformer's by `scaled_dot_product_attention`, step by step in one loop."""


def speeds(units: Sequence[TrainingUnit], task: StudyTask) -> Iterator[Speed]:
    """Each unit's speed on one batch of the task; a step of the standard transformer comes before each of its own."""
    if not units:
        return
    batch = next(iter(task.training(units[0].scale.batch, 0)))
    standard = _stepper(replace(units[0], form=STANDARD), task, batch, implementation="sdpa")
    for unit in units:
        own = _stepper(unit, task, batch)
        pairs = [(standard(), own()) for _ in range(1 + ROUNDS)][1:]
        yield Speed(count_of(batch) / median(b for _, b in pairs), median(a / b for a, b in pairs))


def _stepper(
    unit: TrainingUnit, task: StudyTask, batch: Examples, implementation: str | None = None
) -> Callable[[], float]:
    """Takes a training step of a new model, and says how many seconds it took."""
    accelerator, model = accelerator_of(), model_of(unit, task)
    if implementation is not None:
        model.config._attn_implementation = implementation
    module, optimiser = accelerator.prepare(model.core, torch.optim.AdamW(model.core.parameters(), lr=unit.run.rate))

    def step() -> float:
        start = time.perf_counter()
        step_of(accelerator, module, optimiser, batch, unit.run)
        return time.perf_counter() - start

    return step


SEARCH_SEED = 1_000_003
"""Of the runs that a rate is chosen by: none of those that are reported."""
AGAIN = "Run the same command again, with fewer --jobs if memory was short: what is finished is kept."
Tell = Callable[[str, int, int], None]


MakeTasks = Callable[[], Sequence[StudyTask]]
"""Makes the tasks in another process: their tensors, one a sentence, are too many to be handed over."""


@dataclass(frozen=True)
class StudyPlan:
    """How every cell is trained, and where."""

    scales: Mapping[TaskForm, Scale]
    """Of each form of task sizes, steps, rates and the number of seeds."""
    seed: int
    """The first seed."""
    work: WorkPlan
    """Who trains."""
    store: Store
    """Where outcomes are kept."""
    kept: bool
    """Whether the first seed's model is kept at every look."""


@dataclass(frozen=True)
class CellResult:
    """What came of one cell on one task."""

    cell: PaperCell
    """Which one."""
    task: str
    """The task's name."""
    unit: TrainingUnit
    """Its form and learning rate, as the search chose them."""
    runs: tuple[RunOutcome, ...]
    """One a seed, in the order of seeds."""
    first_name: str
    """The name of the first seed's unit."""
    searched: tuple[tuple[float, float], ...]
    """(learning rate, validation loss) of the search, of the chosen form."""
    speed: Speed
    """Of its training steps."""


def trained_cells(
    cells: Sequence[tuple[PaperCell, StudyTask]], make: MakeTasks, plan: StudyPlan, tell: Tell
) -> list[CellResult]:
    """Every cell: rates are tried on a shorter run each, the one of least validation loss is trained from every seed.

    All cells get the same search and the same steps. The test set is read once a run, at its end. The heads of the
    first seed's run are looked at while it is trained. `make` makes the tasks again in other processes. At the end a
    few steps of each cell are timed.
    """
    tasks = list({id(task): task for _, task in cells}.values())
    digests = {task.name: digest_of(task) for task in tasks}
    tried = {at: _search_units(cell, task, plan.scales[task.form]) for at, (cell, task) in enumerate(cells)}
    total = sum(map(len, tried.values())) + sum(plan.scales[task.form].seeds for _, task in cells)
    done = 0

    def outcomes(units: Iterable[TrainingUnit], stage: str) -> dict[TrainingUnit, RunOutcome]:
        """Train units, or load what is kept of them. Raises ModelError if one could not be trained."""

        def count(_name: str) -> None:
            nonlocal done
            done += 1
            tell(stage, done, total)

        named = {unit.name(digests[unit.task]): unit for unit in units}
        with one_thread():
            compute = trainer(named, tasks, plan.store)
            elsewhere = opened, (make, named, plan.store)
            found = run_units(list(named), compute, plan.work, plan.store, elsewhere=elsewhere, tell=count)
        if found.stopped:
            raise KeyboardInterrupt
        for name, reason in found.missing.items():
            raise ModelError(f"A model of {named[name].task} could not be trained: {reason}", AGAIN)
        return {named[name]: RunOutcome(**value) for name, value in found.values.items()}

    searched = outcomes([unit for units in tried.values() for unit in units], "search")
    chosen = {at: min(units, key=lambda unit: searched[unit].loss) for at, units in tried.items()}
    seeds = {at: _seed_units(unit, plan) for at, unit in chosen.items()}
    found = outcomes([unit for units in seeds.values() for unit in units], "train")
    speed: dict[int, Speed] = {}
    with one_thread():
        for task in tasks:
            own = [at for at, (_, of) in enumerate(cells) if of is task]
            speed |= dict(zip(own, speeds([chosen[at] for at in own], task), strict=True))
    return [
        CellResult(
            cell,
            task.name,
            chosen[at],
            tuple(found[unit] for unit in seeds[at]),
            seeds[at][0].name(digests[task.name]),
            tuple((unit.run.rate, searched[unit].loss) for unit in tried[at] if unit.form == chosen[at].form),
            speed[at],
        )
        for at, (cell, task) in enumerate(cells)
    ]


def trainer(units: Mapping[str, TrainingUnit], tasks: Sequence[StudyTask], store: Store) -> Compute:
    """Return what trains the unit of a name."""
    named = {task.name: task for task in tasks}
    return lambda name: trained(units[name], named[units[name].task], store)


def opened(make: MakeTasks, units: Mapping[str, TrainingUnit], store: Store) -> tuple[Mapping[str, object], Compute]:
    """Prepare the same training runs in another process: its facts, and what trains its units."""
    return store.facts, trainer(units, make(), store)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as other processes do, because outcomes depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _search_units(cell: PaperCell, task: StudyTask, scale: Scale) -> list[TrainingUnit]:
    return [
        TrainingUnit(task.name, form, scale, Run(rate, scale.search_steps, SEARCH_SEED, form.eta), tested=False)
        for form in cell.forms
        for rate in scale.rates
    ]


def _seed_units(chosen: TrainingUnit, plan: StudyPlan) -> list[TrainingUnit]:
    scale = chosen.scale
    run = replace(chosen.run, steps=scale.steps)
    units = [replace(chosen, run=replace(run, seed=plan.seed + number), tested=True) for number in range(scale.seeds)]
    return [replace(units[0], watched=True, kept=plan.kept), *units[1:]]
