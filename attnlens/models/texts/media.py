"""Images and sounds for a model, read from files or generated at random, and prepared by the checkpoint's processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from inspect import signature
from io import BytesIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from warnings import catch_warnings
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from attnlens.errors import FAILURES, ModelError, TextError, UsageError, is_memory
from attnlens.files import read_bytes, shorten_text, with_home
from attnlens.models.loading.locate import first_line, foreign
from attnlens.models.loading.placement import device_of_inputs
from attnlens.models.texts import sequences
from attnlens.models.trace import tensors
from attnlens.records import Text

if TYPE_CHECKING:
    from jaxtyping import Float
    from transformers import PreTrainedModel

    from attnlens.models.loading import Loaded

Modality = Literal["image", "audio"]
Processor = Callable[..., Mapping[str, object]]  # from images or sounds to tensors
INPUTS: dict[Modality, tuple[str, ...]] = {  # Possible parameter names of the prepared image or sound
    "image": ("pixel_values", "flattened_patches", "pixel_values_videos"),
    "audio": ("input_values", "input_features"),
}
RANDOM = {"image": "random pixels", "audio": "random sound"}  # names of random inputs in reports
TYPE_NUMBERS = {"image": 1, "audio": 3}  # values of `mm_token_type_ids` for placeholders; text is 0
MASKS = ("feature_attention_mask", "input_features_mask", "padding_mask")  # parameter names of a sound's mask
ALIASES = {"grid_thw": "image_grid_thw", "merge_sizes": "image_merge_sizes", "pixel_position_ids": "image_position_ids"}
"""Processors' names for inputs of vision models without a language model, keyed by the model's parameter name."""
SAY = {
    "image": "Give an image in a format that Pillow supports, such as .png or .jpg.",
    "audio": "Give an uncompressed .wav file (PCM with 8, 16, 24 or 32 bits).",
}
LARGEST_FILE = 2**28  # maximum size of an image or sound file in bytes
LARGEST_INPUT = 2**24  # maximum number of values in an image (2364 × 2364 in colour) or sound (17 minutes at 16 kHz)
MEMORY = 2**32  # maximum bytes that a processor can allocate: its settings, from the checkpoint, can request any size
COLOURS, IMAGE_SIZE = 16, 224  # squares and pixels along a random image's side; more squares would blur when resized
FRAMES, MOST_FRAMES = 8, 256  # frames of a random video if the config gives no number, and the maximum
RATE = 16_000  # samples per second if the processor gives no rate; samples of a random sound without a processor
Placeholder = tuple[Modality, int, int]  # a modality, its placeholder id, and the number of these ids before a text


@dataclass(frozen=True)
class Media:
    """Images and sounds that a model accepts."""

    processors: Mapping[Modality, Processor | None] = field(default_factory=dict)
    """The checkpoint's processor for each modality; None if the input is random numbers of the shape in the config."""
    before: tuple[Placeholder, ...] = ()  # placeholders before each text
    names: frozenset[str] = frozenset()  # keyword arguments of the forward pass for these modalities
    notes: tuple[str, ...] = ()  # one sentence for each modality that is not used, or not prepared by a processor


_cache: WeakKeyDictionary[PreTrainedModel, Media] = WeakKeyDictionary()


def media_of(model: PreTrainedModel, folder: Path | None = None) -> Media:
    """Return the images and sounds that a model accepts; the result is cached for each model.

    A modality that the model does not require is left out, with a note, if its random input can't be generated or if
    the model fails on it. Raises TextError if a required modality can't be generated. `folder` contains the processors.
    """
    if model not in _cache:
        media = Media()
        for modality in modalities(model):
            media = _add_modality(model, media, modality, folder)
        _cache[model] = media
    return _cache[model]


