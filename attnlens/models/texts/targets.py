"""The prediction task of a model, and its targets for given inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from attnlens.errors import TextError, UsageError
from attnlens.models.loading import Loaded
from attnlens.models.texts import Batches, decodes_text, sequences_in
from attnlens.records import Task

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from transformers import PreTrainedModel

NOTHING = -100  # target at positions without a prediction, which torch's cross_entropy ignores
MASKED_SHARE = 0.15  # share of tokens that are masked for a masked language model to predict (Devlin et al. 2019)
HEADLESS = "no head that predicts a class, a masked token, or a token from those before it alone"
MEANINGS: dict[Task, str] = {
    "causal": "loss: the next token",
    "masked": f"loss: {MASKED_SHARE:.0%} of the tokens, masked",
    "seq2seq": "loss: the decoder's text, which is the encoder's too where that reads text",
    "classification": "loss: the class that the original model chooses",
    "hidden": f"the model has {HEADLESS}: its last hidden states are compared, "
    "or the embeddings of image and text (CLIP)",
}
NO_LOSS = "the model's input is noise that attnlens made up, on which a loss means nothing"
ON_NOISE = (
    "images and sounds are random noise that attnlens made up: the answers of both models to it are compared, and "
    "there is no loss"
)


@dataclass(frozen=True)
class Fed:
    """One forward pass and its targets."""

    inputs: dict[str, Tensor]  # arguments of `model(**inputs)`
    targets: Int[Tensor, "batch positions"] | None
    """Correct token at each position of the logits, −100 for no prediction; None if the original model's choice is the
    target, or there is none."""
    noise: bool = False  # True if the model reads noise: its predictions can be compared, but have no loss

    def rows(self, low: int, high: int) -> Fed:
        """Return only the sequences low … high − 1."""
        count = sequences_in(self.inputs)
        inputs = {name: part[low:high] if len(part) == count else part for name, part in self.inputs.items()}
        return replace(self, inputs=inputs, targets=None if self.targets is None else self.targets[low:high])


def task_of(model: PreTrainedModel) -> Task:
    """Return the task of the head of the model's class; `hidden` if it has none."""
    return tasks_of(model)[0]


def tasks_of(model: PreTrainedModel) -> list[Task]:
    """Return all tasks that the model's class is listed for, likeliest first (XLM: causal, masked); `hidden` last."""
    from transformers.models.auto import modeling_auto as auto

    tasks: dict[Task, tuple[str, ...]] = {
        # first, because transformers also lists BART among the masked models
        "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
        "causal": ("CAUSAL_LM",),
        "masked": ("MASKED_LM",),
        "classification": ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
    }
    listed = list[Task]()
    for task, mapping in ((task, f"MODEL_FOR_{name}_MAPPING") for task, names in tasks.items() for name in names):
        # private in transformers: no public method lists only the classes registered at run time, as by `reproduce`
        registered: dict[type, type] = getattr(getattr(auto, mapping, None), "_extra_content", {})
        if type(model).__name__ in getattr(auto, f"{mapping}_NAMES").values() or type(model) in registered.values():
            # language models with image or sound input are listed as seq2seq, but have no separate decoder
            listed.append("causal" if task == "seq2seq" and not decodes_text(model) else task)
    return [*dict.fromkeys(listed), "hidden"]


def logits_of(result: Any) -> Float[Tensor, "batch ..."]:
    """Return the logits in a model's output."""
    logits: Tensor = result.logits
    return logits


def of_text(
    logits: Float[Tensor, "batch positions classes"], targets: Int[Tensor, "batch tokens"], *, sees: bool
) -> Float[Tensor, "batch tokens classes"]:
    """Return the predictions at the text's tokens: the last ones if an image can precede them (the model `sees`: GIT).

    In other models they are the first ones, before unused positions (Perceiver).
    """
    count = targets.shape[1]
    return logits[:, -count:] if sees else logits[:, :count]


