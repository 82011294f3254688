"""Decay of the last layer's singular values after equal training with and without Primal-Attention there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2LMHeadModel

from attnlens import linalg, primal
from attnlens.experiments.settings import Figure, Progress, averaged, columns, curve, silent
from attnlens.experiments.trained import DEMO, SHARE, TEXT, attention_curve, calls, cosine_curve, demo, sample
from attnlens.ksvd import ETA
from attnlens.records.studies import Curve, Experiment

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import GPT2Config, PreTrainedModel

CANONICAL, PRIMAL = WAYS = ("canonical", "primal")
WARM_UP = 20
"""Steps over which the learning rate rises."""


@dataclass(frozen=True)
class Training:
    """How both are trained: AdamW on random windows of a text."""

    steps: int = 120
    """Batches seen."""
    batch: int = 16
    """Windows of a batch."""
    lr: float = 3e-3
    """The largest learning rate; it rises, then falls linearly to a twentieth."""
    scores: int = 16
    """s of the primal layer."""
    eta: float = ETA
    """Weight of ΣJ² in the loss of Primal.+, in the paper's convention."""

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.lr * min(1.0, (step + 1) / WARM_UP) * (1 - 0.95 * step / self.steps)


def pair(config: GPT2Config, scores: int, seed: int) -> dict[str, PreTrainedModel]:
    """A new model, and its copy whose last layer is primal; they share all initial weights that both have."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
        return {CANONICAL: model, PRIMAL: primal.build(copy.deepcopy(model), layers="last", scores=scores)}


def fit(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows tokens"],
    training: Training,
    seed: int,
    progress: Callable[[int], None],
) -> None:
    """Train in place: the loss in nats, and + η·ΣJ² where a layer is primal. The seed alone decides the batches."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.95), weight_decay=0.1)
    regularised = any(isinstance(part, primal.PrimalHeads) for part in model.modules())
    model.train()
    for step in range(training.steps):
        for group in optimiser.param_groups:
            group["lr"] = training.rate(step)
        chosen = windows[torch.randperm(len(windows), generator=generator)[: training.batch]]
        optimiser.zero_grad()
        with torch.enable_grad():
            loss = nats(model, chosen)
            if regularised:
                loss = loss + training.eta * primal.regulariser(model)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        progress(step + 1)
    model.train(False)


