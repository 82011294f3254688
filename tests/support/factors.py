"""Weight factors of tiny models."""

import families
import pytest
import torch
from loaded import loaded

from attnlens.errors import UnreadableError
from attnlens.models import hooks, texts, weights
from attnlens.models.weights.probe import Probe, float64_weights, smallest
from attnlens.runs.doctor import check_sites

ROTARY = ["gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "cohere", "gpt_oss"]


def read(model, name=None, inputs=None):
    """Return the factors, or the error, of every site of a family, from one token and from the window."""
    inputs = inputs or families.inputs(name, model, batch=1)
    one = {key: value[:, :1] if key.endswith(("ids", "mask")) else value for key, value in inputs.items()}
    return list(weights.factors(model, hooks.survey(model, one), hooks.survey(model, inputs)))


def random_inputs(model, tokens):
    """Return the inputs that attnlens generates, in the model's precision."""
    return hooks.as_dtype(texts.placeholder(loaded(model), tokens, 0).batches[0].inputs, model.dtype)


def factors_of(model):
    """Return the factors of every site, from one generated token and from seven."""
    results = list(weights.factors(model, *(hooks.survey(model, random_inputs(model, tokens)) for tokens in (1, 7))))
    assert results
    assert not [error for error in results if isinstance(error, UnreadableError)], results
    return results


def agrees(model):
    """Return True if the factors reproduce the model's attention on generated inputs."""
    inputs = random_inputs(model, 7)
    first = hooks.survey(model, random_inputs(model, 1))
    return all(check.verdict == "agrees" for check in check_sites(model, first, hooks.survey(model, inputs), inputs))


def random_model(model):
    """Return the model in float64 with random weights; gains stay near 1."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.double().eval().requires_grad_(False).parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def probes(model):
    """Return the probe of every site for one generated token."""
    sites = hooks.survey(model, random_inputs(model, 1))
    return [smallest(Probe(model, site, float64_weights(site.module), site.layout)) for site in sites]


def check_heads(heads, expected, relative, absolute):
    """Check the values of all measures, head by head."""
    for one, other in zip(heads, expected, strict=True):
        assert len(other.measures) >= 4
        for name, measure in other.measures.items():
            assert one.measures[name].value == pytest.approx(measure.value, rel=relative, abs=absolute), name
