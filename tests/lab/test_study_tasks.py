"""Tests of a study's tasks (splits without leaks, repeatable batches, bad files), of beam search and of scores."""

import gzip
import itertools
import json
import math
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attnlens.errors import TextError, UsageError
from attnlens.lab.study import examples, tasks
from attnlens.lab.study.examples import (
    BEGIN,
    END,
    NOTHING,
    PADDING,
    Reversal,
    beam_search,
    bleu_and_chrf,
    draw_batches,
    score,
)
from attnlens.lab.study.tables import SCALES

WORDS = ["light", "darkness", "earth", "water", "firmament", "evening", "morning", "heaven"]


def sizes(**fields):
    return replace(SCALES["tiny"], **{"evaluated": 10**6, "vocabulary": 300, "length": 16} | fields)


def lines(count, seed=0):
    draws = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(len(WORDS), (8,), generator=draws).tolist() for _ in range(count)]
    return [" ".join(WORDS[at] for at in row) + f" {number}." for number, row in enumerate(drawn)]


TEXT = "\n".join(lines(1200)) + "\n"


def same(one, other):
    return all(
        a is b is None or torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def first(task, count, size=4, seed=0):
    return list(itertools.islice(task.training(size, seed), count))


def counts_of(task):
    return {part: Counter(cases.targets.tolist()) for part, cases in task.cases.items()}


# --- splits and batches -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("count", "stretches"), [(3, 1), (7, 10), (40, 1), (1001, 1), (1001, 10)])
def test_blocks_contain_every_number_once_and_are_contiguous(count, stretches):
    parts = tasks.blocks(count, stretches=stretches)
    assert sorted(number for each in parts.values() for block in each for number in block) == list(range(count))
    assert len(parts["test"]) <= stretches
    if count > 100 * stretches:
        assert all(len(parts[part]) == stretches for part in parts)
        assert sum(map(len, parts["training"])) == pytest.approx(0.9 * count, rel=0.02)


def test_an_epoch_contains_every_example_once_in_an_order_of_its_seed():
    def order(seed):
        return list(itertools.islice(draw_batches([number % 11 for number in range(40)], 4, seed), 20))

    epochs = order(0)[:10], order(0)[10:]
    assert [sorted(number for batch in epoch for number in batch) for epoch in epochs] == [[*range(40)]] * 2
    assert not {frozenset(batch) for batch in epochs[0]} & {frozenset(batch) for batch in epochs[1]}
    assert order(0) == order(0) != order(1)
    seen = Counter(number for batch in itertools.islice(draw_batches([1, 2, 3, 4, 100], 2, 0), 60) for number in batch)
    assert seen[4] > 10, "an epoch does not always leave out the longest"
    assert len(next(draw_batches([1, 2, 3], 8, 0))) == 3, "fewer than a batch are all of them"
    assert tasks.space_evenly(10, 5) == [1, 3, 5, 7, 9]
    assert tasks.space_evenly(3, 5) == [0, 1, 2]


# --- language ---------------------------------------------------------------------------------------------------------
def test_windows_do_not_cross_splits_and_targets_are_the_next_tokens():
    parts = tasks.split_text(TEXT)
    assert sorted("".join(part for each in parts.values() for part in each)) == sorted(TEXT)
    task, again, few = (tasks.language([("lines", TEXT)], sizes(evaluated=count)) for count in (10**6, 10**6, 9))
    for part, (inputs, targets) in task.cases.items():
        assert len(inputs) > 10
        for row in torch.cat((inputs, targets[:, -1:]), 1):
            assert any(task.decode(row.tolist()) in block for block in parts[part]), "a window lies in one block"
    batch = first(task, 1)[0]
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.inputs.shape == (4, 16)
    everything = task.decode(task.cases["test"].inputs.flatten().tolist())
    assert not any(everything[at : at + 90] in "".join(parts["training"]) for at in range(0, 900, 90)), "no leak"
    assert all(map(same, first(task, 5), first(again, 5)))
    assert all(map(same, task.held_out("test", 8), again.held_out("test", 8)))
    assert not all(map(same, first(task, 5), first(task, 5, seed=1))), "the control"
    assert len(few.cases["test"].inputs) == 9
    with pytest.raises(TextError, match=r"The .* part of .* is shorter than one window of 64 tokens"):
        tasks.language([("short", "In the beginning")], sizes(length=64))


def test_byte_pairs_are_deterministic_lossless_and_trained_on_the_training_part_alone():
    (*_, last) = tasks.split_text(TEXT)["test"]
    strange = TEXT.replace(last, last.replace("light", "leviathan"))
    tokenizer = tasks.language([("lines", strange)], sizes(vocabulary=400)).tokenizer
    assert len(tasks.encode(tokenizer, [" darkness"])[0]) == 1
    assert len(tasks.encode(tokenizer, [" leviathan"])[0]) > 2, "a word of the test part alone has no id of its own"
    everywhere = tasks.train_byte_pairs(strange.replace("light", "leviathan").splitlines(keepends=True), 400)
    assert len(tasks.encode(everywhere, [" leviathan"])[0]) == 1, "the control"
    text = ["In the beginning", "Énosch, Kénan — 神\n"]
    one, other = (tasks.train_byte_pairs(text * 3, 270, ("<pad>",)) for _ in range(2))
    assert one.to_str() == other.to_str()
    for sentence in (*text, "never seen: ŝ"):
        (ids,) = tasks.encode(one, [sentence])
        assert one.decode(ids) == sentence
        assert sum(len(one.id_to_token(number)) for number in ids) == len(sentence.encode())


def test_the_default_text_is_the_book_in_a_checkout_and_passages_in_a_package(monkeypatch, tmp_path):
    name, text = tasks.load_default_text()
    assert name == "King James Bible"
    assert "[Gen" not in text
    assert text.startswith("In the beginning God created the heaven and the earth.\nAnd the earth")
    monkeypatch.setattr(tasks, "BOOK", tmp_path / "none")
    assert tasks.load_default_text()[0] == "King James passages"
    task = tasks.language([], sizes(length=128, vocabulary=1024))
    assert task.files == {}
    assert min(len(of_part.inputs) for of_part in task.cases.values()) >= 5


# --- translation ------------------------------------------------------------------------------------------------------
BOOKS = {"training": {"Gen", "Exod", "Matt", "Mark"}, "test": {"Job", "Ruth"}, "validation": {"Eccl", "Titus"}}
VERSES = [
    f"{book}.{1 + verse // 10}.{1 + verse % 10}\tdans le livre {book} {verse}\tin the book {book} {verse}"
    for book in itertools.chain(*BOOKS.values())
    for verse in range(20)
]


@pytest.fixture
def read_pairs(tmp_path):
    """Read a translation task from these lines."""

    def read(rows, **fields):
        path = tmp_path / "verses.tsv.gz"
        path.write_bytes(gzip.compress(("\n".join(rows) + "\n").encode()))
        return tasks.translation(path, sizes(**{"length": 64} | fields))

    return read


def test_whole_books_are_held_out_if_ids_are_verses(read_pairs):
    task = read_pairs(VERSES)
    targets = {part: [task.decode(target.tolist()) for target in cases.targets] for part, cases in task.cases.items()}
    assert {part: {text.split()[3] for text in written} for part, written in targets.items()} == BOOKS
    assert task.files.keys() == {"verses.tsv.gz"}
    plain = read_pairs([row.split("\t", 1)[1] for row in VERSES])
    assert [len(plain.cases[part].inputs) for part in ("training", "validation", "test")] == [140, 10, 10]
    (batch,) = first(task, 1)  # the decoder's inputs are the targets, one token later
    for inputs, target in zip(batch.decoder_inputs, batch.targets, strict=True):
        size = int((target != NOTHING).sum())
        assert (inputs[0], target[size - 1]) == (BEGIN, END)
        assert torch.equal(inputs[1:size], target[: size - 1])
    batch = task.held_out("test", 40)[0]
    assert (batch.inputs[batch.mask] != PADDING).all()
    assert (batch.inputs[~batch.mask] == PADDING).all()
    assert task.decode(batch.inputs[0].tolist()).startswith("dans le livre")


def test_longer_pairs_are_left_out_and_counted(read_pairs):
    rows = [*VERSES, "Gen.9.1\t" + "long " * 80 + "\tshort"]
    task = read_pairs(rows, length=40, evaluated=6)
    assert task.left_out == {"training": 1, "validation": 0, "test": 0}
    assert max(len(ids) + 1 for part in task.cases.values() for side in part for ids in side) <= task.length
    assert [len(task.cases[part].inputs) for part in ("validation", "test")] == [6, 6]
    with pytest.raises(TextError, match="part has no usable pair"):
        read_pairs(rows, length=3)


def test_held_out_pairs_are_not_trained_on(read_pairs):
    """600 lines of 50 pairs: repetitions of held-out pairs are removed from training, and counted."""
    task = read_pairs([f"eins {n % 50}\tone {n % 50}" for n in range(600)], evaluated=8)
    pairs = {
        part: [(tuple(source.tolist()), tuple(target.tolist())) for source, target in zip(*of_part, strict=True)]
        for part, of_part in task.cases.items()
    }
    assert pairs["training"]
    assert not set(pairs["training"]) & {*pairs["validation"], *pairs["test"]}
    assert task.repeated == 540 - len(pairs["training"])


COLUMNS = "expected 2 non-empty tab-separated columns; first wrong line: 3 "
PAIRS = "a\tb\nc\td\n{}\ne\tf\n"
BAD_FILES = {
    "only.tsv": (PAIRS.format("only one side").encode(), COLUMNS),
    "source.tsv": (PAIRS.format("\tempty source").encode(), COLUMNS),
    "target.tsv": (PAIRS.format("empty target\t ").encode(), COLUMNS),
    "three.tsv": (PAIRS.format("a\tb\tc").encode(), COLUMNS),
    "empty.tsv": (PAIRS.format("\n" * 6).encode(), r"first wrong line: 3 \(7 in total\)"),
    "no.tsv.gz": (b"no gzip", "can't be unpacked"),
    "cut.tsv.gz": (gzip.compress(b"a\tb\n" * 99)[:-9], "can't be unpacked"),
    "utf8.tsv": (b"a\t\xff\n", "is not UTF-8: the byte at offset 2"),
    "binary.tsv": (b"a\0b\tc\n", "binary"),
    "blank.tsv": (b"  \n", "is empty"),
    "none.tsv": (None, "can't be read"),
}


def test_bad_files_of_pairs_are_refused(tmp_path):
    for name, (content, says) in BAD_FILES.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(TextError, match=says) as caught:
            tasks.translation(tmp_path / name, sizes())
        assert "\n" not in caught.value.problem


# --- series -----------------------------------------------------------------------------------------------------------
def case(steps, label, offset=0.0):
    return f"{','.join(str(offset + step) for step in range(steps))}:{','.join('5' for _ in range(steps))}:{label}"


HEADER = "# made up\n@problemName Walks\n@classLabel true up down\n@data\n"


@pytest.fixture
def read_series(tmp_path):
    """Read a series from these training cases; `test` has two cases."""

    def read(cases, header=HEADER):
        test = [case(9, "down"), case(2, "up")]
        for name, rows, head in (("bad.ts", cases, header), ("b.ts", test, "@problemName Walks\n@data\n")):
            (tmp_path / name).write_text(head + "\n".join(rows) + "\n")
        return tasks.series(tmp_path / "bad.ts", tmp_path / "b.ts")

    return read


def test_series_are_normalised_by_the_training_part_and_padded(read_series, tmp_path):
    task = read_series([case(3 + n % 4, ("up", "down")[n % 2], n) for n in range(20)])
    assert (task.name, task.classes, task.channels, task.length, task.vocabulary) == ("Walks", 2, 2, 9, 0)
    steps = torch.cat(task.cases["training"].inputs)
    torch.testing.assert_close(steps.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    assert float(steps[:, 0].std(correction=0)) == pytest.approx(1)
    assert torch.equal(steps[:, 1], torch.zeros(len(steps))), "a constant channel is centred"
    (batch,) = task.held_out("test", 8)
    assert batch.inputs.dtype == torch.float32
    assert batch.mask.sum(1).tolist() == [2, 9]
    assert batch.targets.tolist() == [0, 1]
    counts = {"training": {0: 8, 1: 8}, "validation": {0: 2, 1: 2}, "test": {0: 1, 1: 1}}
    assert counts_of(task) == counts, "a fifth of each class is used for validation"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "bad.ts").write_text((tmp_path / "b.ts").read_text())
    assert len(tasks.series(tmp_path / "bad.ts", tmp_path / "other" / "bad.ts").files) == 2, "files of one name"
    with pytest.raises(TextError, match="have the same content"):
        tasks.series(tmp_path / "bad.ts", tmp_path / "bad.ts")


UP, DOWN, DATA = case(3, "up"), case(3, "down"), "@data\n"
BAD_SERIES = [  # refusal, cases, header
    ("case 2 has a missing or infinite value", [UP, "1,?,3:4,5,6:up", DOWN], HEADER),
    ("case 2 has a missing or infinite value", [UP, "1,NaN,3:4,5,6:up", DOWN], HEADER),
    ("case 2: expected sequence of length 3", [UP, "1,2,3:4,5:up", DOWN], HEADER),
    ("case 2 has 1 channel, but earlier cases have 2", [UP, "1,2,3:up", DOWN], HEADER),
    ("case 2: could not convert string to float: 'x'", [UP, "1,2,3:4,x,6:up", DOWN], HEADER),
    ("case 2 lacks a class label or channels", [UP, "up", DOWN], HEADER),
    ("case 2 lacks a class label", [UP, "1,2:3,4:", DOWN], HEADER),
    ("a single label: up", [UP] * 4, DATA),
    ("a single case with label down", [UP, UP, DOWN], DATA),
    ("label down, which is missing from bad.ts", [case(3, "left"), case(3, "right")] * 3, DATA),
    ("no cases below its @data line", [UP], ""),
    ("no cases below its @data line", [], DATA),
    ("time stamps", [UP], "@timeStamps true\n@data\n"),
    ("no class labels", [UP], "@classLabel false\n@data\n"),
    ("3 channels, but the test file b.ts has 2", [f"1:{case(1, 'up')}", f"1:{case(1, 'down')}"] * 2, DATA),
]


@pytest.mark.parametrize(("says", "cases", "header"), BAD_SERIES)
def test_bad_series_are_refused(read_series, says, cases, header):
    with pytest.raises(TextError, match=says):
        read_series(cases, header)


# --- labelled texts, and the papers' data -----------------------------------------------------------------------------
def test_labelled_texts_are_split_by_class_without_repeats(tmp_path):
    rows = [f"{line}\t{('bad', 'good')[number % 3 == 0]}" for number, line in enumerate(lines(300))]
    path = tmp_path / "labelled.tsv"
    path.write_text("\n".join(["text\tlabel", *rows, *rows[:7]]))
    task = tasks.load_labelled(path, sizes(length=12))
    assert (task.classes, task.length, task.left_out["repeated"]) == (2, 12, 7)
    assert counts_of(task) == {"training": {0: 160, 1: 80}, "validation": {0: 20, 1: 10}, "test": {0: 20, 1: 10}}
    assert task.left_out["cut"] > 0
    assert same(first(task, 3)[2], first(task, 3)[2])
    for content, says in (
        ("a\tx\nb\tx\n", "a single label: x"),
        ("text\tlabel\n", "no text below its header"),
        ("a\tx\nb\tx\nc\tx\nd\ty\n", "1 text with label y"),
        ("a\tx\nb\n", "expected 2 non-empty tab-separated columns; first wrong line: 2 "),
    ):
        path.write_text(content)
        with pytest.raises(TextError, match=says):
            tasks.load_labelled(path, sizes())


def test_the_papers_data_have_their_own_parts(tmp_path, monkeypatch):
    def dataset(name, row_of):
        folder = tmp_path / name
        folder.mkdir()
        for part, numbers in (("test", range(60)), ("validation", range(60, 120)), ("train", range(120, 520))):
            (folder / f"{part}.jsonl").write_text("".join(json.dumps(row_of(n)) + "\n" for n in numbers))
        return (str(folder),)

    monkeypatch.setattr(tasks, "WIKITEXT", dataset("w", lambda n: {"text": lines(1, n)[0]}))
    pairs = dataset("i", lambda n: {"translation": {"de": f"Zahl {n}", "en": f"number {n}"}})
    monkeypatch.setattr(tasks, "IWSLT", pairs)
    text, talks = tasks.wikitext(sizes()), tasks.iwslt(sizes())
    ids = text.cases["test"].inputs.flatten().tolist()
    assert text.decode(ids).startswith(lines(1, 0)[0] + "\n" + lines(1, 1)[0])
    assert len(talks.cases["training"].inputs) == 400
    assert talks.decode(talks.cases["validation"].targets[7].tolist()) == "number 67"
    assert len(talks.files) == len(text.files) == 3
    monkeypatch.setattr(tasks, "IWSLT", ("/nowhere/at/all",))
    with pytest.raises(TextError) as missing:
        tasks.iwslt(sizes())
    assert "--pairs" in missing.value.remedy
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="require the package `datasets`") as missing:
        tasks.wikitext(sizes())
    assert "attnlens[papers]" in missing.value.remedy


