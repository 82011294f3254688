"""Tests that doctor verifies each family, finds planted errors, and says what it checked."""

from dataclasses import replace

import families
import model_types
import pytest
import tiny
import torch
from hostile import refused
from loaded import family, loaded
from program import invoke
from program import refused as ended

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.models import hooks, weights
from attnlens.models.weights import rebuild
from attnlens.report.sections.checked import site_checks
from attnlens.report.shapes import Shapes
from attnlens.runs.doctor import TOLERANCE, check_sites

ONE = {"backends": ["eager"]}
"""Other backends are compared in test_doctor_backends."""


def examined(name):
    """Return the checks of each site of a tiny model, without and with padding."""
    model = families.build(name).double()
    hooks.allow_float64(model)
    whole, padded = (
        hooks.as_dtype(families.inputs(name, model, padded=padded), torch.float64) for padded in (False, True)
    )
    one = {key: value[:1, :1] if key.endswith(("ids", "mask")) else value[:1] for key, value in whole.items()}
    alone = hooks.survey(model, one)
    return [check_sites(model, alone, hooks.survey(model, inputs), inputs) for inputs in (whole, padded)]


@pytest.mark.parametrize("name", families.UNLIKE)
def test_every_site_of_every_family_is_what_the_model_computes(name):
    for checks in examined(name):
        assert checks
        for check in checks:
            assert check.passed
            assert check.tokens_error <= 2e-6
            assert check.weights_error <= TOLERANCE


def patch_queries(monkeypatch, change):
    """Read the weights with other queries."""
    honest = weights.factors

    def changed(*arguments):
        for factors in honest(*arguments):
            yield replace(factors, maps=replace(factors.maps, query=change(factors.maps.query.clone())))

    monkeypatch.setattr(weights, "factors", changed)


def test_heads_in_another_order_and_a_dropped_rotation_are_found(monkeypatch):
    with monkeypatch.context() as patch:
        patch_queries(patch, lambda query: query.flip(0))
        (checks, _) = examined("gpt2")
        wrong = invoke("doctor", "demo", "--length", "8", "--backends", "eager", "--no-progress", "-q")
    ended(wrong, "Attention differs at 4 of 4 sites: ", "h.0.attn", "attnlens doctor demo --json")
    assert not any(check.passed for check in checks)
    assert all(check.tokens_error <= 2e-6 for check in checks)
    model = families.build("llama").double()
    inputs = families.inputs("llama", model)
    reached = hooks.survey(model, inputs)
    first = next(iter(weights.factors(model, hooks.survey(model, {k: v[:1, :1] for k, v in inputs.items()}), reached)))
    own = reached[0].call.query_key(reached[0].site).logits
    assert (rebuild(reached[0], first).logits - own).norm() < 1e-5 * own.norm(), "the control"
    assert (rebuild(reached[0], replace(first, rotation=None)).logits - own).norm() > 0.01 * own.norm()


def test_only_the_chosen_sites_and_heads_are_checked(demo, monkeypatch):
    options = {"windows": 3, "length": 16, "pack": False, "layers": [1, 3], "heads": [0, 5]}
    report = attnlens.doctor(demo, **options, **ONE)
    assert [check.site for check in report.doctor] == ["transformer.h.1.attn", "transformer.h.3.attn"]
    assert {(check.passed, check.heads) for check in report.doctor} == {(True, 2)}
    assert (report.coverage.sites, report.coverage.heads) == (2, 4)
    assert report.settings.model_dump(include=set(options)) == options
    for wrong in ({"layers": [4]}, {"heads": [8]}):
        refused(UsageError, lambda wrong=wrong: attnlens.doctor(demo, **wrong), "The model lacks")
    patch_queries(monkeypatch, lambda query: torch.cat([query[:2], 2 * query[2:3], query[3:]]))
    for heads, passed in (([0, 1], True), ([1, 2], False)):
        assert attnlens.doctor(demo, heads=heads, layers=[0], length=16, **ONE).doctor[0].passed is passed