def _add_modality(model: PreTrainedModel, media: Media, modality: Modality, folder: Path | None) -> Media:
    """Return `media` with one more modality: prepared by the checkpoint's processor or, if that fails, random numbers.

    If this input can't be generated or the model fails on it, only a note is added unless the model requires the
    modality. Raises TextError if a required modality can't be generated.
    """
    processor, before, problem = None, tuple[Placeholder, ...](), ""
    try:
        processor = load_processor(model, modality, folder)
        inputs = _generate_input(model, modality, processor, 0, 0)
    except ModelError as error:
        processor, problem = None, error.problem
    try:
        if problem:
            inputs = _generate_input(model, modality, None, 0, 0)
        if sequences.reads_ids(model) and not hasattr(model, "get_text_features"):  # CLIP puts no image among its ids
            before = ((modality, *_count_placeholders(model, modality, inputs)),)
            trial, _ = Feed(model, Media({modality: processor}, before), 0).inputs(range(1), [plain_ids(model, 4)])
            with torch.no_grad():
                model(**trial)
    except (TextError, *FAILURES) as error:
        needed = _find_input_name(model, modality) in sequences.required_inputs(model)
        if is_memory(error) or (needed and isinstance(error, TextError)):
            raise
        if not needed:
            why = error.problem if isinstance(error, TextError) else f"{_format_failure(error)}."
            note = f"No {modality} is passed to the model: {why}{f' No processor: {problem}' if problem else ''}"
            return replace(media, notes=(*media.notes, note))
        before = ()
    note = f"The {modality} input is random numbers in the shape given by config.json. No processor: {problem}"
    return Media(
        {**media.processors, modality: processor},
        media.before + before,
        media.names.union(inputs),
        (*media.notes, note) if problem else media.notes,
    )


def modalities(model: PreTrainedModel) -> list[Modality]:
    """Return the modalities other than text for which the model's forward pass has a parameter."""
    return [modality for modality, inputs in INPUTS.items() if not _map_parameters(model).keys().isdisjoint(inputs)]


@dataclass
class Feed:
    """The images and sounds of each sequence, random or read from files; sequences are numbered from 0."""

    model: PreTrainedModel
    media: Media
    seed: int
    skip: int = 0  # number of random draws to skip
    files: Mapping[Modality, Sequence[Mapping[str, Tensor]]] = field(default_factory=dict)
    """Prepared inputs read from files, one item per sequence, keyed by modality."""

    def __post_init__(self) -> None:
        """Start the digest of each modality's random inputs."""
        self._digests = {modality: sha256() for modality in self.media.processors if modality not in self.files}

    def take(self, numbers: Iterable[int]) -> dict[str, Tensor]:
        """Return the concatenated images and sounds of the sequences `numbers`, keyed by parameter name."""
        each = []
        for number in numbers:
            inputs = dict[str, Tensor]()
            for modality, digest in self._digests.items():
                processor = self.media.processors[modality]
                random = _generate_input(self.model, modality, processor, self.seed, number + self.skip)
                for value in random.values():
                    digest.update(value.numpy().tobytes())
                inputs |= random
            for files in self.files.values():
                inputs |= files[number]
            each.append(inputs)
        return {name: torch.cat([item[name] for item in each]) for name in each[0]}

    def inputs(self, numbers: range, rows: Sequence[Sequence[int]], padding: int = 0) -> tuple[dict[str, Tensor], int]:
        """Return the inputs of the sequences `numbers`, and the number of placeholders before each text.

        `rows` contains the token ids of each sequence's text; it is empty if the model reads no text.
        """
        inputs, before = self.take(numbers), list[int]()
        if rows:
            placeholders = self._placeholders(numbers.start)
            before = [id_ for _, id_, count in placeholders for _ in range(count)]
            ids, mask = sequences.token_tensors([[*before, *row] for row in rows], padding)
            inputs |= sequences.text_inputs(self.model, ids, mask, len(before))
            if placeholders and "mm_token_type_ids" in signature(self.model.forward).parameters:
                inputs["mm_token_type_ids"] = torch.zeros_like(ids)
                known = [TYPE_NUMBERS[modality] for modality, _, count in placeholders for _ in range(count)]
                inputs["mm_token_type_ids"][:, : len(known)] = ids.new_tensor(known)
        return move_inputs(self.model, inputs), len(before)

    def _placeholders(self, number: int) -> list[Placeholder]:
        """Return the placeholders before the text of sequence `number`; raise ModelError if the model fails on it."""
        placeholders = [placeholder for placeholder in self.media.before if placeholder[0] not in self.files]
        for modality, inputs in self.files.items():
            try:
                placeholders.append((modality, *_count_placeholders(self.model, modality, inputs[number])))
            except FAILURES as error:
                if is_memory(error):
                    raise
                problem = f"The {modality} can't be passed to the model: {_format_failure(error)}."
                raise ModelError(problem, f"Leave out the {modality} files.") from error
        return placeholders

    @property
    def texts(self) -> list[Text]:
        """A record of the random inputs of each modality, with their SHA-256."""
        return [Text(name=RANDOM[modality], sha256=digest.hexdigest()) for modality, digest in self._digests.items()]


