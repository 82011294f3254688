"""Training runs as units of work: names, outcomes, saved models, and measures of their heads during training."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError

from attnlens.analyzers import registry
from attnlens.analyzers.selection import Selector
from attnlens.files import make_folder, unwritten_folder
from attnlens.kernels.attention import attend
from attnlens.lab.study.tables import Scale
from attnlens.lab.study.tasks import BEGIN, END, PADDING, Examples, StudyTask, score
from attnlens.lab.study.training import Run, train
from attnlens.maths.attsvm.head import Nearness
from attnlens.models import hooks
from attnlens.models.kernel_transformers import (
    AttentionForm,
    KernelAttention,
    KernelTransformer,
    KernelTransformerConfig,
    draw_model,
)
from attnlens.models.loading.building import quiet
from attnlens.records import Call, QueryKey, Site
from attnlens.runs.store import Store, file_stem, key_of, versions

if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.lab.study.cells import CellResult


STEP = "step-{:06d}"  # folder name of a step, parsed by `converge --checkpoints`


def save_step(model: KernelTransformer, task: StudyTask, folder: Path, step: int) -> None:
    """Write the model after so many steps, with its tokenizer if it has one."""
    from transformers import PreTrainedTokenizerFast

    step_folder = folder / STEP.format(step)
    try:
        with quiet():
            model.save_pretrained(step_folder)
            if task.pairs is not None:
                tokenizer = PreTrainedTokenizerFast(tokenizer_object=task.pairs.tokenizer)  # type: ignore[no-untyped-call]
                tokenizer.save_pretrained(step_folder)
    except (OSError, SafetensorError) as error:
        raise unwritten_folder(step_folder, getattr(error, "strerror", None) or str(error)) from None


def save_cells(folder: Path, results: Sequence[CellResult], store: Store) -> None:
    """Copy every cell's saved steps to `folder`/task/cell. Raises OutputError if they cannot be written."""
    for result in results:
        source = _model_folder(store, result.first_name)
        destination = folder / slug(result.task) / slug(result.cell.name)
        make_folder(destination.parent)
        try:
            shutil.copytree(source, destination)
        except OSError as error:
            raise unwritten_folder(destination, error.strerror or str(error)) from None


def _model_folder(store: Store, name: str) -> Path:
    """Return the folder with the saved models of a unit."""
    return Path(store.folder) / "models" / file_stem(name)


def slug(name: str) -> str:
    """Convert a name to a folder name of lower-case letters, digits, dots, plus signs and hyphens."""
    return re.sub(r"[^a-z0-9.+]+", "-", name.lower()).strip("-.") or "unnamed"


MEASURES = (
    *("weights.symmetry", "weights.positivity", "weights.effective_rank"),
    *("tokens.share_skew", "tokens.share_positive", "tokens.entropy", "tokens.max_weight", "tokens.effective_rank"),
)
"""Symmetry, definiteness, spectrum and peakedness of rows: of W_Q W_Kᵀ, and of log k on held-out sequences."""
DECIDED, COSINE = "selection.decided", "selection.projected_svm_cosine"
"""Selection: share of decided queries, and cosine between a head and the SVM of its own choices."""
SEQUENCES = 8  # sequences on which tokens.* are measured


def measure_heads(model: KernelTransformer, batch: Examples) -> dict[str, float]:
    """Compute the median over heads of each measure that has a value; shares have none for causal heads.

    tokens.* are those of `inspect`, averaged over held-out sequences, with log k of the model's own kernel instead of
    s⟨q, k⟩, so they describe its attention. weights.* are of s W_Q W_Kᵀ, whatever the kernel. A kernel that can be
    negative has no log k, so only weights.* are computed. Primal layers have no measures. The SVM of the selection is
    posed on queries and keys, for kernels that depend on the inner product only and have no position bias.
    """
    tokens = [_record_tokens(model, batch.single(row)) for row in range(min(SEQUENCES, len(batch.inputs)))]
    measured = [_measure(_weights(model)), _measure_selection(model, tokens), *map(_measure, tokens)]
    medians = {}
    for name in dict.fromkeys(name for measures in measured for name in measures):
        heads = torch.stack([measures[name] for measures in measured if name in measures]).nanmean(0)
        if not bool(heads.isnan().all()):
            medians[name] = float(heads.nanmedian())
    return medians


def _measure(query_keys: Iterable[QueryKey]) -> dict[str, Tensor]:
    """Compute each measure of all heads, concatenated over modules."""
    by_module: dict[str, list[Tensor]] = {}
    for query_key in query_keys:
        for analyzer in registry.select_analyzers(("symmetry", "spectrum"), query_key.source):
            if isinstance(analyzer, registry.Analyzer):
                for name, value in analyzer.function(query_key).items():
                    if name in MEASURES:
                        by_module.setdefault(name, []).append(value.double().reshape(-1))
    return {name: torch.cat(values) for name, values in by_module.items()}


