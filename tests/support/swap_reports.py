"""Synthetic reports of `swap-kernel`: one kernel or several, swept, healed, diverged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from reports import synthetic_report

from attnlens import records
from attnlens.choices import Part
from attnlens.records import Effect, Healing, HealingStep, Pair, Plan, Rise, Swap
from attnlens.report.report import Report

DIVERGED = "the changed model diverged: its predictions are not finite"
HEADLESS = "the model has no head that predicts a class, a masked token, or the next token from earlier ones"
PREDICTING = ("loss", "perplexity", "kl", "kl_ci95", "top1_agreement")
STATES = ("hidden_cosine", "hidden_cosine_ci95", "hidden_cka")
NOISE = "the model's input is noise that attnlens made up"
BEFORE = 2.43
Sweep = Literal["heads", "layers"] | list[Effect] | None


def outcome(delta: float | None, *, headless: bool = False, noise: bool = False) -> dict[str, Any]:
    """Return the fields of an Outcome whose loss rises by `delta`; None: it diverged."""
    if delta is None:
        return {"diverged": True, "reasons": dict.fromkeys((*PREDICTING, *STATES), DIVERGED)}
    size = abs(delta)
    cosine, kl = 1 / (1 + size), 1.1 * size
    fields: dict[str, Any] = {"hidden_cosine": cosine, "hidden_cka": 1 / (1 + 0.7 * size)}
    fields["hidden_cosine_ci95"] = (max(-1.0, cosine - 0.0412), min(1.0, cosine + 0.0412))
    if headless:
        return fields | {"reasons": dict.fromkeys(PREDICTING, HEADLESS)}
    fields |= {"kl": kl, "kl_ci95": (0.9 * kl, 1.12 * kl), "top1_agreement": 1 / (1 + 0.8 * size)}
    if noise:
        return fields | {"reasons": dict.fromkeys(("loss", "perplexity"), NOISE)}
    half = 0.0202 + 0.05 * size  # so that no interval ends on a half of a shown digit
    ends = {"delta": delta, "ci95": (delta - half, delta + half)}
    powers = np.exp(BEFORE), np.exp(BEFORE + delta)
    perplexity = records.Change(before=powers[0], after=powers[1], delta=powers[1] - powers[0])
    return fields | {"loss": records.Change(before=BEFORE, after=BEFORE + delta, **ends), "perplexity": perplexity}


def swapped(
    layers: int = 4,
    heads: int = 8,
    *,
    deltas: Sequence[float | None] = (3.28,),
    sweep: Sweep = None,
    healed: bool | Healing = False,
    headless: bool = False,
    noise: bool = False,
    parts: Sequence[Part] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Swap:
    """Return the swap of one kernel; `deltas` are those of its first stages (swapped, fitted, healed)."""
    random = np.random.default_rng(seed)
    of = list(parts or ["decoder"] * layers)
    outcomes = [outcome(delta, headless=headless, noise=noise) for delta in deltas]
    errors = (0.3 + 0.6 * random.random(len(of))).tolist()
    place = {"heads": list(range(heads)), "path": "sdpa", "off_simplex": 0.0}
    sites = [
        records.SiteSwap(site=f"model.layers.{n}.attn", layer=n, part=part, output_error=errors[n], **place)
        for n, part in enumerate(of)
    ]
    names = ("swapped", "fitted", "healed")
    fields: dict[str, Any] = {
        **{"kernel": "rbf:gamma=0.5", "formula": "−γ·s‖q − k‖²", "parameters": {"gamma": 0.5}, "noise": noise},
        "stages": [records.Stage(name=name, **each) for name, each in zip(names, outcomes, strict=False)],
        **{"fitted": ["origin"] if len(deltas) > 1 else [], "notes": ["loss: the next token"], "sites": sites},
        **{"identity_error": 3.2e-7, "causality_error": 0.0, "off_simplex": 0.0},
        "task": "hidden" if headless else "seq2seq" if noise else "causal",
        "tokens_per_second": Pair(before=15134.4, after=12042.8),
        "peak_memory_bytes": Pair(before=461586432.0, after=479059968.0),
        "healing": healing() if healed is True else healed or None,
        "sweep": sweep if isinstance(sweep, list) else effects(random, of, heads, sweep) if sweep else [],
    }
    top = outcomes[-1] | {"reasons": {"mask_error": "the sequences have no padding"} | outcomes[-1].get("reasons", {})}
    return Swap(**(fields | top | changes))


def controls(deltas: Sequence[float | None] = (0.05, 5.5, 3.9)) -> list[records.Control]:
    """Return the controls sink-window, hard and uniform with these deltas."""
    roles = [("same size", "sink-window:4,64", 8704.0), ("one key", "hard", 16384.0), ("floor", "uniform", 65.0)]
    return [
        records.Control(role=role, kernel=kernel, state=state, agreement=agreed([64, 10, 64, 12]), **outcome(delta))
        for (role, kernel, state), delta in zip(roles, deltas, strict=True)
    ]


def agreed(until: list[int]) -> records.Agreement:
    """Return the agreement of prompts whose continuations differ after these numbers of tokens."""
    low, middle, high = (sorted(until)[(len(until) - 1) * part // 4] for part in (1, 2, 3))
    facts: dict[str, Any] = {"prompts": len(until), "source": "windows", "prompt_tokens": 64, "tokens": 64}
    never = until.count(64)
    return records.Agreement(**facts, until=until, median=middle, quartiles=(low, high), never=never)


def healing(steps: int = 1000, **changes: Any) -> Healing:
    """Return a healing from 3.5 to about 2.5 nats, whose best step is 700."""
    curve = [
        HealingStep(
            step=step,
            validation=0.12 + 0.95 * float(np.exp(-step / 120)) + (0.01 if step > 700 else 0.0),
            loss=2.52 + 1.03 * float(np.exp(-step / 110)) if step in (0, 50, 200, 1000) else None,
        )
        for step in (0, 50, *range(100, 1001, 100))
        if step <= steps
    ]
    fields = {"steps": steps, "best": min(700, steps), "parameters": 7_077_888, "learning_rate": 1e-3, "curve": curve}
    return Healing(**(fields | changes))


def planned(layers: int = 4, heads: int = 8, healing: Healing | None = None, **changes: Any) -> Report:
    """Return a swap by a plan of ranks: promised +0.21 %, measured +0.87 %, budget 1 %, smaller costs."""
    report = swap_report(swapped(layers, heads, kernel="rank", deltas=(0.02,), healing=healing))
    ranks = [
        records.KeyRank(
            **{"site": f"model.layers.{layer}.attn", "layer": layer, "kv_head": head, "heads": [head]},
            **{"rank": 8 * (head % 8), "part": "decoder", "head_dim": 64},
        )
        for layer, head in np.ndindex(layers, heads)
    ]
    fields: dict[str, Any] = {
        **{"tool": report.tool, "model": report.model, "settings": report.settings, "kernel": "rank", "budget": 0.01},
        **{"ranks": ranks, "mean_rank": float(np.mean([key.rank for key in ranks])), "head_dim": 64.0, "steps": []},
        "estimated": Rise(share=0.0018, ci95=(0.0001, 0.0040), sequences=64),
        "promised": Rise(share=0.0021, ci95=(0.0002, 0.0041), sequences=64),
        "measured": Rise(share=0.0087, ci95=(0.0058, 0.0096), sequences=32),
        "parameters": Pair(before=13_271_040.0, after=9_000_000.0),
        "flops_per_token": Pair(before=28_771_200.0, after=20_000_000.0),
        "cache_bytes_per_token": Pair(before=46_080.0, after=39_600.0),
    }
    return with_plan(report, Plan(**(fields | changes)))


def with_plan(report: Report, plan: Plan | None) -> Report:
    """Return the report of a swap with this plan."""
    assert report.swap is not None
    return report.model_copy(update={"swap": report.swap.model_copy(update={"plan": plan})})


def effects(random: np.random.Generator, parts: Sequence[Part], heads: int, what: str) -> list[Effect]:
    """Return effects of few harmful and many harmless units, the most harmful first."""
    units = []
    for layer, part in enumerate(parts):
        for head in range(heads) if what == "heads" else [None]:
            delta = float(0.02 * random.standard_normal() + 0.15 * random.exponential() ** 3 / 6)
            half = float(0.012 + 0.1 * abs(delta))
            p_value = float(np.exp(-abs(delta) / half * 2))
            fields: dict[str, Any] = {"ci95": (delta - half, delta + half), "p_value": p_value, "delta": delta}
            units.append(Effect(layer=layer, head=head, part=part, significant=p_value < 0.03, **fields))
    return sorted(units, key=lambda effect: -(effect.delta or 0.0))


def swap_report(*swaps: Swap, **settings: Any) -> Report:
    """Return the report of these swaps (default: one of `swapped`)."""
    every = swaps or (swapped(),)
    count, heads = len(every[0].sites), sum(len(site.heads) for site in every[0].sites)
    base = synthetic_report(1, 1, source="tokens", model="HuggingFaceTB/SmolLM2-135M", architecture="LlamaForCausalLM")
    update = {"command": "swap-kernel", "kind": "swap", "heads": []}
    update["coverage"] = records.Coverage(sites=count, heads=heads, analysed=heads)
    update["settings"] = base.settings.model_copy(update=settings)
    return with_swaps(base.model_copy(update=update), *every)


def with_swaps(report: Report, *swaps: Swap) -> Report:
    """Return the report with these swaps; its plan, if any, stays."""
    fields = dict(swaps[0]) | {"others": list(swaps[1:]), "plan": report.plan}
    return report.model_copy(update={"swap": records.SwapBody(**fields)})


def several(layers: int = 4, heads: int = 8, sweep: Sweep = None) -> Report:
    """Return the report of four kernels, each also tied; the tied linear kernel diverges."""
    deltas = {"exponential": 0.0, "symmetric": 1.9, "rbf:gamma=0.5": 3.28, "rbf:gamma=0.5+symmetric": 2.9}
    deltas |= {"polynomial:degree=2,offset=0": 6.4, "polynomial:degree=2,offset=0+symmetric": 6.1}
    deltas |= {"linear": 7.7, "linear+symmetric": None}
    swaps = [
        swapped(layers, heads, kernel=kernel, deltas=(delta,), seed=seed, sweep=sweep)
        for seed, (kernel, delta) in enumerate(deltas.items())
    ]
    return swap_report(*swaps)
