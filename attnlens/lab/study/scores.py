"""Scores of a model on the held-out examples of a task: loss and perplexity, accuracy, BLEU and chrF."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from attnlens.errors import UsageError
from attnlens.lab.study.examples import BEGIN, END, NOTHING, PADDING, Examples, Split, StudyTask

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from tokenizers import Tokenizer
    from torch import Tensor

    from attnlens.models.kernel_transformers import EncoderDecoder

WIDTH = 4  # number of beams, as in the papers' translation tables


def score(task: StudyTask, model: nn.Module, split: Split, size: int) -> dict[str, float]:
    """Score `model` on a part of the task, in evaluation mode and batches of `size` examples.

    All forms: `loss`, the mean over all targets (tokens or classes) in nats. Language: `perplexity` exp(loss), and
    `bits_per_byte`, which is comparable across vocabularies. Classification: `accuracy` in [0, 1].
    Translation: `BLEU` and `chrF` in [0, 100] by sacrebleu, from a beam search of width 4 on each source; both are NaN
    if the loss is not finite. Raises UsageError if sacrebleu is missing.
    """
    with _evaluation_mode(model) as device:
        batches = [batch.to(device) for batch in task.held_out(split, size)]
        total, targets, right = _add_losses(model, batches)
        loss = total / targets
        if task.form == "classification":
            return {"loss": loss, "accuracy": right / targets}
        if task.form == "language":
            names = {number: name for name, number in cast("Tokenizer", task.tokenizer).get_vocab().items()}
            predicted = torch.cat([batch.targets[batch.targets != NOTHING] for batch in batches]).tolist()
            width = sum(len(names[number]) for number in predicted)  # a byte-level name has one character per byte
            # exp overflows float64 above 709; the product keeps NaN
            perplexity = math.exp(loss) if loss < 700 else loss * math.inf
            return {"loss": loss, "perplexity": perplexity, "bits_per_byte": total / math.log(2) / width}
        if not math.isfinite(loss):  # beam search needs finite probabilities
            return {"loss": loss, "BLEU": math.nan, "chrF": math.nan}
        pairs = []
        for batch in batches:
            translations = beam_search(cast("EncoderDecoder", model), batch.inputs, batch.mask, most=task.length)
            for written, target in zip(translations, batch.targets.tolist(), strict=True):
                pairs.append((task.decode(written), task.decode(number for number in target if number > END)))
        return {"loss": loss} | bleu_and_chrf(pairs)


def mean_loss(task: StudyTask, model: nn.Module, split: Split, size: int) -> float:
    """Compute only the `loss` of `score`, without beam search; settings are chosen by it."""
    with _evaluation_mode(model) as device:
        total, targets, _ = _add_losses(model, (batch.to(device) for batch in task.held_out(split, size)))
    return total / targets


def _add_losses(model: nn.Module, batches: Iterable[Examples]) -> tuple[float, int, int]:
    """Return the sum of all losses in nats, the number of targets, and the number of correct predictions."""
    total, targets, right = 0.0, 0, 0
    for batch in batches:
        logits = model(batch.inputs, batch.mask, batch.decoder_inputs)
        total += float(cross_entropy(logits, batch.targets))
        targets += int((batch.targets != NOTHING).sum())
        right += int((logits.argmax(-1) == batch.targets).sum())
    return total, targets, right


def bleu_and_chrf(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Compute BLEU and chrF2 of translations with one reference each (Post 2018), with sacrebleu's defaults.

    Raises UsageError if sacrebleu is missing.
    """
    try:
        import sacrebleu
    except ImportError:
        raise UsageError(
            "BLEU scores require sacrebleu, which is not installed.", 'Run: pip install "attnlens[study]"'
        ) from None
    written, references = [text for text, _ in pairs], [[text for _, text in pairs]]
    return {
        "BLEU": sacrebleu.corpus_bleu(written, references).score,
        "chrF": sacrebleu.corpus_chrf(written, references).score,
    }


def cross_entropy(logits: Float[Tensor, "*batch outputs"], targets: Int[Tensor, "*batch"]) -> Float[Tensor, ""]:
    """Compute Σ −log p of the targets in nats, ignoring targets that are NOTHING."""
    flat = logits.flatten(0, -2).float()
    return nn.functional.cross_entropy(flat, targets.flatten(), ignore_index=NOTHING, reduction="sum")


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[torch.device]:
    """Put the model in evaluation mode without gradients inside the context; yield its device."""
    trained = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    finally:
        model.train(trained)


class _Generator(PreTrainedModel, GenerationMixin):
    """Adapter that lets transformers' `generate` call an encoder and a decoder."""

    def __init__(self, model: EncoderDecoder, device: torch.device) -> None:
        super().__init__(PreTrainedConfig(is_encoder_decoder=True))  # type: ignore[no-untyped-call]
        self._model, self._device = model, device

    @property
    def device(self) -> torch.device:
        return self._device  # the model need not have parameters from which to infer it

    def forward(
        self, decoder_input_ids: Tensor, encoder_outputs: BaseModelOutput, attention_mask: Tensor, **kwargs: object
    ) -> Seq2SeqLMOutput:
        mask = None if bool(attention_mask.all()) else attention_mask.bool()
        return Seq2SeqLMOutput(logits=self._model.decode(decoder_input_ids, encoder_outputs[0], mask))


@torch.no_grad()
def beam_search(
    model: EncoderDecoder, inputs: Tensor, mask: Tensor | None, *, most: int, width: int = WIDTH
) -> list[list[int]]:
    """Return for each source the best sentence y found, by log p(y | x)/|y|, of at most `most` tokens.

    `most` and |y| include END; the result contains no BEGIN, END or padding. A source is finished when `width`
    sentences have ended. At token `most` a sentence must end, and END's log-probability counts.
    """

    def bar(written: Tensor, scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[1], device=scores.device)
        last = written.shape[1] == most
        barred = places != END if last else (places == BEGIN) | (places == PADDING)
        return scores.masked_fill(barred, -torch.inf)

    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=most,
        num_beams=width,
        early_stopping=True,
        use_cache=False,
        decoder_start_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PADDING,
    )
    generator: Any = _Generator(model, inputs.device)  # `generate` expects a Protocol that GenerationMixin lacks
    rows: Tensor = generator.generate(
        encoder_outputs=BaseModelOutput(model.encode(inputs, mask)),
        attention_mask=torch.ones_like(inputs) if mask is None else mask,
        logits_processor=LogitsProcessorList([bar]),
        generation_config=config,
    )
    return [[number for number in row if number not in (BEGIN, END, PADDING)] for row in rows.tolist()]
