"""Decay of singular values by layer: Figure 1 of Primal-Attention on the demo model."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from attnlens.experiments.figures import Figure, averaged, columns, curve
from attnlens.experiments.settings import Progress, silent
from attnlens.experiments.trained import DEMO, SHARE, TEXT, attention_curve, calls, cosine_curve, demo, sample
from attnlens.records.experiments import Curve, Experiment

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel

TOKENS = 128
WINDOWS, FEW = 32, 8
"""Windows of the built-in text, in full and quick."""
THIRDS = ("first", "middle", "last")
"""Thirds of the layers, as even as their number allows."""
SOURCE = (
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
    found = by_third(loaded.model, sample(loaded, TOKENS, windows))
    progress("decay by depth", 1, 1)
    rows = _rows({name: [third[..., 0].mean(-1) for third in thirds] for name, thirds in found.items()})
    return Experiment(
        name="decay by depth",
        question="Do deeper layers decay faster: is σ₁/Σσ larger there? (± over windows)",
        model=DEMO,
        settings={"text": TEXT, "windows": windows, "tokens": TOKENS, "layers": loaded.model.config.n_layer},
        source=SOURCE,
        axis="first k singular values",
        curves={
            f"{name}: {third} third": _curve(values, name, f"{third} third")
            for name, thirds in found.items()
            for third, values in zip(THIRDS, thirds, strict=True)
        },
        **columns(rows),
    )


def _rows(shares: dict[str, list[Float[Tensor, " windows"]]]) -> dict[str, Figure]:
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


def _curve(values: Float[Tensor, "windows heads steps"], kernel: str, third: str) -> Curve:
    """Median and quartiles over heads, of their means over windows."""
    heads = values.mean(0)
    return curve(range(1, heads.shape[-1] + 1), heads.mT, SHARE, bounded=True, picture=kernel, label=third)