def _measure_selection(model: KernelTransformer, tokens: Sequence[Sequence[QueryKey]]) -> dict[str, Tensor]:
    """Compute the selection measures of all heads of all modules, over all sequences."""
    decided: list[float] = []
    cosines: list[float] = []
    for module, *query_keys in zip(_modules(model), *tokens, strict=True) if any(tokens) else ():
        selector = Selector(registry.GatheringPlace(query_keys[0].site))
        for number, query_key in enumerate(query_keys):
            selector.update(query_key, number)
        decided += [sum(shares.values()) / len(shares) for shares in selector.shares.values()]
        if selector.stored and module.kernel.tie is None and module.kernel.info.dot is not None:
            compared = [selector.nearness(head) for head in selector.shares]
            cosines += [head.svm_cosine if isinstance(head, Nearness) else math.nan for head in compared]
    return {name: torch.tensor(values) for name, values in ((DECIDED, decided), (COSINE, cosines)) if values}


def _weights(model: KernelTransformer) -> Iterator[QueryKey]:
    """Yield s W_Q W_Kᵀ of every module with a kernel, in float64."""
    for layer, module in enumerate(_modules(model)):
        heads = tuple(range(module.heads))
        query, key = (  # a linear map's weight is (outputs, inputs); its outputs are those of all heads
            part.weight.detach().cpu().double().mT.reshape(part.in_features, module.heads, -1).transpose(0, 1)
            for part in (module.query, module.key or module.query)
        )
        site = Site(f"layer {layer}", 0, layer, module.part)
        yield QueryKey(query, key, query.shape[-1] ** -0.5, "weights", site, heads, key_of=heads)


def _record_tokens(model: KernelTransformer, example: Examples) -> list[QueryKey]:
    """Compute log k of every module on one sequence; empty if a kernel can be negative."""
    if any(module.kernel.signed for module in _modules(model)):
        return []
    query_keys: list[QueryKey] = []

    def answer(call: Call) -> Tensor:
        number, module = len(query_keys), cast("KernelAttention", call.module)
        query_keys.append(call.query_key(Site(f"layer {number}", 0, number, module.part)))
        return attend(call, hooks.OWN)

    model.train(False)
    inputs = example.to(next(model.parameters()).device)
    with torch.no_grad(), hooks.answer_calls(model, answer, modules=()):
        model.core(inputs.inputs, inputs.mask, inputs.decoder_inputs)
    return query_keys


def _modules(model: KernelTransformer) -> list[KernelAttention]:
    return [module for module in model.attentions() if module.primal is None]


@dataclass(frozen=True)
class TrainingUnit:
    """Training run of one attention form on one task."""

    task: str
    form: AttentionForm
    scale: Scale
    run: Run  # learning rate, steps, seed
    tested: bool  # whether it is scored on the test set; learning-rate search runs are not
    watched: bool = False  # whether its heads are measured during training
    saved: bool = False  # whether its model is saved at every evaluation

    def name(self, digest: str) -> str:
        """Return the unit's name, with a hash of everything that determines it; `digest` identifies the task's data."""
        facts = {
            "versions": versions(),
            "data": digest,
            "form": asdict(self.form),
            "sizes": {name: value for name, value in asdict(self.scale).items() if name not in SEARCHED},
            "run": asdict(self.run),
            "what is done": [self.tested, self.watched, self.saved],
        } | ({"device": "cuda"} if torch.cuda.is_available() else {})  # GPUs round differently
        return f"{self.task} rate {self.run.rate} seed {self.run.seed} {key_of(facts)}"


SEARCHED = ("rates", "seeds", "steps", "search_steps")
"""Fields of a scale that determine the set of runs but not a single run."""


def train_unit(unit: TrainingUnit, task: StudyTask, store: Store) -> dict[str, object]:
    """Train a unit, resumed from its last saved state if any; return the fields of its RunOutcome."""
    name = unit.name(hash_task(task))
    model = build_model(unit, task)
    batch = task.held_out("validation", SEQUENCES)[0] if unit.watched else None

    def watch(step: int) -> dict[str, float]:
        if unit.saved:
            save_step(model, task, _model_folder(store, name), step)
        return {} if batch is None else measure_heads(model, batch)

    outcome = train(model.core, task, unit.scale, unit.run, store.inside(name), watch)
    scores = score(task, model.core, "test", unit.scale.batch) if unit.tested and not outcome.problem else {}
    if not all(math.isfinite(value) for value in scores.values()):
        outcome, scores = replace(outcome, problem="its loss on the test set is not finite"), {}
    outcome = replace(
        outcome,
        watched=outcome.watched if unit.watched else [],
        scores=scores,
        parameters=sum(part.numel() for part in model.parameters()),
        kernel_parameters=sum(module.kernel_parameters for module in model.attentions()),
    )
    return asdict(outcome)


def build_model(unit: TrainingUnit, task: StudyTask) -> KernelTransformer:
    """Build the unit's initial model."""
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
        decoder_start_token_id=BEGIN if task.form == "translation" else None,
        eos_token_id=END if task.form == "translation" else None,
        pad_token_id=PADDING if task.form == "translation" else None,
    )
    return draw_model(task.form, config, unit.run.seed)


def hash_task(task: StudyTask) -> str:
    """Hash a task's name and sizes and the hashes of its files; built-in tasks have no files."""
    sizes = task.vocabulary, task.outputs, task.channels, task.length
    return sha256(json.dumps([task.name, sorted(task.files.items()), *sizes]).encode()).hexdigest()
