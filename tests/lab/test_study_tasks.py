"""Tests the study's tasks: splits that do not leak, batches that repeat, bad files, and what the planted tasks hold."""

import gzip
import itertools
import json
import math
import sys
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from planted_tasks import angles, before, least_leak, majority, permuted
from torch import nn

from attnlens.errors import TextError, UsageError
from attnlens.lab.study import tasks
from attnlens.lab.study.examples import BEGIN, END, NOTHING, PADDING, Reversal, cross_entropy, endless, score
from attnlens.lab.study.tables import SCALES
from attnlens.lab.study.tasks import blocks, encode, space_evenly, train_byte_pairs

WORDS = ["light", "darkness", "earth", "water", "firmament", "evening", "morning", "heaven"]


def sizes(**fields):
    return replace(SCALES["tiny"], **{"evaluated": 10**6} | fields)


def lines(count, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return [
        " ".join(WORDS[at] for at in torch.randint(len(WORDS), (8,), generator=draws).tolist()) + f" {number}."
        for number in range(count)
    ]


def same(one, other):
    """Whether two batches hold the same."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("inputs", "mask", "targets", "decoder_inputs")]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def first(task, count, size=4, seed=0):
    return list(itertools.islice(task.training(size, seed), count))


# splits and batches


@pytest.mark.parametrize("count", [3, 7, 40, 1001])
@pytest.mark.parametrize("stretches", [1, 10])
def test_blocks_hold_every_number_once_and_held_out_blocks_are_contiguous(count, stretches):
    parts = blocks(count, stretches=stretches)
    flat = sorted(number for each in parts.values() for block in each for number in block)
    assert flat == list(range(count))
    assert len(parts["test"]) <= stretches
    if count > 100 * stretches:
        assert all(len(parts[part]) == stretches for part in parts)
        assert sum(map(len, parts["training"])) == pytest.approx(0.9 * count, rel=0.02)


def test_an_epoch_gives_every_example_once_in_an_order_of_its_seed():
    lengths = [number % 11 for number in range(40)]

    def order(seed):
        return list(itertools.islice(endless(lengths, 4, seed), 20))

    epochs = order(0)[:10], order(0)[10:]
    assert [sorted(number for batch in epoch for number in batch) for epoch in epochs] == [[*range(40)]] * 2
    assert not {frozenset(batch) for batch in epochs[0]} & {frozenset(batch) for batch in epochs[1]}
    assert order(0) == order(0)
    assert order(0) != order(1), "a control"


def test_what_an_epoch_leaves_out_is_not_always_the_longest():
    seen = Counter(number for batch in itertools.islice(endless([1, 2, 3, 4, 100], 2, 0), 60) for number in batch)
    assert seen[4] > 10
    assert len(next(endless([1, 2, 3], 8, 0))) == 3, "fewer than a batch are all of them"


def test_evaluated_sentences_are_spread_evenly():
    assert space_evenly(10, 5) == [1, 3, 5, 7, 9]
    assert space_evenly(3, 5) == [0, 1, 2]


# language


def test_windows_do_not_cross_splits_and_targets_are_the_next_tokens():
    text = "\n".join(lines(1200)) + "\n"
    parts = tasks.split_text(text)
    assert sorted("".join(part for each in parts.values() for part in each)) == sorted(text)
    task = tasks.language([("lines", text)], sizes(length=16, vocabulary=300))
    for part, (inputs, targets) in task.cases.items():
        assert len(inputs) > 10
        for row in torch.cat((inputs, targets[:, -1:]), 1):
            assert any(task.decode(row.tolist()) in block for block in parts[part]), "a window stands in one block"
    batch = first(task, 1)[0]
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.inputs.shape == (4, 16)
    everything = task.decode(task.cases["test"].inputs.flatten().tolist())
    assert not any(everything[at : at + 90] in "".join(parts["training"]) for at in range(0, 900, 90)), "no leak"


def test_byte_pairs_are_trained_on_the_training_part_alone():
    text = "\n".join(lines(1200)) + "\n"
    (*_, last) = tasks.split_text(text)["test"]
    strange = text.replace(last, last.replace("light", "leviathan"))
    task = tasks.language([("lines", strange)], sizes(length=16, vocabulary=400))
    assert len(encode(task.tokenizer, [" darkness"])[0]) == 1
    assert len(encode(task.tokenizer, [" leviathan"])[0]) > 2, "a word of the test part alone has no id of its own"
    everywhere = train_byte_pairs(strange.replace("light", "leviathan").splitlines(keepends=True), 400)
    assert len(encode(everywhere, [" leviathan"])[0]) == 1, "a control"


def test_byte_pairs_lose_nothing_are_deterministic_and_know_their_bytes():
    text = ["In the beginning", "Énosch, Kénan — 神\n"]
    one, other = (train_byte_pairs(text * 3, 270, ("<pad>",)) for _ in range(2))
    assert one.to_str() == other.to_str()
    for sentence in (*text, "never seen: ŝ"):
        (ids,) = encode(one, [sentence])
        assert one.decode(ids) == sentence
        assert sum(len(one.id_to_token(number)) for number in ids) == len(sentence.encode())


def test_two_tasks_of_one_text_give_the_same_batches_and_other_seeds_other_ones():
    text = "\n".join(lines(1200)) + "\n"
    one, other = (tasks.language([("lines", text)], sizes(length=16, vocabulary=300)) for _ in range(2))
    assert all(map(same, first(one, 5), first(other, 5)))
    assert all(map(same, one.held_out("test", 8), other.held_out("test", 8)))
    assert not all(map(same, first(one, 5), first(one, 5, seed=1))), "a control"
    assert len(tasks.language([("a", text)], sizes(length=16, vocabulary=300, evaluated=9)).cases["test"].inputs) == 9


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(TextError, match=r"too short: its .* part is shorter than one window of 64 tokens"):
        tasks.language([("short", "In the beginning")], sizes(length=64, vocabulary=300))


def test_the_default_text_is_the_book_in_a_checkout_and_the_passages_in_an_installed_package(monkeypatch, tmp_path):
    name, text = tasks.load_default_text()
    assert name == "King James Bible"
    assert "[Gen" not in text
    assert text.startswith("In the beginning God created the heaven and the earth.\nAnd the earth")
    monkeypatch.setattr(tasks, "BOOK", tmp_path / "none")
    assert tasks.load_default_text()[0] == "King James passages"
    task = tasks.language([], sizes(length=128))
    assert task.files == {}
    assert min(len(of_part.inputs) for of_part in task.cases.values()) >= 5


# translation


@pytest.fixture
def verses(tmp_path):
    """Books of twenty verses, of which some are held out; each book has a word of its own."""
    books = ["Gen", "Exod", "Matt", "Mark", "Job", "Ruth", "Eccl", "Titus"]
    rows = [
        f"{book}.{1 + verse // 10}.{1 + verse % 10}\tdans le livre {book} {verse}\tin the book {book} {verse}"
        for book in books
        for verse in range(20)
    ]
    path = tmp_path / "verses.tsv.gz"
    path.write_bytes(gzip.compress(("\n".join(rows) + "\n").encode()))
    return path


def texts_of(task, part):
    return [task.decode(target.tolist()) for target in task.cases[part].targets]


def test_whole_books_are_held_out_where_ids_are_verses(verses):
    task = tasks.translation(verses, sizes(vocabulary=300))
    found = {part: {text.split()[3] for text in texts_of(task, part)} for part in task.cases}
    assert found == {
        "training": {"Gen", "Exod", "Matt", "Mark"},
        "validation": {"Eccl", "Titus"},
        "test": {"Job", "Ruth"},
    }
    assert task.files.keys() == {"verses.tsv.gz"}
    assert not set(texts_of(task, "test")) & set(texts_of(task, "training"))


def test_pairs_without_verses_are_split_by_contiguous_blocks(verses, tmp_path):
    plain = tmp_path / "pairs.tsv"
    rows = [line.split("\t", 1)[1] for line in gzip.decompress(verses.read_bytes()).decode().splitlines()]
    plain.write_text("\n".join(rows))
    task = tasks.translation(plain, sizes(vocabulary=300))
    assert [len(task.cases[part].inputs) for part in ("training", "validation", "test")] == [140, 10, 10]


def test_the_decoder_reads_what_it_has_to_predict_one_token_later(verses):
    task = tasks.translation(verses, sizes(vocabulary=300))
    for batch in first(task, 3):
        for given, meant in zip(batch.decoder_inputs, batch.targets, strict=True):
            size = int((meant != NOTHING).sum())
            assert given[0] == BEGIN
            assert torch.equal(given[1:size], meant[: size - 1])
            assert meant[size - 1] == END
    batch = task.held_out("test", 40)[0]
    assert (batch.inputs[batch.mask] != PADDING).all()
    assert (batch.inputs[~batch.mask] == PADDING).all()
    assert task.decode(batch.inputs[0].tolist()).startswith("dans le livre")


def test_longer_pairs_are_left_out_and_counted(verses):
    rows = gzip.decompress(verses.read_bytes()).decode()
    verses.write_bytes(gzip.compress((rows + "Gen.9.1\t" + "long " * 80 + "\tshort\n").encode()))
    task = tasks.translation(verses, sizes(vocabulary=300, length=40, evaluated=6))
    assert task.left_out == {"training": 1, "validation": 0, "test": 0}
    assert max(len(ids) + 1 for part in task.cases.values() for side in part for ids in side) <= task.length
    assert [len(task.cases[part].inputs) for part in ("validation", "test")] == [6, 6]
    with pytest.raises(TextError, match="part has no usable pair"):
        tasks.translation(verses, sizes(vocabulary=300, length=3))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("only one side", "expected 2 non-empty tab-separated columns; first wrong line: 3 "),
        ("\tempty source", "expected 2 non-empty tab-separated columns; first wrong line: 3 "),
        ("empty target\t ", "expected 2 non-empty tab-separated columns; first wrong line: 3 "),
        ("a\tb\tc", "expected 2 non-empty tab-separated columns; first wrong line: 3 "),
        ("\n\n\n\n\n\n", r"first wrong line: 3 \(7 in total\)"),
    ],
)
def test_pairs_with_empty_or_unequal_sides_are_told_with_their_lines(tmp_path, bad, said):
    path = tmp_path / "pairs.tsv"
    path.write_text(f"a\tb\nc\td\n{bad}\ne\tf\n")
    with pytest.raises(TextError, match=said) as caught:
        tasks.translation(path, sizes())
    assert "\n" not in caught.value.problem


def test_broken_and_strange_files_are_refused(tmp_path):
    for name, content in (
        ("a.tsv.gz", b"no gzip"),
        ("b.tsv.gz", gzip.compress(b"a\tb\n" * 99)[:-9]),
        ("c.tsv", b"a\t\xff\n"),
        ("d.tsv", b"a\0b\tc\n"),
        ("e.tsv", b"  \n"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TextError):
            tasks.translation(tmp_path / name, sizes())
    with pytest.raises(TextError, match="can't be read"):
        tasks.translation(tmp_path / "none.tsv", sizes())


# series


def series_file(path, cases, header="@problemName Walks\n@classLabel true up down\n@data\n"):
    path.write_text("# made up\n" + header + "\n".join(cases) + "\n")
    return path


def case(steps, label, offset=0.0):
    return (
        ",".join(str(offset + step) for step in range(steps)) + ":" + ",".join("5" for _ in range(steps)) + f":{label}"
    )


@pytest.fixture
def walks(tmp_path):
    train = series_file(tmp_path / "a.ts", [case(3 + n % 4, ("up", "down")[n % 2], n) for n in range(20)])
    test = series_file(tmp_path / "b.ts", [case(9, "down"), case(2, "up")])
    return train, test


def test_series_are_normalised_by_the_training_part_and_padded(walks):
    task = tasks.series(*walks)
    assert (task.name, task.classes, task.channels, task.length, task.vocabulary) == ("Walks", 2, 2, 9, 0)
    steps = torch.cat(task.cases["training"].inputs)
    torch.testing.assert_close(steps.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    assert float(steps[:, 0].std(correction=0)) == pytest.approx(1)
    assert torch.equal(steps[:, 1], torch.zeros(len(steps))), "a constant channel is centred"
    (batch,) = task.held_out("test", 8)
    assert batch.inputs.dtype == torch.float32
    assert batch.mask.sum(1).tolist() == [2, 9]
    assert batch.targets.tolist() == [0, 1]


def test_validation_is_a_fifth_of_each_class_whatever_the_seed(walks):
    task = tasks.series(*walks)
    assert {part: Counter(found.targets.tolist()) for part, found in task.cases.items()} == {
        "training": {0: 8, 1: 8},
        "validation": {0: 2, 1: 2},
        "test": {0: 1, 1: 1},
    }


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("1,?,3:4,5,6:up", "case 2 has a missing value"),
        ("1,NaN,3:4,5,6:up", "case 2 has a missing value"),
        ("1,2,3:4,5:up", "case 2: expected sequence of length 3"),
        ("1,2,3:up", "case 2 has 1 channels, but earlier cases have 2"),
        ("1,2,3:4,x,6:up", "case 2: could not convert string to float: 'x'"),
        ("up", "case 2 lacks a class label or channels"),
        ("1,2:3,4:", "case 2 lacks a class label"),
    ],
)
def test_a_bad_case_is_told_with_its_number(walks, tmp_path, bad, said):
    train = series_file(tmp_path / "bad.ts", [case(3, "up"), bad, case(3, "down")])
    with pytest.raises(TextError, match=said):
        tasks.series(train, walks[1])


def test_files_that_are_no_problem_of_classes_are_refused(walks, tmp_path):
    for cases, header, said in (
        ([case(3, "up")] * 4, "@data\n", "a single label: up"),
        ([case(3, "up"), case(3, "up"), case(3, "down")], "@data\n", "a single case with label down"),
        ([case(3, "left"), case(3, "right")] * 3, "@data\n", "label down, which is missing in bad.ts"),
        ([case(3, "up")], "", "no cases below its @data line"),
        ([], "@data\n", "no cases below its @data line"),
        ([case(3, "up")], "@timeStamps true\n@data\n", "time stamps"),
        ([case(3, "up")], "@classLabel false\n@data\n", "no class labels"),
        ([f"1:{case(1, 'up')}", f"1:{case(1, 'down')}"] * 2, "@data\n", "3 channels and b.ts has 2"),
    ):
        with pytest.raises(TextError, match=said):
            tasks.series(series_file(tmp_path / "bad.ts", cases, header), walks[1])


# labelled texts


def test_labelled_texts_are_split_by_class_without_repeats(tmp_path):
    rows = [f"{line}\t{('bad', 'good')[number % 3 == 0]}" for number, line in enumerate(lines(300))]
    path = tmp_path / "labelled.tsv"
    path.write_text("\n".join(["text\tlabel", *rows, *rows[:7]]))
    task = tasks.load_labelled(path, sizes(length=12, vocabulary=300))
    assert task.classes == 2
    assert task.left_out["repeated"] == 7
    assert {part: Counter(found.targets.tolist()) for part, found in task.cases.items()} == {
        "training": {0: 160, 1: 80},
        "validation": {0: 20, 1: 10},
        "test": {0: 20, 1: 10},
    }
    assert task.length == 12
    assert task.left_out["cut"] > 0
    assert same(first(task, 3)[2], first(task, 3)[2])


def test_labels_that_can_not_be_learnt_are_refused(tmp_path):
    path = tmp_path / "labelled.tsv"
    for content, said in (
        ("a\tx\nb\tx\n", "a single label: x"),
        ("text\tlabel\n", "no text below its header"),
        ("a\tx\nb\tx\nc\tx\nd\ty\n", "1 text.s. with label y"),
        ("a\tx\nb\n", "expected 2 non-empty tab-separated columns; first wrong line: 2 "),
    ):
        path.write_text(content)
        with pytest.raises(TextError, match=said):
            tasks.load_labelled(path, sizes())


# planted tasks


def sources_of(task, size):
    """All sources of so many letters."""
    return itertools.product(range(3, 3 + task.letters), repeat=size)


def conditional_entropy(rows):
    """Naive: the mean of −log p(token | what is known, tokens before it), summed over a target; p from counts."""
    seen = defaultdict(Counter)
    for known, target in rows:
        for place, token in enumerate(target):
            seen[known, target[:place]][token] += 1
    return sum(
        -count * math.log(count / sum(tokens.values())) for tokens in seen.values() for count in tokens.values()
    ) / len(rows)


@pytest.mark.parametrize("size", [2, 4, 5])
def test_a_bag_of_letters_leaves_the_target_open_and_their_order_does_not(size):
    task = Reversal(letters=3)
    targets = [(s, (*task.target(torch.tensor(s)).tolist(), 2)) for s in sources_of(task, size)]
    naive = conditional_entropy([(tuple(sorted(source)), target) for source, target in targets])
    assert naive > 0.4
    assert conditional_entropy(targets) == 0, "a control: who knows the order has no loss"


def test_the_reversal_is_as_told():
    task = Reversal(letters=4)
    # letters 0 3 2 1 are ids 3 6 5 4; capitals are four further
    assert task.target(torch.tensor([3, 6, 5, 4])).tolist() == [4, 5 + 4, 6, 3]
    batch = first(task, 1, size=64)[0]
    assert batch.inputs.shape[1] <= task.length
    assert batch.targets[batch.targets != NOTHING].max() < task.vocabulary
    assert same(first(task, 2)[1], first(task, 2)[1])
    assert not same(first(task, 1)[0], first(task, 1, seed=1)[0])


def test_of_every_bag_half_of_the_orders_have_each_class_and_order_tells_it():
    task = before(tokens=5, fillers=1)
    rows = torch.stack(list(task.cases["training"].inputs))
    labels = task.cases["training"].targets
    assert len({tuple(sorted(row)) for row in rows.tolist()}) == 1, "one bag"
    assert float(labels.float().mean()) == pytest.approx(0.5, abs=0.03)
    assert torch.equal((rows == 0).long().argmax(1) < (rows == 1).long().argmax(1), labels.bool())
    assert (rows[:, [0, -1]] > 1).all(), "picking the first or the last token helps nobody"


def test_the_bag_alone_tells_the_majority():
    task = majority()
    rows = torch.stack(list(task.cases["test"].inputs))
    assert torch.equal(2 * rows.sum(1) > rows.shape[1], task.cases["test"].targets.bool())


def test_few_features_leak_at_least_what_the_bound_says():
    draws = torch.Generator().manual_seed(0)
    off = ~torch.eye(16, dtype=torch.bool)
    for features in (1, 3, 5, 10):
        for _ in range(50):
            left, right = (torch.randn(16, features, generator=draws).double() for _ in range(2))
            ratio = left @ right.T
            ratio = ratio / ratio.diagonal()[:, None]
            assert ratio[off].pow(2).mean().sqrt() >= least_leak(16, features) - 1e-12
    places = 2 * math.pi * torch.arange(16).double() / 16
    cosine = (places[:, None] - places).cos()
    best = sum(((order * (places[:, None] - places)).cos() for order in (1, 2)), torch.full((16, 16), 0.5).double())
    assert float((best / best[0, 0])[off].pow(2).mean().sqrt()) == pytest.approx(least_leak(16, 5)), "it is attained"
    for offset in (0.0, 0.5, 1.0, 3.0):
        square = ((cosine + offset) / (1 + offset)) ** 2
        assert square[off].pow(2).mean().sqrt() >= least_leak(16, 5)
    assert (100 * (cosine - 1)).exp()[off].pow(2).mean().sqrt() < 0.01 < least_leak(16, 5), "a control: exponential"


class OneHead(nn.Module):
    """Attention of one layer, two heads, with the exponential kernel or the square, and a feed-forward part."""

    def __init__(self, task, exponential):
        super().__init__()
        self.exponential = exponential
        self.maps = nn.ModuleList(nn.Linear(task.channels, 32) for _ in range(3))
        self.forward_part = nn.Sequential(
            nn.Linear(32 + task.channels, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, task.classes)
        )

    def forward(self, inputs, mask, decoder_inputs):
        query, key, value = (part(inputs).unflatten(-1, (2, 16)).transpose(1, 2) for part in self.maps)
        score = query @ key.mT / 4
        log_k = score if self.exponential else 2 * (score.abs() + 1e-6).log()
        mixed = (log_k.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return self.forward_part(torch.cat((mixed, inputs), -1)).mean(1)


def trained(task, exponential):
    """Accuracy on test after 400 steps."""
    torch.manual_seed(0)
    model = OneHead(task, exponential)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=400)
    for batch in itertools.islice(task.training(64, 0), 400):
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs, batch.mask, None), batch.targets).div(64).backward()
        optimizer.step()
        schedule.step()
    return score(task, model, "test", 128)["accuracy"]


def test_the_exponential_kernel_selects_directions_that_the_square_can_not_tell_apart():
    task = angles()
    exponential, square = trained(task, True), trained(task, False)
    assert exponential > 0.95
    assert square < exponential - 0.08
    mixed = trained(permuted(task, 0), True)
    assert abs(mixed - 0.5) < 4 * math.sqrt(0.25 / 512), "a control: permuted labels give chance"


# --- the papers' data -------------------------------------------------------------------------------------------------


def hub(folder, rows):
    """A dataset in a folder, as datasets reads it: one file of rows a part."""
    folder.mkdir()
    for part, own in (("test", range(60)), ("validation", range(60, 120)), ("train", range(120, 520))):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(rows(n)) + "\n" for n in own))
    return (str(folder),)


def test_the_papers_data_come_in_their_own_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "WIKITEXT", hub(tmp_path / "w", lambda n: {"text": lines(1, n)[0]}))
    pairs = hub(tmp_path / "i", lambda n: {"translation": {"de": f"Zahl {n}", "en": f"number {n}"}})
    monkeypatch.setattr(tasks, "IWSLT", pairs)
    text, talks = tasks.wikitext(sizes(length=16, vocabulary=300)), tasks.iwslt(sizes(length=16, vocabulary=300))
    ids = text.cases["test"].inputs.flatten().tolist()
    assert text.decode(ids).startswith(lines(1, 0)[0] + "\n" + lines(1, 1)[0])
    assert len(talks.cases["training"].inputs) == 400
    assert talks.decode(talks.cases["validation"].targets[7].tolist()) == "number 67"
    assert len(talks.files) == len(text.files) == 3


def test_papers_data_that_can_not_be_had_are_named_with_what_to_give(monkeypatch):
    monkeypatch.setattr(tasks, "IWSLT", ("/nowhere/at/all",))
    with pytest.raises(TextError) as caught:
        tasks.iwslt(sizes())
    assert "--pairs" in caught.value.remedy
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="not installed") as missing:
        tasks.wikitext(sizes())
    assert "attnlens[papers]" in missing.value.remedy


def test_pairs_that_are_held_out_are_not_trained_on(tmp_path):
    """600 lines of 50 pairs: what is judged on is nowhere in training, and is counted."""
    path = tmp_path / "repeated.tsv"
    path.write_text("".join(f"eins {n % 50}\tone {n % 50}\n" for n in range(600)))
    task = tasks.translation(path, sizes(length=16, vocabulary=270, evaluated=8))
    pairs = {
        part: [(tuple(source.tolist()), tuple(target.tolist())) for source, target in zip(*of_part, strict=True)]
        for part, of_part in task.cases.items()
    }
    assert pairs["training"]
    assert not set(pairs["training"]) & {*pairs["validation"], *pairs["test"]}
    assert task.repeated == 540 - len(pairs["training"])


def test_series_of_one_name_are_told_apart_and_one_file_twice_is_refused(tmp_path):
    rows = "@problemName p\n@univariate true\n@classLabel true a b\n@data\n" + "1,2,3:a\n3,2,1:b\n" * 10
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.ts").write_text(rows + ("" if folder == "train" else "1,1,3:a\n"))
    assert len(tasks.series(tmp_path / "train" / "x.ts", tmp_path / "test" / "x.ts").files) == 2
    with pytest.raises(TextError, match="have the same content"):
        tasks.series(tmp_path / "train" / "x.ts", tmp_path / "train" / "x.ts")