def read_files(loaded: Loaded, modality: Modality, paths: Sequence[str]) -> tuple[list[dict[str, Tensor]], list[Text]]:
    """Prepare each file with the checkpoint's processor; return the inputs, and a record of each file.

    Raises UsageError if the model does not read this modality, TextError if a file can't be read, and ModelError if
    there is no processor or if the processor fails.
    """
    if modality not in modalities(loaded.model):
        problem = f"{loaded.info.id} does not read {modality} input: {modality} files would be ignored."
        raise UsageError(problem, f"Leave out the {modality} files.")
    processor = load_processor(loaded.model, modality, loaded.folder)
    inputs, records = list[dict[str, Tensor]](), list[Text]()
    for path in paths:
        content = read_bytes(with_home(path), TextError, SAY[modality], most=LARGEST_FILE)
        raw: Sequence[object] | np.ndarray = ()
        if modality == "audio":
            raw = _samples(path, content, _find_rate(processor))
        else:
            with foreign(f"{path} can't be read as an image", SAY["image"], TextError):
                try:
                    raw = [Image.open(BytesIO(content)).convert("RGB")]
                except UnidentifiedImageError:  # its message contains the address of the content in memory
                    raise ValueError("unknown format") from None
        inputs.append(_apply_processor(loaded.model, modality, processor, raw, path))
        records.append(Text(name=Path(path).name, sha256=sha256(content).hexdigest(), windows=[0]))
    return inputs, records


