"""Experiments on the demo model and models of its size: decay by depth and by training, identities of kernel SVD."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2LMHeadModel

from attnlens.kernels.attention.primal_scores import running
from attnlens.lab import primal
from attnlens.lab.experiments.settings import Figure, Progress, averaged, columns, curve, silent
from attnlens.maths import ksvd, linalg
from attnlens.maths.ksvd import ETA
from attnlens.models import hooks, loading, texts
from attnlens.records.studies import Curve, Experiment

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import GPT2Config, PreTrainedModel

    from attnlens.records import Call, QueryKey


DEMO, TEXT = "demo", "King James passages"  # what experiments on a trained model read, as their records name it
SHARE = "share of Σσ"  # what their curves show
CANONICAL, PRIMAL = WAYS = ("canonical", "primal")
WARM_UP = 20  # steps over which the learning rate rises


@dataclass(frozen=True)
class Training:
    """How both are trained: AdamW on random windows of a text."""

    steps: int = 120  # batches seen
    batch: int = 16  # windows of a batch
    lr: float = 3e-3  # the largest learning rate; it rises, then falls linearly to a twentieth
    scores: int = 16  # s of the primal layer
    eta: float = ETA  # weight of ΣJ² in the loss of Primal.+, in the paper's convention

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
SEEDS = 3  # each gives a pair of models
EVERY = 8  # of the built-in text's windows, every eighth is kept for evaluation
ALL = 10_000  # more windows than that text has
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

            def told(step: int, done: int = done) -> None:
                progress("decay by training", done + step, total)

            fit(model, windows, training, seed, told)
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


def demo() -> loading.Loaded:
    """The model that ships, on the processor that every machine has."""
    return loading.load(DEMO, device="cpu")


def sample(loaded: loading.Loaded, tokens: int, sequences: int) -> Int[Tensor, "sequences tokens"]:
    """Windows spread over the built-in passages, which demo was not trained on; fewer where they have no more."""
    found = texts.batches(loaded, texts.sample(DEMO), texts.Cut(tokens=tokens, sequences=sequences))
    return torch.cat([batch.inputs["input_ids"] for batch in found])


def calls(model: PreTrainedModel, ids: Int[Tensor, "sequences tokens"]) -> list[tuple[Call, QueryKey]]:
    """What every layer's attention is asked for, layer by layer, in one pass.

    Layers below a primal one are the model's own; a primal one is asked with its own queries and keys too.
    """
    return [(found.call, found.call.query_key(found.site)) for found in hooks.survey(model, {"input_ids": ids})]


def attention_curve(query_key: QueryKey) -> Float[Tensor, "sequences heads steps"]:
    """(σ₁ + … + σₖ)/Σσ of the attention matrix P (Chen et al. 2023, Figure 1)."""
    return linalg.cumulative(linalg.attention_singular_values(query_key))


def cosine_curve(call: Call, *, averaged: bool = False) -> Float[Tensor, "sequences heads steps"]:
    """The same of K_ij = cos(q_i, k_j); `averaged`, of the running means of q and k, as causal primal attention has."""
    sides = (call.query.double(), call.paired_key.double())
    queries, keys = (ksvd.cosine_features(running(side) if averaged else side) for side in sides)
    return linalg.cumulative(linalg.product_singular_values(queries, keys))


DEPTH_TOKENS = 128
WINDOWS, FEW = 32, 8
"""Windows of the built-in text, in full and quick."""
THIRDS = ("first", "middle", "last")  # thirds of the layers, as even as their number allows
DEPTH_SOURCE = (
    "Chen et al. 2023, Figure 1: σ₁/Σσ of DeiT-S on images is 0.16, 0.39 and 0.62 in its first, middle and last third; "
    "another model, data and mask than demo's, so that nothing is judged here. The claim holds (1, else 0) where "
    "first < middle < last"
)


def depth_decay(quick: bool = False, progress: Progress = silent) -> Experiment:
    """σ₁/Σσ of P and of the cosine kernel by third of demo's layers, in the mean over heads and then over windows.

    A claim about another model has no verdict here: `published` is None, and `holds` says how it comes out, beside the
    difference of last and first with its error.
    """
    loaded, windows = demo(), FEW if quick else WINDOWS
    found = by_third(loaded.model, sample(loaded, DEPTH_TOKENS, windows))
    progress("decay by depth", 1, 1)
    rows = _depth_rows({name: [third[..., 0].mean(-1) for third in thirds] for name, thirds in found.items()})
    return Experiment(
        name="decay by depth",
        question="Do deeper layers decay faster: is σ₁/Σσ larger there? (± over windows)",
        model=DEMO,
        settings={"text": TEXT, "windows": windows, "tokens": DEPTH_TOKENS, "layers": loaded.model.config.n_layer},
        source=DEPTH_SOURCE,
        axis="first k singular values",
        curves={
            f"{name}: {third} third": _depth_curve(values, name, f"{third} third")
            for name, thirds in found.items()
            for third, values in zip(THIRDS, thirds, strict=True)
        },
        **columns(rows),
    )


def _depth_rows(shares: dict[str, list[Float[Tensor, " windows"]]]) -> dict[str, Figure]:
    """By kernel each third's σ₁/Σσ, last − first, and whether they rise, which has no error."""
    rows: dict[str, Figure] = {}
    for name, thirds in shares.items():
        for third, values in zip(THIRDS, thirds, strict=True):
            rows[f"{name}_{third}"] = averaged(values, f"{name}, {third} third")
        rows[f"{name}_last_minus_first"] = averaged(thirds[-1] - thirds[0], f"{name}, last − first")
    return rows | {
        f"{name}_holds": Figure(holds([float(x.mean()) for x in thirds]), label=f"{name}, claim holds")
        for name, thirds in shares.items()
    }


