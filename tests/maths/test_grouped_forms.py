"""Test that forms of heads that share a key head have the values of each head alone."""

import pytest
import torch
from heads import random

from attnlens.maths import linalg
from attnlens.records import QueryKey, Site


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "rows of weights"])
def test_heads_that_share_a_key_head_read_what_each_reads_alone(turned):
    query, key = random(6, 40, 8, seed=4), random(2, 40, 8, seed=5)
    if turned:
        query, key = (part.mT.contiguous().mT for part in (query, key))
    site = Site("attention", 0, 0, "encoder")
    shared = QueryKey(query, key, 1.0, "weights", site, tuple(range(6)), (0, 0, 0, 1, 1, 1))
    some = shared.select([0, 3, 4])
    forms = linalg.Form(shared), linalg.Form(some)
    torch.testing.assert_close(forms[0].cross, shared.paired_key.mT @ query)
    torch.testing.assert_close(forms[1].cross, forms[0].cross[[0, 3, 4]])
    for measure in (linalg.directionality, linalg.symmetry):
        torch.testing.assert_close(measure(forms[1]), measure(forms[0])[[0, 3, 4]])
