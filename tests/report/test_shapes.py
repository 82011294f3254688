"""Tests that maps, shares and orders are found in a report by their shape alone."""

from __future__ import annotations

import warnings

import numpy as np
from matplotlib.colors import to_hex
from reports import planted, synthetic_report

from attnlens.records import Null
from attnlens.report.pictures.maps import draw_shares, has_all
from attnlens.report.pictures.style import PART_COLOURS, house_style, new_figure
from attnlens.report.shapes import Shapes, by_turns


def test_shares_are_found_by_their_sum_and_not_by_their_name() -> None:
    shapes = Shapes(synthetic_report(4, 4))
    names = [f"tokens.share_{part}" for part in ("positive", "negative", "skew", "key")]
    scores = [f"tokens.share_{part}" for part in ("key", "distance", "interaction")]
    # weights.inertia_± have a stem too, and sum to 128
    assert list(shapes.shares.items()) == [("tokens.kernel_shares", names), ("tokens.score_shares", scores)]
    assert has_all(shapes, names)


def test_every_head_is_a_line_of_parts_in_their_own_colours() -> None:
    report = synthetic_report(3, 4, missing=[(1, 0)])
    lost = [head.model_copy(update={"measures": {}}) if head.layer == 2 else head for head in report]
    shapes = Shapes(report.model_copy(update={"heads": lost}))
    colours: dict[str, set[str]] = {}
    for whole, names in shapes.shares.items():
        assert not has_all(shapes, names)
        with house_style():
            axes = new_figure(4, 3).add_axes((0.1, 0.1, 0.8, 0.8))
            draw_shares(axes, shapes, whole)
        right = np.array([[path.vertices[:, 0].max() for path in part.get_paths()] for part in axes.collections])
        assert right.shape[1] == 2, "a block a layer, and none for the layer without a value"
        np.testing.assert_allclose(right[-1], 1, atol=1e-6)
        np.testing.assert_allclose(right[0], [max(shapes.readings[names[0]].values[row]) for row in (0, 1)])
        assert len([patch for patch in axes.patches if patch.get_hatch()]) == 1
        for part in axes.collections:
            colours.setdefault(str(part.get_label()), set()).add(to_hex(part.get_facecolor()[0]).upper())
    assert colours == {part: {colour.upper()} for part, colour in PART_COLOURS.items()}


def test_the_shares_that_most_heads_have_come_first() -> None:
    decoder = Shapes(synthetic_report(4, 4, parts=["decoder"] * 4))
    assert list(decoder.shares) == ["tokens.score_shares"]
    mixed = Shapes(synthetic_report(6, 4, parts=["encoder"] * 2 + ["decoder", "cross"] * 2))
    assert list(mixed.shares) == ["tokens.score_shares", "tokens.kernel_shares"]
    cross = Shapes(synthetic_report(2, 4, parts=["cross"] * 2))
    assert cross.shares == {"tokens.score_shares": ["tokens.share_key", "tokens.share_interaction"]}


def test_measures_that_the_registry_does_not_know_are_tried_by_their_stem() -> None:
    report = planted(np.array([[0.25, 0.5]]), name="other.part_a")
    heads = []
    for head in report.heads:
        (measure,) = head.measures.values()
        rest = measure.model_copy(update={"value": 1 - measure.value})
        heads.append(head.model_copy(update={"measures": head.measures | {"other.part_b": rest}}))
    assert Shapes(report.model_copy(update={"heads": heads})).shares == {"other.part": ["other.part_a", "other.part_b"]}
    assert Shapes(report).shares == {}


def test_what_says_most_by_itself_comes_first_and_what_says_nothing_last() -> None:
    names = list(Shapes(synthetic_report(4, 4, source="weights")).readings)
    assert names[0] == "weights.symmetry"
    assert names.index("weights.effective_rank") < names.index("weights.norm") < names.index("weights.kind")
    assert names[-2:] == ["weights.inertia_positive", "weights.inertia_negative"]


def test_sources_take_turns() -> None:
    assert by_turns(["w.a", "w.b", "w.c", "t.a"]) == ["w.a", "t.a", "w.b", "w.c"]


def test_a_report_with_absurd_numbers_of_layers_makes_no_absurd_map() -> None:
    report = planted(np.eye(2))
    far = [head.model_copy(update={"layer": head.layer * 10**9, "head": head.head * 10**9}) for head in report]
    shapes = Shapes(report.model_copy(update={"heads": far}))
    assert shapes.readings["weights.planted"].values.shape == (2, 2)


def test_a_null_that_never_varies_is_met_or_not_without_a_division_by_zero() -> None:
    def chance(values: list[float], sds: list[float]) -> bool:
        report = planted(np.array([values]))
        heads = []
        for head, sd in zip(report.heads, sds, strict=True):
            (measure,) = head.measures.values()
            null = Null(mean=0.0, sd=sd)
            heads.append(
                head.model_copy(update={"measures": {"weights.planted": measure.model_copy(update={"null": null})}})
            )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (reading,) = Shapes(report.model_copy(update={"heads": heads})).readings.values()
            return reading.chance

    assert chance([0.0, 0.5, 0.1], [0.0, 1.0, 1.0])  # 0/0 is no distance at all
    assert not chance([3.0, 0.0, 4.0], [0.0, 1.0, 1.0])  # 3/0 is the farthest
    assert not chance([1.0, 2.0, 0.1], [0.0, 0.0, 1.0]), "the median sd is 0"
    assert chance([3.0, 0.5, 0.1], [0.0, 1.0, 1.0])
