"""What a model is fed beside a text, or in its place: which inputs, and which ids stand for them in the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attnlens.errors import FAILURES, TextError, is_memory
from attnlens.models.hub import first_line
from attnlens.records import Text
from attnlens.texts.inputs import not_made, reads_ids, wanted
from attnlens.texts.noise import OF, SAID, is_packed, made, makable, said, values_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

STANDING = {
    "image": (("image_token_id", "image_token_index"), "get_image_features"),
    "audio": (("audio_token_id", "audio_token_index"), "get_audio_features"),
}
"""What the configuration calls the id that stands for a part of an image or a sound, and what gives these parts."""
TYPES = {"image": 1, "audio": 3}
"""What `mm_token_type_ids` calls them; text is 0."""
PROBE = tuple(range(10, 14))
"""Ids of a text of no meaning."""


@dataclass(frozen=True)
class Towers:
    """Which inputs a model is given beside ids, and how many ids stand for them."""

    names: tuple[str, ...]
    """Of the inputs."""
    before: tuple[tuple[str, int, int], ...] = ()
    """What stands before each text: modality, id, and how many of it."""
    notes: tuple[str, ...] = ()
    """Which tower does not run, and why."""
    alone: bool = False
    """Whether every sequence needs a pass of its own, since the images of a batch would stand in one row."""

    @property
    def ids(self) -> list[int]:
        """What stands before each text."""
        return [number for _, number, count in self.before for _ in range(count)]

    @property
    def types(self) -> list[int]:
        """What each of them stands for."""
        return [TYPES[modality] for modality, _, count in self.before for _ in range(count)]


_found: WeakKeyDictionary[PreTrainedModel, Towers] = WeakKeyDictionary()


def towers(model: PreTrainedModel) -> Towers:
    """The inputs that can be made up for the model, less those under which it does not run; found once.

    A language model that sees or hears gets as many ids of its own for an image or a sound as its tower makes parts of
    it, counted on noise. Where the tower, or the model behind it, fails, it is left out and the reason is told.
    """
    if model not in _found:
        _found[model] = _towers(model)
    return _found[model]


def _towers(model: PreTrainedModel) -> Towers:
    names = makable(model)
    before, notes = list[tuple[str, int, int]](), list[str]()
    for modality, (ids, features) in STANDING.items():
        own = tuple(name for name in names if OF[name] == modality)
        number = next((one for name in ids if (one := said(model.config, name)) is not None), None)
        if not own or number is None or not reads_ids(model):
            continue
        found = _parts(model, own, features)
        if isinstance(found, int):
            found = _refusal(model, _of(model, own, ((modality, number, found),))) or found
        if isinstance(found, int):
            before.append((modality, number, found))
        elif not set(own) & set(wanted(model)):
            names = tuple(name for name in names if name not in own)
            notes.append(f"No {modality} is fed: {found}.")
    return _of(model, names, tuple(before), tuple(notes))


def _of(
    model: PreTrainedModel,
    names: tuple[str, ...],
    before: tuple[tuple[str, int, int], ...],
    notes: tuple[str, ...] = (),
) -> Towers:
    return Towers(names, before, notes, alone=is_packed(model) and any(OF[name] == "image" for name in names))


class Noise:
    """Draws the inputs of one sequence after the other, whatever the size of a batch."""

    def __init__(self, model: PreTrainedModel, given: Towers, seed: int, skip: int = 0) -> None:
        """Leaves out the first `skip` draws."""
        import torch

        self._model, self._names = model, given.names
        self._draws = torch.Generator().manual_seed(seed)
        self._digests = {name: sha256() for name in given.names}
        for _ in range(skip):
            made(model, given.names, self._draws, 1)

    def take(self, count: int, width: int) -> dict[str, Tensor]:
        """The inputs of the next `count` sequences of `width` ids."""
        import torch

        each = [made(self._model, self._names, self._draws, width) for _ in range(count)]
        missing = [name for name in wanted(self._model) if name in OF and name not in each[0]]
        if missing:
            raise TextError(*not_made(self._model, missing))
        inputs = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        for name, tensor in inputs.items():
            self._digests[name].update(tensor.numpy().tobytes())
        return inputs

    @property
    def described(self) -> list[Text]:
        """What was drawn, as what was fed; masks and grids are no noise of their own."""
        seen = dict[str, Any]()
        for name, digest in self._digests.items():
            if OF[name] in SAID:
                seen.setdefault(OF[name], digest)
        return [Text(name=SAID[modality], sha256=digest.hexdigest()) for modality, digest in seen.items()]


def _parts(model: PreTrainedModel, names: tuple[str, ...], features: str) -> int | str:
    """How many ids stand for one image or sound, or why it can't be told."""
    import torch

    owner: Any = next((part for part in _nested(model) if hasattr(part, features)), None)
    if owner is None:
        return f"{type(model).__name__} has no {features}"
    try:
        inputs = placed(model, made(model, names, torch.Generator().manual_seed(0), len(PROBE)))
        taken = signature(getattr(owner, features)).parameters
        with torch.no_grad():
            result = getattr(owner, features)(**{name: value for name, value in inputs.items() if name in taken})
    except FAILURES as error:
        if is_memory(error):
            raise
        return f"its tower fails on noise ({type(error).__name__}: {first_line(error)})"
    found = result if isinstance(result, list | tuple | torch.Tensor) else result.pooler_output
    return sum(value.shape[:-1].numel() for value in values_of(found))


def _refusal(model: PreTrainedModel, only: Towers) -> str | None:
    """Why the model does not run on four ids behind one image or sound; None where it does."""
    import torch

    try:
        ids = torch.tensor([[*only.ids, *PROBE]])
        inputs: Mapping[str, Tensor] = Noise(model, only, 0).take(1, ids.shape[1]) | types_of(model, only, ids)
        with torch.no_grad():
            model(input_ids=ids.to(model.device), **placed(model, inputs))
    except FAILURES as error:
        if is_memory(error):
            raise
        return f"the model fails on noise ({type(error).__name__}: {first_line(error)})"
    return None


def types_of(model: PreTrainedModel, given: Towers, ids: Tensor) -> dict[str, Tensor]:
    """Which ids stand for what, for the models that ask."""
    if not given.before or "mm_token_type_ids" not in signature(model.forward).parameters:
        return {}
    types = ids.new_zeros(ids.shape)
    types[:, : len(given.types)] = types.new_tensor(given.types)
    return {"mm_token_type_ids": types}


def placed(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the model's device, numbers in its type."""
    dtypes = {name: model.dtype if value.is_floating_point() else value.dtype for name, value in inputs.items()}
    return {name: value.to(model.device, dtypes[name]) for name, value in inputs.items()}


def _nested(model: PreTrainedModel) -> Iterator[Any]:
    yield model
    yield from (part for name in ("model", "thinker") if (part := getattr(model, name, None)) is not None)