def load_processor(model: PreTrainedModel, modality: Modality, folder: Path | None) -> Processor:
    """Load the checkpoint's image or audio processor from local files without running code, or raise ModelError."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    place = str(folder or model.name_or_path)
    name = place or type(model).__name__
    remedy = f"Correct the processor's settings, or leave out the {modality} files."
    class_ = AutoImageProcessor if modality == "image" else AutoFeatureExtractor
    load: Callable[..., Processor] = class_.from_pretrained
    revision = getattr(model.config, "_commit_hash", None)  # private: the commit from which the model was loaded
    with foreign(f"The processor of {name} can't be loaded", remedy), _bounded_memory():
        try:
            processor = load(place, revision=revision, local_files_only=True, trust_remote_code=False)
        except OSError as error:
            problem = f"{name} has no valid preprocessor_config.json, which describes how to prepare {modality} input."
            remedy = "Put this file into the model's folder, or pass prepared inputs to attnlens.capture."
            raise ModelError(problem, remedy) from error
    if hasattr(processor, "auto_map"):  # transformers would use its own class with the settings of another one
        problem = f"The processor of {name} is Python code in the checkpoint, which attnlens does not run."
        raise ModelError(problem, f"Prepare the {modality} input yourself, and pass it to attnlens.capture in Python.")
    return processor


def _generate_input(
    model: PreTrainedModel, modality: Modality, processor: Processor | None, seed: int, number: int
) -> dict[str, Tensor]:
    """Return the inputs for one random image or sound, determined by `seed` and `number`, or raise AttnlensError."""
    draws = np.random.default_rng([seed % 2**63, number])  # numpy takes no negative seeds
    if processor is None:
        numbers = draws.standard_normal(_shape(model, modality), np.float32)
        return {_find_input_name(model, modality): torch.from_numpy(numbers)[None]}
    if modality == "audio":
        samples = draws.normal(0, 0.1, _find_rate(processor)).astype(np.float32)
        return _apply_processor(model, modality, processor, samples, "a random sound")
    frames = _find_input_name(model, modality) == model.main_input_name and setting(model, "num_frames")
    height, width = (side if type(side) is int and 0 < side < IMAGE_SIZE else IMAGE_SIZE for side in _find_sides(model))
    images = [
        Image.fromarray(draws.integers(0, 256, (COLOURS, COLOURS, 3), np.uint8)).resize((width, height))
        for _ in range(frames if frames in range(1, MOST_FRAMES + 1) else 1)
    ]
    return _apply_processor(model, modality, processor, images, "a random image")


def _find_sides(model: PreTrainedModel) -> tuple[object, object]:
    """Return the height and width of images in the config, which can be invalid; the default is IMAGE_SIZE."""
    size = setting(model, "image_size", "crop_size", "input_size", "img_size") or IMAGE_SIZE
    if isinstance(size, dict):
        return size.get("height", size.get("shortest_edge")), size.get("width", size.get("shortest_edge"))
    sides = size if isinstance(size, list | tuple) else (size,)
    return sides[-2:][0], sides[-1]


def _shape(model: PreTrainedModel, modality: Modality) -> tuple[int, ...]:
    """Return the shape of one image, video or sound for this config; raise TextError if it is unknown or invalid."""
    name, shape = _find_input_name(model, modality), tuple[Any, ...]()
    if modality == "image":
        shape = (setting(model, "num_channels", "in_channels", "in_chans") or 3, *_find_sides(model))
        frames = setting(model, "num_frames", "frames_per_clip")
        if name == "pixel_values_videos" or (frames and name == model.main_input_name):
            shape = (frames or FRAMES, *shape)
    elif name == "input_values":
        shape = (RATE,)
    elif setting(model, "num_mel_bins") and setting(model, "max_source_positions"):  # Whisper halves the frames
        shape = setting(model, "num_mel_bins"), 2 * setting(model, "max_source_positions")
    if not shape:
        raise TextError(*sequences.describe_missing_inputs(model, [name]))
    if not all(isinstance(side, int) and side > 0 for side in shape) or prod(shape) > LARGEST_INPUT:
        sizes = " × ".join(shorten_text(str(side)) for side in shape)
        problem = f"The config requires {name} of {sizes} numbers, but only 1 to {LARGEST_INPUT:,} are supported."
        raise TextError(problem, "Correct the sizes in config.json.")
    return shape


def _samples(path: str, content: bytes, expected: int) -> Float[np.ndarray, " samples"]:
    """Return the samples of a .wav file, averaged over channels; integers are scaled to −1 … 1.

    Raises TextError if the file can't be read, is empty or too long, or does not have `expected` samples per second.
    """
    from scipy.io import wavfile

    with foreign(f"{path} can't be read as an audio file", SAY["audio"], TextError), catch_warnings(action="ignore"):
        rate, values = wavfile.read(BytesIO(content))  # it warns about chunks that are not sound
    if rate != expected:
        problem = f"{path} has {rate} samples per second, but the model expects {expected}."
        raise TextError(problem, f"Convert it first, for example: ffmpeg -i {path} -ar {expected} -ac 1 converted.wav")
    if not len(values) or len(values) > LARGEST_INPUT:
        problem = f"{path} has {len(values):,} samples, but must have between 1 and {LARGEST_INPUT:,}."
        raise TextError(problem, "Give an audio file of a few seconds.")
    if values.dtype == np.uint8:  # 8-bit samples count from 128, longer ones from 0
        values = (values.astype(np.int16) - 128) * 256
    scale = 2.0 ** (8 * values.itemsize - 1) if values.dtype.kind == "i" else 1.0
    samples: np.ndarray = (values.reshape(len(values), -1) / scale).mean(1).astype(np.float32)
    return samples


def _find_rate(processor: Processor) -> int:
    """Return the samples per second that a processor expects, or RATE if the processor has no valid rate."""
    rate = getattr(processor, "sampling_rate", None)
    return rate if isinstance(rate, int) and 0 < rate <= LARGEST_INPUT else RATE


def _apply_processor(
    model: PreTrainedModel, modality: Modality, processor: Processor, raw: Sequence[object] | np.ndarray, name: str
) -> dict[str, Tensor]:
    """Apply the processor to images or samples; return the tensors that the model accepts, keyed by parameter name."""
    names, options = _map_parameters(model), dict[str, object]()
    if modality == "audio":
        options["sampling_rate"] = _find_rate(processor)
        if names.get("attention_mask") in MASKS and "return_attention_mask" in signature(processor).parameters:
            options["return_attention_mask"] = True
    problem, remedy = f"The model's processor fails on {name}", f"Give another file, or leave out the {modality} files."
    with foreign(problem, remedy), _bounded_memory():
        result = dict(processor(raw, return_tensors="pt", **options))
    inputs = {names[name]: value for name, value in result.items() if name in names and isinstance(value, Tensor)}
    if not any(names.get(name) in inputs for name in INPUTS[modality]):
        problem = f"The model's processor returns {', '.join(result)}, but {type(model).__name__} accepts none of them."
        raise ModelError(problem, f"Leave out the {modality} files.")
    return inputs


def _map_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Map the names that processors use to the parameters of the model's forward pass."""
    parameters = signature(model.forward).parameters
    names = {name: name for name in parameters} | {alias: name for name, alias in ALIASES.items() if name in parameters}
    if "grid_thw" in parameters and "hidden_states" in parameters:
        names["pixel_values"] = "hidden_states"
    masks = [name for name in MASKS if name in parameters]
    if "input_ids" in names:  # `attention_mask` belongs to the ids
        names.pop("attention_mask", None)
    if masks:
        names.setdefault("attention_mask", masks[0])
    return names


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """On Linux, make allocations inside the `with` fail if they exceed MEMORY bytes in total."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_AS, getpagesize, getrlimit, setrlimit

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        yield
        return
    soft, hard = getrlimit(RLIMIT_AS)
    limit = pages * getpagesize() + MEMORY
    try:
        setrlimit(RLIMIT_AS, (limit if soft == RLIM_INFINITY else min(soft, limit), hard))
        yield
    finally:
        setrlimit(RLIMIT_AS, (soft, hard))


def _find_input_name(model: PreTrainedModel, modality: Modality) -> str:
    """Return the name of the forward pass's parameter for the prepared image or sound."""
    names = _map_parameters(model)
    return next(names[name] for name in INPUTS[modality] if name in names)


