"""Reads images and sounds from files, and prepares them as the checkpoint's own processor does."""

from __future__ import annotations

import wave
from collections.abc import Mapping, Sequence
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlens.errors import FAILURES, ModelError, TextError, UsageError
from attnlens.files import read_bytes, with_home
from attnlens.models.hub import first_line
from attnlens.models.processors import Modality, processor
from attnlens.records import Text
from attnlens.texts.noise import LARGEST_INPUT, OF, makable

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.models import Loaded

LARGEST_FILE = 2**28
"""Bytes of the largest image or sound that is read."""
SAY = {
    "image": "Give a picture that Pillow reads, such as a .png or .jpg file.",
    "audio": "Give a .wav file of plain samples (PCM of 8, 16, 24 or 32 bits).",
}
"""Which files are read."""
MASKS = ("feature_attention_mask", "input_features_mask", "padding_mask")
"""What models that read text beside a sound call the sound's mask."""


def prepared(loaded: Loaded, modality: Modality, paths: Sequence[str]) -> tuple[list[dict[str, Tensor]], list[Text]]:
    """The inputs that the checkpoint's processor makes of each file, and what these files are.

    Raises UsageError for a model that reads no such thing, TextError for a file that can't be read, and ModelError
    where the checkpoint has no processor, or one that fails.
    """
    own = [name for name in makable(loaded.model) if OF[name] == modality]
    if not own:
        raise UsageError(
            f"{loaded.info.id} reads no {modality}, so that --{modality} would be ignored.", f"Leave out --{modality}."
        )
    reader = processor(loaded, modality)
    contents = [(path, read_bytes(with_home(path), TextError, SAY[modality], most=LARGEST_FILE)) for path in paths]
    made = _images if modality == "image" else _sounds
    inputs = [_named(loaded, made(reader, path, content)) for path, content in contents]
    return inputs, [
        Text(name=Path(path).name, sha256=sha256(content).hexdigest(), windows=[0]) for path, content in contents
    ]


def _images(reader: Any, path: str, content: bytes) -> Mapping[str, Any]:
    from io import BytesIO

    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(content)) as found:
            picture = found.convert("RGB")
    except UnidentifiedImageError:
        raise TextError(f"{path} can't be read as an image: its format is not known.", SAY["image"]) from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise TextError(f"{path} can't be read as an image: {first_line(error)}", SAY["image"]) from None
    return _processed(lambda: reader(images=[picture], return_tensors="pt"), path)


def _sounds(reader: Any, path: str, content: bytes) -> Mapping[str, Any]:
    samples, rate = _samples(path, content)
    wanted = getattr(reader, "sampling_rate", None)
    if wanted is not None and rate != wanted:
        raise TextError(
            f"{path} has {rate} samples a second, and the model hears {wanted}.",
            f"Convert it first, as with: ffmpeg -i {path} -ar {wanted} -ac 1 converted.wav",
        )
    return _processed(lambda: reader(samples, sampling_rate=rate, return_tensors="pt"), path)


def _samples(path: str, content: bytes) -> tuple[Float[np.ndarray, " samples"], int]:
    """The samples of a .wav file between −1 and 1, the mean of its channels, and how many there are in a second."""
    from io import BytesIO

    import numpy as np

    try:
        with wave.open(BytesIO(content)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise TextError(f"{path} can't be read as a sound: {first_line(error)}", SAY["audio"]) from None
    raw = raw[: len(raw) // (width * channels) * width * channels]
    if not raw or len(raw) // (width * channels) > LARGEST_INPUT:
        raise TextError(f"{path} holds {len(raw) // (width * channels)} samples.", "Give a sound of a few seconds.")
    whole = np.frombuffer(raw, np.uint8).reshape(-1, width).astype(np.int64)
    if width == 1:  # of one byte they count from 128, of more from 0
        values = whole[:, 0] - 128
    else:
        values = (whole << (8 * np.arange(width))).sum(1)
        values -= (values >> (8 * width - 1)) << (8 * width)
    return (values / 2.0 ** (8 * width - 1)).reshape(-1, channels).mean(1).astype(np.float32), rate


def _processed(run: Any, path: str) -> Mapping[str, Any]:
    try:
        result: Mapping[str, Any] = run()
    except FAILURES as error:
        raise ModelError(
            f"The model's processor fails on {path}: {first_line(error)}", "Give another file, or leave it out."
        ) from error
    return result


def _named(loaded: Loaded, result: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the model takes of it, under the names of its forward pass."""
    import torch

    taken = signature(loaded.model.forward).parameters
    mask = "attention_mask"
    if "input_ids" in taken:  # whose own mask is called so
        mask = next((name for name in MASKS if name in taken), "")
    named = {mask if name == "attention_mask" else name: value for name, value in result.items()}
    return {name: value for name, value in named.items() if name in taken and isinstance(value, torch.Tensor)}
