"""Tests the ksvd.* measures against dense computations, and their picture by depth."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import views
from heads import dense, query_key, random
from matplotlib.colors import Normalize
from reports import planted

import attnlens
from attnlens.analyzers import spectrum
from attnlens.analyzers.ksvd import TOKENS, of_tokens
from attnlens.analyzers.registry import MeasureInfo, measure_infos, measure_sources, select_analyzers
from attnlens.models import hooks, loading, texts
from attnlens.records import Call, Site
from attnlens.report.pictures.maps import groups_by_depth, overview_figure, page_rows
from attnlens.report.pictures.style import DEPTH, house_style
from attnlens.report.report import Report
from attnlens.report.shapes import Shapes

CAUSAL = torch.ones(30, 30, dtype=torch.bool).tril()[None]
SCALARS = [info.name for info in TOKENS if not info.curve]


def close(ours, theirs, tolerance=1e-9):
    torch.testing.assert_close(ours, theirs.to(ours), rtol=tolerance, atol=tolerance)


def heads(*batch, n=30, sharpness=2.0, **rest):
    """Four query heads on two key heads, with values."""
    query, key = sharpness * random(*batch, 4, n, 6), random(*batch, 2, n, 6, seed=1)
    return query_key(query, key, "tokens", value=random(*batch, 2, n, 5, seed=2), **rest)


def cosine(found):
    key = found.key[..., list(found.key_of), :, :]
    return (found.query / found.query.norm(dim=-1, keepdim=True)) @ (key / key.norm(dim=-1, keepdim=True)).mT


def cumulated(matrix, power, steps):
    sigma = torch.linalg.svdvals(matrix)[..., :steps] ** power
    return sigma.cumsum(-1) / sigma.sum(-1, keepdim=True)


def test_it_is_entered_for_tokens_and_its_names_have_a_source():
    (found,) = select_analyzers(["ksvd"])
    assert (found.name, found.source) == ("ksvd", "tokens")
    assert {measure_sources()[info.name] for info in TOKENS} == {"tokens"}
    assert measure_sources()["weights.symmetry"] == "weights"


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=["no batch", "a batch", "two batch axes"])
def test_every_measure_is_there_finite_and_in_range(batch):
    readings = of_tokens(heads(*batch))
    assert list(readings) == [info.name for info in TOKENS]
    for info in TOKENS:
        reading = readings[info.name]
        steps = () if not info.curve else (6,) if "cosine" in info.name else (30,)
        assert reading.shape == (*batch, 4, *steps)
        assert reading.dtype == torch.float64
        assert not (reading < info.low - 1e-12).any()
        assert info.high is None or not (reading > info.high + 1e-12).any()
        assert reading.isfinite().all()


@pytest.mark.parametrize("allowed", [None, CAUSAL], ids=["all", "causal"])
def test_the_curves_are_those_of_the_formed_matrices(allowed):
    found = heads(allowed=allowed, sharpness=0.5)
    logits = dense(found)
    attention = (logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)).softmax(-1)
    readings, kernel = of_tokens(found), cosine(found)
    row_mode = torch.ones(30, 30, dtype=torch.float64) / 30
    for name, matrix, steps in (
        ("attention", attention, 30),
        ("centred_attention", attention - attention @ row_mode, 30),
        ("cosine", kernel, 6),
        ("centred_cosine", kernel - kernel @ row_mode, 6),
    ):
        close(readings[f"ksvd.{name}_spectrum"], cumulated(matrix, 1, steps))
        close(readings[f"ksvd.{name}_energy"], cumulated(matrix, 2, steps))
    close(readings["ksvd.first_share"], cumulated(attention, 1, 30)[:, 0])
    close(readings["ksvd.attention_spectrum"], spectrum.of_tokens(found)["tokens.singular_values"])
    assert (readings["ksvd.attention_spectrum"] - readings["ksvd.centred_attention_spectrum"]).abs().max() > 0.01


def test_the_two_analyzers_share_what_they_both_need_and_nobody_elses(monkeypatch):
    found, other, calls = heads(), heads(n=20), []
    monkeypatch.setattr(
        "attnlens.maths.linalg.attention.singular_values",
        lambda matrix: calls.append(1) or torch.linalg.svdvals(matrix),
    )
    first = spectrum.of_tokens(found)
    second = of_tokens(found)
    assert len(calls) == 2
    assert torch.equal(first["tokens.singular_values"], second["ksvd.attention_spectrum"])
    assert of_tokens(other)["ksvd.attention_spectrum"].shape == (4, 20)
    assert len(calls) == 4
    assert of_tokens(replace(found, allowed=CAUSAL))["ksvd.first_share"].sum() != second["ksvd.first_share"].sum()


def test_rank_alignment_and_asymmetry_are_those_of_the_dense_svd():
    found = heads()
    readings, kernel = of_tokens(found), cosine(found)
    u, sigma, vh = torch.linalg.svd(kernel)
    _, centred_sigma, centred_vh = torch.linalg.svd(kernel - kernel.mean(-1, keepdim=True))
    for head in range(4):
        energy = sigma[head].square().cumsum(0) / sigma[head].square().sum()
        s = int((energy < 0.9).sum()) + 1
        value = found.value[head // 2] - found.value[head // 2].mean(0)
        right, left = vh[head, :s].mT, u[head, :, :s]
        assert readings["ksvd.rank90"][head] == s
        close(readings["ksvd.asymmetry"][head], torch.linalg.svdvals(left.mT @ right).clamp(max=1).acos().mean())
        energy = centred_sigma[head].square().cumsum(0) / centred_sigma[head].square().sum()
        s = int((energy < 0.9).sum()) + 1
        right = centred_vh[head, :s].mT
        assert readings["ksvd.centred_rank90"][head] == s
        close(readings["ksvd.value_alignment"][head], (right.mT @ value).norm() ** 2 / value.norm() ** 2)
        # the other key head's values do not fit
        slip = found.value[1 - head // 2] - found.value[1 - head // 2].mean(0)
        assert abs((right.mT @ slip).norm() ** 2 / slip.norm() ** 2 - readings["ksvd.value_alignment"][head]) > 1e-3


def by_the_uncentred_kernel(found):
    """The share of centred values in the leading right singular space of K itself, and its s."""
    _, sigma, vh = torch.linalg.svd(cosine(found).double())
    s = 1 + (sigma.square().cumsum(-1) / sigma.square().sum(-1, keepdim=True) < 0.9).sum(-1)
    value = found.paired_value.double()
    value = value - value.mean(-2, keepdim=True)
    inside = (vh @ value).square().sum(-1) * (torch.arange(sigma.shape[-1]) < s[..., None])
    return inside.sum(-1) / value.square().sum((-2, -1)), s


def test_values_in_the_kernels_own_directions_are_aligned_also_where_its_first_mode_is_constant():
    key = 0.05 * random(3, 30, 6, seed=1) * torch.logspace(0, -2, 6, dtype=torch.float64) + 1.0
    found = query_key(random(3, 30, 6) + 1.0, key, "tokens")
    kernel = cosine(found)
    space = torch.linalg.svd(kernel - kernel.mean(-1, keepdim=True)).Vh[:, :1].mT
    planted = replace(found, value=space @ random(3, 1, 5, seed=3) + random(3, 1, 5, seed=4))
    readings = of_tokens(planted)
    assert (readings["ksvd.rank90"] == 1).all()
    close(readings["ksvd.value_alignment"], torch.ones(3))
    assert (by_the_uncentred_kernel(planted)[0] < 0.05).all(), "the control: in K's own first mode they are not"


def test_random_values_have_their_chance_level_on_every_real_head():
    loaded = loading.load("demo")
    batch = texts.batches(loaded, texts.sample("demo"), texts.Cut(tokens=128, sequences=1, batch_size=1)).batches[0]
    ratios, old, ranks = [], [], []
    for reached in hooks.survey(loaded.model, batch.inputs):
        query_key = reached.call.query_key(reached.site)
        drawn = replace(query_key, value=random(*query_key.value.shape[:-1], 2000, seed=reached.site.layer))
        readings, (shares, s) = of_tokens(drawn), by_the_uncentred_kernel(drawn)
        ratios.append(readings["ksvd.value_alignment"] / (readings["ksvd.centred_rank90"] / 127))
        old.append(shares / (s / 128))
        ranks.append(readings["ksvd.rank90"])
    ratios, old, ranks = (torch.cat([part.flatten() for part in parts]) for parts in (ratios, old, ranks))
    assert (ranks == 1).sum() >= 8, "many a real head's kernel is one near-constant mode"
    assert (ratios - 1).abs().max() < 0.15
    assert (ratios - 1).abs().mean() < 0.03
    assert old[ranks == 1].mean() < 0.7, "the control: in K's own space the level that was stated is not reached"


def test_keys_of_one_direction_have_no_alignment():
    found = heads()
    found.key[0] = found.key[0, :1] * torch.arange(1, 31, dtype=torch.float64)[:, None]
    readings = of_tokens(found)
    for name in ("value_alignment", "centred_rank90"):
        assert readings[f"ksvd.{name}"].isnan().tolist() == [True, True, False, False]
    assert (readings["ksvd.rank90"][:2] == 1).all()
    assert readings["ksvd.centred_cosine_spectrum"].isnan().all(-1).tolist() == [True, True, False, False]


def test_the_certificates_are_rounding():
    readings = of_tokens(heads(3))
    assert (readings["ksvd.residual"] < 1e-12).all()
    assert (readings["ksvd.objective"] < 1e-12).all()


def test_a_symmetric_head_has_no_asymmetry_and_its_values_lie_inside_where_they_are_planted():
    x = random(2, 30, 6)
    same = query_key(x, x, "tokens", value=(x / x.norm(dim=-1, keepdim=True)))
    readings = of_tokens(same)
    close(readings["ksvd.asymmetry"], torch.zeros(2))
    chance = of_tokens(replace(same, value=random(2, 30, 6, seed=5)))["ksvd.value_alignment"]
    assert (readings["ksvd.value_alignment"] > 0.8).all()
    assert (chance < 0.5).all()
    assert (of_tokens(heads())["ksvd.asymmetry"] > 0.1).all()


def test_without_values_there_is_no_alignment_and_all_else_is_there():
    with_values, without = of_tokens(heads()), of_tokens(replace(heads(), value=None))
    assert without["ksvd.value_alignment"].isnan().all()
    for name in set(SCALARS) - {"ksvd.value_alignment"}:
        torch.testing.assert_close(without[name], with_values[name], equal_nan=True)
    alike = of_tokens(replace(heads(), value=torch.full((2, 30, 5), 0.3)))
    assert alike["ksvd.value_alignment"].isnan().all()


def test_zero_queries_divide_nothing_and_a_head_of_zeros_has_no_kernel():
    found = heads()
    found.query[0] = 0
    found.query[1, 4:9] = 0
    readings = of_tokens(found)
    for name in ("rank90", "asymmetry", "residual", "objective"):
        assert readings[f"ksvd.{name}"].isnan().tolist() == [True, False, False, False]
    assert readings["ksvd.cosine_spectrum"].isnan().all(-1).tolist() == [True, False, False, False]
    assert readings["ksvd.first_share"].isfinite().all()


def test_queries_that_may_see_nothing_have_no_spectrum():
    nothing = torch.zeros(1, 30, 30, dtype=torch.bool)
    readings = of_tokens(heads(allowed=nothing))
    assert readings["ksvd.first_share"].isnan().all()
    assert readings["ksvd.attention_spectrum"].isnan().all()


def test_more_features_than_tokens():
    readings = of_tokens(heads(n=3))
    assert readings["ksvd.cosine_spectrum"].shape == (4, 3)
    assert (readings["ksvd.rank90"] <= 3).all()
    assert (readings["ksvd.residual"] < 1e-12).all()


def test_a_batch_reads_what_its_members_read():
    together = of_tokens(heads(3))
    for member in range(3):
        alone = heads(3)
        part = {name: getattr(alone, name)[member] for name in ("query", "key", "value")}
        for name, reading in of_tokens(replace(alone, **part)).items():
            torch.testing.assert_close(together[name][member], reading, rtol=1e-9, atol=1e-11, equal_nan=True)


def test_cross_attention_has_all_but_the_asymmetry():
    found = query_key(random(3, 20, 4), random(3, 12, 4, seed=1), "tokens", part="cross", value=random(3, 12, 4))
    readings = of_tokens(found)
    assert readings["ksvd.asymmetry"].isnan().all()
    assert [info.name for info in TOKENS if info.self_only] == ["ksvd.asymmetry"]
    assert readings["ksvd.value_alignment"].isfinite().all()
    assert (readings["ksvd.residual"] < 1e-12).all()


# --- values on their way ----------------------------------------------------------------------------------------------


def test_a_call_hands_its_values_on_without_copying_and_selections_keep_them_with_their_heads():
    call = Call(random(2, 4, 7, 3), random(2, 2, 7, 3), value := random(2, 2, 7, 5), scale=1.0)
    whole = call.query_key(Site("attention", 0, 0, "decoder"))
    assert whole.value.data_ptr() == value.data_ptr()
    assert torch.equal(whole.paired_value, value[:, [0, 0, 1, 1]])
    some = whole.select([1, 3])
    assert torch.equal(some.paired_value, value[:, [0, 1]])
    cut = some.sequences([1], torch.tensor([0, 2]), torch.tensor([1, 4, 5]))
    assert torch.equal(cut.paired_value, value[[1]][:, [0, 1]][:, :, [1, 4, 5]])
    without = query_key(random(2, 4, 3), random(2, 4, 3))
    assert without.select([0]).paired_value is None


@cache
def demo() -> Report:
    return attnlens.inspect("demo", analyzers="ksvd", windows=3)


def test_inspect_measures_a_model_with_errors_over_its_sequences():
    report = demo()
    assert report.coverage.without == {}
    assert report.settings.analyzers == ["ksvd"]
    for head in report.heads:
        assert set(head.measures) == set(SCALARS)
        assert set(head.curves) == {info.name for info in TOKENS if info.curve}
        for name in ("ksvd.first_share", "ksvd.rank90", "ksvd.value_alignment", "ksvd.asymmetry"):
            assert head.measures[name].n == 3
            assert head.measures[name].se is not None
        assert head.measures["ksvd.residual"].value < 1e-11
        assert len(head.curves["ksvd.attention_spectrum"]) == 128
        assert len(head.curves["ksvd.cosine_spectrum"]) == 16
        assert not any("decay" in name for name in head.measures), "a rate without a null says nothing"
    assert json.loads(report.model_dump_json())["heads"][0]["measures"]["ksvd.rank90"]["value"] >= 1


# --- figure 1 ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def grouped(monkeypatch):
    """A curve that asks to be seen by depth, under a name that no analyzer has."""
    infos = measure_infos() | {"any.curve": MeasureInfo("any.curve", "what it is", "c", curve=True, by_depth=True)}
    monkeypatch.setattr("attnlens.analyzers.registry.measure_infos", lambda: infos)

    def shapes(starts, parts=None):
        curves = [list(np.linspace(start, 1, 9)) for start in starts]
        report = planted(np.array(starts)[:, None] ** 2, name="any.scalar")
        found = [
            head.model_copy(update={"curves": {"any.curve": c}}) for head, c in zip(report.heads, curves, strict=True)
        ]
        if parts:
            found = [head.model_copy(update={"part": part}) for head, part in zip(found, parts, strict=True)]
        return Shapes(report.model_copy(update={"heads": found}))

    return shapes


def test_the_layers_are_cut_into_thirds_with_their_medians(grouped):
    found = groups_by_depth(grouped([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]), "any.curve")
    assert [group.title for group in found] == ["layers 0–2", "layers 3–4", "layers 5–6"]
    assert [group.quartiles[1][0] for group in found] == pytest.approx([0.2, 0.45, 0.65])
    assert found[0].note == "starts at 0.20 (quartiles 0.15 to 0.25), 3 heads"
    assert [group.title for group in groups_by_depth(grouped([0.1, 0.2]), "any.curve")] == ["layer 0", "layer 1"]


def test_parts_are_groups_and_are_not_mixed(grouped):
    shapes = grouped([0.1, 0.2, 0.3, 0.4], parts=["encoder", "encoder", "decoder", "cross"])
    assert [group.title for group in groups_by_depth(shapes, "any.curve")] == ["encoder", "decoder", "cross"]


def test_the_overview_is_the_picture_by_depth_with_maps_below(grouped):
    shapes = grouped([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    rows = page_rows(shapes)
    assert [panel.title for panel in rows[0]] == ["layers 0–1", "layers 2–3", "layers 4–5"]
    assert [panel.stem for panel in rows[1]] == ["any.scalar"]
    with house_style():
        figure = overview_figure(shapes)
    panels = figure.axes[:3]
    assert len({axes.get_xlim() for axes in panels}) == len({axes.get_ylim() for axes in panels}) == 1
    blacks = [[line for line in axes.lines if line.get_color() == "black"] for axes in panels]
    middles = [next(line for line in lines if line.get_linestyle() == "-").get_ydata()[0] for lines in blacks]
    assert middles == pytest.approx([0.15, 0.35, 0.55])
    dotted = [line for line in panels[0].lines if line.get_linestyle() == ":"]
    assert [line.get_ydata()[0] for line in dotted] == pytest.approx([0.35, 0.55])
    assert dotted[1].get_color() == DEPTH(Normalize(0, 5)(4.5))
    assert [text.get_text() for text in panels[0].get_legend().get_texts()][-1] == "other groups' medians"


def test_a_curve_that_does_not_ask_is_drawn_as_before(grouped, monkeypatch):
    shapes = grouped([0.1, 0.2, 0.3])
    silent = measure_infos() | {"any.curve": MeasureInfo("any.curve", "what it is", "c", curve=True)}
    monkeypatch.setattr("attnlens.analyzers.registry.measure_infos", lambda: silent)
    assert [panel.title for row in page_rows(shapes) for panel in row] == ["scalar", "curve"]


def test_ksvds_overview_is_figure_1(tmp_path):
    shapes = Shapes(demo())
    (first, second) = page_rows(shapes)
    assert {panel.stem for panel in first} == {"ksvd.attention_spectrum"}
    assert second[0].stem == "ksvd.first_share", "the only map that attention identifies stands first"
    assert all(panel.note.startswith("not identified") for panel in second[1:])
    (file,) = views.save_pictures(demo(), tmp_path / "figure1.png")
    again = views.save_pictures(demo(), tmp_path / "again.png")[0]
    assert file.read_bytes() == again.read_bytes()
