"""Tests of `attnlens.Lens`: each method returns what the function of the same job returns."""

import pytest
import torch

import attnlens
from attnlens.errors import UsageError

SMALL = {"windows": 2, "length": 16, "layers": [1]}


@pytest.fixture(scope="module")
def lens():
    return attnlens.Lens("demo")


def test_methods_return_what_the_functions_return(lens):
    assert lens.inspect(**SMALL).heads == attnlens.inspect("demo", **SMALL).heads
    swapped = lens.swap("linear", **SMALL, generate=0, controls=False)
    assert swapped.swap.loss == attnlens.swap_kernel("demo", "linear", **SMALL, generate=0, controls=False).swap.loss
    other = attnlens.load("demo")
    other.model.transformer.h[1].attn.c_attn.weight.data[:, :16] *= 1.5  # queries of head 0
    changes = lens.compare(attnlens.Lens(other), **SMALL).comparison
    assert changes is not None
    assert changes.rows, "the control: the models differ"


def test_a_text_and_a_batch_are_captured_alike(lens):
    batch = lens.loaded.tokenizer("In the beginning", return_tensors="pt")
    for first, second in zip(lens.capture("In the beginning"), lens.capture(batch), strict=True):
        assert torch.equal(first.query, second.query)
        assert torch.equal(first.key, second.key)


def test_a_model_in_memory_is_used_as_it_is(lens):
    model = lens.loaded.model
    assert attnlens.Lens(model, tokenizer=lens.loaded.tokenizer).loaded.model is model
    with pytest.raises(UsageError, match="has no tokenizer"):
        attnlens.Lens(model).capture("a text")
    with pytest.raises(UsageError, match="no option 'devise'"):
        attnlens.Lens("demo", devise="cpu")
