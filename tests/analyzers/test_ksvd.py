"""Tests the ksvd.* measures against dense computations, and their picture by depth."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import views
from heads import close, dense, query_key, random
from matplotlib.colors import Normalize
from reports import planted

import attnlens
from attnlens.analyzers import spectrum
from attnlens.analyzers.ksvd import TOKENS, compute_rank90, measure_tokens
from attnlens.analyzers.registry import MeasureInfo, measure_infos
from attnlens.records import Call, Site
from attnlens.report.pictures.maps import groups_by_depth, overview_figure, page_rows
from attnlens.report.pictures.style import DEPTH, house_style
from attnlens.report.shapes import Shapes

CAUSAL = torch.ones(30, 30, dtype=torch.bool).tril()[None]
SCALARS = [info.name for info in TOKENS if not info.curve]


def heads(*batch, n=30, sharpness=2.0, **rest):
    """Four query heads on two key heads, with values."""
    query, key = sharpness * random(*batch, 4, n, 6), random(*batch, 2, n, 6, seed=1)
    return query_key(query, key, "tokens", value=random(*batch, 2, n, 5, seed=2), **rest)


def cosine(qk):
    return torch.cosine_similarity(qk.query[..., :, None, :], qk.paired_key[..., None, :, :], dim=-1)


def leading(matrix):
    """Least number of singular values with 90 % of the energy, and the singular vectors, by head."""
    u, sigma, vh = torch.linalg.svd(matrix)
    shares = sigma.square().cumsum(-1) / sigma.square().sum(-1, keepdim=True)
    return 1 + (shares < 0.9).sum(-1), u, vh.mT


def share_inside(qk, matrix):
    """The share of the centred values in the leading right singular space of the matrix."""
    s, _, right = leading(matrix)
    value = qk.paired_value.double() - qk.paired_value.double().mean(-2, keepdim=True)
    inside = (right.mT @ value).square().sum(-1) * (torch.arange(right.shape[-1]) < s[..., None])
    return inside.sum(-1) / value.square().sum((-2, -1))


@pytest.mark.parametrize("allowed", [None, CAUSAL], ids=["all", "causal"])
def test_the_curves_are_those_of_the_formed_matrices(allowed):
    qk = heads(allowed=allowed, sharpness=0.5)
    logits = dense(qk)
    attention = (logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)).softmax(-1)
    readings, kernel = measure_tokens(qk), cosine(qk)
    centring = torch.eye(30, dtype=torch.float64) - 1 / 30
    matrices = {"attention": (attention, 30), "cosine": (kernel, 6)}
    matrices |= {f"centred_{name}": (matrix @ centring, steps) for name, (matrix, steps) in matrices.items()}
    for name, (matrix, steps) in matrices.items():
        for kind, power in (("spectrum", 1), ("energy", 2)):
            sigma = torch.linalg.svdvals(matrix)[..., :steps] ** power
            close(readings[f"ksvd.{name}_{kind}"], sigma.cumsum(-1) / sigma.sum(-1, keepdim=True))
    close(readings["ksvd.first_share"], readings["ksvd.attention_spectrum"][:, 0])
    close(readings["ksvd.attention_spectrum"], spectrum.measure_tokens(qk)["tokens.singular_values"])
    assert (readings["ksvd.attention_spectrum"] - readings["ksvd.centred_attention_spectrum"]).abs().max() > 0.01


def test_the_two_analyzers_share_singular_values_of_the_same_heads_alone(monkeypatch):
    qk, other, calls = heads(), heads(n=20), []
    count = lambda matrix: calls.append(1) or torch.linalg.svdvals(matrix)  # noqa: E731
    monkeypatch.setattr("attnlens.maths.linalg.attention.singular_values", count)
    first, second = spectrum.measure_tokens(qk), measure_tokens(qk)
    assert len(calls) == 2
    assert torch.equal(first["tokens.singular_values"], second["ksvd.attention_spectrum"])
    assert measure_tokens(other)["ksvd.attention_spectrum"].shape == (4, 20)
    assert len(calls) == 4
    assert measure_tokens(replace(qk, allowed=CAUSAL))["ksvd.first_share"].sum() != second["ksvd.first_share"].sum()


def test_rank_alignment_and_asymmetry_are_those_of_the_dense_svd():
    qk = heads()
    readings, kernel = measure_tokens(qk), cosine(qk)
    centred = kernel - kernel.mean(-1, keepdim=True)
    s, left, right = leading(kernel)
    assert readings["ksvd.rank90"].tolist() == s.tolist()
    assert torch.equal(compute_rank90(qk)["ksvd.rank90"], readings["ksvd.rank90"])
    assert readings["ksvd.centred_rank90"].tolist() == leading(centred)[0].tolist()
    for head, count in enumerate(s.tolist()):
        angles = torch.linalg.svdvals(left[head, :, :count].mT @ right[head, :, :count]).clamp(max=1).acos()
        close(readings["ksvd.asymmetry"][head], angles.mean())
    close(readings["ksvd.value_alignment"], share_inside(qk, centred))
    slip = share_inside(replace(qk, value=qk.value.flip(0)), centred)
    assert ((slip - readings["ksvd.value_alignment"]).abs() > 1e-3).all(), "the other key head's values do not fit"
    assert (readings["ksvd.asymmetry"] > 0.1).all()
    x = random(2, 30, 6)
    same = query_key(x, x, "tokens", value=x / x.norm(dim=-1, keepdim=True))
    close(measure_tokens(same)["ksvd.asymmetry"], torch.zeros(2))
    assert (measure_tokens(same)["ksvd.value_alignment"] > 0.8).all()
    assert (measure_tokens(replace(same, value=random(2, 30, 6, seed=5)))["ksvd.value_alignment"] < 0.5).all()
    # values in the directions of the kernel are aligned also if its first mode is constant
    key = 0.05 * random(3, 30, 6, seed=1) * torch.logspace(0, -2, 6, dtype=torch.float64) + 1.0
    qk = query_key(random(3, 30, 6) + 1.0, key, "tokens")
    kernel = cosine(qk)
    space = leading(kernel - kernel.mean(-1, keepdim=True))[2][..., :1]
    aligned = replace(qk, value=space @ random(3, 1, 5, seed=3) + random(3, 1, 5, seed=4))
    readings = measure_tokens(aligned)
    assert (readings["ksvd.rank90"] == 1).all()
    close(readings["ksvd.value_alignment"], torch.ones(3))
    assert (share_inside(aligned, kernel) < 0.05).all(), "the control: in K's own first mode they are not"


def test_degenerate_heads_lack_only_what_is_undefined():
    qk = heads()
    qk.key[0] = qk.key[0, :1] * torch.arange(1, 31, dtype=torch.float64)[:, None]
    one_direction = measure_tokens(qk)
    for name in ("value_alignment", "centred_rank90", "centred_cosine_spectrum"):
        assert one_direction[f"ksvd.{name}"].isnan().view(4, -1).all(-1).tolist() == [True, True, False, False]
    assert (one_direction["ksvd.rank90"][:2] == 1).all()
    zeros = heads()
    zeros.query[0], zeros.query[1, 4:9] = 0, 0
    readings = measure_tokens(zeros)
    for name in ("rank90", "asymmetry", "residual", "objective", "cosine_spectrum"):
        assert readings[f"ksvd.{name}"].isnan().view(4, -1).all(-1).tolist() == [True, False, False, False]
    assert readings["ksvd.first_share"].isfinite().all()
    nothing = measure_tokens(heads(allowed=torch.zeros(1, 30, 30, dtype=torch.bool)))
    assert all(nothing[f"ksvd.{name}"].isnan().all() for name in ("first_share", "attention_spectrum"))
    whole, without = measure_tokens(heads()), measure_tokens(replace(heads(), value=None))
    assert without["ksvd.value_alignment"].isnan().all()
    for name in set(SCALARS) - {"ksvd.value_alignment"}:
        torch.testing.assert_close(without[name], whole[name], equal_nan=True)
    assert measure_tokens(replace(heads(), value=torch.full((2, 30, 5), 0.3)))["ksvd.value_alignment"].isnan().all()
    short = measure_tokens(heads(n=3))  # fewer tokens than features
    assert short["ksvd.cosine_spectrum"].shape == (4, 3)
    assert (short["ksvd.rank90"] <= 3).all()
    for name in ("residual", "objective"):
        assert all((each[f"ksvd.{name}"] < 1e-12).all() for each in (short, whole)), "the certificates are rounding"
    crossed = query_key(random(3, 20, 4), random(3, 12, 4, seed=1), "tokens", part="cross")
    assert (measure_tokens(crossed)["ksvd.residual"] < 1e-12).all()
    assert [info.name for info in TOKENS if info.self_only] == ["ksvd.asymmetry"]


def test_values_are_passed_without_copying_and_selected_with_their_heads():
    call = Call(random(2, 4, 7, 3), random(2, 2, 7, 3), value := random(2, 2, 7, 5), scale=1.0)
    whole = call.query_key(Site("attention", 0, 0, "decoder"))
    assert whole.value.data_ptr() == value.data_ptr()
    assert torch.equal(whole.paired_value, value[:, [0, 0, 1, 1]])
    some = whole.select([1, 3])
    assert torch.equal(some.paired_value, value[:, [0, 1]])
    cut = some.sequences([1], torch.tensor([0, 2]), torch.tensor([1, 4, 5]))
    assert torch.equal(cut.paired_value, value[[1]][:, [0, 1]][:, :, [1, 4, 5]])
    assert query_key(random(2, 4, 3), random(2, 4, 3)).select([0]).paired_value is None


@pytest.mark.usefixtures("without_layout")
def test_inspect_measures_a_model_with_errors_over_its_sequences_and_the_overview_is_figure_1(tmp_path):
    report = attnlens.inspect("demo", analyzers="ksvd", windows=3, layers=[0, 1])
    assert report.coverage.without == {}
    assert report.settings.analyzers == ["ksvd"]
    for head in report.heads:
        assert set(head.measures) == set(SCALARS)
        assert set(head.curves) == {info.name for info in TOKENS if info.curve}
        for name in ("ksvd.first_share", "ksvd.rank90", "ksvd.value_alignment", "ksvd.asymmetry"):
            assert head.measures[name].n == 3
            assert head.measures[name].se is not None
        assert head.measures["ksvd.residual"].value < 1e-11
        assert [len(head.curves[f"ksvd.{name}_spectrum"]) for name in ("attention", "cosine")] == [128, 16]
        assert not any("decay" in name for name in head.measures), "a rate without a null says nothing"
    assert json.loads(report.model_dump_json())["heads"][0]["measures"]["ksvd.rank90"]["value"] >= 1
    first, second = page_rows(Shapes(report))
    assert {panel.stem for panel in first} == {"ksvd.attention_spectrum"}
    assert second[0].stem == "ksvd.first_share", "the only map that attention identifies comes first"
    assert all(panel.note.startswith("not identified") for panel in second[1:])
    files = [views.save_pictures(report, tmp_path / name)[0].read_bytes() for name in ("figure1.png", "again.png")]
    assert files[0] == files[1]


@pytest.fixture
def by_depth(monkeypatch):
    """Reports with a curve that is plotted by depth, under a name that no analyzer has."""

    def shapes(starts, parts=None, *, by_depth=True):
        info = MeasureInfo("any.curve", "what it is", "c", curve=True, by_depth=by_depth)
        infos = measure_infos() | {"any.curve": info}
        monkeypatch.setattr("attnlens.analyzers.registry.measure_infos", lambda: infos)
        report = planted(np.array(starts)[:, None] ** 2, name="any.scalar")
        places = zip(report.heads, starts, parts or [head.part for head in report.heads], strict=True)
        curves = [
            head.model_copy(update={"curves": {"any.curve": [*np.linspace(start, 1, 9)]}, "part": part})
            for head, start, part in places
        ]
        return Shapes(report.model_copy(update={"heads": curves}))

    return shapes


def test_layers_are_grouped_in_thirds_with_their_medians_and_parts_are_not_mixed(by_depth):
    groups = groups_by_depth(by_depth([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]), "any.curve")
    assert [group.title for group in groups] == ["layers 0–2", "layers 3–4", "layers 5–6"]
    assert [group.quartiles[1][0] for group in groups] == pytest.approx([0.2, 0.45, 0.65])
    assert groups[0].note == "starts at 0.20 (quartiles 0.15 to 0.25), 3 heads"
    for starts, parts, titles in (
        ([0.1, 0.2], None, ["layer 0", "layer 1"]),
        ([0.1, 0.2, 0.3, 0.4], ["encoder", "encoder", "decoder", "cross"], ["encoder", "decoder", "cross"]),
    ):
        assert [group.title for group in groups_by_depth(by_depth(starts, parts), "any.curve")] == titles
    plain = by_depth([0.1, 0.2, 0.3], by_depth=False)
    assert [panel.title for row in page_rows(plain) for panel in row] == ["scalar", "curve"]


def test_the_overview_draws_groups_by_depth_with_maps_below(by_depth):
    shapes = by_depth([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    rows = page_rows(shapes)
    assert [panel.title for panel in rows[0]] == ["layers 0–1", "layers 2–3", "layers 4–5"]
    assert all("\n2 heads; black: median" in panel.caption for panel in rows[0]), "each caption describes its own group"
    assert [panel.stem for panel in rows[1]] == ["any.scalar"]
    with house_style():
        panels = overview_figure(shapes).axes[:3]
    assert len({axes.get_xlim() for axes in panels}) == len({axes.get_ylim() for axes in panels}) == 1
    solid = [next(x for x in axes.lines if (x.get_color(), x.get_linestyle()) == ("black", "-")) for axes in panels]
    assert [line.get_ydata()[0] for line in solid] == pytest.approx([0.15, 0.35, 0.55])
    dotted = [line for line in panels[0].lines if line.get_linestyle() == ":"]
    assert [line.get_ydata()[0] for line in dotted] == pytest.approx([0.35, 0.55])
    assert dotted[1].get_color() == DEPTH(Normalize(0, 5)(4.5))
    assert [text.get_text() for text in panels[0].get_legend().get_texts()][-1] == "other groups' medians"
