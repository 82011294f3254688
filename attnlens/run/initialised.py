"""Refuses measurements that depend on weights which the checkpoint lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens import hooks, models
from attnlens.attention import attend
from attnlens.errors import ModelError
from attnlens.records import Call, Task
from attnlens.texts.targets import asking, logits_of, states_of

Measured = Callable[[PreTrainedModel, Mapping[str, Tensor]], Iterable[Tensor]]
"""What is measured of a forward pass on these inputs."""


def attention(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The queries, keys and values of every attention computation."""
    found: list[Tensor] = []

    def answer(call: Call) -> Tensor:
        found.extend((call.query, call.key, call.value))
        return attend(call, hooks.OWN, "eager")

    with hooks.opened(model, answer):
        hooks.forward(model, inputs)
    return found


def predictions(task: Task) -> Measured:
    """The model's predictions, or where it has no head its hidden states."""

    def measured(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        result = hooks.forward(model, inputs, **asking(task))
        return [states_of(result) if task == "hidden" else logits_of(result)]

    return measured


def refuse_initialised(loaded: models.Loaded, inputs: Mapping[str, Tensor], measured: Measured) -> None:
    """Raise ModelError if what is measured rests on a weight that the checkpoint lacks, so that it is random."""
    if random := random_weights(loaded, inputs, measured):
        raise ModelError(
            f"The checkpoint of {loaded.info.id} lacks {_listed(random)}, which would be filled at random.",
            "Get a complete checkpoint, or load it under the architecture that it was saved from.",
        )


def no_loss(loaded: models.Loaded, inputs: Mapping[str, Tensor], task: Task) -> tuple[str, str] | None:
    """Return the module whose random weight the predictions rest on, and why there is no loss; None if there is one."""
    random = random_weights(loaded, inputs, predictions(task))
    if not random:
        return None
    return _owner(random[0]), f"the checkpoint lacks {_listed(random)}, and so the model has no loss"


def _listed(random: list[str]) -> str:
    return random[0] + (f" and {len(random) - 1} more" if len(random) > 1 else "")


def random_weights(loaded: models.Loaded, inputs: Mapping[str, Tensor], measured: Measured) -> list[str]:
    """Return the weights that the checkpoint lacks and on which what is measured rests.

    A weight is excused where its module ran and a gradient says that nothing measured depends on it, as BERT's pooler.
    What did not run on these inputs (an expert that no token chose) may run on others.
    """
    missing = _missing(loaded)
    if not missing:
        return []
    with _recording(loaded.model, missing) as (leaves, ran):
        outputs = [found.sum() for found in measured(loaded.model, inputs) if found.requires_grad]
        slopes = (
            torch.autograd.grad(outputs, list(leaves.values()), allow_unused=True) if outputs else [None] * len(leaves)
        )
    excused = {name for name, slope in zip(leaves, slopes, strict=True) if slope is None and _owner(name) in ran}
    return [name for name in missing if name not in excused]


def _missing(loaded: models.Loaded) -> list[str]:
    """The parameters and buffers of the model that its files lack, in its order."""
    lacking = set(loaded.missing_keys)
    parts = (loaded.model.named_parameters, loaded.model.named_buffers)
    return [name for part in parts for name, _ in part(remove_duplicate=False) if name in lacking]


@contextmanager
def _recording(model: PreTrainedModel, names: list[str]) -> Iterator[tuple[dict[str, Tensor], set[str]]]:
    """Inside, the parameters of these names record gradients, and the paths of their modules are noted as they run."""
    every, ran = dict(model.named_parameters(remove_duplicate=False)), set[str]()
    leaves = {name: every[name].requires_grad_() for name in names if name in every}
    owners = {path: model.get_submodule(path) for path in map(_owner, leaves)}
    notes = [module.register_forward_hook(_noting(ran, path)) for path, module in owners.items()]
    try:
        with torch.enable_grad():
            yield leaves, ran
    finally:
        for note in notes:
            note.remove()
        for leaf in leaves.values():
            leaf.requires_grad_(False)


def _noting(ran: set[str], path: str) -> Callable[[nn.Module, object, object], None]:
    def note(_module: nn.Module, _arguments: object, _result: object) -> None:
        ran.add(path)

    return note


def _owner(name: str) -> str:
    """The path of the module that a parameter is of."""
    return name.rpartition(".")[0]
