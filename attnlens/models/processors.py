"""Loads what a checkpoint reads images and sounds with, or says why it can't be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from attnlens.errors import ModelError
from attnlens.models.folders import names_in, read_json
from attnlens.models.hub import first_line

if TYPE_CHECKING:
    from attnlens.models import Loaded

Modality = Literal["image", "audio"]
SETTINGS = ("processor_config.json", "preprocessor_config.json")
"""In which files transformers looks for the settings of a processor."""


def processor(loaded: Loaded, modality: Modality) -> Any:
    """What turns images, or sounds, into the inputs of this model.

    Raises ModelError where the checkpoint has none, where it would run code of its own, and where it can't be loaded.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    where = loaded.folder
    if where is None:
        raise ModelError(
            f"{loaded.info.id} has no folder that a processor could lie in.",
            "Load the model by its name or folder, or give its inputs to attnlens.capture.",
        )
    found = [name for name in SETTINGS if name in names_in(where)]
    if not found:
        raise ModelError(
            f"{where} has no {SETTINGS[1]}, which says how the model's {modality}s are prepared.",
            f"Copy it from the model's page, or leave out --{modality}: then noise is fed.",
        )
    if any("auto_map" in read_json(where / name) for name in found):
        raise ModelError(
            f"The processor of {loaded.info.id} is code of its own, which attnlens does not run.",
            f"Prepare the {modality}s yourself, and give them to attnlens.capture in Python.",
        )
    kind: Any = AutoImageProcessor if modality == "image" else AutoFeatureExtractor
    try:
        return kind.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ModelError(
            f"{where} has no processor of {modality}s that can be loaded: {first_line(error)}",
            f"Mend its {found[0]}, or leave out --{modality}.",
        ) from error
