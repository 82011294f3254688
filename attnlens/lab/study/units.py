"""Resumable training runs, one per unit of work, with heads measured and models saved during training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice, starmap
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from torch import nn

from attnlens.analyzers import registry
from attnlens.analyzers.selection import Selector
from attnlens.errors import UsageError
from attnlens.files import unwritten_folder
from attnlens.kernels.attention import attend
from attnlens.kernels.attention.primal_heads import regulariser
from attnlens.lab.study.examples import BEGIN, END, NOTHING, PADDING, Examples, StudyTask, cross_entropy, score
from attnlens.lab.study.tables import SUM, Scale
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
from attnlens.runs.store import Store, file_stem, hash_json, versions

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor


@dataclass
class RunOutcome:
    """Result of a training run, updated at each step."""

    curve: list[tuple[int, float]]  # (step, validation loss in nats), starting at step 0
    watched: list[dict[str, float]]  # medians over heads by measure, at each step of `curve`; {} if not measured
    problem: str = ""  # reason for not converging; empty if the run converged
    scores: dict[str, float] = field(default_factory=dict)  # on the test set; empty if not tested or not converged
    parameters: int = 0  # number of parameters of the model
    kernel_parameters: int = 0  # number of parameters in projections of queries, keys and positions, over all layers
    tokens: int = 0  # number of training tokens
    seconds: float = 0.0  # seconds spent in training steps

    @property
    def loss(self) -> float:
        """Smallest validation loss; infinite if the run did not converge."""
        return math.inf if self.problem else min(loss for _, loss in self.curve)


def _copy_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


SEARCHED = ("rates", "seeds", "steps", "search_steps")  # fields of a scale that do not affect an individual run
DECAY, CLIPPED = 0.01, 1.0  # AdamW's weight decay, and the maximum gradient norm
LAST = 0.05  # learning rate at the end of the cosine, as a share of its peak


@dataclass(frozen=True)
class TrainingUnit:
    """Training run of one attention form on one task."""

    task: str
    form: AttentionForm
    scale: Scale
    rate: float  # peak learning rate
    steps: int
    seed: int  # seed of weights, data order and dropout
    tested: bool = False  # True if the model is scored on the test set; False in the learning-rate search
    watched: bool = False  # True if heads are measured during training
    saved: bool = False  # True if the model is saved at every evaluation

    def name(self, digest: str) -> str:
        """Return the unit's name, which contains a hash of all settings and of `digest`, the hash of the task."""
        scale = {name: value for name, value in asdict(self.scale).items() if name not in SEARCHED}
        facts = {"versions": versions(), "data": digest, "unit": asdict(self) | {"scale": scale}}
        if torch.cuda.is_available():  # GPUs round differently
            facts["device"] = "cuda"
        return f"{self.task} rate {self.rate} seed {self.seed} {hash_json(facts)}"


