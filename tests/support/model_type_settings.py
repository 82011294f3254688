"""Settings of single model types, besides those that tests/support/model_types.py shrinks in all types."""

VOCABULARY = 320
listed = str.split

# fmt: off
THREE_AXES = {"rope_parameters": {"mrope_section": [2, 3, 3], "rope_theta": 10000.0}}
HALF_TURNED = {"rope_parameters": {"mrope_section": [2, 1, 1]}}
PREROTATED = {"rope_parameters": {"mrope_section": [3, 3, 2], "rope_theta": 10000.0}}
THREE_AXES_INSIDE = {"text_config": THREE_AXES}
SERIES = {"prediction_length": 4, "context_length": 8}
ALL_HEADS = {"num_key_value_heads": 4}
STARTS = {"decoder_start_token_id": 0}
STANDS = {"image_token_index": 300, "image_token_id": 300, "video_token_index": 300}
STAGES = ["stage1", "stage2", "stage3", "stage4"]
FOUR_STAGES = {
    "backbone_config": {"num_hidden_layers": 4, "out_features": STAGES}, "neck_hidden_sizes": [16, 16, 16, 16],
    "fusion_hidden_size": 16, "reassemble_hidden_size": 64,
}
FEW_TOKENS = {"mm_tokens_per_image": 4}
TILES = {"image_grid_pinpoints": [[32, 32], [32, 64]]}
SEEN = {"vision_config": {"projection_dim": 64}, "projection_dim": 64}
PROJECTED = {"text_config": {"projection_size": 64}}
SAM = {
    "vision_config": {"hidden_size": 64, "image_size": 64, "patch_size": 16, "output_channels": 32, "window_size": 2,
    "global_attn_indexes": [1], "num_attention_heads": 4, "mlp_dim": 96, "mlp_ratio": 2.0, "num_pos_feats": 16},
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 16, "image_embedding_size": 4,
    "mask_input_channels": 4}, "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 4,
    "iou_head_hidden_dim": 32},
}
PROMPTED = {
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
    "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 32, "iou_head_hidden_dim": 32},
}
HIERA = {
    "hidden_size": 16, "image_size": [64, 64], "embed_dim_per_stage": [16, 32, 64, 128],
    "blocks_per_stage": [1, 1, 2, 1], "global_attention_blocks": [3], "window_size_per_stage": [4, 2, 4, 2],
    "num_attention_heads": 1,
}
HIERA_SEEN = {
    "backbone_config": HIERA, "backbone_channel_list": [128, 64, 32, 16], "fpn_hidden_size": 32,
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}
CODES = {"base_channels": 32, "num_res_blocks": 1}
MIXED_TURNS = {
    "rope_parameters": {"full_attention": {"rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    "sliding_attention": {"rope_theta": 10000.0, "mrope_section": [4, 2, 2]}},
    "layer_types": ["sliding_attention", "full_attention"],
}
WINDOWED_LATENTS = {"head_dim": 24, "shared_experts_intermediate_size": 32}
FOUR_RESOLUTIONS = {
    "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_hidden_layers": 4, "patch_sizes": [4, 5, 5, 4],
}
KERNELS = {"longratio": 7, "midratio": 5, "shortratio": 3}
STROKES = {
    "intraclass_block_config": {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]}
    | {f"vertical_long_to_small_conv_{way}": [[size, 1], 1, [size // 2, 0]] for way, size in KERNELS.items()}
    | {f"horizontal_small_to_long_conv_{way}": [[1, size], 1, [0, size // 2]] for way, size in KERNELS.items()}
    | {f"symmetric_conv_long_{way}": [size, 1, size // 2] for way, size in KERNELS.items()},
    "scale_factor_list": [1, 2, 4, 8], "kernel_list": [3, 2, 2], "neck_out_channels": 32,
}
INDEXED = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 4, "hc_lowrank": 16, "ple_layer_ids": [1], "ple_embed_dim": 64, "eos_token_id": 2,
    "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1,
    "number_of_conv_states": 3,
}
FOUR_AXES = {"rope_parameters": {"mrope_section": [2, 2, 2, 2]}}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
FINER = {
    "vision_config": {"fpn_hidden_size": 64, "backbone_config": {"global_attn_indexes": [1], "window_size": 2,
    "pretrain_image_size": 32, "image_size": 64}},
}
FEW_BLOCKS = {"index_block_size": 4, "index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]}
FEW_FILTERS = {"num_filters": 4}
TEXTS = {"glm4v_moe": HALF_TURNED, "hunyuan_vl": FOUR_AXES, "minimax_m3_vl": FEW_BLOCKS, "qwen4_exp": INDEXED}
CHANGES = {
    **dict.fromkeys(listed("qwen2_vl_text qwen2_5_vl_text glm4v_text glm_image_text glm_ocr_text"), THREE_AXES),
    **dict.fromkeys(listed("qwen2_vl qwen2_5_vl glm46v glm4v glm_image glm_ocr paddleocr_vl"), THREE_AXES_INSIDE),
    **dict.fromkeys(listed("informer autoformer time_series_transformer"), SERIES),
    **dict.fromkeys(listed("longt5 t5 pop2piano switch_transformers"), STARTS),
    **dict.fromkeys(listed("siglip siglip2"), PROJECTED),
    **dict.fromkeys(listed("blip-2 instructblip instructblipvideo"), STANDS),
    **dict.fromkeys(listed("llava_next llava_next_video llava_onevision"), TILES),
    **dict.fromkeys(listed("paligemma janus"), SEEN),
    **dict.fromkeys(listed("chmv2 depth_anything zoedepth tipsv2_dpt prompt_depth_anything"), FOUR_STAGES),
    **dict.fromkeys(listed("moonshine_streaming granite_speech5_encoder nemotron3_diarization_audio"), ALL_HEADS),
    **dict.fromkeys(listed("sam3 sam3_lite_text"), FINER),
    **{f"vibevoice_acoustic_tokenizer{part}": FEW_FILTERS for part in ("", "_decoder", "_encoder")},
    **{f"{name}_text": changes for name, changes in TEXTS.items()},
    **{name: {"text_config": changes} for name, changes in TEXTS.items()},
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 16}, "autoformer": SERIES | {"label_length": 4},
    "bailing_hybrid": {"num_expert_group": 1}, "bamba": {"attn_layer_indices": [1], "mamba_d_head": 16},
    "big_bird": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 256, "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64}},
    "bros": {"dim_bbox_sinusoid_emb_2d": 16, "dim_bbox_sinusoid_emb_1d": 2, "dim_bbox_projection": 16},
    "chameleon": {"vocabulary_map": {"<image>": 300} | {f"IMGIMG{'ABCDEFGH'[i]}Z": 304 + i for i in range(8)},
        "vq_config": CODES | {"resolution": 32, "num_embeddings": 8, "channel_multiplier": [1, 1, 1, 1]}},
    "clap": {"audio_config": {"patch_embeds_hidden_size": 32, "hidden_size": 256}},
    "clvp": {"text_config": {"num_attention_heads": 2}, "speech_config": {"num_attention_heads": 2}},
    "cohere_compass": {"text_config": MIXED_TURNS, "vision_config": {"deepstack_visual_indexes": [0]}},
    "cohere_compass_text": MIXED_TURNS, "colpali": {"vlm_config": SEEN},
    "colqwen2": {"vlm_config": {"text_config": THREE_AXES}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "num_key_value_heads": 2},
    "deberta": RELATIVE,
    "deberta-v2": RELATIVE | {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"sam_config": {"downsample_channels": [32, 64]}}},
    "depth_pro": {"intermediate_hook_ids": [1, 0], "intermediate_feature_dims": [16, 16]},
    "dia": {"decoder_start_token_id": 1},
    "diffusion_gemma": {"canvas_length": 16, "text_config": {"num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32}},
    "dots3_note": {"text_config": WINDOWED_LATENTS, "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16,
        "conv_output_size": 256}}, "dots3_note_text": WINDOWED_LATENTS,
    "emu3": {"vocabulary_map": {"<image>": 300, "<|extra_200|>": 301}
        | {f"<|visual token {code:06d}|>": 304 + code for code in range(8)}, "vq_config": CODES | {"codebook_size": 8,
        "channel_multiplier": [1, 1, 1, 1]}}, "encoder-decoder": {"decoder_start_token_id": 1, "pad_token_id": 0},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 16]} | PREROTATED},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4, "emb_layer_norm_before": False,
        "position_embedding_type": "rotary"}, "esmc": {"mask_token_id": 4, "num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16}, "florence2": STARTS | SEEN,
    "gemma3": FEW_TOKENS, "glmga": THREE_AXES_INSIDE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"],
        "window_size": 4, "intermediate_size": 96},
    "granite4_vision": TILES | {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1, 1, 1, 1]}, "granite_speech5_ctc": ALL_HEADS | {"encoder_config": ALL_HEADS},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 8},
    "kosmos-2": {"latent_query_num": 4}, "led": {"attention_window": [8, 8]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lightglue": {"keypoint_detector_config": {"max_keypoints": 32}},
    "lilt": {"hidden_size": 48, "num_attention_heads": 4},
    "llama4": {"vision_config": {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64,
        "vision_output_dim": 64}}, "longformer": {"attention_window": [8, 8]},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "mistral4": {"head_dim": 8, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    "molmo2": {"vision_config": {"image_size": [32, 32], "num_position_embeddings": 16},
        "adapter_config": {"vision_feature_layer": [1, 0]}, "image_patch_id": 300},
    "muse_spark": {"text_config": {"moe_hidden_size": 32}, "vision_config": {"max_position_embeddings": 1024},
        "audio_config": FOUR_RESOLUTIONS, "out_hidden_size": 256, "projector_hidden_size": 64},
    "muse_spark_audio": FOUR_RESOLUTIONS,
    "nemo_speechlm": {"word_timestamp_config": ALL_HEADS, "audio_config": {"asr_config": ALL_HEADS,
        "diarization_config": {"audio_config": ALL_HEADS}}}, "nemotron": {"num_key_value_heads": 2},
    "nemotron3_5_transcribe_asr_audio": ALL_HEADS, "nemotron3_diarization": {"audio_config": ALL_HEADS},
    "omdet-turbo": {"backbone_config": {"embed_dim": 16, "num_heads": [2, 2, 4, 4], "image_size": 64},
        "encoder_in_channels": [32, 64, 128]},
    "perceiver": {"d_model": 64, "num_latents": 8, "d_latents": 64, "num_self_attends_per_block": 2},
    "pp_doclayout_v2": {"class_thresholds": [0.5] * 25, "class_order": list(range(25))}, "pp_ocrv5_server_det": STROKES,
    "pp_ocrv6_medium_det": STROKES | {"backbone_config": {"out_features": STAGES, "stem_channels": [3, 8, 8],
        "block_configs": [[[3, 8, 8, stride, False]] for stride in (1, 2, 2, 2)], "depths": [1, 1, 1, 1],
        "stage_out_channels": [8, 8, 8, 8]}},
    "qwen2_5_omni_thinker": THREE_AXES_INSIDE | {"vision_start_token_id": 303, "audio_config": {"output_dim": 64}},
    "qwen3_omni_moe": {"thinker_config": THREE_AXES_INSIDE, "talker_config": {"spatial_merge_size": 2,
        "text_config": {"shared_expert_intermediate_size": 32} | THREE_AXES}},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 303, "audio_start_token_id": 304},
    "reformer": {"axial_pos_embds": False, "num_buckets": 2, "hidden_size": 64, "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4}, "sam": SAM,
    "sam2": PROMPTED | {"vision_config": HIERA_SEEN, "prompt_encoder_config": PROMPTED["prompt_encoder_config"]
        | {"patch_size": 16}}, "sam2_hiera_det_model": HIERA, "sam2_vision_model": HIERA_SEEN,
    "sam3_tracker": PROMPTED | {"vision_config": {"fpn_hidden_size": 32,
        "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]], "backbone_config": {"image_size": 64, "window_size": 4,
        "global_attn_indexes": [1]}}},
    "sam_hq": SAM | {"mask_decoder_config": SAM["mask_decoder_config"] | {"vit_dim": 64}},
    "seggpt": {"image_size": [64, 32]}, "shieldgemma2": FEW_TOKENS | {"yes_token_index": 20, "no_token_index": 21},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "superglue": {"keypoint_encoder_sizes": [32, 64], "gnn_layers_types": ["self", "cross"],
        "keypoint_detector_config": {"descriptor_decoder_dim": 64, "max_keypoints": 32}},
    "t5gemma2_encoder": FEW_TOKENS | {"text_config": {"dropout_rate": 0.0}},
    "vibevoice": {"audio_config": FEW_FILTERS, "semantic_model_config": FEW_FILTERS},
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": FEW_FILTERS,
        "semantic_tokenizer_encoder_config": FEW_FILTERS},
    "vitmatte": {"backbone_config": {"patch_size": 16, "image_size": 32}},
    "vjepa2": {"crop_size": 32, "frames_per_clip": 4, "pred_hidden_size": 64, "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 2, "pred_num_mask_tokens": 2},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3,
        "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 4},
    "zamba2": {"mamba_headdim": 16, "attention_hidden_size": 128, "attention_head_dim": 32, "hybrid_layer_ids": [1]},
    "zoedepth": FOUR_STAGES | {"bottleneck_features": 16},
}
# fmt: on
"""Changes of the configuration by type; later ones replace earlier ones."""