def nats(model: PreTrainedModel, windows: Int[Tensor, "windows tokens"]) -> Float[Tensor, ""]:
    """Mean negative log likelihood of every token but a window's first."""
    logits = model(windows, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


TOKENS = 64
"""Of a window: all that is changed of demo's config, which has 256, so that training takes a minute and not an hour."""
MODEL = f"models of {DEMO}'s size, trained here"
"""How the record names what is trained: it shares demo's config and tokenizer, and none of its weights."""
SEEDS = 3
"""Each gives a pair of models."""
EVERY = 8
"""Of the built-in text's windows, every eighth is kept for evaluation."""
ALL = 10_000
"""More windows than that text has."""
MATRICES = ("attention", "cosine", "running_cosine")
SOURCE = (
    "Chen et al. 2023, Figure 1: σ₁/Σσ of the last layer is 0.77 in DeiT-S and 0.93 in Primal.+ on images; other "
    "models and data, so that nothing is judged here. The claim holds in the share of seeds in which Primal.+ has "
    "more; difference: primal − canonical; loss: nats per token of windows that were not trained on. "
    "attention: P, and in Primal.+ eΛrᵀ, which stands for it and has rank head_dim at most; cosine: cos(q_i, k_j) in "
    "both; running cosine: of the running means of q and k in both, which causal Primal-Attention reads"
)


@dataclass(frozen=True)
class HeldOutReading:
    """What a trained model shows on windows that it was not trained on."""

    loss: float
    """Nats per predicted token."""
    curves: dict[str, Float[Tensor, "heads steps"]]
    """Cumulative singular values of the last layer by matrix, in the mean over windows."""


def primal_decay(seed: int = 0, progress: Progress = silent) -> Experiment:
    """New models of demo's size on the text that demo was not trained on; every eighth window is for evaluation."""
    loaded = demo()
    config = cast("GPT2Config", copy.deepcopy(loaded.model.config))
    config.update({"n_positions": TOKENS})
    ids = sample(loaded, TOKENS, ALL)
    kept = torch.arange(len(ids)) % EVERY == EVERY - 1
    found = compared(config, ids[~kept], ids[kept], Training(), range(seed, seed + SEEDS), progress)
    split = f"{TEXT}, every eighth window for evaluation"
    return found.model_copy(update={"model": MODEL, "settings": {"text": split, **found.settings}})


def compared(
    config: GPT2Config,
    windows: Int[Tensor, "windows tokens"],
    held: Int[Tensor, "kept tokens"],
    training: Training,
    seeds: Sequence[int],
    progress: Progress = silent,
) -> Experiment:
    """Losses and the last layer's σ₁/Σσ of a model and of its Primal.+ after equal training, over seeds.

    `published` is None: the paper's figures are those of other models and data.
    """
    found: dict[str, list[HeldOutReading]] = {way: [] for way in WAYS}
    total, done = len(seeds) * len(WAYS) * training.steps, 0
    for seed in seeds:
        for way, model in pair(config, training.scores, seed).items():
            fit(model, windows, training, seed, partial(_tell, progress, done, total))
            done += training.steps
            found[way].append(read(model, held))
    settings = {"seeds": list(seeds), "layers": config.n_layer, "heads": config.n_head, "d_model": config.n_embd}
    sizes = {"tokens": windows.shape[-1], "windows": len(windows), "evaluated_on": len(held)}
    return Experiment(
        name="decay by training",
        question="After equal training, does a primal last layer decay faster than a canonical one? (± over seeds)",
        settings=settings | sizes | asdict(training),
        source=SOURCE,
        axis="first k singular values",
        curves={f"{_words(matrix)}: {way}": _curve(found[way], matrix, way) for matrix in MATRICES for way in WAYS},
        **columns(_rows(found)),
    )


def _tell(progress: Progress, done: int, total: int, step: int) -> None:
    progress("decay by training", done + step, total)


def read(model: PreTrainedModel, held: Int[Tensor, "kept tokens"]) -> HeldOutReading:
    """The loss, and the three kernels of the last layer."""
    with torch.no_grad():
        loss = float(nats(model, held))
        last = _scores_curve(model)
        call, query_key = calls(model, held)[-1]
    found = {
        "attention": attention_curve(query_key) if last is None else last,
        "cosine": cosine_curve(call),
        "running_cosine": cosine_curve(call, averaged=True),
    }
    return HeldOutReading(loss, {name: values.mean(0) for name, values in found.items()})


def _scores_curve(model: PreTrainedModel) -> Float[Tensor, "kept heads steps"] | None:
    """The curve of eΛrᵀ, K itself where e and r solve the kernel SVD, of the last pass; None without a primal layer."""
    for part in model.modules():
        if isinstance(part, primal.PrimalHeads) and part.last is not None:
            e, r, _ = part.last
            return linalg.cumulative(linalg.product_singular_values(e * part.log_multipliers.exp()[:, None], r))
    return None


def _rows(found: dict[str, list[HeldOutReading]]) -> dict[str, Figure]:
    """The loss and each matrix's σ₁/Σσ both ways, primal − canonical, and in which share of seeds primal has more."""
    first = {
        matrix: {way: torch.stack([one.curves[matrix][:, 0].mean() for one in found[way]]) for way in WAYS}
        for matrix in MATRICES
    }
    losses = {way: torch.tensor([one.loss for one in found[way]], dtype=torch.float64) for way in WAYS}
    named = {"loss": losses, **first}
    both = {
        f"{name}_{way}": averaged(ways[way], f"{_words(name)}, {way}") for name, ways in named.items() for way in WAYS
    }
    apart = {
        f"{name}_difference": averaged(ways[PRIMAL] - ways[CANONICAL], f"{_words(name)}, difference")
        for name, ways in named.items()
    }
    holds = {
        f"{matrix}_holds": Figure(
            float((ways[PRIMAL] > ways[CANONICAL]).double().mean()), label=f"{_words(matrix)}, claim holds"
        )
        for matrix, ways in first.items()
    }
    return both | apart | holds


def _words(name: str) -> str:
    return name.replace("_", " ")


def _curve(reads: list[HeldOutReading], matrix: str, way: str) -> Curve:
    """Median and quartiles over the heads of all seeds."""
    heads = torch.cat([one.curves[matrix] for one in reads])
    steps = range(1, heads.shape[-1] + 1)
    return curve(steps, heads.mT, SHARE, bounded=True, picture=_words(matrix), label=way)
