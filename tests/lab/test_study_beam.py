"""Tests beam search against exhaustive search on small random models, and scores against sacrebleu and by hand."""

import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attnlens.errors import UsageError
from attnlens.lab.study.examples import BEGIN, END, PADDING, Examples, Reversal, beam_search, bleu_and_chrf, score

OUTPUTS, MOST = 5, 4


class RandomWriter(nn.Module):
    """Logits that are a random function of the source's sum and of the last two tokens."""

    def __init__(self, seed, spread=2.0):
        super().__init__()
        table = torch.randn(11, OUTPUTS, OUTPUTS, OUTPUTS, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("table", spread * table)

    def encode(self, inputs, mask):
        seen = inputs if mask is None else inputs * mask
        return seen.sum(1)[:, None, None] % 11

    def decode(self, decoder_inputs, memory, mask):
        before = torch.cat((torch.zeros_like(decoder_inputs[:, :1]), decoder_inputs[:, :-1]), 1)
        return self.table[memory[:, 0], before, decoder_inputs]


def mean_log_probability(model, source, sentence):
    """Naive: log p(sentence, END | source) a token, one token at a time."""
    memory, decoder_inputs, total = model.encode(source[None], None), [BEGIN], 0.0
    for token in (*sentence, END):
        logits = model.decode(torch.tensor([decoder_inputs]), memory, None)[0, -1]
        total += float(logits.double().log_softmax(-1)[token])
        decoder_inputs.append(token)
    return total / (len(sentence) + 1)


def exhaustive(model, source):
    """The best of all sentences of at most MOST tokens, END included."""
    letters = [letter for letter in range(OUTPUTS) if letter not in (PADDING, BEGIN, END)]
    every = [list(s) for size in range(MOST) for s in itertools.product(letters, repeat=size)]
    return max(every, key=lambda sentence: mean_log_probability(model, source, sentence))


SOURCES = torch.arange(3, 15).view(12, 1) * torch.tensor([1, 2])


def found(model, width):
    return beam_search(model, SOURCES, None, most=MOST, width=width)


@pytest.mark.parametrize("seed", range(3))
def test_as_many_beams_as_beginnings_find_what_exhaustive_search_finds(seed):
    model = RandomWriter(seed)
    assert found(model, 2 ** (MOST - 1) * 4) == [exhaustive(model, source) for source in SOURCES]


def test_four_beams_find_likelier_sentences_than_one_which_misses_the_best():
    means, misses = {1: 0.0, 4: 0.0}, {1: 0, 4: 0}
    for seed in range(6):
        model = RandomWriter(seed)
        best = [exhaustive(model, source) for source in SOURCES]
        for width in means:
            each = found(model, width)
            means[width] += sum(mean_log_probability(model, *pair) for pair in zip(SOURCES, each, strict=True))
            misses[width] += sum(one != other for one, other in zip(each, best, strict=True))
    assert means[4] > means[1]
    assert misses[4] < misses[1], "a control: one beam alone misses the best"
    assert misses[1] > 10


def test_sources_of_one_batch_do_not_touch_each_other_and_padding_is_not_read():
    model = RandomWriter(1)
    alone = [beam_search(model, source[None], None, most=MOST)[0] for source in SOURCES]
    assert found(model, 4) == alone
    mask = torch.cat((torch.ones(12, 2, dtype=torch.bool), torch.zeros(12, 1, dtype=torch.bool)), 1)
    inputs = torch.cat((SOURCES, torch.full((12, 1), 7)), 1)
    assert beam_search(model, inputs, mask, most=MOST) == alone
    assert beam_search(model, inputs, None, most=MOST) != alone, "a control: unmasked padding is read"


def test_a_sentence_has_at_most_so_many_tokens_and_no_barred_one():
    class Endless(RandomWriter):
        def decode(self, decoder_inputs, memory, mask):
            logits = torch.zeros(*decoder_inputs.shape, OUTPUTS)
            logits[..., PADDING], logits[..., BEGIN], logits[..., END] = 9.0, 9.0, -50.0
            return logits

    for sentence in found(Endless(0), 4):
        assert len(sentence) == MOST - 1
        assert not {PADDING, BEGIN, END} & set(sentence)


class KnowsTheTarget(nn.Module):
    """A model of the planted reversal that knows its rule, and forgets capitals where it is told to."""

    def __init__(self, task, *, forgets=False):
        super().__init__()
        self.task, self.forgets = task, forgets

    def encode(self, inputs, mask):
        return (inputs if mask is None else inputs * mask)[..., None]

    def decode(self, decoder_inputs, memory, mask):
        logits = torch.zeros(*decoder_inputs.shape, self.task.vocabulary)
        for row, source in enumerate(memory[..., 0]):
            target = self.task.target(source[source > END])
            if self.forgets:
                target = (target - 3) % self.task.letters + 3
            meant = [*target.tolist(), *[END] * decoder_inputs.shape[1]]
            for place in range(decoder_inputs.shape[1]):
                logits[row, place, meant[place]] = 40.0
        return logits

    def forward(self, inputs, mask, decoder_inputs):
        return self.decode(decoder_inputs, self.encode(inputs, mask), mask)


def test_who_knows_the_rule_of_the_reversal_has_no_loss_and_a_hundred_bleu():
    task = Reversal(evaluated=40)
    known = score(task, KnowsTheTarget(task), "test", 16)
    assert known["loss"] == pytest.approx(0, abs=1e-6)
    assert (known["BLEU"], known["chrF"]) == pytest.approx((100, 100))
    control = score(task, KnowsTheTarget(task, forgets=True), "test", 16)
    assert control["loss"] > 1
    assert control["BLEU"] < 60
    forgetful = KnowsTheTarget(task, forgets=True)
    assert score(task, forgetful, "test", 7, loss_only=True)["loss"] == pytest.approx(control["loss"]), (
        "whatever the batch size"
    )


def test_a_model_that_diverged_has_no_bleu_and_no_endless_search():
    class Diverged(KnowsTheTarget):
        def forward(self, inputs, mask, decoder_inputs):
            return super().forward(inputs, mask, decoder_inputs) * math.nan

    task = Reversal(evaluated=4)
    assert all(math.isnan(value) for value in score(task, Diverged(task), "validation", 4).values())


WRITTEN = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
MEANT = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]
"""The system and the first reference of sacrebleu's own example."""


