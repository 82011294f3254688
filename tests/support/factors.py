"""Weight factors of tiny models."""

import families

from attnlens.models import hooks, weights


def read(model, name=None, inputs=None):
    """(factors, site) of every site, from one token and from the window."""
    inputs = inputs or families.inputs(name, model, batch=1)
    one = {key: value[:, :1] if key.endswith(("ids", "mask")) else value for key, value in inputs.items()}
    first, window = hooks.survey(model, one), hooks.survey(model, inputs)
    return list(weights.factors(model, first, window))


ROTARY = ["gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "cohere", "gpt_oss"]
