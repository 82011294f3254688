"""Tasks and batches of their examples, the built-in reversal task, and scores of models on a task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from attnlens.errors import UsageError
from attnlens.runs.feeding import evaluation_mode

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from attnlens.models.kernel_transformers import EncoderDecoder

TaskForm: TypeAlias = Literal["language", "translation", "classification"]
Split: TypeAlias = Literal["validation", "test"]  # validation to choose settings, test for one evaluation at the end
NOTHING = -100  # target of positions without a prediction; torch's cross-entropy ignores this value
PADDING, BEGIN, END = 0, 1, 2  # first ids of every vocabulary of sentences
SPECIALS = ("<pad>", "<s>", "</s>")  # names of PADDING, BEGIN and END


@dataclass(frozen=True, eq=False)
class Examples:
    """One batch of model inputs and targets."""

    inputs: Tensor  # ids (batch, tokens), int64; or a series (batch, steps, channels), float32
    mask: Tensor | None  # (batch, tokens), bool, False for padding, which is on the right; None: no padding
    targets: Tensor  # ids to predict (batch, tokens), NOTHING at positions without a target; or class indices (batch,)
    decoder_inputs: Tensor | None = None  # ids (batch, target tokens), starting with BEGIN; None without a decoder

    def to(self, device: torch.device | str) -> Examples:
        """Copy the batch to a device."""
        mask, decoder_inputs = (None if part is None else part.to(device) for part in (self.mask, self.decoder_inputs))
        return Examples(self.inputs.to(device), mask, self.targets.to(device), decoder_inputs)


class Cases(NamedTuple):
    """Examples of one part of a task, neither batched nor padded."""

    inputs: Sequence[Tensor] | Tensor  # per example: ids (tokens,), int64, or a series (steps, channels), float32
    targets: Sequence[Tensor] | Tensor  # per example: ids to predict (tokens,), or a class index ()


@dataclass(frozen=True, eq=False, kw_only=True)
class StudyTask:
    """Task with examples for training (in an order set by a seed), validation and test."""

    name: str  # names of its texts or files
    form: TaskForm
    cases: Mapping[str, Cases]  # by part; sentences lack BEGIN and END
    length: int  # maximum number of tokens of a sequence; for translation, per side, including END
    vocabulary: int = 0  # number of ids; 0 for a series
    classes: int = 0  # number of classes; 0 if ids are predicted
    channels: int = 0  # numbers per step of a series; 0 for ids
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of each file by name; empty for built-in data
    tokenizer: Tokenizer | None = None  # trained only on the training part; None: no tokenizer
    left_out: Mapping[str, int] = field(default_factory=dict)  # numbers of omitted or cut examples, by part or reason
    repeated: int = 0  # number of examples removed from training because they are also held out

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """Yield shuffled batches endlessly; examples of similar length share a batch."""
        return (self.batch("training", chosen) for chosen in draw_batches(self.lengths("training"), size, seed))

    def held_out(self, split: Split, size: int) -> Sequence[Examples]:
        """Return each example of a part once, shortest first, in batches of `size`; the last batch may be smaller."""
        lengths = self.lengths(split)
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        return [self.batch(split, order[start : start + size]) for start in range(0, len(order), size)]

    def lengths(self, part: str) -> list[int]:
        """Return the number of input and target tokens of each example of a part."""
        inputs, targets = self.cases[part]
        if self.form == "language":
            return [2 * self.length] * len(inputs)
        return [len(source) + target.numel() for source, target in zip(inputs, targets, strict=True)]

    def batch(self, part: str, chosen: Sequence[int]) -> Examples:
        """Build a batch of the chosen examples of a part."""
        inputs, targets = ([side[number] for number in chosen] for side in self.cases[part])
        if self.form == "translation":
            return pair_sentences(inputs, targets)
        return Examples(*pad(inputs, PADDING), torch.stack(targets))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text without special tokens; without a tokenizer, list the ids as numbers."""
        if self.tokenizer is None:
            return " ".join(str(number) for number in ids if number >= len(SPECIALS))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))  # bytes that are not UTF-8: U+FFFD


def pair_sentences(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Examples:
    """Build a batch: encoder input source + END, decoder input BEGIN + target, decoder output target + END."""
    end, begin = torch.tensor([END]), torch.tensor([BEGIN])
    inputs, mask = pad([torch.cat((source, end)) for source in sources], PADDING)
    decoder_inputs, _ = pad([torch.cat((begin, target)) for target in targets], PADDING)
    outputs, _ = pad([torch.cat((target, end)) for target in targets], NOTHING)
    return Examples(inputs, mask, outputs, decoder_inputs)


def pad(rows: Sequence[Tensor], value: float) -> tuple[Tensor, Bool[Tensor, "batch tokens"] | None]:
    """Pad the rows on the right with `value` to one tensor; return the tensor and its mask (`Examples.mask`)."""
    sizes = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(sizes.max())) < sizes[:, None]
    batch = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
    return batch, None if bool(mask.all()) else mask


POOL = 32  # maximum number of batches per pool of a shuffled epoch; a pool is sorted by length, which saves padding
POOLS = 4  # minimum number of pools per epoch; if a whole epoch were sorted, batches would always be the same


