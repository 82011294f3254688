"""Tests that layers of models with several parts are numbered within their part, in every output and every option."""

import re

import families
import pytest
from loaded import BARE, family, sites_of

import attnlens
from attnlens.arguments import listed_layers
from attnlens.checks.rule import parse_condition
from attnlens.errors import UsageError
from attnlens.models.hooks.survey import number_within_parts
from attnlens.records import ModelInfo, Site
from attnlens.report import export
from attnlens.report.findings.heads import next_commands
from attnlens.report.render.markdown import workflow_commands
from attnlens.report.sections.explorer import explorer
from attnlens.report.shapes import Shapes
from attnlens.requests import head, layer_list
from attnlens.runs.swap.pipeline import swap_kernel

SHALLOW = {"windows": 2, "length": 8}
SYMMETRY = {"source": "weights", "analyzers": ["symmetry"]}


@pytest.fixture(scope="module")
def whisper():
    return attnlens.inspect(family("whisper"), **SYMMETRY)


@pytest.mark.parametrize("name", ["whisper", "bart", "t5"])
def test_each_part_is_numbered_by_the_models_own_modules(name):
    model = families.build(name)
    sites = sites_of(model, families.inputs(name, model))
    layers = {"whisper": "layers", "bart": "layers", "t5": "block"}[name]
    for site in sites:
        own = site.path.split(f"{layers}.")[1].split(".")[0]
        assert site.layer_name == f"{site.part}.{own}"
    assert [site.layer for site in sites] == list(range(len(sites)))  # the key of records stays the order of calls
    assert {site.part for site in sites} == {"encoder", "decoder", "cross"}


@pytest.mark.parametrize("name", ["gpt2", "albert", "vit"])
def test_a_model_with_one_part_keeps_plain_numbers(name):
    sites = sites_of(families.build(name), families.inputs(name, families.build(name)))
    assert [site.layer_name for site in sites] == [str(site.layer) for site in sites]
    report = attnlens.inspect(family(name), **SYMMETRY)
    assert report.model.layer_names == []
    assert report.model.layer_name(1) == "1"


def sites(*paths):
    """Build sites with these paths; a path with `cross` is cross-attention."""
    parts = ["cross" if "cross" in path else "decoder" for path in paths]
    return [Site(path, 0, layer, part) for layer, (path, part) in enumerate(zip(paths, parts, strict=True))]


def test_gaps_in_the_models_numbers_stay_and_ambiguous_paths_are_counted():
    interleaved = number_within_parts(sites("layers.0.self", "layers.1.self", "layers.2.cross", "layers.3.self"))
    assert [site.layer_name for site in interleaved] == ["decoder.0", "decoder.1", "cross.2", "decoder.3"]
    stages = number_within_parts(sites("stage.0.block.0", "stage.0.block.1", "stage.1.block.0", "cross"))
    assert [site.layer_name for site in stages] == ["decoder.0", "decoder.1", "decoder.2", "cross.0"]
    assert [site.number for site in number_within_parts(sites("a.0", "a.1"))] == [None, None]


def test_options_select_a_layer_of_one_part_or_of_each(whisper):
    one = attnlens.inspect(family("whisper"), **SYMMETRY, layers="decoder.1")
    assert {(h.part, one.model.layer_name(h.layer)) for h in one.heads} == {("decoder", "decoder.1")}
    expected = [h for h in whisper.heads if h.part == "decoder" and whisper.model.layer_name(h.layer) == "decoder.1"]
    assert [h.measures["weights.symmetry"].value for h in one.heads] == pytest.approx(
        [h.measures["weights.symmetry"].value for h in expected]
    )
    each = attnlens.inspect(family("whisper"), **SYMMETRY, layers=[1])
    assert {each.model.layer_name(h.layer) for h in each.heads} == {"encoder.1", "decoder.1", "cross.1"}
    with pytest.raises(UsageError, match=r"The model lacks layer decoder\.9") as refused:
        attnlens.inspect(family("whisper"), **SYMMETRY, layers="decoder.9")
    assert "encoder.0 to encoder.1" in refused.value.remedy
    assert "cross.0 to cross.1" in refused.value.remedy


def test_a_swap_selects_and_names_layers_within_their_part():
    report = swap_kernel(family("bart"), "rbf", layers="decoder.1", **SHALLOW, **BARE)
    assert [report.model.layer_name(site.layer) for site in report.swap.sites] == ["decoder.1"]
    swept = swap_kernel(family("bart"), "rbf", layers=["decoder.0", "encoder.1"], sweep="layers", **SHALLOW, **BARE)
    assert {report.model.layer_name(unit.layer) for unit in swept.swap.sweep} == {"decoder.0", "encoder.1"}
    assert "--layers decoder.0,encoder.1" in export.WRITERS["markdown"](swept)


def test_rules_select_layers_within_their_part(whisper):
    covered = attnlens.check(whisper, ["weights.symmetry: count >= 0 @layers decoder.1"]).checks[0].heads
    each = attnlens.check(whisper, ["weights.symmetry: count >= 0 @layers 1"]).checks[0].heads
    assert (covered, each) == (4, 8)  # cross-attention has no symmetry
    failed = attnlens.check(whisper, ["weights.norm: max < 0 @layers decoder.1"])
    assert "layer decoder.1 head" in " ".join(workflow_commands(failed))
    assert parse_condition("min > 0 @layers decoder.1,0-1").filters == " @layers 0,1,decoder.1"
    with pytest.raises(UsageError, match="part"):
        parse_condition("min > 0 @layers middle.1")


@pytest.mark.usefixtures("without_layout")
def test_every_rendering_shows_the_names(whisper):
    names = list(dict.fromkeys(whisper.model.layer_name(h.layer) for h in whisper.heads))
    assert sorted(names) == [f"{part}.{layer}" for part in ("cross", "decoder", "encoder") for layer in (0, 1)]
    data = explorer(Shapes(whisper))
    assert list(data["names"]) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "cross.0", "cross.1"]
    assert data["layers"] == [0, 1, 0, 1, 0, 1]
    commands = " ".join(next_commands(Shapes(whisper)))
    assert "--head 3." not in commands
    for form in ("html", "markdown"):
        text = export.WRITERS[form](whisper).split("<script")[0]
        assert "layer 3" not in text
        assert not re.search("layer [4-9]", text)
    again = type(whisper).model_validate_json(whisper.model_dump_json())
    assert again.model.layer_names == whisper.model.layer_names


def test_a_head_is_named_with_its_part():
    assert head("decoder.3.7") == ("decoder.3", 7)
    assert head(("cross.1", 0)) == ("cross.1", 0)
    assert head("3.7") == head((3, 7)) == (3, 7)
    assert layer_list("layers", ["decoder.0-1", 3]) == ["decoder.0", "decoder.1", 3]
    assert listed_layers("--layers", "7,0-2") == [0, 1, 2, 7]
    for wrong in ("middle.0", "decoder.", "decoder.3-1", "decoder.x"):
        with pytest.raises(UsageError):
            layer_list("layers", wrong)
    with pytest.raises(UsageError):
        head("middle.0.1")


def test_a_model_knows_its_layers_choices():
    plain, several = (
        ModelInfo(id="a", architecture="A", parameters=1),
        ModelInfo(id="b", architecture="B", parameters=1, layer_names=["encoder.0", "decoder.0", "decoder.1"]),
    )
    assert plain.layer_choices(2, "decoder") == {2, "decoder.2"}
    assert several.layer_choices(2, "decoder") == {1, "decoder.1"}
    assert several.layer_number(2) == "1"
