"""Training with Primal-Attention: a torch module, its regulariser, and whole transformers that contain the module.

>>> import torch
>>> from transformers import BertConfig
>>> from attnlens.lab import primal
>>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
>>> config = BertConfig(vocab_size=50, max_position_embeddings=16, architectures=["BertForMaskedLM"], **sizes)
>>> model = primal.build(config, layers="last", scores=8)  # Primal.+: canonical attention except in the last layer
>>> words = torch.arange(10)[None]
>>> loss = model.train()(input_ids=words, labels=words).loss + 0.1 * primal.regulariser(model)
>>> loss.backward()

`PrimalAttention` is the layer alone, for use in other models:

>>> layer = primal.PrimalAttention(d_model=32, heads=2, scores=8)
>>> layer(torch.randn(1, 10, 32)).shape
torch.Size([1, 10, 32])
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from torch import Tensor, nn

from attnlens.errors import ModelError, TextError, UsageError
from attnlens.kernels.attention import attend
from attnlens.kernels.attention.primal_heads import PrimalAttention, PrimalHeads, regulariser
from attnlens.kernels.attention.sums import whole_reach
from attnlens.records import Call, ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from attnlens.models.hooks import SiteCall

__all__ = ["PrimalAttention", "PrimalHeads", "build", "regulariser"]

NAME = "attnlens_primal"  # name under which transformers finds the attention of the models built here
ONLY_BY = "attnlens.lab.primal.build"  # name unknown to transformers, so that `from_pretrained` refuses a saved folder


def build(
    base: PreTrainedConfig | PreTrainedModel,
    layers: Literal["all", "last"] | Sequence[int] = "all",
    scores: int = 30,
    samples: int = 0,
) -> PreTrainedModel:
    """Build a model with primal attention in all layers (PrimalFormer), the last layer (Primal.+) or listed layers.

    A config gives a new model of the class named in `architectures` (default: AutoModel's choice). A model is modified
    in place and keeps its weights. Each chosen attention module gets a submodule `primal` (PrimalHeads), which reads
    the queries and keys after their rotation, if any; the values have no effect.

    `model.config.attnlens_primal` lists the primal layers. transformers' `from_pretrained` refuses a folder in which
    the model is saved; to load it, call `build(AutoConfig.from_pretrained(folder), …)` with the same arguments, then
    `safetensors.torch.load_model`.

    In training, minimise loss + eta * primal.regulariser(model). The model has no key-value cache. `scores` is s, the
    number of e-scores per head; issues a UserWarning if head_dim or `samples` limits the rank of the scores. In
    encoders, the matrix F of PrimalHeads consists of `samples` rows of the module's input; with `samples=0`, F = I.
    Raises ModelError for models that cannot be hooked, and for a chosen layer that is cross-attention, adds a bias to
    its scores (T5's positions) or is called more than once. Raises UsageError for invalid arguments.
    """
    from attnlens.models import hooks, loading, texts
    from attnlens.runs.feeding import evaluation_mode

    model = base if isinstance(base, nn.Module) else _new_model(base)
    info = ModelInfo(id=type(model).__name__, architecture=type(model).__name__, parameters=0)
    loaded = loading.Loaded(model, None, "", info, loading.kind_of(model))
    try:  # one forward pass over four tokens, or noise, records the attention modules
        with evaluation_mode(model):
            site_calls = hooks.survey(model, texts.placeholder(loaded, 4, 0).batches[0].inputs)
    except TextError as error:
        raise ModelError(error.problem, error.remedy) from None
    chosen = _select_layers(site_calls, layers)
    for target in chosen:
        _check_layer(target, samples)
    for target in chosen:
        call = target.call
        heads = PrimalHeads(call.query.shape[1], call.query.shape[-1], scores, call.value.shape[-1], samples)
        target.module.add_module("primal", heads.to(model.device, model.dtype))
        if samples:
            target.module.register_forward_pre_hook(_keep_input, with_kwargs=True)
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            config.use_cache = False
    hooks.install(model, NAME, _compute_attention)
    model.config.attnlens_primal = [
        {"layer": target.site.layer, "scores": part.log_multipliers.shape[-1], "samples": part.samples}
        for target in site_calls
        if isinstance(part := getattr(target.module, "primal", None), PrimalHeads)
    ]
    model.config.attn_implementation = ONLY_BY
    return model


def _new_model(config: PreTrainedConfig) -> PreTrainedModel:
    import transformers

    config = copy.deepcopy(config)
    if config._attn_implementation in (ONLY_BY, NAME):
        config._attn_implementation = None  # back to transformers' default
    name = (getattr(config, "architectures", None) or [""])[0]
    return cast("PreTrainedModel", getattr(transformers, name, transformers.AutoModel.from_config)(config))


def _select_layers(site_calls: list[SiteCall], layers: Literal["all", "last"] | Sequence[int]) -> list[SiteCall]:
    if isinstance(layers, str):
        if layers not in ("all", "last"):
            raise UsageError(f"Cannot parse the layers {layers!r}.", 'Write "all", "last" or numbers.')
        return site_calls if layers == "all" else site_calls[-1:]
    wrong = [layer for layer in layers if not 0 <= layer < len(site_calls)]
    if wrong or not layers:
        what = f"The model lacks layer {wrong[0]}." if wrong else "No layers given."
        raise UsageError(what, f"Choose from layers 0 to {len(site_calls) - 1}.")
    return [call for call in site_calls if call.site.layer in layers]


def _check_layer(layer: SiteCall, samples: int) -> None:
    problem = ""
    if layer.site.part == "cross":
        problem = "is cross-attention: e- and r-scores would belong to different tokens"
    elif layer.call.bias is not None:
        problem = "adds a position bias to its scores (as in T5), but primal attention has no score for each pair"
    elif layer.site.repeated:
        problem = "is called more than once per forward pass"
    if problem:
        raise ModelError(f"{layer.site.path} {problem}.", "Choose another model, or omit such layers.")
    if hasattr(layer.module, "primal"):
        raise UsageError(f"{layer.site.path} already has primal attention.", "Use a model without primal layers.")
    if samples and layer.site.part == "decoder":
        raise UsageError("Causal primal attention cannot sample rows: future tokens would leak.", "Use samples=0.")
    heads, _, size = layer.call.query.shape[1:]
    if samples and heads * size != layer.arguments[layer.input_name].shape[-1]:
        problem = f"The input of {layer.site.path} cannot be split into {heads} heads of {size} dimensions."
        raise UsageError(problem, "Use samples=0.")


def _keep_input(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Store the module's input (the first tensor argument) on the module until its attention is computed."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    object.__setattr__(module, "_primal_input", tensors[0])


def _compute_attention(call: Call) -> Tensor:
    """Compute a module's output (batch, queries, heads, value_dim) with its primal heads; without them, by softmax."""
    from attnlens.models.hooks import OWN

    module = cast("nn.Module", call.module)
    heads = getattr(module, "primal", None)
    if heads is None:
        return attend(call, OWN)
    reach, rows = whole_reach(call), None
    if heads.samples:
        inputs = cast("Tensor", module.__dict__.pop("_primal_input"))
        rows = inputs.reshape(*inputs.shape[:2], call.query.shape[1], -1).transpose(1, 2)
    output = heads(call.query, call.paired_key, causal=reach.causal, real=reach.real, rows=rows)
    return cast("Tensor", output.to(call.query.dtype).transpose(1, 2))
