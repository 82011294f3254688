"""Tests of linear layers computed of a few tokens against all of them; of grouped heads against single ones."""

import pytest
import torch
from heads import random
from torch import nn

from attnlens.maths import linalg
from attnlens.models.weights.probe import FewTokens
from attnlens.records import QueryKey, Site


@pytest.fixture
def layer():
    return nn.Linear(12, 5).double()


def test_tokens_that_repeat_one_have_its_answer_and_may_be_changed_in_place(layer):
    x = random(2, 1, 12, seed=0).expand(2, 7, 12)
    with torch.no_grad(), FewTokens():
        found = layer(x)
    torch.testing.assert_close(found, layer(x.contiguous()))
    found[0, 0] += 1
    assert not torch.equal(found[0, 0], found[0, 1])


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "rows of weights"])
def test_heads_that_share_a_key_head_read_what_each_reads_alone(turned):
    query, key = random(6, 40, 8, seed=4), random(2, 40, 8, seed=5)
    if turned:
        query, key = (part.mT.contiguous().mT for part in (query, key))
    site = Site("attention", 0, 0, "encoder")
    shared = QueryKey(query, key, 1.0, "weights", site, tuple(range(6)), (0, 0, 0, 1, 1, 1))
    some = shared.select([0, 3, 4])
    forms = linalg.Form(shared), linalg.Form(some)
    assert [form.group for form in forms] == [3, None]
    torch.testing.assert_close(forms[0].cross, shared.paired_key.mT @ query)
    torch.testing.assert_close(forms[1].cross, forms[0].cross[[0, 3, 4]])
    for measure in (linalg.directionality, linalg.symmetry):
        torch.testing.assert_close(measure(forms[1]), measure(forms[0])[[0, 3, 4]])
