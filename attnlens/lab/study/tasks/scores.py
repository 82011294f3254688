"""Scores of a model on the held-out examples of a task: loss and perplexity, accuracy, BLEU and chrF."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from attnlens.errors import UsageError
from attnlens.lab.study.tasks.classification import Labelled
from attnlens.lab.study.tasks.language import NextTokens, Reversal, SentencePairs
from attnlens.lab.study.tasks.task import NOTHING, Examples, Split

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from attnlens.models.kernel_transformers import EncoderDecoder

TranslationTask: TypeAlias = SentencePairs | Reversal
"""Sentence-to-sentence task: ids `begin` and `end` delimit a sentence, `padding` pads it, `written` decodes it."""
StudyTask: TypeAlias = NextTokens | Labelled | TranslationTask
"""Examples for training (`training`, a function of the seed only) and for evaluation (`held_out`).

`form` is the kind of task; `metric` is the key of `score`'s result by which models are compared. Input ids are below
`vocabulary` (0: a series of `channels`), targets below `outputs`. No sequence is longer than `length`.
"""
WIDTH = 4  # number of beams, as in the papers' translation tables


def score(task: StudyTask, model: nn.Module, split: Split, size: int) -> dict[str, float]:
    """Score `model` on a part of the task, in evaluation mode and batches of `size` examples.

    All forms: `loss`, the mean over all targets (tokens or classes) in nats. Language: `perplexity` exp(loss), and
    `bits_per_byte` if ids encode text, which is comparable across vocabularies. Classification: `accuracy` in [0, 1].
    Translation: `BLEU` and `chrF` in [0, 100] by sacrebleu, from a beam search of width 4 on each source; both are NaN
    if the loss is not finite. Raises UsageError if sacrebleu is missing.
    """
    with _evaluation_mode(model) as device:
        batches = [batch.to(device) for batch in task.held_out(split, size)]
        if task.form == "language":
            total, tokens, width = _sum_losses(task.widths, model, batches)
            loss = total / tokens
            # exp overflows float64 above 709; the product keeps NaN
            scores = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else loss * math.inf}
            return scores | ({} if width is None else {"bits_per_byte": total / math.log(2) / width})
        if task.form == "classification":
            total, right, cases = 0.0, 0, 0
            for batch in batches:
                logits = _logits(model, batch)
                total += float(cross_entropy(logits, batch.targets))
                right += int((logits.argmax(-1) == batch.targets).sum())
                cases += len(batch.targets)
            return {"loss": total / cases, "accuracy": right / cases}
        total, tokens, _ = _sum_losses(None, model, batches)
        loss = total / tokens
        if not math.isfinite(loss):  # beam search needs finite probabilities
            return {"loss": loss, "BLEU": math.nan, "chrF": math.nan}
        return {"loss": loss} | bleu_and_chrf(_translate(task, model, batches))


def mean_loss(task: StudyTask, model: nn.Module, split: Split, size: int) -> float:
    """Compute only the `loss` of `score`, without beam search; settings are chosen by it."""
    with _evaluation_mode(model) as device:
        total, targets, _ = _sum_losses(None, model, [batch.to(device) for batch in task.held_out(split, size)])
    return total / targets


def bleu_and_chrf(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Compute BLEU and chrF2 of translations with one reference each (Post 2018), with sacrebleu's defaults.

    Raises UsageError if sacrebleu is missing.
    """
    try:
        import sacrebleu
    except ImportError:
        raise UsageError(
            "Translations are judged by sacrebleu, which is not installed.", 'Run: pip install "attnlens[study]"'
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


def _logits(model: nn.Module, batch: Examples) -> Tensor:
    found: Tensor = model(inputs=batch.inputs, kept=batch.kept, given=batch.given)
    return found


def _sum_losses(
    widths: Float[Tensor, " vocabulary"] | None, model: nn.Module, batches: Sequence[Examples]
) -> tuple[float, int, float | None]:
    """Compute Σ −log p, the number of targets, and the bytes they encode (None without `widths`)."""
    total, tokens, width = 0.0, 0, 0.0
    for batch in batches:
        targets = batch.targets[batch.targets != NOTHING]
        total += float(cross_entropy(_logits(model, batch), batch.targets))
        tokens += len(targets)
        width += 0.0 if widths is None else float(widths[targets.cpu()].sum())
    return total, tokens, None if widths is None else width


def _translate(task: TranslationTask, model: nn.Module, batches: Sequence[Examples]) -> list[tuple[str, str]]:
    pairs = []
    for batch in batches:
        translations = beam_search(cast("EncoderDecoder", model), batch.inputs, batch.kept, task, most=task.length)
        for written, target in zip(translations, batch.targets.tolist(), strict=True):
            reference = [number for number in target if number not in (NOTHING, task.end)]
            pairs.append((task.written(written), task.written(reference)))
    return pairs


class _Generator(PreTrainedModel, GenerationMixin):
    """Adapter that lets transformers' `generate` call an encoder and a decoder."""

    def __init__(self, model: EncoderDecoder, device: torch.device) -> None:
        super().__init__(PreTrainedConfig(is_encoder_decoder=True))  # type: ignore[no-untyped-call]
        self._model, self._device = model, device

    @property
    def device(self) -> torch.device:
        return self._device  # the model need not have parameters from which to infer it

    def forward(
        self, decoder_input_ids: Tensor, encoder_outputs: BaseModelOutput, attention_mask: Tensor, **kwargs: Any
    ) -> Seq2SeqLMOutput:
        kept = None if bool(attention_mask.all()) else attention_mask.bool()
        return Seq2SeqLMOutput(logits=self._model.decode(decoder_input_ids, encoder_outputs[0], kept))


@torch.no_grad()
def beam_search(
    model: EncoderDecoder, inputs: Tensor, kept: Tensor | None, task: TranslationTask, *, most: int, width: int = WIDTH
) -> list[list[int]]:
    """Return for each source the best sentence y found, by log p(y | x)/|y|, of at most `most` tokens.

    `most` and |y| include END; the result contains no BEGIN, END or padding. A source is finished when `width`
    sentences have ended. At token `most` a sentence must end, and END's log-probability counts.
    """

    def bar(written: Tensor, scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[1], device=scores.device)
        last = written.shape[1] == most
        barred = places != task.end if last else (places == task.begin) | (places == task.padding)
        return scores.masked_fill(barred, -torch.inf)

    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=most,
        num_beams=width,
        early_stopping=True,
        use_cache=False,
        decoder_start_token_id=task.begin,
        eos_token_id=task.end,
        pad_token_id=task.padding,
    )
    generator: Any = _Generator(model, inputs.device)
    found: Tensor = generator.generate(
        encoder_outputs=BaseModelOutput(model.encode(inputs, kept)),
        attention_mask=torch.ones_like(inputs) if kept is None else kept,
        logits_processor=LogitsProcessorList([bar]),
        generation_config=config,
    )
    return [[number for number in row if number not in (task.begin, task.end, task.padding)] for row in found.tolist()]
