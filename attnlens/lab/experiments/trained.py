"""Experiments on `demo` and models of its size: singular-value decay by depth and training, kernel-SVD identities."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2LMHeadModel

from attnlens.kernels.attention.sums import running_means
from attnlens.lab import primal
from attnlens.lab.experiments.tokens import Figure, average_trials, columns, curve
from attnlens.maths import ksvd, linalg
from attnlens.maths.ksvd import ETA
from attnlens.maths.linalg.spectra import one_thread
from attnlens.models import hooks, loading, texts
from attnlens.records.studies import Curve, Experiment
from attnlens.runs.progress import Progress, silent

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import GPT2Config, PreTrainedModel

    from attnlens.records import Call, QueryKey


DEMO, TEXT = "demo", "King James passages"  # model and text of these experiments, as named in their records
CANONICAL, PRIMAL = WAYS = ("canonical", "primal")
WARM_UP = 20  # steps of linear learning-rate warm-up


@dataclass(frozen=True)
class Training:
    """Training settings of the canonical and the primal model: AdamW on random windows of a text."""

    steps: int = 120  # batches in total
    batch: int = 16  # windows per batch
    lr: float = 3e-3  # peak learning rate, reached after warm-up; the rate then falls linearly to a twentieth
    scores: int = 16  # s of the primal layer
    eta: float = ETA  # weight of ΣJ² in the loss of Primal.+, in the paper's convention


def build_pair(config: GPT2Config, scores: int, seed: int) -> dict[str, PreTrainedModel]:
    """Build a new model and a copy with a primal last layer; all other parameters have equal initial values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
        return {CANONICAL: model, PRIMAL: primal.build(copy.deepcopy(model), layers="last", scores=scores)}