def setting(model: PreTrainedModel, *names: str) -> Any:  # settings of config.json have any type
    """Return the first of these settings in the config or, level by level, in nested configs; None if absent."""
    level: list[object] = [model.config]
    while level:
        values = [value for config in level for name in names if (value := getattr(config, name, None)) is not None]
        if values:
            return values[0]
        level = [getattr(config, name, None) for config in level for name in getattr(config, "sub_configs", ())]
    return None


def _count_placeholders(model: PreTrainedModel, modality: Modality, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the placeholder id and the number of placeholders for `inputs`; (0, 0) if the model uses none."""
    token, method = setting(model, f"{modality}_token_id", f"{modality}_token_index"), f"get_{modality}_features"
    owners = [part for part in model.modules() if hasattr(part, method)]
    if token is None or not owners:
        return 0, 0
    run = getattr(owners[-1], method)  # the innermost module, whose method names all of its parameters
    parameters = signature(run).parameters
    with torch.no_grad():
        result = run(**{name: value for name, value in move_inputs(model, inputs).items() if name in parameters})
    features = result if isinstance(result, list | tuple | Tensor) else result.pooler_output
    return token, sum(value.shape[:-1].numel() for value in tensors(features))


def _format_failure(error: Exception) -> str:
    return f"the model fails on it ({type(error).__name__}: {first_line(error)})"


def placeholder_ids(model: PreTrainedModel) -> set[int]:
    """Return the token ids that stand for images or sounds."""
    names = [f"{modality}_token_{suffix}" for modality in INPUTS for suffix in ("id", "index")]
    return {token for name in names if (token := setting(model, name)) is not None}


def plain_ids(model: PreTrainedModel, count: int) -> list[int]:
    """Return `count` token ids, from 10 upwards, that are not placeholders."""
    placeholders = placeholder_ids(model)
    return [id_ for id_ in range(10, 10 + count + len(placeholders)) if id_ not in placeholders][:count]


def move_inputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move inputs to the model's device, and convert floating-point inputs to its dtype."""
    device, dtype = device_of_inputs(model), model.dtype
    return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()}
