"""Tests of `attnlens.Lens`: each method returns what the function of the same job returns."""

from functools import partial

import pytest
import torch
from hostile import refused
from loaded import BARE

import attnlens
from attnlens.errors import UsageError

SMALL = {"windows": 2, "length": 16, "layers": [1], "analyzers": ["symmetry"]}


def test_methods_return_what_the_functions_return(demo):
    lens = attnlens.Lens("demo")
    first, second = (run(**SMALL) for run in (lens.inspect, partial(attnlens.inspect, demo)))
    assert first.heads == second.heads
    first, second = (
        run("linear", windows=2, length=16, layers=[1], **BARE)
        for run in (lens.swap, partial(attnlens.swap_kernel, demo))
    )
    assert first.swap.loss == second.swap.loss
    other = attnlens.load("demo")
    other.model.transformer.h[1].attn.c_attn.weight.data[:, :16] *= 1.5  # queries of head 0
    changes = lens.compare(attnlens.Lens(other), **SMALL).comparison
    moved = [(row.layer, row.head) for row in changes.rows if row.measure == "compare.form_change" and row.named]
    assert moved == [(1, 0)]
    batch = lens.loaded.tokenizer("In the beginning", return_tensors="pt")
    for first, second in zip(lens.capture("In the beginning"), lens.capture(batch), strict=True):
        assert torch.equal(first.query, second.query)
        assert torch.equal(first.key, second.key)


def test_a_model_in_memory_is_used_as_it_is(demo):
    assert attnlens.Lens(demo.model, tokenizer=demo.tokenizer).loaded.model is demo.model
    refused(UsageError, lambda: attnlens.Lens(demo.model).capture("a text"), "has no tokenizer")
    refused(UsageError, lambda: attnlens.Lens("demo", devise="cpu"), "Unknown option 'devise'")


@pytest.mark.usefixtures("without_layout")
def test_heads_plot_and_notebook_show_the_report_of_a_plain_inspect(demo, monkeypatch):
    lens = attnlens.Lens(demo)
    assert lens._repr_html_() is None
    assert repr(lens) == "<Lens demo: GPT2LMHeadModel, 826 k parameters>"
    report = lens.inspect(**SMALL)
    assert lens.report is report
    assert list(lens.heads["layer"]) == [1] * 8
    assert len(lens.plot().axes) > 2
    shown = lens._repr_html_()
    assert report.findings[0].answer in shown
    assert "<script" not in shown
    assert "data:image/" in shown
    ranked = lens.ranks("loss:50%", latents="group=1", windows=2, length=16, layers=[1], generate=0)
    assert ranked.plan.budget == 0.5
