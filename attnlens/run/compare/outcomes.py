"""How the predictions of two models differ on the same windows."""

from __future__ import annotations

from contextlib import nullcontext

from attnlens import hooks, texts
from attnlens.errors import AttnlensError
from attnlens.records import Outcome, Task
from attnlens.run import checks
from attnlens.run.compare.sides import ComparedModel, Pairing
from attnlens.run.initialised import predictions, refuse_initialised
from attnlens.run.outcomes.differences import Differences
from attnlens.run.outcomes.outputs import PassOutputs, run, tokens_in
from attnlens.statistics import Design
from attnlens.texts.targets import Fed, feed

OTHER_PREDICTIONS = "Predictions are not compared: the models predict other things"


def outcome(pairing: Pairing, design: Design) -> tuple[Outcome | None, list[str]]:
    """Loss, KL, agreement and hidden states of both models; or None, and why."""
    sides = pairing.first, pairing.second
    fed = pairing.first.inspection.fed
    if fed is None:
        return None, []
    inputs = fed.batches[0].inputs
    try:
        tasks = [checks.task_on(side.loaded, inputs) for side in sides]
        for side, task in zip(sides, tasks, strict=True):
            refuse_initialised(side.loaded, texts.first(inputs, 2), predictions(task))
        batches = feed(sides[0].loaded, fed, tasks[0], pairing.first.inspection.settings.seed)
    except AttnlensError as error:
        return None, [f"Predictions are not compared: {error.problem}"]
    if tasks[0] != tasks[1]:
        return None, [f"{OTHER_PREDICTIONS} ({tasks[0]}, {tasks[1]})."]
    found = Differences(tasks[0], fed.made_up, design)
    for one in batches:
        own, new = passes = [_run(side, one, tasks[0]) for side in sides]
        classes = {None if made.logits is None else made.logits.shape[-1] for made in passes}
        states = {None if made.hidden is None else made.hidden.shape[-1] for made in passes}
        if len(classes) > 1 or len(states) > 1:
            return None, [f"{OTHER_PREDICTIONS}, or their states have other sizes."]
        found.add(own, new, one.targets, tokens_in(one))
    names = list(dict.fromkeys(fed.parts))
    return Outcome(**found.outcome(pairing.first.inspection.settings.seed, names)), []


def _run(side: ComparedModel, fed: Fed, task: Task) -> PassOutputs:
    """One pass of a side's model, with the kernel that it was saved with."""
    model = side.loaded.model
    with hooks.replace(model, side.inspection.sites, side.swaps) if side.swaps else nullcontext():
        return run(model, fed, task)