def holds(shares: list[float]) -> float:
    """1 where the shares rise from third to third, else 0."""
    return float(all(low < high for low, high in pairwise(shares)))


def by_third(
    model: PreTrainedModel, ids: Int[Tensor, "windows tokens"]
) -> dict[str, list[Float[Tensor, "windows heads steps"]]]:
    """Cumulative singular values of all heads of each third of the layers; of a rest, earlier thirds get more.

    attention: P, as in the figure; cosine: K_ij = cos(q_i, k_j), of which the paper's theory speaks, head_dim of them.
    """
    layers = calls(model, ids)
    read = {
        "attention": [attention_curve(query_key) for _, query_key in layers],
        "cosine": [cosine_curve(call) for call, _ in layers],
    }
    groups = torch.arange(len(layers)).tensor_split(len(THIRDS))
    return {
        name: [torch.cat([curves[layer] for layer in group.tolist()], 1) for group in groups]
        for name, curves in read.items()
    }


def _depth_curve(values: Float[Tensor, "windows heads steps"], kernel: str, third: str) -> Curve:
    """Median and quartiles over heads, of their means over windows."""
    heads = values.mean(0)
    return curve(range(1, heads.shape[-1] + 1), heads.mT, SHARE, bounded=True, picture=kernel, label=third)


LAYER, HEAD, HEAD_TOKENS = 1, 3, 128  # whose queries and keys, and on how much of the built-in text
SCORES, ROWS, RANDOM = 4, 10, 64
"""s, the sampled rows X', and the random features of a token."""
KERNELS = f"cosine and random features of head {LAYER}.{HEAD} of demo, Gaussian features"
NOISE = 0.1  # standard deviation of what H_e is perturbed by, for the control
CONTROL = "J_perturbed"  # the figure that must not be 0
LIMIT, MOVED = 1e-10, 0.1  # how large an identity's error may be, and how large the control's J must be
LABELS = {"primal_minus_dual": "primal − dual", "rank_s_error": "rank-s error"}
"""How an identity is written, where its name is not that."""
IDENTITIES_SOURCE = "Chen et al. 2023, Theorem 3.2 and Eq. 6: equalities, here to rounding; J is in K's unit"


class Case(NamedTuple):
    """One kernel K = Φ_q FᵀF Φ_kᵀ."""

    name: str
    queries: Float[Tensor, "n features"]  # Φ_q
    keys: Float[Tensor, "m features"]  # Φ_k
    projection: Float[Tensor, "sampled features"] | None  # F; None is the identity

    @property
    def kernel(self) -> Float[Tensor, "n m"]:
        """K, written out: what the identities are held against."""
        if self.projection is None:
            return self.queries @ self.keys.mT
        return (self.queries @ self.projection.mT) @ (self.keys @ self.projection.mT).mT