def fit(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows tokens"],
    training: Training,
    seed: int,
    progress: Callable[[], object],
) -> None:
    """Train a model in place on its loss in nats, plus η·ΣJ² if a layer is primal; equal seeds draw equal batches."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.95), weight_decay=0.1)
    regularised = any(isinstance(part, primal.PrimalHeads) for part in model.modules())
    model.train()
    for step in range(training.steps):
        for group in optimiser.param_groups:
            group["lr"] = training.lr * min(1.0, (step + 1) / WARM_UP) * (1 - 0.95 * step / training.steps)
        chosen = windows[torch.randperm(len(windows), generator=generator)[: training.batch]]
        optimiser.zero_grad()
        with torch.enable_grad():
            loss = measure_loss(model, chosen)
            if regularised:
                loss = loss + training.eta * primal.regulariser(model)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        progress()
    model.train(False)


def measure_loss(model: PreTrainedModel, windows: Int[Tensor, "windows tokens"]) -> Float[Tensor, ""]:
    """Compute the mean negative log-likelihood, in nats, of all tokens except each window's first."""
    logits = model(windows, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


TOKENS = 64  # tokens per window; demo's 256 are reduced so that training takes a minute rather than an hour
MODEL = f"models of {DEMO}'s size, trained here"  # name of the trained models in the record
SEEDS = 3  # number of seeds, each for one pair of models
EVERY = 8  # every eighth window of the built-in text is held out for evaluation
MATRICES = {"attention": "attention", "cosine": "cosine", "running_cosine": "running cosine"}  # name → display name


@one_thread()
def primal_decay(seed: int = 0, progress: Progress = silent) -> Experiment:
    """Train pairs of models of demo's size on seven eighths of the built-in text, and evaluate on the other eighth."""
    loaded = demo()
    config = cast("GPT2Config", copy.deepcopy(loaded.model.config))
    config.update({"n_positions": TOKENS})
    ids = sample(loaded, TOKENS, 10_000)  # more windows than the built-in text has
    held_out, seeds = torch.arange(len(ids)) % EVERY == EVERY - 1, range(seed, seed + SEEDS)
    experiment = compare_training(config, ids[~held_out], ids[held_out], Training(), seeds, progress)
    split = f"{TEXT}, every eighth window for evaluation"
    return experiment.model_copy(update={"model": MODEL, "settings": {"text": split, **experiment.settings}})


def compare_training(
    config: GPT2Config,
    windows: Int[Tensor, "windows tokens"],
    held_out: Int[Tensor, "windows tokens"],
    training: Training,
    seeds: Sequence[int],
    progress: Progress = silent,
) -> Experiment:
    """Train a model and its Primal.+ version for each seed; compare their losses and their last layers' σ₁/Σσ."""
    total, numbers = len(seeds) * len(WAYS) * training.steps, count(1)
    measured: dict[tuple[str, str], list[Tensor]] = {(name, way): [] for name in ("loss", *MATRICES) for way in WAYS}
    for seed in seeds:
        for way, model in build_pair(config, training.scores, seed).items():
            fit(model, windows, training, seed, lambda: progress("decay by training", next(numbers), total))
            for name, value in measure_decay(model, held_out).items():
                measured[name, way].append(value)
    values = {
        (name, way): torch.stack([value if name == "loss" else value[:, 0].mean() for value in each])
        for (name, way), each in measured.items()
    }
    both, differences, claims = dict[str, Figure](), dict[str, Figure](), dict[str, Figure]()
    for name in ("loss", *MATRICES):
        label, ours, theirs = MATRICES.get(name, name), values[name, PRIMAL], values[name, CANONICAL]
        both |= {f"{name}_{way}": average_trials(values[name, way], f"{label}, {way}") for way in WAYS}
        differences[f"{name}_difference"] = average_trials(ours - theirs, f"{label}, difference")
        if name != "loss":
            claims[f"{name}_holds"] = Figure(float((ours > theirs).double().mean()), label=f"{label}, claim holds")
    settings = {"seeds": list(seeds), "layers": config.n_layer, "heads": config.n_head, "d_model": config.n_embd}
    sizes = {"tokens": windows.shape[-1], "windows": len(windows), "evaluated_on": len(held_out)}
    return Experiment(
        name="decay by training",
        question="After equal training, do singular values decay faster in a primal last layer than in a canonical "
        "last layer? (± over seeds)",
        settings=settings | sizes | asdict(training),
        source="Chen et al. 2023, Figure 1: σ₁/Σσ of the last layer is 0.77 in DeiT-S and 0.93 in Primal.+ on images; "
        "models and data differ here, so nothing is judged. claim holds: share of seeds in which σ₁/Σσ is larger in "
        "Primal.+; difference: primal − canonical; loss: nats per token. attention: P, or eΛrᵀ in Primal.+; cosine: "
        "cos(q_i, k_j); running cosine: cosine of the running means of q and k, the inputs of causal Primal-Attention",
        axis="first k singular values",
        curves={
            f"{label}: {way}": _head_curve(torch.cat(measured[matrix, way]), label, way)
            for matrix, label in MATRICES.items()
            for way in WAYS
        },
        **columns(both | differences | claims),
    )


def measure_decay(model: PreTrainedModel, held_out: Int[Tensor, "windows tokens"]) -> dict[str, Tensor]:
    """Compute the `loss` in nats and, averaged over windows, the last layer's curves of MATRICES, (heads, steps)."""
    attention = None
    with torch.no_grad():
        loss = measure_loss(model, held_out).double()
        for part in model.modules():
            if isinstance(part, primal.PrimalHeads) and part.last is not None:  # eΛrᵀ is K if e, r solve the kernel SVD
                e, r, _ = part.last
                values = linalg.product_singular_values(e * part.log_multipliers.exp()[:, None], r)
                attention = linalg.cumulative(values)
        call, query_key = record_calls(model, held_out)[-1]
    if attention is None:
        attention = attention_curve(query_key)
    spectra = attention, cosine_curve(call), cosine_curve(call, averaged=True)
    return {"loss": loss} | {name: values.mean(0) for name, values in zip(MATRICES, spectra, strict=True)}


def _head_curve(heads: Float[Tensor, "heads steps"], picture: str, label: str) -> Curve:
    """Build the curve of median and quartiles over heads, titled `picture` and labelled `label`."""
    return curve(range(1, heads.shape[-1] + 1), heads.mT, "share of Σσ", bounded=True, picture=picture, label=label)


def demo() -> loading.Loaded:
    """Load the demo model on the CPU, so that results do not depend on a GPU."""
    return loading.load(DEMO, device="cpu")


def sample(loaded: loading.Loaded, tokens: int, sequences: int) -> Int[Tensor, "sequences tokens"]:
    """Return at most `sequences` windows spread over the built-in passages, on which demo was not trained."""
    chunks = texts.batches(loaded, texts.sample(DEMO), texts.Cut(tokens=tokens, sequences=sequences))
    return torch.cat([batch.inputs["input_ids"] for batch in chunks])


def record_calls(model: PreTrainedModel, ids: Int[Tensor, "sequences tokens"]) -> list[tuple[Call, QueryKey]]:
    """Return the attention call and query-key pair of every layer, primal or not, recorded in one forward pass."""
    return [(site.call, site.call.query_key(site.site)) for site in hooks.survey(model, {"input_ids": ids})]


def attention_curve(query_key: QueryKey) -> Float[Tensor, "sequences heads steps"]:
    """Compute (σ₁ + … + σₖ)/Σσ of the attention matrix P as a function of k (Chen et al. 2023, Figure 1)."""
    return linalg.cumulative(linalg.attention_singular_values(query_key))


def cosine_curve(call: Call, *, averaged: bool = False) -> Float[Tensor, "sequences heads steps"]:
    """Compute (σ₁ + … + σₖ)/Σσ of the matrix cos(q_i, k_j) as a function of k.

    If `averaged`, q and k are replaced by their running means, as in causal Primal-Attention.
    """
    sides = (call.query.double(), call.paired_key.double())
    queries, keys = (ksvd.cosine_features(running_means(side) if averaged else side) for side in sides)
    return linalg.cumulative(linalg.product_singular_values(queries, keys))


DEPTH_TOKENS = 128
WINDOWS, FEW = 32, 8  # windows of the built-in text, full and quick
THIRDS = ("first", "middle", "last")  # thirds of the layers, as equal as possible


def depth_decay(quick: bool = False, progress: Progress = silent) -> Experiment:
    """Compute σ₁/Σσ of attention and of the cosine kernel, averaged over heads in each third of `demo`'s layers."""
    loaded, windows = demo(), FEW if quick else WINDOWS
    spectra = by_third(loaded.model, sample(loaded, DEPTH_TOKENS, windows))
    progress("decay by depth", 1, 1)
    rows, holding, curves = dict[str, Figure](), dict[str, Figure](), dict[str, Curve]()
    for name, thirds in spectra.items():
        shares = [third[..., 0].mean(-1) for third in thirds]
        for third, values, spectrum in zip(THIRDS, shares, thirds, strict=True):
            rows[f"{name}_{third}"] = average_trials(values, f"{name}, {third} third")
            curves[f"{name}: {third} third"] = _head_curve(spectrum.mean(0), name, f"{third} third")
        rows[f"{name}_last_minus_first"] = average_trials(shares[-1] - shares[0], f"{name}, last − first")
        rises = all(low < high for low, high in pairwise([float(values.mean()) for values in shares]))
        holding[f"{name}_holds"] = Figure(float(rises), label=f"{name}, claim holds")
    return Experiment(
        name="decay by depth",
        question="Do singular values decay faster in deeper layers, so that σ₁/Σσ is larger? (± over windows)",
        model=DEMO,
        settings={"text": TEXT, "windows": windows, "tokens": DEPTH_TOKENS, "layers": loaded.model.config.n_layer},
        source="Chen et al. 2023, Figure 1: σ₁/Σσ of DeiT-S on images is 0.16, 0.39 and 0.62 in its first, middle and "
        "last third; model, data and mask differ from demo's, so nothing is judged here. The claim holds (1, otherwise "
        "0) if first < middle < last",
        axis="first k singular values",
        curves=curves,
        **columns(rows | holding),
    )


def by_third(
    model: PreTrainedModel, ids: Int[Tensor, "windows tokens"]
) -> dict[str, list[Float[Tensor, "windows heads steps"]]]:
    """Compute each head's `attention_curve` and `cosine_curve`, keyed by matrix, for each third of the layers."""
    layers = record_calls(model, ids)
    spectra = {
        "attention": [attention_curve(query_key) for _, query_key in layers],
        "cosine": [cosine_curve(call) for call, _ in layers],
    }
    groups = torch.arange(len(layers)).tensor_split(len(THIRDS))
    return {
        name: [torch.cat([each[layer] for layer in group], 1) for group in groups] for name, each in spectra.items()
    }


LAYER, HEAD, HEAD_TOKENS = 1, 3, 128  # head that supplies queries and keys, and number of tokens
SCORES, ROWS, RANDOM = 4, 10, 64  # s, number of sampled rows X', and number of random features per token
KERNELS = f"cosine and random features of head {LAYER}.{HEAD} of demo, Gaussian features"
NOISE = 0.1  # standard deviation of the noise added to H_e in the control
CONTROL = "J_perturbed"  # figure that must not be 0
LIMIT, MOVED = 1e-10, 0.1  # maximum error of an identity, above float64's rounding; minimum J of the control
LABELS = {"primal_minus_dual": "primal − dual", "rank_s_error": "rank-s error"}  # display names


class Case(NamedTuple):
    """Factors of a kernel matrix K = Φ_q FᵀF Φ_kᵀ on which the identities of kernel SVD are tested."""

    queries: Float[Tensor, "n features"]  # Φ_q
    keys: Float[Tensor, "m features"]  # Φ_k
    projection: Float[Tensor, "sampled features"] | None  # F; None is the identity


def ksvd_identities(seed: int = 0, progress: Progress = silent) -> Experiment:
    """Compute the largest error of each identity over all kernels, and the smallest |J| of the perturbed control."""
    all_cases, all_errors = list(build_cases(seed)), list[dict[str, float]]()
    for done, case in enumerate(all_cases, 1):
        all_errors.append(measure_errors(case, seed))
        progress("KSVD identities", done, len(all_cases))
    identity = partial(Figure, published=0.0, tolerance=LIMIT, bound="at most")
    rows = {name: identity(max(each[name] for each in all_errors), label=LABELS.get(name)) for name in all_errors[0]}
    control = partial(Figure, label="J perturbed (control)", published=MOVED, bound="at least", origin="control")
    rows[CONTROL] = control(min(each[CONTROL] for each in all_errors))
    return Experiment(
        name="KSVD identities",
        question="Do primal and dual kernel SVD agree, with J = 0 at the solution and J ≠ 0 in the perturbed control?",
        model=DEMO,
        settings={"text": TEXT, "kernels": KERNELS, "F": "I and X'", "s": SCORES, "sampled_rows": ROWS, "seed": seed},
        source="Chen et al. 2023, Theorem 3.2 and Eq. 6: equalities, here up to rounding; J is in the unit of K",
        **columns(rows),
    ).judge()


def build_cases(seed: int) -> Iterator[Case]:
    """Yield cosine, random and Gaussian features (for Gaussian, n ≠ m), each with F = I and with rows of Φ_k as F."""
    loaded = demo()
    _, query_key = record_calls(loaded.model, sample(loaded, HEAD_TOKENS, 1))[LAYER]
    sides = query_key.query[0, HEAD], query_key.paired_key[0, HEAD]
    generator = torch.Generator().manual_seed(seed)
    for queries, keys in (
        [ksvd.cosine_features(x) for x in sides],
        [ksvd.random_features(x, query_key.scale, RANDOM, seed) for x in sides],
        [torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (40, 30)],
    ):
        yield Case(queries, keys, None)
        yield Case(queries, keys, ksvd.sampled_rows(keys, ROWS))


def measure_errors(case: Case, seed: int) -> dict[str, float]:
    """Compute each identity's error on the s leading components, relative except for J, Λe − h and the control."""
    solution = ksvd.dual(case.queries, case.keys, SCORES, case.projection)
    queries, keys = case[:2] if case.projection is None else [side @ case.projection.mT for side in case[:2]]
    kernel = queries @ keys.mT  # K as an explicit matrix, the reference for the identities
    weights = ksvd.primal(solution, *case)
    e, r = weights.e_scores(case.queries), weights.r_scores(case.keys)
    sigma, top = solution.values, float(solution.values[0])
    remainder = torch.linalg.svdvals(kernel)[len(sigma) :].norm()
    noise = torch.randn(solution.left.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    perturbed = replace(solution, left=solution.left + NOISE * noise)  # not a kernel SVD
    return {
        "eigen_residual": float(ksvd.matrix_residual(solution, kernel)),
        "primal_minus_dual": _largest(e - solution.e, r - solution.r) / top,
        "Λe − h": _largest(weights.multipliers * e - solution.left, weights.multipliers * r - solution.right),
        "J": _objective(case, solution),
        "Σe² − σ²": _largest(e.square().sum(0) - sigma.square()) / top**2,
        "rank_s_error": float(((kernel - e @ solution.right.mT).norm() - remainder).abs() / kernel.norm()),
        CONTROL: _objective(case, perturbed),
    }


def _objective(case: Case, solution: ksvd.Dual) -> float:
    """Compute |J|, in the unit of K, at the primal weights of a dual solution."""
    weights = ksvd.primal(solution, *case)
    e, r = weights.e_scores(case.queries), weights.r_scores(case.keys)
    return float(ksvd.objective(e, r, weights.query_weight, weights.key_weight, weights.multipliers).abs())


def _largest(*differences: Tensor) -> float:
    return max(float(difference.abs().amax()) for difference in differences)
