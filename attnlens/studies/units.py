"""Training runs as units of work: each is named by what determines it, and its outcome is one file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import torch

import attnlens
from attnlens.kernel_transformers import AttentionForm, KernelTransformer, KernelTransformerConfig, made
from attnlens.runs.work import Store, key_of
from attnlens.studies.lens import SEQUENCES, medians
from attnlens.studies.saved import models_of, save_step
from attnlens.studies.scales import Scale
from attnlens.studies.tasks import StudyTask, score
from attnlens.studies.training import Run, train


@dataclass(frozen=True)
class TrainingUnit:
    """One training run of one form on one task."""

    task: str
    """The task's name."""
    form: AttentionForm
    """Its attention."""
    scale: Scale
    """Its sizes."""
    run: Run
    """Rate, steps, seed."""
    tested: bool
    """Whether it is judged on the test set; runs that a rate is chosen by are not."""
    watched: bool = False
    """Whether its heads are looked at while it is trained."""
    kept: bool = False
    """Whether its model is kept at every look."""

    def name(self, digest: str) -> str:
        """Return the name of its unit of work, with a hash of what determines it; `digest` is of the task's data."""
        facts = {
            "version": attnlens.__version__,
            "data": digest,
            "form": asdict(self.form),
            "sizes": {name: value for name, value in asdict(self.scale).items() if name not in SEARCHED},
            "run": asdict(self.run),
            "what is done": [self.tested, self.watched, self.kept],
        } | ({"device": "cuda"} if torch.cuda.is_available() else {})  # which rounds otherwise
        return f"{self.task} rate {self.run.rate} seed {self.run.seed} {key_of(facts)}"


SEARCHED = ("rates", "seeds", "steps", "search_steps")
"""Fields of a scale that say which runs there are, and nothing of any one of them."""


@dataclass(frozen=True)
class RunOutcome:
    """What came of a unit."""

    curve: list[tuple[int, float]]
    """(step, validation loss in nats)."""
    watched: list[dict[str, float]]
    """Medians over heads at these steps, by measure; empty where nothing was looked at."""
    problem: str
    """Why it did not converge; empty where it did."""
    scores: dict[str, float]
    """On the test set; empty where it was not tested or did not converge."""
    parameters: int
    """Of the model."""
    kernel_parameters: int
    """Of the projections of queries, keys and positions, of all layers."""
    tokens: int
    """That it was trained on."""
    seconds: float
    """Of training steps."""

    @property
    def loss(self) -> float:
        """The least validation loss; infinite where it did not converge."""
        return math.inf if self.problem else min(loss for _, loss in self.curve)


def trained(unit: TrainingUnit, task: StudyTask, store: Store) -> dict[str, Any]:
    """Train a unit, on from its last look if it was killed; returns the fields of its RunOutcome."""
    name = unit.name(digest_of(task))
    model = model_of(unit, task)
    held = task.held_out("validation", SEQUENCES)[0] if unit.watched else None

    def watch(step: int) -> dict[str, float]:
        if unit.kept:
            save_step(model, task, models_of(store, name), step)
        return {} if held is None else medians(model, held)

    found = train(model.core, task, unit.scale, unit.run, store.inside(name), watch)
    scores = score(task, model.core, "test", unit.scale.batch) if unit.tested and not found.problem else {}
    finite = all(math.isfinite(value) for value in scores.values())
    outcome = RunOutcome(
        list(found.curve),
        list(found.watched) if unit.watched else [],
        found.problem if finite else "its loss on the test set is no finite number",
        scores if finite else {},
        sum(part.numel() for part in model.parameters()),
        sum(module.kernel_parameters for module in model.attentions()),
        found.tokens,
        found.seconds,
    )
    return asdict(outcome)


def model_of(unit: TrainingUnit, task: StudyTask) -> KernelTransformer:
    """The model that the unit begins with."""
    scale = unit.scale
    config = KernelTransformerConfig(
        vocab_size=task.vocabulary,
        hidden_size=scale.d_model,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        intermediate_size=scale.d_forward,
        max_position_embeddings=task.length,
        dropout=scale.dropout,
        channels=task.channels,
        classes=task.outputs if task.form == "classification" else 0,
        form=asdict(unit.form),
        decoder_start_token_id=getattr(task, "begin", None),
        eos_token_id=getattr(task, "end", None),
        pad_token_id=getattr(task, "padding", None),
    )
    return made(task.form, config, unit.run.seed)


def digest_of(task: StudyTask) -> str:
    """What stands for a task's data: its files' hashes, or its name where it is built in, and its sizes."""
    facts: list[Any] = [
        task.name,
        sorted(task.files.items()),
        task.vocabulary,
        task.outputs,
        task.channels,
        task.length,
    ]
    return sha256(json.dumps(facts).encode()).hexdigest()