def draw_batches(lengths: Sequence[int], size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of `size` example indices endlessly, in a new order each epoch. An incomplete batch is dropped.

    If there are fewer than `size` examples, all of them form one batch.
    """
    draws = torch.Generator().manual_seed(seed)
    while True:
        order: list[int] = torch.randperm(len(lengths), generator=draws).tolist()
        whole = order[: max(len(order) // size * size, min(size, len(order)))]
        most = size * min(max(len(whole) // size // POOLS, 1), POOL)
        for start in range(0, len(whole), most):
            pool = sorted(whole[start : start + most], key=lengths.__getitem__)
            parts = [pool[at : at + size] for at in range(0, len(pool), size)]
            for number in torch.randperm(len(parts), generator=draws).tolist():
                yield parts[number]


LETTERS = range(4, 9)  # numbers of letters of a source; a sequence also has END
HELD_OUT = {"validation": 10**9 + 7, "test": 10**9 + 9}  # seeds of the held-out examples, far from training seeds


class Reversal(StudyTask):
    """Task of reversing random letters; a letter becomes a capital if it follows an odd letter (b, d, …) in the source.

    Without positions in the encoder and in cross-attention, the decoder's output does not depend on the order of the
    source's letters (Tsai et al. 2019, Proposition 1). Such a model cannot solve the task, because sources with the
    same letters have different targets.
    """

    def __init__(self, letters: int = 8, evaluated: int = 256) -> None:
        self.letters = letters
        draws = {part: torch.Generator().manual_seed(seed) for part, seed in HELD_OUT.items()}
        super().__init__(
            name="planted reversal",
            form="translation",
            cases={part: Cases(*self._draw(evaluated, generator)) for part, generator in draws.items()},
            length=LETTERS.stop,
            vocabulary=len(SPECIALS) + 2 * letters,  # letters and capitals
        )

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """Yield batches of newly drawn (source, target) pairs endlessly."""
        draws = torch.Generator().manual_seed(seed)
        while True:
            yield pair_sentences(*self._draw(size, draws))

    def _draw(self, count: int, draws: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
        """Draw `count` random sources, with uniformly distributed letters and lengths; return sources and targets."""
        first = len(SPECIALS)
        sizes = torch.randint(LETTERS.start, LETTERS.stop, (count,), generator=draws).tolist()
        sources = [torch.randint(first, first + self.letters, (size,), generator=draws) for size in sizes]
        return sources, [self.target(source) for source in sources]

    def target(self, source: Tensor) -> Tensor:
        """Reverse the source; capitalise each letter that follows an odd letter (b, d, …) in the source."""
        before = torch.cat((torch.zeros(1, dtype=torch.int64), (source[:-1] - len(SPECIALS)) % 2))
        return (source + self.letters * before).flip(0)


def score(task: StudyTask, model: nn.Module, split: Split, size: int, *, loss_only: bool = False) -> dict[str, float]:
    """Score `model` on a part of the task, in evaluation mode and in batches of `size` examples.

    Return `loss`, the mean over all targets (tokens or classes) in nats, and, unless `loss_only`, further scores: for
    language, `perplexity` = exp(loss), and `bits_per_byte`, which is comparable across vocabularies; for
    classification, `accuracy` in [0, 1]; for translation, `BLEU` and `chrF` in [0, 100] of beam search, or NaN if the
    loss is not finite.
    """
    device = next((parameter.device for parameter in model.parameters()), "cpu")
    batches, total, targets, right = [batch.to(device) for batch in task.held_out(split, size)], 0.0, 0, 0
    with torch.no_grad(), evaluation_mode(cast(PreTrainedModel, model)):
        for batch in batches:
            logits = model(batch.inputs, batch.mask, batch.decoder_inputs)
            total += float(cross_entropy(logits, batch.targets))
            targets += int((batch.targets != NOTHING).sum())
            right += int((logits.argmax(-1) == batch.targets).sum())
        loss = total / targets
        if loss_only:
            return {"loss": loss}
        if task.form == "classification":
            return {"loss": loss, "accuracy": right / targets}
        if task.form == "language":
            names = {number: name for name, number in cast(Tokenizer, task.tokenizer).get_vocab().items()}
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


def bleu_and_chrf(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Compute BLEU and chrF2 of (translation, reference) pairs with sacrebleu's defaults (Post 2018)."""
    try:
        import sacrebleu
    except ImportError:
        raise UsageError("BLEU scores require sacrebleu.", 'Run: pip install "attnlens[study]"') from None
    written, references = [text for text, _ in pairs], [[text for _, text in pairs]]
    bleu, chrf = sacrebleu.corpus_bleu(written, references), sacrebleu.corpus_chrf(written, references)
    return {"BLEU": bleu.score, "chrF": chrf.score}


def cross_entropy(logits: Float[Tensor, "*batch outputs"], targets: Int[Tensor, "*batch"]) -> Float[Tensor, ""]:
    """Compute Σ −log p over the targets, in nats, ignoring targets equal to NOTHING."""
    flat = logits.flatten(0, -2).float()
    return nn.functional.cross_entropy(flat, targets.flatten(), ignore_index=NOTHING, reduction="sum")


class _Generator(PreTrainedModel, GenerationMixin):
    """Adapter that lets transformers' `generate` call the encoder and decoder of a study's model."""

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
    model: EncoderDecoder, inputs: Tensor, mask: Tensor | None, *, most: int, width: int = 4
) -> list[list[int]]:
    """Return for each source x the sentence y with the largest log p(y | x)/|y| found by beam search.

    A sentence has at most `most` tokens, and |y| counts END; the result contains no BEGIN, END or padding. A source is
    finished when `width` sentences have ended.
    """

    def forbid_tokens(written: Tensor, scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[1], device=scores.device)
        last = written.shape[1] == most
        forbidden = places != END if last else (places == BEGIN) | (places == PADDING)
        return scores.masked_fill(forbidden, -torch.inf)

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
        logits_processor=LogitsProcessorList([forbid_tokens]),
        generation_config=config,
    )
    return [[number for number in row if number not in (BEGIN, END, PADDING)] for row in rows.tolist()]
