"""Which tensors a checkpoint's weight files hold for transformers, in each of the forms that weights are stored in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.errors import ModelError
from attnlens.models.deferred.gguf_files import SAY_LOAD, GgufFiles
from attnlens.models.deferred.reading import SafetensorsFiles, local
from attnlens.models.deferred.remote import RemoteFile
from attnlens.models.locate import Location
from attnlens.models.quantised import method_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def files_of(place: Location, config: PreTrainedConfig) -> SafetensorsFiles | GgufFiles:
    """The tensors in the weight files of that place. Raises ModelError for a form that is not read in parts."""
    if place.form == "pickle":
        raise ModelError(
            f"{place.folder / place.file} is a pickle, of which no single tensors are read.",
            "Convert it to safetensors.",
        )
    if method := method_of(place):
        raise ModelError(
            f"The weights of {place.folder} are quantised by {method}, and are decoded all at once.", SAY_LOAD
        )
    if place.form == "gguf":
        return GgufFiles(place, config)
    if place.urls:
        return SafetensorsFiles(tuple(RemoteFile(name, url) for name, url in place.urls))
    return local(place.weights)
