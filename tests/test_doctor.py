"""Does doctor prove each family, and does it find what is planted wrong?"""

from dataclasses import replace

import families
import pytest
import torch

from attnlens import hooks, weights
from attnlens.run.doctor import TOLERANCE, check_sites, from_weights

REACHED = families.REACHED


def examined(name, *, padded=False):
    model = families.build(name).double()
    hooks.allow_float64(model)
    inputs = hooks.as_dtype(families.inputs(name, model, padded=padded), torch.float64)
    one = {key: value[:1, :1] if key.endswith(("ids", "mask")) else value[:1] for key, value in inputs.items()}
    return check_sites(model, one, inputs)


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
    right = from_weights(reached[0], factors[0]).logits
    wrong = from_weights(reached[0], replace(factors[0], rotation=None)).logits
    assert (right - own).norm() < 1e-5 * own.norm()
    assert (wrong - own).norm() > 0.01 * own.norm()
