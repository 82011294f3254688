"""Tests degenerate models in every verb: numbers if they exist, else a true reason, never a bug."""

import math

import pytest
import tiny
import torch
import transformers as tf
import views
from loaded import BARE, loaded

import attnlens
from attnlens.errors import AttnlensError

SMALL = {"windows": 2, "length": 16}


def fill(value):
    return lambda model: [parameter.fill_(value) for parameter in model.parameters()]


def scale(factor):
    return lambda model: [parameter.mul_(factor) for parameter in model.parameters()]


def put(value):
    return lambda model: model.transformer.h[1].attn.c_attn.weight[3].index_fill_(0, torch.tensor(5), value)


def keyless(model):
    for block in model.transformer.h:
        block.attn.c_attn.weight[:, :64] = 0
        block.attn.c_attn.bias[:64] = 0


def identical(model):
    for block in model.transformer.h:
        weight = block.attn.c_attn.weight
        weight.copy_(torch.cat([weight[:, 32 * part : 32 * part + 8].repeat(1, 4) for part in range(3)], 1))


MODELS = {
    "all zero": (fill(0.0), {}),
    "all NaN": (fill(math.nan), {}),
    "one NaN": (put(math.nan), {}),
    "one Inf": (put(math.inf), {}),
    "1e-40": (scale(1e-40), {}),
    "1e30": (scale(1e30), {}),
    "no queries and keys": (keyless, {}),
    "identical heads": (identical, {}),
    "one head": (None, {"n_head": 1}),
    "head_dim 1": (None, {"n_head": 32}),
    "one layer": (None, {"n_layer": 1}),
}
REFUSED = {
    ("all zero", "head"): "no query sees two different tokens",
    ("1e-40", "head"): "no query sees two different tokens",
    ("all NaN", "inspect"): "contains NaN or Inf",
    ("all NaN", "ksvd"): "contains NaN or Inf",
    ("all NaN", "head"): "NaN or Inf in every sequence",
    ("no queries and keys", "head"): "the largest scores are tied in all",
} | {
    (model, verb): "contains NaN or Inf"
    for model in ("all NaN", "one NaN", "one Inf")
    for verb in ("rbf", "rank", "sweep")
} | {("1e30", verb): "overflow" for verb in ("inspect", "ksvd", "rbf", "rank", "sweep", "head")}  # fmt: skip
VERBS = {
    "inspect": lambda model: attnlens.inspect(model, **SMALL),
    "ksvd": lambda model: attnlens.inspect(model, analyzers=["ksvd"], **SMALL),
    "doctor": lambda model: attnlens.doctor(model, **SMALL),
    "rbf": lambda model: attnlens.swap_kernel(model, ["rbf", "linear"], allow_signed=True, **SMALL),
    "rank": lambda model: attnlens.swap_kernel(model, "rank:1", **SMALL, **BARE),
    "sweep": lambda model: attnlens.swap_kernel(model, "rbf", sweep="layers", **SMALL, **BARE),
    "head": lambda model: attnlens.converge_head(model, head=(0, 0), iterations=5, **SMALL),
}


def built(change, sizes):
    torch.manual_seed(0)
    base = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**(base | sizes))).eval()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight *= 60
        if change is not None:
            change(model)
    return loaded(model, tiny.tokenizer("gpt2"))


SHORT = [
    *(("all NaN", "inspect"), ("one NaN", "inspect"), ("one NaN", "rank"), ("one NaN", "doctor"), ("1e30", "inspect")),
    *(("one Inf", "inspect"), ("all zero", "inspect"), ("all zero", "doctor"), ("no queries and keys", "head")),
    *(("one head", "rbf"), ("head_dim 1", "inspect"), ("one layer", "sweep"), ("identical heads", "head")),
    *(("all zero", "ksvd"), ("head_dim 1", "ksvd"), ("1e-40", "head"), ("1e30", "rbf"), ("one Inf", "sweep")),
    ("no queries and keys", "sweep"),
]
WHOLE = [pytest.param([(model, verb) for verb in VERBS], id=model, marks=pytest.mark.full) for model in MODELS]


@pytest.mark.parametrize("cases", [pytest.param(SHORT, id="some"), *WHOLE])
def test_a_verb_measures_or_refuses_with_the_true_reason(cases, tmp_path):
    for model, verb in cases:
        run = lambda model=model, verb=verb: VERBS[verb](built(*MODELS[model]))  # noqa: E731
        if problem := REFUSED.get((model, verb)):
            with pytest.raises(AttnlensError, match=problem):
                run()
            continue
        report = run()
        report.write_json(tmp_path / "report.json")  # which can't hold NaN
        assert attnlens.read_report(tmp_path / "report.json").to_json() == report.to_json()
        for head in report.heads:
            for name, measure in head.measures.items():
                assert (measure.value is None) == (measure.reason is not None), (model, verb, name)
        if (model, verb) in {("one NaN", "inspect"), ("one Inf", "inspect")}:
            skipped = [skip.heads for skip in report.coverage.skipped if "contains NaN or Inf" in skip.reason]
            assert {head for heads in skipped for head in heads} == {0}
        if verb in ("inspect", "rbf", "sweep"):
            assert views.save_pictures(report, tmp_path / "page.png")