def test_the_model_is_loaded_or_copied_in_float64_unless_another_type_is_requested(demo, tmp_path):
    assert attnlens.doctor("demo", layers=[0], length=16, dtype="float32", **ONE).settings.dtype == "float32"
    report = attnlens.doctor(demo, layers=[0], length=16, **ONE)
    assert (report.settings.dtype, demo.model.dtype) == ("float64", torch.float32)
    assert report.doctor[0].weights_error < 1e-12
    upcasting = tiny.gpt2(reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True)
    for block in upcasting.transformer.h:
        torch.nn.init.normal_(block.attn.c_attn.weight, std=0.3)
    upcasting.save_pretrained(tmp_path)
    for dtype in ("float64", "float32"):
        checks = attnlens.doctor(tmp_path, length=8, dtype=dtype, **ONE).doctor
        assert len(checks) == 2
        assert all(check.passed and check.weights_error is not None for check in checks)


def test_a_model_that_fails_or_attends_differently_in_float64_is_compared_in_float32(demo, monkeypatch):
    fsmt = loaded(model_types.build("fsmt"), tiny.tokenizer("roberta"))
    report = attnlens.doctor(fsmt, length=8, layers=[0], **ONE)
    assert (report.summary.verdict, report.settings.dtype) == ("agrees", "float32")
    (note,) = (note for note in report.settings.notes if "float32" in note)
    assert note.startswith("Computed in float32 (whose rounding counts as error) because of a problem in float64: ")
    assert "can't run on input_ids" in note
    assert any(note in section.notes for section in site_checks(Shapes(report), "terminal")), "shown with the table"
    assert fsmt.model.dtype == torch.float32, "the caller's model is left as it is"
    # EoMT passes float32 masks to torch's attention, which misreads them for queries in float64
    eomt = attnlens.doctor(loaded(model_types.build("eomt")), layers=[0], **ONE)
    assert eomt.summary.verdict != "differs"
    assert "because of a problem in float64: recomputed attention changes the outputs by" in eomt.settings.notes[-1]

    def failing(*_):
        raise RuntimeError("The size of tensor a (4) must match the size of tensor b (8)")

    monkeypatch.setattr(hooks, "identity_error", failing)
    problem = "can't run on input_ids and attention_mask: RuntimeError: The size"
    refused(ModelError, lambda: attnlens.doctor(demo, length=8), problem)


def test_doctor_gives_a_verdict_on_each_site_and_on_the_model(tmp_path):
    whole = attnlens.doctor(family("llama"), length=8, **ONE)
    assert {check.verdict for check in whole.doctor} == {whole.summary.verdict} == {"agrees"}
    assert not any("float32" in note for note in whole.settings.notes)
    hunyuan, tokenizer = model_types.build("hunyuan_v1_dense"), tiny.tokenizer("roberta")
    partly = attnlens.doctor(loaded(hunyuan, tokenizer), length=8, **ONE)
    assert {check.verdict for check in partly.doctor} == {partly.summary.verdict} == {"partly checked"}
    assert not partly.coverage.complete
    assert "without weights.*" in partly.coverage.sentence
    other = attnlens.doctor(loaded(model_types.build("paligemma"), tokenizer), length=8, **ONE)
    assert {check.verdict for check in other.doctor} == {"not checked"}
    assert all("eager attention changes" in check.reason for check in other.doctor)
    assert (other.coverage.analysed, other.summary.verdict) == (0, "partly checked")
    assert other.summary.identity_error < 1e-5
    for part in (hunyuan, tokenizer):
        part.save_pretrained(tmp_path)
    options = "--layers", "0", "--length", "8", "--backends", "eager", "--no-progress"
    for words, code in (((tmp_path,), 0), ((tmp_path, "--strict"), 3), (("demo", "--strict"), 0)):
        assert invoke("doctor", *words, *options).returncode == code, words


def test_outputs_that_are_infinite_in_both_passes_are_equal():
    class Model(torch.nn.Module):
        def forward(self):
            return (torch.tensor([next(outputs)]),)

    for again, error in (([-torch.inf, 3.0, 4.0], 0.0), ([-torch.inf, 3.0, 4.5], 0.1), ([0.0, 3.0, 4.0], torch.inf)):
        outputs = iter([[-torch.inf, 3.0, 4.0], again])
        assert hooks.repeat_error(Model(), {}) == pytest.approx(error)
