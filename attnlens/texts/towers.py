"""What a model is fed beside a text, or in its place: which inputs, and which ids stand for them in the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attnlens.errors import FAILURES, ModelError, TextError, is_memory
from attnlens.models.hub import first_line
from attnlens.models.placement import device_of_inputs
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
Standing = tuple[tuple[str, int, int], ...]
"""What stands before a text: modality, id, and how many of it."""
PROBE = 4
"""Ids of a text of no meaning."""


@dataclass(frozen=True)
class Towers:
    """Which inputs a model is given beside ids, and how many ids stand for them."""

    names: tuple[str, ...]
    """Of the inputs."""
    before: Standing = ()
    """What stands before each text."""
    notes: tuple[str, ...] = ()
    """Which tower does not run, and why."""
    alone: bool = False
    """Whether every sequence needs a pass of its own, since the images of a batch would stand in one row."""

    @property
    def ids(self) -> list[int]:
        """What stands before each text."""
        return ids_of(self.before)


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
    import torch

    names = makable(model)
    before, notes = list[tuple[str, int, int]](), list[str]()
    for modality, (ids, features) in STANDING.items():
        own = tuple(name for name in names if OF[name] == modality)
        if not own or not reads_ids(model) or hasattr(model, "get_text_features"):
            continue
        number = said(model.config, *ids)
        drawn = made(model, own, torch.Generator().manual_seed(0), PROBE)
        found: int | str = "the configuration does not say its shape"
        if drawn:
            found = 0 if number is None else _parts(model, placed(model, drawn), features)
        standing = ((modality, number or 0, found),) if isinstance(found, int) else ()
        if isinstance(found, int):
            others = tuple(name for name in names if OF[name] not in STANDING)
            found = _refusal(model, _of(model, own + others, standing)) or found
        if isinstance(found, int):
            before += standing
        elif not set(own) & set(wanted(model)):
            names = tuple(name for name in names if name not in own)
            notes.append(f"No {modality} is fed: {found}.")
    return _of(model, names, tuple(before), tuple(notes))


def _of(
    model: PreTrainedModel,
    names: tuple[str, ...],
    before: Standing,
    notes: tuple[str, ...] = (),
) -> Towers:
    return Towers(names, before, notes, alone=is_packed(model) and any(OF[name] == "image" for name in names))


def without_standing(given: Towers) -> Towers:
    """The same without the modalities that ids stand for."""
    gone = {modality for modality, _, _ in given.before}
    names = tuple(name for name in given.names if OF[name] not in gone)
    return replace(given, names=names, before=(), alone=given.alone and "image" not in gone)


class Beside:
    """Gives the inputs of one sequence after the other: noise, or the next of the files of a modality."""

    def __init__(
        self,
        model: PreTrainedModel,
        given: Towers,
        seed: int,
        skip: int = 0,
        files: Mapping[str, Sequence[Mapping[str, Tensor]]] | None = None,
    ) -> None:
        """Leaves out the first `skip` draws."""
        import torch

        self.given, self.files = given, files or {}
        self._model, self._next = model, 0
        self._names = tuple(name for name in given.names if OF[name] not in self.files)
        self._draws = torch.Generator().manual_seed(seed)
        self._digests = {name: sha256() for name in self._names}
        for _ in range(skip):
            made(model, self._names, self._draws, 1)

    def before(self, number: int) -> Standing:
        """What stands before the text of that sequence."""
        if not self.files:
            return self.given.before
        kept = tuple(standing for standing in self.given.before if standing[0] not in self.files)
        return kept + tuple(self._standing(modality, number) for modality in self.files)

    def _standing(self, modality: str, number: int) -> tuple[str, int, int]:
        ids, features = STANDING[modality]
        stands = said(self._model.config, *ids)
        if stands is None:
            return modality, 0, 0
        found = _parts(self._model, placed(self._model, self._file(modality, number)), features)
        if isinstance(found, str):
            raise ModelError(f"The {modality} can't be fed: {found}.", f"Leave out --{modality}.")
        return modality, stands, found

    def _file(self, modality: str, number: int) -> Mapping[str, Tensor]:
        return self.files[modality][number % len(self.files[modality])]

    def take(self, count: int, width: int) -> dict[str, Tensor]:
        """The inputs of the next `count` sequences of `width` ids."""
        import torch

        each = [made(self._model, self._names, self._draws, width) for _ in range(count)]
        for name in each[0]:
            self._digests[name].update(torch.cat([one[name] for one in each]).numpy().tobytes())
        for own, number in zip(each, range(self._next, self._next + count), strict=True):
            own |= {name: value for modality in self.files for name, value in self._file(modality, number).items()}
        self._next += count
        missing = [name for name in wanted(self._model) if name in OF and name not in each[0]]
        if missing:
            raise TextError(*not_made(self._model, missing))
        return {name: torch.cat([one[name] for one in each]) for name in each[0]}

    @property
    def described(self) -> list[Text]:
        """What was drawn, as what was fed; masks and grids are no noise of their own."""
        seen = dict[str, Any]()
        for name, digest in self._digests.items():
            if OF[name] in SAID:
                seen.setdefault(OF[name], digest)
        return [Text(name=SAID[modality], sha256=digest.hexdigest()) for modality, digest in seen.items()]


def ids_of(standing: Standing) -> list[int]:
    """The ids that stand for an image or a sound."""
    return [number for _, number, count in standing for _ in range(count)]


def _parts(model: PreTrainedModel, inputs: Mapping[str, Tensor], features: str) -> int | str:
    """How many ids stand for one image or sound (none, where tokens meet it in cross-attention), or what fails."""
    import torch

    owners: list[Any] = [part for part in _nested(model) if hasattr(part, features)]
    if not owners:
        return 0
    try:
        run = getattr(owners[-1], features)  # of the innermost, which names all that it takes
        taken = signature(run).parameters
        with torch.no_grad():
            result = run(**{name: value for name, value in inputs.items() if name in taken})
    except FAILURES as error:
        if is_memory(error):
            raise
        return f"its tower fails on it ({type(error).__name__}: {first_line(error)})"
    found = result if isinstance(result, list | tuple | torch.Tensor) else result.pooler_output
    parts: int = sum(value.shape[:-1].numel() for value in values_of(found))
    return parts


def _refusal(model: PreTrainedModel, only: Towers) -> str | None:
    """Why the model does not run on four ids behind one image or sound; None where it does."""
    import torch

    try:
        ids = torch.tensor([[*only.ids, *plain_ids(model, PROBE)]])
        inputs: Mapping[str, Tensor] = Beside(model, only, 0).take(1, ids.shape[1]) | types_of(model, only.before, ids)
        with torch.no_grad():
            model(input_ids=ids.to(device_of_inputs(model)), **placed(model, inputs))
    except FAILURES as error:
        if is_memory(error):
            raise
        return f"the model fails on it ({type(error).__name__}: {first_line(error)})"
    return None


def standing_ids(model: PreTrainedModel) -> set[int]:
    """The ids that stand for a part of an image or a sound."""
    found = {said(model.config, name) for ids, _ in STANDING.values() for name in ids}
    return {number for number in found if number is not None}


def plain_ids(model: PreTrainedModel, count: int) -> list[int]:
    """So many ids from 10 on that stand for nothing but themselves."""
    taken = standing_ids(model)
    return [number for number in range(10, 10 + count + len(taken)) if number not in taken][:count]


def types_of(model: PreTrainedModel, standing: Standing, ids: Tensor) -> dict[str, Tensor]:
    """Which ids stand for what, for the models that ask."""
    if not standing or "mm_token_type_ids" not in signature(model.forward).parameters:
        return {}
    types = ids.new_zeros(ids.shape)
    known = [TYPES[modality] for modality, _, count in standing for _ in range(count)]
    types[:, : len(known)] = types.new_tensor(known)
    return {"mm_token_type_ids": types}


def placed(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the model's device, numbers in its type."""
    dtypes = {name: model.dtype if value.is_floating_point() else value.dtype for name, value in inputs.items()}
    return {name: value.to(device_of_inputs(model), dtypes[name]) for name, value in inputs.items()}


def _nested(model: Any) -> Iterator[Any]:
    yield model
    for part in (part for name in ("model", "thinker", "vlm") if (part := getattr(model, name, None)) is not None):
        yield from _nested(part)