def last_states(result: object) -> Float[Tensor, "batch tokens d_model"] | None:
    """Return the last hidden states of a model's output, of the decoder if there is one; None if it has none.

    For models like CLIP, whose classes are the texts of a batch, return the embeddings of each image and its text.
    """
    for name in ("decoder_hidden_states", "hidden_states"):
        states = getattr(result, name, None)
        if states and isinstance(states[-1], Tensor):  # MaskFormer's Swin has a tuple for each stage
            return states[-1]
    outputs = result if isinstance(result, ModelOutput) else {}
    embeddings = [value for name, value in outputs.items() if name.endswith("_embeds")]
    paired = len(embeddings) > 1 and all(part.dim() == 2 and part.shape == embeddings[0].shape for part in embeddings)
    return torch.stack(embeddings, 1) if paired else None


def states_of(result: object) -> Float[Tensor, "batch ... d_model"]:
    """Return the last hidden states of a headless model, or its first output if it returns none."""
    states = last_states(result)
    return cast("Sequence[Tensor]", result)[0] if states is None else states


def output_options(task: Task) -> dict[str, bool]:
    """Return the arguments of a forward pass with which its output contains the hidden states for `states_of`."""
    return {"output_hidden_states": True} if task == "hidden" else {}


def feed(loaded: Loaded, batches: Batches, task: Task, seed: int) -> list[Fed]:
    """Add targets to the batches; for a masked language model, `seed` determines which tokens are masked.

    Raises TextError if a masked language model's tokenizer has no mask token.
    """
    generator = torch.Generator().manual_seed(seed)
    passes = []
    for batch in batches:
        inputs, targets = batch.inputs, None
        if task == "causal":
            targets = _next_tokens(inputs["input_ids"], inputs.get("attention_mask"), batch.start)
        elif task == "masked":
            inputs, targets = _mask_tokens(loaded, inputs, generator)
        elif task == "seq2seq":
            targets = _next_tokens(inputs["decoder_input_ids"], inputs.get("decoder_attention_mask"))
        passes.append(Fed(inputs, targets, noise=batches.made_up))
    return passes


def meanings(task: Task, *, noise: bool) -> list[str]:
    """Return sentences on what the loss or comparison means, and on noise, which has no loss."""
    return [MEANINGS[task]] * (task == "hidden" or not noise) + [ON_NOISE] * noise


def check_input(evaluated: Batches) -> None:
    """Raise UsageError if the model's input is noise: there is no loss to set a budget for."""
    if evaluated.made_up:
        problem = "A loss budget cannot be applied: this model's input is random noise generated by attnlens."
        raise UsageError(problem, "Use the same rank for all heads, e.g. --kernel rank:16.")


def _next_tokens(ids: Tensor, mask: Tensor | None, start: int = 0) -> Tensor:
    """Return the token after each position; NOTHING for padding, before the text's `start` and at the last position."""
    real = ids.clone() if mask is None else ids.masked_fill(mask == 0, NOTHING)
    real[:, :start] = NOTHING
    return torch.cat([real[:, 1:], torch.full_like(real[:, :1], NOTHING)], 1)


def _mask_tokens(
    loaded: Loaded, inputs: dict[str, Tensor], generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs with MASKED_SHARE of the tokens masked, and targets with only those tokens."""
    mask_id = getattr(loaded.tokenizer, "mask_token_id", None)
    if loaded.tokenizer is None or mask_id is None:
        problem = "This masked language model's tokenizer has no mask token."
        raise TextError(problem, "Put all files of its tokenizer into the model's folder.")
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    draws = torch.full(ids.shape, 2.0)  # padding and special tokens keep 2, which is never masked
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
    for row, length in zip(draws, lengths, strict=True):
        row[:length] = torch.rand(length, generator=generator)  # by sequence, so that batch size has no effect
    special = torch.isin(ids, torch.tensor(loaded.tokenizer.all_special_ids, device=ids.device))
    draws = draws.to(ids.device).masked_fill(special, 2.0)
    masked = draws < MASKED_SHARE
    # if no draw of a short line is below the share, mask its smallest one, unless all its tokens are special
    masked |= (draws == draws.amin(1, keepdim=True)) & (draws < 1) & ~masked.any(1, keepdim=True)
    return {**inputs, "input_ids": ids.masked_fill(masked, mask_id)}, ids.masked_fill(~masked, NOTHING)
