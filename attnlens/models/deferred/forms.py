"""Which tensors a checkpoint's weight files hold for transformers, in each of the forms that weights are stored in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.errors import ModelError
from attnlens.models.building import gguf_files
from attnlens.models.deferred.coded_files import CodedFiles
from attnlens.models.deferred.reading import SafetensorsFiles, local
from attnlens.models.deferred.remote import RemoteFile
from attnlens.models.gguf import SAY_LOAD, GgufFiles
from attnlens.models.locate import Location
from attnlens.models.quantised import coded_weights, method_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def files_of(place: Location, config: PreTrainedConfig) -> SafetensorsFiles | CodedFiles | GgufFiles:
    """The tensors in the weight files of that place. Raises ModelError for a form that is not read in parts."""
    if place.form == "pickle":
        raise ModelError(
            f"{place.folder / place.file} is a pickle, of which no single tensors are read.",
            "Convert it to safetensors.",
        )
    if place.form == "gguf":
        found = gguf_files(place, config)
        if found is None:
            path = place.folder / place.file
            raise ModelError(f"{path} has an architecture of which no single tensors are read.", SAY_LOAD)
        return found
    remote = tuple(RemoteFile(name, url) for name, url in place.urls)
    files = SafetensorsFiles(remote) if remote else local(place.weights)
    method = method_of(place)
    return files if method is None else CodedFiles(files, coded_weights(place, method, files.places))
