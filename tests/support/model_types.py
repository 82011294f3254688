"""Build any model type of transformers tiny: from its own configuration, with smaller values of known names.

`build(name)` returns a model with sharpened W_Q and W_K and perturbed norms, without network access; `TYPES()` lists
all types. Some families constrain sizes relative to each other, so several ways of shrinking are tried (`WAYS`).
"""

import copy
import inspect
import math
import re

import torch
import transformers as tf
import transformers.models.auto.modeling_auto as auto
from huggingface_hub.errors import StrictDataclassError
from model_type_settings import CHANGES, VOCABULARY, listed
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnlens.errors import FAILURES

LARGEST = 130_000_000
"""Largest number of parameters of a model."""
WAYS = (frozenset(), frozenset({"ungrouped"}), frozenset({"larger image"}), frozenset({"full width"}))
"""Ways of shrinking: everything; without grouped key heads; with larger images; only the depth."""
CLASSES = listed(
    "SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ MASKED_LM CAUSAL_LM IMAGE_TEXT_TO_TEXT MULTIMODAL_LM RETRIEVAL "
    "ZERO_SHOT_IMAGE_CLASSIFICATION MODEL CTC IMAGE_CLASSIFICATION OBJECT_DETECTION MASK_GENERATION "
    "SEMANTIC_SEGMENTATION DEPTH_ESTIMATION TEXT_TO_SPECTROGRAM TEXT_TO_WAVEFORM PRETRAINING BACKBONE TEXT_ENCODING "
    "KEYPOINT_MATCHING KEYPOINT_DETECTION UNIVERSAL_SEGMENTATION IMAGE TIME_SERIES_PREDICTION POSE_ESTIMATION RNNT TDT"
)
"""Kinds of classes; the first that a type has is built."""
UNBUILT = (*FAILURES, StrictDataclassError)
"""Errors of configurations and models whose sizes don't fit together."""
BARE = {"blip", "clip", "siglip", "siglip2", "align"}
"""Types that are built without a head."""
DEPTHS = listed(
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
    "depth decoder_num_hidden_layers encoder_num_hidden_layers num_blocks layers"
)
HEADS = listed(
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "encoder_num_attention_heads decoder_num_attention_heads num_encoder_attention_heads num_decoder_attention_heads"
)
KEY_HEADS = listed("num_key_value_heads num_kv_heads encoder_num_key_value_heads decoder_num_key_value_heads")
IMAGES = listed("image_size input_size")
VOCABULARIES = listed("vocab_size text_vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size")
LISTS_OF_LAYERS = ("layer_types", "layers_block_type", "block_types", "layers_types", "attn_layers")
_MOST = {
    0: "num_kv_shared_layers num_nextn_predict_layers",
    1: "n_group topk_group first_k_dense_replace n_shared_experts moe_num_shared_experts num_shared_experts "
    "num_layers_per_stack",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k linear_num_key_heads num_conv_pos_embedding_groups",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts num_query_tokens linear_num_value_heads "
    "index_n_heads index_kpool",
    8: "rotary_dim qk_rope_head_dim linear_key_head_dim linear_value_head_dim mamba_n_heads mamba_d_state "
    "mamba_num_heads state_size ssm_state_size num_latents sliding_window local_attention attention_chunk_size "
    "index_topk patch_size",
    10: "num_queries",
    16: "kv_lora_rank qk_nope_head_dim v_head_dim mamba_d_head mamba_chunk_size chunk_size num_conv_pos_embeddings "
    "image_seq_length num_image_tokens index_head_dim mamba_head_dim hidden_size_per_layer_input "
    "head_dim d_kv attention_head_dim d_head attention_head_size kv_channels",
    24: "q_lora_rank qk_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size shared_intermediate_size projection_dim",
    50: "max_source_positions",
    64: "upsample_groups entity_vocab_size entity_emb_size d_latents hidden_size d_model n_embd dim embed_dim "
    "embedding_size decoder_hidden_size encoder_hidden_size word_embed_proj_dim out_hidden_size emb_dim decoder_dim "
    "cross_attention_hidden_size text_hidden_size vision_hidden_size audio_hidden_size attention_hidden_size lru_width "
    "output_hidden_size",
    96: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim dim_feedforward ffn_hidden_size "
    "decoder_intermediate_size feed_forward_size intermediate_size_mlp dense_intermediate_size mlp_dim",
    128: "max_position_embeddings n_positions n_ctx max_target_positions max_seq_len mamba_d_ssm",
    VOCABULARY: "vocab_size_per_layer_input",
}
MOST = {name: most for most, names in _MOST.items() for name in names.split()}
"""Largest value of each of these settings."""
UNSET = {"head_dim": 16, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}
"""Values of settings that a configuration leaves unset."""
TOKENS = {"image_token_id": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPPED = listed(
    "transformers_version architectures _name_or_path dtype torch_dtype attn_implementation _attn_implementation "
    "id2label label2id"
)


TABLES = [name for name in dir(auto) if name.startswith("MODEL") and name.endswith("_MAPPING_NAMES")]


def TYPES():  # noqa: N802
    """List the model types with a model class."""
    return sorted({name for table in TABLES for name in getattr(auto, table)})


def build(name, ways=WAYS):
    """Build the tiny model of a type in evaluation mode; raise RuntimeError with the reasons if no way succeeds.

    The first way of shrinking whose model runs on `plain_inputs` is used, else the first that builds a model. If a
    package that a type needs is not installed, transformers raises ImportError.
    """
    model_class = class_of(name)
    if model_class is None:
        raise RuntimeError("no class that can be imported")
    reasons, built = [], None
    for way in ways:
        try:
            model = _built(model_class, config_of(name, way))
        except UNBUILT as error:
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        built = built or model
        try:
            with torch.no_grad():
                model(**plain_inputs(model))
        except (*FAILURES, ImportError):  # another way of shrinking may run
            continue
        return model
    if built is None:
        raise RuntimeError("; ".join(dict.fromkeys(reasons)))
    return built


def _built(model_class, config):
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise RuntimeError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return sharpened(model_class(copy.deepcopy(config)).eval().requires_grad_(False))


def class_of(name):
    """Return the class to build: the first that accepts the type's configuration; None if no class is found."""
    names = [f"MODEL_FOR_{one}_MAPPING_NAMES" if one != "MODEL" else "MODEL_MAPPING_NAMES" for one in CLASSES]
    classes = []
    for table in (*(["MODEL_MAPPING_NAMES"] if name in BARE else names), *TABLES):
        entry = getattr(auto, table, {}).get(name, ())
        classes += [getattr(tf, one, None) for one in ((entry,) if isinstance(entry, str) else entry)]
    classes = [one for one in classes if one is not None]
    fitting = [one for one in classes if issubclass(CONFIG_MAPPING[name], getattr(one, "config_class", None) or ())]
    return next(iter((*fitting, *classes)), None)


def config_of(name, way):
    """Return the type's configuration, shrunk."""
    config_class = CONFIG_MAPPING[name]
    small = _merged(shrunk(config_class(**_first_sizes(name)).to_dict(), way), CHANGES.get(name, {}))
    return config_class(**{key: value for key, value in small.items() if key != "model_type"})


def _first_sizes(name):
    """Return settings for the default configuration: some types need another backbone or fitting sizes."""
    if name == "funnel":
        return {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": 16, "n_head": 4, "d_model": 64}
    if name == "omdet-turbo":
        return {"use_timm_backbone": False}
    if name not in ("detr", "conditional_detr", "table-transformer", "deformable_detr", "dab-detr"):
        return {}
    stages = ["stage2", "stage3", "stage4"] if name == "deformable_detr" else ["stage4"]
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    plain = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    return plain | {"backbone_config": tf.ResNetConfig(**sizes, out_features=stages)}


def shrunk(config, way):
    """Return a configuration, as a dictionary, with smaller sizes, also in its inner configurations."""
    config = {name: copy.deepcopy(value) for name, value in config.items() if name not in DROPPED}
    kinds, pattern = _pattern(config)
    per_layer = config.pop("per_layer_config", None)
    _without_stages(config)
    small = {name: _smaller(name, value, config, way, kinds, pattern) for name, value in config.items()}
    if isinstance(per_layer, dict):
        layers = {index: one for index, one in per_layer.items() if int(index) < (len(kinds) if kinds else 2)}
        places = {index: pattern.index(kinds[int(index)]) if kinds else index for index in layers}
        small["per_layer_config"] = {places[index]: shrunk(one, way) for index, one in layers.items()}
    return small


def _pattern(config):
    """Return the kinds of the layers, and a shorter list with each kind once; empty lists if there are none."""
    kinds = next((config[name] for name in LISTS_OF_LAYERS if isinstance(config.get(name), list) and config[name]), [])
    counted = any(isinstance(config.get(name), int) and config[name] == len(kinds) for name in DEPTHS)
    if not counted or not all(isinstance(kind, str) for kind in kinds):
        return [], []
    return kinds, _shorter(kinds)


def _shorter(values):
    each = list(dict.fromkeys(values))
    return (each + [values[0]] * 2)[: max(2, len(each))]


def _without_stages(config):
    """Drop the names of stages that go with the number of layers."""
    names = ["out_features", "_out_features", "out_indices", "_out_indices", "stage_names"]
    staged = bool(config.get("out_features") and (config.get("depths") or config.get("hidden_sizes")))
    flat = not isinstance(config.get("depths"), list) and "num_hidden_layers" in config
    for name in names if flat else names[1:] if staged else ():
        config.pop(name, None)


def _smaller(name, value, config, way, kinds, pattern):
    """Return one entry of a configuration, smaller."""
    depth = len(pattern) if kinds else 2
    if isinstance(value, dict):
        if name in ("rope_parameters", "rope_scaling"):
            return _rope(value, _turned(config))
        return shrunk(value, way) if name.endswith("config") or "model_type" in value else value
    if value is None:
        return UNSET.get(name)
    if isinstance(value, list):
        if len(kinds) > 2 and len(value) == len(kinds) and name != "depths":
            if value != kinds and all(isinstance(one, str) for one in value):
                return _shorter([value[kinds.index(kind)] for kind in dict.fromkeys(kinds)])[:depth]
            return pattern if value == kinds else value[:depth]
        if name == "mlp_layer_types" and len(value) > 2:
            return (list(dict.fromkeys(value)) + [value[-1]] * depth)[:depth]
        return _list(name, value, way, depth)
    return _number(name, value, config, way, depth) if type(value) is int else value


def _list(name, value, way, depth):
    if name.endswith("token_id"):
        return [one if one < VOCABULARY else 2 for one in value]
    if "full width" in way:
        return value
    if name in IMAGES and all(isinstance(one, int) for one in value):
        return [min(one, 64 if "larger image" in way else 32) for one in value]
    fixed = {"conv_dim": [32] * len(value), "attention_window": [8] * depth}
    return [min(one, 2) for one in value] if name == "depths" else fixed.get(name, value)


def _number(name, value, config, way, depth):
    if name in VOCABULARIES:
        return VOCABULARY
    if name in DEPTHS:
        return min(value, depth)
    if name.endswith("token_id") and value >= VOCABULARY:
        return TOKENS.get(name, 301 if "video" in name else 302 if "audio" in name else 303)
    if name.endswith("token_index") and value >= VOCABULARY:
        return 300 if "image" in name else 301
    if "full width" in way:
        return value
    if name in ("embed_dim", "hidden_size", "embedding_size") and isinstance(config.get("depths"), list):
        return value
    if name in KEY_HEADS and value > 1:
        return 4 if config.get("kv_lora_rank") or "ungrouped" in way else 2
    if name == "head_dim" and isinstance(config.get("qk_rope_head_dim"), int):
        return 8
    if name in HEADS:
        return min(4, 4 * value)
    most = MOST | dict.fromkeys(IMAGES, 64 if "larger image" in way else 32)
    return min(value, most.get(name, value))


def _turned(config):
    """Return how many coordinates of a head the rotation turns."""
    rope = config.get("rope_parameters") or {}
    share = (rope if isinstance(rope, dict) else {}).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return int((8 if isinstance(config.get("qk_rope_head_dim"), int) else 16) * (share or 1.0))


def _rope(rope, turned):
    small = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _rope(value, turned)
        elif name == "mrope_section" and isinstance(value, list) and len(value) == 3:
            small[name] = [turned // 2 - 2 * (turned // 6), turned // 6, turned // 6]
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            small[name] = [1.0] * (turned // 2)
        else:
            small[name] = 64 if name == "original_max_position_embeddings" and isinstance(value, int) else value
    return small


def _merged(config, changes):
    both = {name for name, value in changes.items() if isinstance(value, dict) and isinstance(config.get(name), dict)}
    return config | {name: _merged(config[name], value) if name in both else value for name, value in changes.items()}


SHARP = re.compile(
    r"(^|[._])(q|k|query|key|q_proj|k_proj|q_lin|k_lin|to_q|to_k|wq|wk|Wq|Wk|qkv|Wqkv|qkv_proj|query_key_value|c_attn|"
    r"in_proj|query_proj|key_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|q_attn|attn_q|attn_k|linear_q|linear_k|"
    r"kv_proj|kv|W_pack)([._]|$)"
)
"""Names of modules that contain W_Q or W_K."""


def sharpened(model):
    """Draw matrices that keep their inputs' variance, W_Q and W_K sharper, and perturb norms; return the model."""
    draw = torch.Generator().manual_seed(0)
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(path, recurse=False):
            if parameter.is_floating_point():
                _draw(key, module, parameter, draw)
    return model


def _draw(key, module, parameter, draw):
    noise = torch.randn(parameter.shape, generator=draw)
    conv = type(module).__name__ == "Conv1D"
    if isinstance(module, nn.Embedding) and "Sinusoidal" not in type(module).__name__:  # a table that is computed
        parameter.copy_(noise)
    elif parameter.ndim == 2 and (isinstance(module, nn.Linear) or conv or "in_proj_weight" in key):
        inputs = parameter.shape[0] if conv else parameter.shape[1]
        parameter.copy_(noise * (1.5 if SHARP.search(key) else 1.0) / math.sqrt(inputs))
    elif parameter.ndim == 1 and isinstance(module, nn.Linear):
        parameter.copy_(0.1 * noise)
    elif parameter.ndim > 2 and parameter.numel() and parameter.abs().max() < 1e-3:  # BLIP's patches, all but 0
        parameter.copy_(noise / math.sqrt(parameter[0].numel()))
    elif parameter.ndim == 1 and parameter.numel() > 1 and "Norm" in type(module).__name__:
        parameter.add_(0.1 * noise)


def plain_inputs(model):
    """Return inputs by the signature of the model's forward pass, two sequences of 12 tokens, without attnlens."""
    config, draw = model.config, torch.Generator().manual_seed(0)
    names, main = inspect.signature(model.forward).parameters, model.main_input_name
    both = hasattr(model, "get_image_features") and hasattr(model, "get_text_features")
    inputs = {}
    if main == "input_ids" or both:
        inputs["input_ids"] = torch.randint(16, 272, (2, 12), generator=draw)
        if "attention_mask" in names:
            inputs["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
    if "decoder_input_ids" in names and config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(16, 272, (2, 10), generator=draw)
    if "pixel_values" in names and (main == "pixel_values" or both):
        size = _setting(config, "image_size", "input_size", "img_size", default=64)
        channels = _setting(config, "num_channels", "in_channels", "in_chans", default=3)
        sides = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        inputs["pixel_values"] = torch.randn(2, channels, *sides, generator=draw)
    if main == "input_values":
        inputs["input_values"] = torch.randn(2, 16_000, generator=draw)
    if main == "input_features":
        mel = _setting(config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
        frames = 2 * _setting(config, "max_source_positions", default=100)
        inputs["input_features"] = torch.randn(2, mel, frames, generator=draw)
    return inputs


def _setting(config, *names, default):
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    values = (vars(one).get(name) for one in (config, *filter(None, inner)) for name in names)
    return next((value for value in values if isinstance(value, int | list | tuple)), default)