# --- built-in tasks ---------------------------------------------------------------------------------------------------
def test_the_reversal_needs_the_order_of_letters():
    task = Reversal(letters=4)
    # letters 0 3 2 1 are ids 3 6 5 4; capitals are four further
    assert task.target(torch.tensor([3, 6, 5, 4])).tolist() == [4, 5 + 4, 6, 3]
    batch = first(task, 1, size=64)[0]
    assert batch.inputs.shape[1] <= task.length
    assert batch.targets[batch.targets != NOTHING].max() < task.vocabulary
    assert same(first(task, 2)[1], first(task, 2)[1])
    assert not same(first(task, 1)[0], first(task, 1, seed=1)[0])
    by_bag = {}
    for source in itertools.product(range(3, 7), repeat=4):
        by_bag.setdefault(tuple(sorted(source)), set()).add(tuple(task.target(torch.tensor(source)).tolist()))
    assert max(map(len, by_bag.values())) > 10, "a bag of letters leaves the target open"


# --- beam search ------------------------------------------------------------------------------------------------------
OUTPUTS, MOST = 5, 4
SOURCES = torch.arange(3, 15).view(12, 1) * torch.tensor([1, 2])


class RandomWriter(nn.Module):
    """Logits that are a random function of the source's sum and of the last two tokens."""

    def __init__(self, seed):
        super().__init__()
        table = torch.randn(11, OUTPUTS, OUTPUTS, OUTPUTS, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("table", 2 * table)

    def encode(self, inputs, mask):
        return (inputs if mask is None else inputs * mask).sum(1)[:, None, None] % 11

    def decode(self, decoder_inputs, memory, mask):
        before = torch.cat((torch.zeros_like(decoder_inputs[:, :1]), decoder_inputs[:, :-1]), 1)
        return self.table[memory[:, 0], before, decoder_inputs]


def mean_log_probability(model, source, sentence):
    """log p(sentence, END | source) per token."""
    outputs = torch.tensor([*sentence, END])
    logits = model.decode(torch.tensor([[BEGIN, *sentence]]), model.encode(source[None], None), None)[0]
    return float(logits.double().log_softmax(-1).gather(1, outputs[:, None]).mean())


def exhaustive(model, source):
    """The best of all sentences of at most MOST tokens, END included."""
    letters = [letter for letter in range(OUTPUTS) if letter not in (PADDING, BEGIN, END)]
    sentences = [list(s) for size in range(MOST) for s in itertools.product(letters, repeat=size)]
    return max(sentences, key=lambda sentence: mean_log_probability(model, source, sentence))


def search(model, width=4):
    return beam_search(model, SOURCES, None, most=MOST, width=width)


def test_many_beams_find_the_best_sentence_and_four_find_better_ones_than_one():
    means, misses = {1: 0.0, 4: 0.0}, {1: 0, 4: 0}
    for seed in range(4):
        model = RandomWriter(seed)
        best = [exhaustive(model, source) for source in SOURCES]
        assert search(model, 2 ** (MOST - 1) * 4) == best
        for width in means:
            each = search(model, width)
            means[width] += sum(mean_log_probability(model, *pair) for pair in zip(SOURCES, each, strict=True))
            misses[width] += sum(one != other for one, other in zip(each, best, strict=True))
    assert means[4] > means[1]
    assert misses[4] < misses[1] > 8, "the control: one beam alone misses the best"


def test_sources_of_one_batch_are_independent_and_padding_is_not_read():
    model = RandomWriter(1)
    alone = [beam_search(model, source[None], None, most=MOST)[0] for source in SOURCES]
    assert search(model) == alone
    mask = torch.cat((torch.ones(12, 2, dtype=torch.bool), torch.zeros(12, 1, dtype=torch.bool)), 1)
    inputs = torch.cat((SOURCES, torch.full((12, 1), 7)), 1)
    assert beam_search(model, inputs, mask, most=MOST) == alone
    assert beam_search(model, inputs, None, most=MOST) != alone, "the control"


def test_sentences_have_a_maximum_length_and_no_special_tokens():
    class Endless(RandomWriter):
        def decode(self, decoder_inputs, memory, mask):
            logits = torch.zeros(*decoder_inputs.shape, OUTPUTS)
            logits[..., PADDING], logits[..., BEGIN], logits[..., END] = 9.0, 9.0, -50.0
            return logits

    for sentence in search(Endless(0)):
        assert len(sentence) == MOST - 1
        assert not {PADDING, BEGIN, END} & set(sentence)


# --- scores -----------------------------------------------------------------------------------------------------------
class KnowsTheTarget(nn.Module):
    """A model that knows the rule of the reversal, times a factor, or without capitals."""

    def __init__(self, task, *, forgets=False, factor=1.0):
        super().__init__()
        self.task, self.forgets, self.factor = task, forgets, factor

    def encode(self, inputs, mask):
        return (inputs if mask is None else inputs * mask)[..., None]

    def decode(self, decoder_inputs, memory, mask):
        logits = torch.zeros(*decoder_inputs.shape, self.task.vocabulary)
        for row, source in enumerate(memory[..., 0]):
            target = self.task.target(source[source > END])
            if self.forgets:
                target = (target - 3) % self.task.letters + 3
            expected = [*target.tolist(), *[END] * decoder_inputs.shape[1]]
            for place in range(decoder_inputs.shape[1]):
                logits[row, place, expected[place]] = 40.0
        return logits

    def forward(self, inputs, mask, decoder_inputs):
        return self.decode(decoder_inputs, self.encode(inputs, mask), mask) * self.factor


def test_translations_are_scored():
    task = Reversal(evaluated=20)
    right, wrong = KnowsTheTarget(task), KnowsTheTarget(task, forgets=True)
    scores = score(task, right, "test", 16)
    assert scores["loss"] == pytest.approx(0, abs=1e-6)
    assert (scores["BLEU"], scores["chrF"]) == pytest.approx((100, 100))
    control = score(task, wrong, "test", 16)
    assert control["loss"] > 1
    assert control["BLEU"] < 60
    assert score(task, wrong, "test", 7, loss_only=True)["loss"] == pytest.approx(control["loss"]), "any batch size"
    diverged = score(task, KnowsTheTarget(task, factor=math.nan), "validation", 4)
    assert all(math.isnan(value) for value in diverged.values()), "without an endless search"


def test_bleu_and_chrf_are_those_of_n_grams_counted_by_hand(monkeypatch):
    """BLEU-4 of words and punctuation marks; chrF2 of up to six letters, for sacrebleu's own example."""
    written = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
    reference = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]
    scores = bleu_and_chrf(list(zip(written, reference, strict=True)))
    assert scores == pytest.approx({"BLEU": 45.067506321, "chrF": 50.043063607})
    swapped = bleu_and_chrf(list(zip(reference, written, strict=True)))
    assert swapped["chrF"] == pytest.approx(47.065843947), "recall counts more than precision"
    assert bleu_and_chrf(list(zip(reference, reference, strict=True)))["BLEU"] == pytest.approx(100), "the control"
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UsageError) as caught:
        bleu_and_chrf([("a", "a")])
    assert "attnlens[study]" in caught.value.remedy


