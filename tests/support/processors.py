"""Processors for tiny models of any type: the type's own class with the sizes in the model's config.

A checkpoint on the hub has its processor's settings beside its weights; `save` writes them beside a tiny model's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from attnlens.errors import FAILURES, AttnlensError
from attnlens.models.texts import media
from attnlens.models.texts.sequences import decodes_text, reads_ids

SETTINGS = "processor_config.json"
NAMES = {
    "merge_size": ("spatial_merge_size",),
    "max_num_patches": ("num_patches",),
    "max_image_tiles": ("max_num_tiles",),
    "feature_size": ("num_mel_bins", "input_feat_per_channel"),
}
"""What a model's config calls a processor's setting where it has another name."""


CLASSES = {"wav2vec2-bert": "SeamlessM4TFeatureExtractor", "glm_ocr": "Glm46VImageProcessorPil"}
"""What checkpoints of a type say where it is not what transformers' table says."""

ALSO: dict[str, dict[str, Any]] = {
    "clap": {"truncation": "rand_trunc"},
    "gemma4": {"max_soft_tokens": 70},
    "gemma4_vision": {"max_soft_tokens": 70},
}
"""Settings that checkpoints of a type have and its config does not say."""

SMALL, LARGEST = 64, 224
"""Sides of images: that are cut into patches of any number, and of a model whose config names none."""


def save(model: Any, folder: Path) -> None:
    """Write the settings of the processors of images and sounds that the model runs with, if there are any."""
    found: dict[str, Any] = {}
    for key, table in (
        ("image_processor", IMAGE_PROCESSOR_MAPPING_NAMES),
        ("feature_extractor", FEATURE_EXTRACTOR_MAPPING_NAMES),
    ):
        try:
            made = class_of(model.config.model_type, table)
            if made is None:
                continue
            settings = json.loads(processor_of(made, model).to_json_string())
            (folder / SETTINGS).write_text(json.dumps({key: settings}))
            runs(model, "image" if key == "image_processor" else "audio", folder)
            found[key] = settings
        except (*FAILURES, OSError, ImportError, AttnlensError):
            continue
    (folder / SETTINGS).unlink(missing_ok=True)
    if found:
        (folder / SETTINGS).write_text(json.dumps(found))


def class_of(name: str, table: Any) -> Any:
    """The processor of a model type, or of the type whose encoder it is; None without one that needs no torchvision."""
    kind = "Image" if table is IMAGE_PROCESSOR_MAPPING_NAMES else "Feature"
    table = dict(table) | {other: made for other, made in CLASSES.items() if kind in made}
    known = [other for other in table if name == other or name.startswith(f"{other}_")]
    found = table[max(known, key=len)] if known else None
    return getattr(transformers, str(found.get("pil") if isinstance(found, dict) else found), None)


def processor_of(made: Any, model: Any) -> Any:
    """That processor with the sizes in the model's config."""
    own = made().to_dict()
    changed = {name: media.setting(model, *NAMES.get(name, (name,))) for name in own if not name.endswith("_type")}
    side = media.setting(model, "image_size", "crop_size", "input_size", "img_size")
    side = max(side) if isinstance(side, list | tuple) else side or LARGEST
    if "temporal_patch_size" in own:  # its sizes are numbers of pixels
        changed["size"] = {"shortest_edge": SMALL**2, "longest_edge": SMALL**2}
    for name in ("size", "crop_size", "max_image_size"):
        if isinstance(own.get(name), dict) and isinstance(side, int) and "temporal_patch_size" not in own:
            changed[name] = dict.fromkeys(own[name], side)
    if "chunk_length" in own and (length := media.setting(model, "max_source_positions")):
        changed["chunk_length"] = 2 * length * own["hop_length"] // own["sampling_rate"]
    if "max_patches" in own:  # an image is cut into about that many, whatever its size
        changed["max_patches"] = SMALL
    changed = {name: value for name, value in changed.items() if value is not None}
    if isinstance(changed.get("patch_size"), list | tuple):
        changed["patch_size"] = changed["patch_size"][-1]
    return made(**changed, **ALSO.get(model.config.model_type, {}))


def runs(model: Any, modality: media.Modality, folder: Path) -> None:
    """Raise if the model does not run on what the processor makes."""
    found = media.media_of(model, folder)
    del media._cache[model]  # later trials have other settings
    assert found.processors[modality] is not None
    if not reads_ids(model) and not decodes_text(model):
        with torch.no_grad():
            model(**media.Feed(model, found, 0).take([0]))
