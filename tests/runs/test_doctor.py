"""Tests that doctor proves each family, and finds what is planted wrong."""

from dataclasses import replace

import families
import model_types
import pytest
import tiny
import torch
from loaded import family, loaded

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.models import hooks, weights
from attnlens.models.weights import rebuild
from attnlens.report.sections.checked import site_checks
from attnlens.report.shapes import Shapes
from attnlens.runs.doctor import TOLERANCE, check_sites

REACHED = families.REACHED


def examined(name, *, padded=False):
    model = families.build(name).double()
    hooks.allow_float64(model)
    inputs = hooks.as_dtype(families.inputs(name, model, padded=padded), torch.float64)
    one = {key: value[:1, :1] if key.endswith(("ids", "mask")) else value[:1] for key, value in inputs.items()}
    return check_sites(model, hooks.survey(model, one), hooks.survey(model, inputs), inputs)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", REACHED)
def test_every_site_of_every_family_is_what_the_model_computes(name, padded):
    checks = examined(name, padded=padded)
    assert checks
    for check in checks:
        assert check.passed
        assert check.tokens_error <= 2e-6
        assert check.weights_error <= TOLERANCE


def test_heads_in_another_order_are_found(monkeypatch):
    honest = weights.factors

    def shuffled(*arguments):
        for factors in honest(*arguments):
            yield replace(factors, maps=replace(factors.maps, query=factors.maps.query.flip(0)))

    monkeypatch.setattr(weights, "factors", shuffled)
    checks = examined("gpt2")
    assert not any(check.passed for check in checks)
    assert all(check.tokens_error <= 2e-6 for check in checks)


def test_a_dropped_rotation_is_found():
    model = families.build("llama").double()
    inputs = families.inputs("llama", model)
    one = {key: value[:1, :1] for key, value in inputs.items()}
    reached = hooks.survey(model, inputs)
    factors = list(weights.factors(model, hooks.survey(model, one), reached))
    own = reached[0].call.query_key(reached[0].site).logits
    right = rebuild(reached[0], factors[0]).logits
    wrong = rebuild(reached[0], replace(factors[0], rotation=None)).logits
    assert (right - own).norm() < 1e-5 * own.norm()
    assert (wrong - own).norm() > 0.01 * own.norm()


def test_only_the_chosen_sites_and_heads_are_checked():
    report = attnlens.doctor("demo", layers=[1, 3], heads=[0, 5], windows=3, length=16, pack=False)
    assert [check.site for check in report.doctor] == ["transformer.h.1.attn", "transformer.h.3.attn"]
    assert all(check.passed and check.heads == 2 for check in report.doctor)
    assert (report.coverage.sites, report.coverage.heads) == (2, 4)
    settings = report.settings
    assert (settings.windows, settings.length, settings.pack, settings.layers, settings.heads) == (
        3,
        16,
        False,
        [1, 3],
        [0, 5],
    )
    for words in ({"layers": [4]}, {"heads": [8]}):
        with pytest.raises(UsageError, match="There is no"):
            attnlens.doctor("demo", **words)


def test_a_head_that_is_not_chosen_is_not_judged(monkeypatch):
    honest = weights.factors

    def spoilt(*arguments):
        for factors in honest(*arguments):
            query = factors.maps.query.clone()
            query[2] *= 2
            yield replace(factors, maps=replace(factors.maps, query=query))

    monkeypatch.setattr(weights, "factors", spoilt)
    options = {"layers": [0], "length": 16}
    assert all(check.passed for check in attnlens.doctor("demo", heads=[0, 1], **options).doctor)
    assert not any(check.passed for check in attnlens.doctor("demo", heads=[1, 2], **options).doctor)


def test_another_type_is_honoured_and_a_loaded_model_is_copied():
    assert attnlens.doctor("demo", layers=[0], length=16, dtype="float32").settings.dtype == "float32"
    loaded = attnlens.load("demo")
    report = attnlens.doctor(loaded, layers=[0], length=16)
    assert report.settings.dtype == "float64"
    assert report.doctor[0].weights_error < 1e-12
    assert loaded.model.dtype == torch.float32


def test_gpt2s_own_upcasting_does_not_stand_in_the_way_of_float64(tmp_path):
    model = tiny.gpt2(reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True)
    for block in model.transformer.h:
        torch.nn.init.normal_(block.attn.c_attn.weight, std=0.3)
    model.save_pretrained(tmp_path)
    for dtype in ("float64", "float32"):
        checks = attnlens.doctor(tmp_path, length=8, dtype=dtype).doctor
        assert len(checks) == 2
        assert all(check.passed and check.weights_error is not None for check in checks)


def test_a_model_that_can_not_be_read_in_float64_is_compared_in_float32():
    assert not any("float32" in note for note in attnlens.doctor(family("bert"), length=8).settings.notes)
    fsmt = loaded(model_types.build("fsmt"), tiny.tokenizer("roberta"))
    report = attnlens.doctor(fsmt, length=8)
    assert report.summary.verdict == "agrees"
    (note,) = (note for note in report.settings.notes if "float32" in note)
    assert note.startswith("Computed in float32, whose rounding counts as error, because in float64: ")
    assert "can't run on input_ids" in note
    assert report.settings.dtype == "float32"
    assert any(note in section.notes for section in site_checks(Shapes(report), "terminal")), "shown beside the table"
    assert fsmt.model.dtype == torch.float32, "the caller's model is left as it is"


def test_a_model_whose_own_attention_is_another_in_float64_is_compared_in_float32():
    """EoMT hands its masks to torch's attention in float32, which misreads them beside queries in float64."""
    eomt = attnlens.doctor(loaded(model_types.build("eomt")))
    assert eomt.summary.verdict != "differs"
    assert "because in float64: recomputed attention changes the outputs by" in eomt.settings.notes[-1]


def test_a_model_that_fails_when_left_alone_is_refused(monkeypatch):
    def failing(*_):
        raise RuntimeError("The size of tensor a (4) must match the size of tensor b (8)")

    monkeypatch.setattr(hooks, "identity_error", failing)
    with pytest.raises(ModelError, match="can't run on input_ids and attention_mask: RuntimeError: The size"):
        attnlens.doctor("demo", length=8)


@pytest.mark.parametrize(
    ("again", "error"), [([-torch.inf, 3.0, 4.0], 0.0), ([-torch.inf, 3.0, 4.5], 0.1), ([0.0, 3.0, 4.0], torch.inf)]
)
def test_outputs_that_are_infinite_in_both_passes_are_the_same(again, error):
    outputs = iter([[-torch.inf, 3.0, 4.0], again])

    class Model(torch.nn.Module):
        def forward(self):
            return (torch.tensor([next(outputs)]),)

    assert hooks.repeat_error(Model(), {}) == pytest.approx(error)
