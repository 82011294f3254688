"""Processors for tiny models of any type: the type's own class with the sizes in the model's config.

A checkpoint on the hub has its processor's settings beside its weights; `save` writes them beside a tiny model's.
"""

import json

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
"""A processor's setting → its other names in a model's config."""
ALSO = {"clap": {"truncation": "rand_trunc"}, **{name: {"max_soft_tokens": 70} for name in ("gemma4", "gemma4_vision")}}
"""Model type → settings of its checkpoints that its config lacks."""
SMALL, LARGEST = 64, 224
"""Sides of images: if they are cut into any number of patches, and if the config names no side."""
KINDS = {
    "image_processor": ("image", dict(IMAGE_PROCESSOR_MAPPING_NAMES) | {"glm_ocr": "Glm46VImageProcessorPil"}),
    "feature_extractor": (
        "audio",
        dict(FEATURE_EXTRACTOR_MAPPING_NAMES) | {"wav2vec2-bert": "SeamlessM4TFeatureExtractor"},
    ),
}
"""Key in the file → modality, and the class of each type: that in transformers' table or, for two types, that in their
checkpoints."""


def save(model, folder):
    """Write the settings of the image and audio processors with which the model runs, if any."""
    path, working = folder / SETTINGS, {}
    for key, (modality, table) in KINDS.items():
        try:
            class_ = class_of(model.config.model_type, table)
            if class_ is not None:
                settings = json.loads(processor_of(class_, model).to_json_string())
                path.write_text(json.dumps({key: settings}))
                run(model, modality, folder)
                working[key] = settings
        except (*FAILURES, OSError, ImportError, AttnlensError):
            continue
    path.unlink(missing_ok=True)
    if working:
        path.write_text(json.dumps(working))


def class_of(name, table):
    """Return the processor of a model type, or of the type whose part it is; None if all need torchvision."""
    known = [other for other in table if name == other or name.startswith(f"{other}_")]
    entry = table[max(known, key=len)] if known else None
    return getattr(transformers, str(entry.get("pil") if isinstance(entry, dict) else entry), None)


def processor_of(class_, model):
    """Build this processor with the sizes in the model's config."""
    default = class_().to_dict()
    changed = {name: media.setting(model, *NAMES.get(name, (name,))) for name in default if not name.endswith("_type")}
    side = media.setting(model, "image_size", "crop_size", "input_size", "img_size")
    side = max(side) if isinstance(side, list | tuple) else side or LARGEST
    if "temporal_patch_size" in default:  # its sizes are numbers of pixels
        changed["size"] = {"shortest_edge": SMALL**2, "longest_edge": SMALL**2}
    for name in ("size", "crop_size", "max_image_size"):
        if isinstance(default.get(name), dict) and isinstance(side, int) and "temporal_patch_size" not in default:
            changed[name] = dict.fromkeys(default[name], side)
    if "chunk_length" in default and (length := media.setting(model, "max_source_positions")):
        changed["chunk_length"] = 2 * length * default["hop_length"] // default["sampling_rate"]
    if "max_patches" in default:  # an image is cut into about that many, whatever its size
        changed["max_patches"] = SMALL
    changed = {name: value for name, value in changed.items() if value is not None}
    if isinstance(changed.get("patch_size"), list | tuple):
        changed["patch_size"] = changed["patch_size"][-1]
    return class_(**changed, **ALSO.get(model.config.model_type, {}))


def run(model, modality, folder):
    """Raise if the model does not run on the processor's output."""
    accepted = media.media_of(model, folder)
    del media._cache[model]  # later trials have other settings
    assert accepted.processors[modality] is not None
    if not reads_ids(model) and not decodes_text(model):
        with torch.no_grad():
            model(**media.Feed(model, accepted, 0).take([0]))