def ksvd_identities(seed: int = 0, progress: Progress = silent) -> Experiment:
    """The largest error of each identity over the kernels, and the least |J| of the control, which must not be 0."""
    posed = list(cases(seed))
    found: dict[str, list[float]] = {}
    for done, case in enumerate(posed):
        for name, error in errors(case, seed).items():
            found.setdefault(name, []).append(error)
        progress("KSVD identities", done + 1, len(posed))
    rows = {
        name: Figure(max(values), label=LABELS.get(name), published=0.0, tolerance=LIMIT, bound="at most")
        for name, values in found.items()
    }
    rows[CONTROL] = Figure(min(found[CONTROL]), label="J perturbed, the control", published=MOVED, bound="at least")
    return Experiment(
        name="KSVD identities",
        question="Do primal and dual kernel SVD agree, and is J = 0 there (perturbed: the control, which must not be)?",
        model=DEMO,
        settings={"text": TEXT, "kernels": KERNELS, "F": "I and X'", "s": SCORES, "sampled_rows": ROWS, "seed": seed},
        source=IDENTITIES_SOURCE,
        **columns(rows),
    ).judged()


def cases(seed: int) -> Iterator[Case]:
    """A head's cosine features, its softmax random features, and Gaussian features of other counts, each with both F.

    X' are evenly spaced rows of Φ_k.
    """
    loaded = demo()
    _, query_key = calls(loaded.model, sample(loaded, HEAD_TOKENS, 1))[LAYER]
    q, k = query_key.query[0, HEAD], query_key.paired_key[0, HEAD]
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(rows, 6, generator=generator, dtype=torch.float64) for rows in (40, 30))
    head = f"head {LAYER}.{HEAD} of demo"
    posed = {
        f"{head}, cosine": (ksvd.cosine_features(q), ksvd.cosine_features(k)),
        f"{head}, random features": tuple(ksvd.random_features(x, query_key.scale, RANDOM, seed) for x in (q, k)),
        "Gaussian features": tuple(drawn),
    }
    for name, (queries, keys) in posed.items():
        yield Case(f"{name}, F = I", queries, keys, None)
        yield Case(f"{name}, F = X'", queries, keys, ksvd.sampled_rows(keys, ROWS))


def errors(case: Case, seed: int) -> dict[str, float]:
    """How far each identity of the s leading components is from holding, relative to K but for J; and the control."""
    sides = case.queries, case.keys, case.projection
    solution, kernel = ksvd.dual(case.queries, case.keys, SCORES, case.projection), case.kernel
    weights = ksvd.primal(solution, *sides)
    e, r = weights.e_scores(case.queries), weights.r_scores(case.keys)
    sigma, top = solution.values, float(solution.values[0])
    rest = torch.linalg.svdvals(kernel)[len(sigma) :].norm()
    noise = torch.randn(solution.left.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    perturbed = replace(solution, left=solution.left + NOISE * noise)  # no kernel SVD any more
    return {
        "eigen_residual": float(ksvd.matrix_residual(solution, kernel)),
        "primal_minus_dual": _largest(e - solution.e, r - solution.r) / top,
        "Λe − h": _largest(weights.multipliers * e - solution.left, weights.multipliers * r - solution.right),
        "J": _objective(case, solution),
        "Σe² − σ²": _largest(e.square().sum(0) - sigma.square()) / top**2,
        "rank_s_error": float((torch.linalg.matrix_norm(kernel - e @ solution.right.mT) - rest).abs() / kernel.norm()),
        CONTROL: _objective(case, perturbed),
    }


def _objective(case: Case, solution: ksvd.Dual) -> float:
    """|J| at the primal weights that a dual solution gives, in K's unit."""
    weights = ksvd.primal(solution, case.queries, case.keys, case.projection)
    e, r = weights.e_scores(case.queries), weights.r_scores(case.keys)
    return float(ksvd.objective(e, r, weights.query_weight, weights.key_weight, weights.multipliers).abs())


def _largest(*differences: Tensor) -> float:
    return max(float(difference.abs().amax()) for difference in differences)