def grams(units, order):
    return [tuple(units[at : at + order]) for at in range(len(units) - order + 1)]


def counts(written, meant, order):
    """N-grams that both sides have, all that are written, all that are meant."""
    hits, made, asked = 0, 0, 0
    for one, other in zip(written, meant, strict=True):
        left = grams(other, order)
        made, asked = made + len(grams(one, order)), asked + len(left)
        for gram in grams(one, order):
            if gram in left:
                left.remove(gram)
                hits += 1
    return hits, made, asked


def test_bleu_and_chrf_are_what_counting_n_grams_gives():
    made = bleu_and_chrf(list(zip(WRITTEN, MEANT, strict=True)))
    words = [[one.replace(".", " .").split() for one in side] for side in (WRITTEN, MEANT)]
    precision = [hits / written for hits, written, _ in (counts(*words, order) for order in range(1, 5))]
    lengths = [sum(map(len, side)) for side in words]
    brevity = min(1.0, math.exp(1 - lengths[1] / lengths[0]))
    assert made["BLEU"] == pytest.approx(100 * brevity * math.prod(precision) ** 0.25)
    letters = [[one.replace(" ", "") for one in side] for side in (WRITTEN, MEANT)]
    rows = [counts(*letters, order) for order in range(1, 7)]
    precise = sum(hits / written for hits, written, _ in rows) / 6
    complete = sum(hits / meant for hits, _, meant in rows) / 6
    assert made["chrF"] == pytest.approx(100 * 5 * precise * complete / (4 * precise + complete))
    assert bleu_and_chrf(list(zip(MEANT, MEANT, strict=True)))["BLEU"] == pytest.approx(100), "a control"


def test_without_sacrebleu_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UsageError) as caught:
        bleu_and_chrf([("a", "a")])
    assert "attnlens[study]" in caught.value.remedy


class Fixed(nn.Module):
    """Gives the same logits for every target."""

    def __init__(self, logits, shape):
        super().__init__()
        self.logits, self.shape, self.dropped = nn.Parameter(torch.tensor(logits)), shape, []

    def forward(self, inputs, mask, decoder_inputs):
        self.dropped.append(self.training)
        return self.logits.expand(*self.shape(inputs), -1)


class TwoBatches:
    """A language of two batches of unlike numbers of targets."""

    form, tokenizer = "language", SimpleNamespace(get_vocab=lambda: {"a": 0, "bc": 1})

    def held_out(self, split, size):
        rows = [torch.tensor([[0, 1, 1]]), torch.tensor([[0, -100, -100]])]
        return [Examples(row.clamp(min=0), None, row) for row in rows]


def test_the_loss_is_the_mean_over_all_tokens_and_not_over_batches():
    model = Fixed([math.log(1 / 4), math.log(3 / 4)], lambda inputs: inputs.shape)
    found = score(TwoBatches(), model.train(), "test", 1)
    loss = (2 * math.log(4) + 2 * math.log(4 / 3)) / 4
    assert found["loss"] == pytest.approx(loss)
    assert found["perplexity"] == pytest.approx(math.exp(loss))
    assert found["bits_per_byte"] == pytest.approx(4 * loss / math.log(2) / 6)
    assert score(TwoBatches(), model, "test", 1, loss_only=True)["loss"] == found["loss"]
    over_batches = ((math.log(4) + 2 * math.log(4 / 3)) / 3 + math.log(4)) / 2
    assert found["loss"] != pytest.approx(over_batches), "a control"
    assert model.dropped == [False] * 4, "it is judged in evaluation mode"
    assert model.training, "and left as it was"