class Fixed(nn.Module):
    """The same logits for every target."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.modes = nn.Parameter(torch.tensor(logits)), []

    def forward(self, inputs, mask, decoder_inputs):
        self.modes.append(self.training)
        return self.logits.expand(*inputs.shape, -1)


class TwoBatches:
    """A language of two batches with different numbers of targets."""

    form, tokenizer = "language", SimpleNamespace(get_vocab=lambda: {"a": 0, "bc": 1})

    def held_out(self, split, size):
        rows = [torch.tensor([[0, 1, 1]]), torch.tensor([[0, -100, -100]])]
        return [examples.Examples(row.clamp(min=0), None, row) for row in rows]


def test_the_loss_is_the_mean_over_all_tokens_and_not_over_batches():
    model = Fixed([math.log(1 / 4), math.log(3 / 4)])
    scores = score(TwoBatches(), model.train(), "test", 1)
    loss = (2 * math.log(4) + 2 * math.log(4 / 3)) / 4
    assert scores["loss"] == pytest.approx(loss)
    assert scores["perplexity"] == pytest.approx(math.exp(loss))
    assert scores["bits_per_byte"] == pytest.approx(4 * loss / math.log(2) / 6)
    assert score(TwoBatches(), model, "test", 1, loss_only=True)["loss"] == scores["loss"]
    over_batches = ((math.log(4) + 2 * math.log(4 / 3)) / 3 + math.log(4)) / 2
    assert scores["loss"] != pytest.approx(over_batches), "the control"
    assert model.modes == [False] * 4, "in evaluation mode"
    assert model.training, "as it was before"