def train(
    model: nn.Module,
    task: StudyTask,
    unit: TrainingUnit,
    state: Store | None = None,
    watch: Callable[[int], dict[str, float]] = lambda _step: {},
) -> RunOutcome:
    """Minimise the task's loss plus η times the primal regulariser; end with the weights of least validation loss.

    Training is deterministic on one CPU thread. At every evaluation, `watch` measures the model, and the state of the
    training is saved to the store `state`, from which a repeated call resumes. A run has not converged if a loss is not
    finite, which ends the run, or if the validation loss never falls below its initial value.
    """
    accelerator, scale = build_accelerator(), unit.scale
    optimiser = torch.optim.AdamW(model.parameters(), lr=unit.rate, weight_decay=DECAY)
    looks = {round(unit.steps * (number + 1) / scale.looks) for number in range(scale.looks)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(unit.seed)
        restored = None if state is None else _restore_training(state, model, optimiser)
        if restored is None:
            loss = score(task, model, "validation", scale.batch, loss_only=True)["loss"]
            restored = RunOutcome([(0, loss)], [watch(0)]), _copy_weights(model)
        outcome, best = restored
        model, optimiser = accelerator.prepare(model, optimiser)
        done, start = outcome.curve[-1][0], time.perf_counter()
        batches = islice(task.training(scale.batch, unit.seed), done, None)
        for step in range(done + 1, unit.steps + 1):
            for group in optimiser.param_groups:
                group["lr"] = unit.rate * _rate_factor(step, unit.steps, scale.warmup)
            loss, tokens = take_step(accelerator, model, optimiser, next(batches), unit.form.eta)
            outcome.tokens += tokens
            if not math.isfinite(loss):
                outcome.problem = f"its loss was not finite at step {step}"
                break
            if step not in looks:
                continue
            seconds = time.perf_counter() - start
            loss = score(task, model, "validation", scale.batch, loss_only=True)["loss"]
            if not math.isfinite(loss):
                outcome.problem = f"its validation loss was not finite at step {step}"
                break
            outcome.seconds += seconds
            outcome.watched.append(watch(step))
            if loss < min((known for _, known in outcome.curve[1:]), default=math.inf):
                best = _copy_weights(model)
            outcome.curve.append((step, loss))
            if state is not None:
                moments = optimiser.state_dict()["state"]
                parts = {"outcome": asdict(outcome), "model": _copy_weights(model), "best": best, "moments": moments}
                random = {"random": torch.get_rng_state(), "random of the GPU": torch.cuda.get_rng_state_all()}
                state.keep("state", parts | random)
            start = time.perf_counter()
    model.load_state_dict(best)
    (_, first), *later = outcome.curve
    if not outcome.problem and not min(loss for _, loss in later) < first:
        outcome.problem = "it never predicts better than before training"
    return outcome


def _restore_training(
    state: Store, model: nn.Module, optimiser: torch.optim.Optimizer
) -> tuple[RunOutcome, dict[str, Tensor]] | None:
    """Restore the state saved by `train`, if any; return the outcome and best weights so far, or else None."""
    if (saved := state.load("state")) is None:
        return None
    model.load_state_dict(saved["model"])
    optimiser.load_state_dict({**optimiser.state_dict(), "state": saved["moments"]})
    torch.set_rng_state(saved["random"])
    torch.cuda.set_rng_state_all(saved["random of the GPU"])
    return RunOutcome(**saved["outcome"]), saved["best"]


def build_accelerator() -> Accelerator:
    """Create an Accelerator, which moves models to the GPU, if any; raise UsageError if accelerate is missing."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise UsageError("Training models requires accelerate.", 'Run: pip install "attnlens[study]"') from None
    return Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")


def take_step(
    accelerator: Accelerator, model: nn.Module, optimiser: torch.optim.Optimizer, batch: Examples, eta: float
) -> tuple[float, int]:
    """Take one step on loss + `eta` · primal regulariser; return the loss and the number of tokens in the batch."""
    model.train()
    examples = batch.to(accelerator.device)
    with accelerator.autocast():
        logits = model(examples.inputs, examples.mask, examples.decoder_inputs)
        loss = cross_entropy(logits, examples.targets) / (examples.targets != NOTHING).sum().clamp_min(1)
        objective = loss + eta * regulariser(model) if eta else loss
    accelerator.backward(objective)
    accelerator.clip_grad_norm_(model.parameters(), CLIPPED)
    optimiser.step()
    optimiser.zero_grad()
    return float(loss.detach()), count_tokens(batch)


def _rate_factor(step: int, steps: int, warmup: float) -> float:
    """Return the factor of the peak learning rate at a step: linear warm-up, then a half-cosine decay to LAST."""
    rise = max(1, round(warmup * steps))
    if step <= rise:
        return step / rise
    done = (step - rise) / max(1, steps - rise)
    return LAST + (1 - LAST) * (1 + math.cos(math.pi * done)) / 2


def count_tokens(batch: Examples) -> int:
    """Count the tokens of a batch: target tokens, or input tokens for classification."""
    if batch.targets.dim() > 1:
        return int((batch.targets != NOTHING).sum())
    return int(batch.mask.sum()) if batch.mask is not None else batch.inputs.shape[0] * batch.inputs.shape[1]


def measure_speeds(units: Sequence[TrainingUnit], task: StudyTask) -> dict[TrainingUnit, tuple[float, float]]:
    """Return each unit's median tokens per second, and its median speed relative to a standard SDPA transformer."""
    batch = next(iter(task.training(units[0].scale.batch, 0)))

    def build_timer(unit: TrainingUnit, implementation: str | None = None) -> Callable[[], float]:
        """Build a function that times one training step of a new model."""
        accelerator, model = build_accelerator(), build_model(unit, task)
        if implementation is not None:
            model.config._attn_implementation = implementation  # private: the public setter refuses undeclared names
        optimiser = torch.optim.AdamW(model.core.parameters(), lr=unit.rate)
        module, optimiser = accelerator.prepare(model.core, optimiser)
        return partial(timeit, partial(take_step, accelerator, module, optimiser, batch, unit.form.eta), number=1)

    time_standard, speeds = build_timer(replace(units[0], form=SUM), "sdpa"), {}
    for unit in units:
        time_unit = build_timer(unit)
        pairs = [(time_standard(), time_unit()) for _ in range(13)][1:]  # the first step is slower
        speeds[unit] = count_tokens(batch) / median(b for _, b in pairs), median(a / b for a, b in pairs)
    return speeds


def save_step(model: KernelTransformer, task: StudyTask, folder: Path, step: int) -> None:
    """Write the model after `step` steps, with the task's tokenizer, if any, to a subfolder of `folder`."""
    from transformers import PreTrainedTokenizerFast

    step_folder = folder / f"step-{step:06d}"  # parsed by `converge --checkpoints`
    try:
        with quiet():
            model.save_pretrained(step_folder)
            if task.tokenizer is not None:
                tokenizer = PreTrainedTokenizerFast(tokenizer_object=task.tokenizer)  # type: ignore[no-untyped-call]
                tokenizer.save_pretrained(step_folder)
    except (OSError, SafetensorError) as error:
        raise unwritten_folder(step_folder, getattr(error, "strerror", None) or str(error)) from None


def model_folder(store: Store, name: str) -> Path:
    """Return the folder of a training unit's saved steps."""
    return Path(store.folder) / "models" / file_stem(name)


MEASURES = {"weights.symmetry", "weights.positivity", "weights.effective_rank"}  # of W_Q W_Kᵀ
MEASURES |= {f"tokens.{name}" for name in ("share_skew", "share_positive", "entropy", "max_weight", "effective_rank")}
SEQUENCES = 8  # sequences on which tokens.* are measured


def measure_heads(model: KernelTransformer, sequences: Sequence[Examples]) -> dict[str, float]:
    """Compute the median of each measure over heads; omit primal layers and measures without values.

    tokens.* are computed from log k and averaged over the sequences. If a kernel can be negative, tokens.* and
    selection.* are omitted. Only kernels of an inner product without a tie or position bias are compared with the SVM.
    """
    modules = [module for module in model.attentions() if module.primal is None]
    measured = [_measure(starmap(_read_weights, enumerate(modules)))]
    if not any(module.kernel.signed for module in modules):
        tokens = [_record_tokens(model, example) for example in sequences]
        measured += [_measure_selection(modules, tokens), *map(_measure, tokens)]
    medians = {}
    for name in dict.fromkeys(chain.from_iterable(measured)):
        heads = torch.stack([measures[name] for measures in measured if name in measures]).nanmean(0)
        if not bool(heads.isnan().all()):
            medians[name] = float(heads.nanmedian())
    return medians


def _measure(query_keys: Iterable[QueryKey]) -> dict[str, Tensor]:
    """Compute each of MEASURES for all heads, concatenated over modules."""
    by_module: dict[str, list[Tensor]] = {}
    for query_key in query_keys:
        for analyzer in registry.select_analyzers(("symmetry", "spectrum"), query_key.source):
            if isinstance(analyzer, registry.Analyzer):
                for name, value in analyzer.function(query_key).items():
                    if name in MEASURES:
                        by_module.setdefault(name, []).append(value.double().reshape(-1))
    return {name: torch.cat(values) for name, values in by_module.items()}


def _measure_selection(modules: Sequence[KernelAttention], tokens: Sequence[Sequence[QueryKey]]) -> dict[str, Tensor]:
    """Compute each head's share of decided queries, and the cosine of M with the SVM that selects the same tokens.

    A cosine is NaN if the SVM has no solution. Cosines are computed only for kernels of an inner product without a tie
    or a position bias.
    """
    decided, cosines = list[float](), list[float]()
    for module, *query_keys in zip(modules, *tokens, strict=True):
        selector = Selector(registry.GatheringPlace(query_keys[0].site))
        for number, query_key in enumerate(query_keys):
            selector.update(query_key, number)
        decided += [sum(shares.values()) / len(shares) for shares in selector.shares.values()]
        if selector.stored and module.kernel.tie is None and module.kernel.info.dot is not None:
            compared = [selector.nearness(head) for head in selector.shares]
            cosines += [head.svm_cosine if isinstance(head, Nearness) else math.nan for head in compared]
    measured = {"selection.decided": decided, "selection.projected_svm_cosine": cosines}
    return {name: torch.tensor(values) for name, values in measured.items() if values}


def _read_weights(layer: int, module: KernelAttention) -> QueryKey:
    """Return the factors of W_Q W_Kᵀ/√head_dim of a module that has a kernel, in float64."""
    query, key = (  # a linear map's weight is (outputs, inputs); its outputs are those of all heads
        part.weight.detach().cpu().double().mT.reshape(part.in_features, module.heads, -1).transpose(0, 1)
        for part in (module.query, module.key or module.query)
    )
    site = Site(f"layer {layer}", 0, layer, module.part)
    heads = tuple(range(module.heads))
    return QueryKey(query, key, query.shape[-1] ** -0.5, "weights", site, heads, key_of=heads)


def _record_tokens(model: KernelTransformer, example: Examples) -> list[QueryKey]:
    """Run the model on one sequence; return, for each module that has a kernel, a QueryKey whose logits are log k."""
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


def train_unit(unit: TrainingUnit, task: StudyTask, store: Store) -> dict[str, object]:
    """Train a unit, resuming from the last saved state, if any; return the fields of its RunOutcome."""
    name = unit.name(hash_task(task))
    model = build_model(unit, task)
    sequences = task.held_out("validation", 1)[:SEQUENCES] if unit.watched else None

    def watch(step: int) -> dict[str, float]:
        if unit.saved:
            save_step(model, task, model_folder(store, name), step)
        return {} if sequences is None else measure_heads(model, sequences)

    outcome = train(model.core, task, unit, store.inside(name), watch)
    if unit.tested and not outcome.problem:
        outcome.scores = score(task, model.core, "test", unit.scale.batch)
        if not all(map(math.isfinite, outcome.scores.values())):
            outcome.problem, outcome.scores = "its loss on the test set is not finite", {}
    outcome.parameters = sum(part.numel() for part in model.parameters())
    outcome.kernel_parameters = sum(module.kernel_parameters for module in model.attentions())
    return asdict(outcome)


def build_model(unit: TrainingUnit, task: StudyTask) -> KernelTransformer:
    """Build the unit's initial model."""
    scale = unit.scale
    ids = {"decoder_start_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PADDING}
    config = KernelTransformerConfig(
        vocab_size=task.vocabulary,
        hidden_size=scale.d_model,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        intermediate_size=scale.d_forward,
        max_position_embeddings=task.length,
        dropout=scale.dropout,
        channels=task.channels,
        classes=task.classes,
        form=asdict(unit.form),
        **(ids if task.form == "translation" else dict.fromkeys(ids)),
    )
    return draw_model(task.form, config, unit.seed)


def hash_task(task: StudyTask) -> str:
    """Hash a task's name, its sizes and the hashes of its files, if any (built-in tasks have none)."""
    return hash_json([task.name, sorted(task.files.items()), task.vocabulary, task.classes, task.channels, task.length])
