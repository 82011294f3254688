"""Tests how texts are read, cut into windows or lines, chosen, wrapped in special tokens, padded and refused."""

import hashlib
import io
import json
import re
import sys
from dataclasses import replace
from itertools import pairwise

import families
import loaded as support
import pytest
import tiny
import tokenizers
import torch
import transformers

import attnlens
from attnlens.errors import TextError, UsageError
from attnlens.models import texts
from attnlens.models.texts import Content, sequences, targets

WRAPS = {"bert": (1, 1), "roberta": (1, 1), "albert": (1, 1), "t5": (0, 1), "llama": (1, 0), "gpt2": (0, 0)}
"""Number of special tokens before and after a text, by tokenizer."""
PROSE = "the cat sat on the mat, the dog lay by the door.\n\nit was a quiet evening, and no one came.\n" * 20
LINES = "a cat\nthe dog lay by the door\n\n   \nhe\r\nand so on and on, no end\n"
windows_and_lines = pytest.mark.parametrize("pack", [True, False], ids=["windows", "lines"])


def loaded(name, tokenizer=None, model=None):
    model = support.loaded(families.build(name) if model is None else model)
    return replace(model, tokenizer=tokenizer, tokenizer_problem="" if tokenizer else "its files are missing")


def reader(name, **sizes):
    """A small GPT-2 (whatever the tokenizer: it takes any ids), or T5, which reads a text twice."""
    return loaded(name, tiny.tokenizer(name), None if name == "t5" else tiny.gpt2(**{"vocab_size": 300} | sizes))


def cut(model, text, *, skip_noise=0, apart=None, **options):
    """The batches of a string, a text or a list of texts."""
    contents = text if isinstance(text, list) else [Content(text, "a text") if isinstance(text, str) else text]
    options = texts.Cut(**{"placement": "first"} | options)
    return texts.batches(model, contents, options, skip_noise=skip_noise, apart_from=apart)


def rows(batches):
    return [row for batch in batches for row in batch.inputs["input_ids"].tolist()]


def refused(kind, call, *args, **options):
    """The error of a call, which says in one line what is wrong, and in another what to do."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert "\n" not in caught.value.problem
    assert "\n" not in caught.value.remedy
    return caught.value


def test_files_and_standard_input_are_read_as_separate_texts_unless_they_are_equal(tmp_path, monkeypatch):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("first")
    two.write_text("second\n")
    assert texts.read_each([str(one), str(two)]) == (Content("first", "one.txt"), Content("second\n", "two.txt"))
    assert texts.read_each([]) == ()
    two.write_text("first")
    for paths in ([one, two], [one, one]):
        error = refused(TextError, texts.read_each, [*map(str, paths)])
        assert "have the same content" in error.problem
        assert error.remedy == "Give each text only once."
    one.write_text(PROSE + "naïve\n", encoding="utf-8")
    (record,) = cut(reader("gpt2"), [*texts.read_each([str(one)])], tokens=16).texts
    assert (record.name, record.sha256) == ("one.txt", hashlib.sha256(one.read_bytes()).hexdigest())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffnaïve\n".encode()), encoding="ascii"))
    assert texts.read_each(["-"]) == (Content("naïve\n", "stdin"),)


def test_built_in_sample_has_three_kinds_of_text_and_one_for_demo_and_its_descendants(demo, tmp_path):
    sample = texts.sample("bert-base-uncased")
    assert [text.name for text in sample] == ["King James passages", "attnlens documentation", "attnlens source code"]
    assert all(len(text.text.encode()) >= 30_000 for text in sample)
    demo.tokenizer.save_pretrained(tmp_path / "copy")
    for name in ("demo", sequences.DEMO / "checkpoints" / "step-00030", tmp_path / "copy"):
        assert texts.sample(str(name)) == sample[:1]
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    for name in (tmp_path, tmp_path / "copy" / "none"):
        assert texts.sample(str(name)) == sample


def numbered(count):
    """A text whose lines and windows of four letters are all different."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return Content("".join(f"{letters[i // 26]}{letters[i % 26]}z\n" for i in range(count)), "a text")


@windows_and_lines
def test_each_text_gives_an_equal_share_and_a_short_one_all_it_has(pack):
    model, lengths = reader("gpt2"), {"the": 40, "cat": 1, "dog": 40}
    parts = [Content(f"{word} and so on, and on and on.\n" * lines, word) for word, lines in lengths.items()]
    options = {"tokens": 12, "batch_size": 4, "pack": pack}
    alone = [rows(cut(model, part, **options)) for part in parts]
    batches, short = cut(model, parts, sequences=9, **options), len(alone[1])
    assert short < 3
    counts = [-(-(9 - short) // 2), short, (9 - short) // 2]
    assert batches.parts == tuple(name for name, count in zip(lengths, counts, strict=True) for _ in range(count))
    assert rows(batches) == [row for part, count in zip(alone, counts, strict=True) for row in part[:count]]
    assert [(text.name, len(text.windows)) for text in batches.texts] == list(zip(lengths, counts, strict=True))
    assert (batches.texts[1].available, batches.left_out) == (short, ())
    assert cut(model, parts, sequences=2, **options).left_out == ("dog",)


@windows_and_lines
def test_spread_windows_lie_evenly_over_the_text(pack):
    """Systematic sampling: neighbours lie ⌊n/k⌋ or ⌈n/k⌉ apart, and over the seeds every window comes up alike."""
    model, text, times = reader("gpt2"), numbered(103), [0] * 103
    options = {"tokens": 4, "sequences": 10, "pack": pack}
    for seed in range(60):
        (record,) = cut(model, text, seed=seed, placement="spread", **options).texts
        assert record.available == 103
        assert {after - before for before, after in pairwise(record.windows)} <= {10, 11}
        assert record.windows[0] < 11
        assert record.windows[-1] >= 103 - 11
        for window in record.windows:
            times[window] += 1
    assert max(times) <= 6 * 60 * 10 / 103, "a window comes up far more often than chance"
    assert cut(model, text, **options).texts[0].windows == list(range(10)), "control: `first` is the beginning alone"
    drawn = [cut(model, text, placement="random", seed=seed, **options).texts[0].windows for seed in (0, 1)]
    assert drawn[0] != drawn[1]
    assert len({after - before for before, after in pairwise(drawn[0])}) > 2


def test_other_windows_of_a_text_are_disjoint_turns_at_their_numbers():
    model, text = reader("gpt2"), numbered(60)
    evaluated = cut(model, text, tokens=4, sequences=16, placement="spread", seed=3)
    more = {"tokens": 4, "sequences": 36, "placement": "spread", "apart": evaluated}
    turns = [cut(model, text, turn=(turn, 3), **more) for turn in range(3)]
    windows = [set(part.texts[0].windows) for part in (evaluated, *turns)]
    assert [len(part) for part in windows] == [16, 12, 12, 12]
    assert len(set().union(*windows)) == 16 + 36
    assert min(max(part) - min(part) for part in windows) > 40, "each part lies over the whole text"
    everything = cut(model, text, tokens=4, sequences=60)
    for part in (evaluated, *turns):
        assert rows(part) == [rows(everything)[number] for number in part.texts[0].windows]
    assert "no windows besides" in refused(TextError, cut, model, text, tokens=4, apart=everything).problem


def test_a_very_long_text_is_thinned_to_blocks_spread_over_it(monkeypatch):
    longest, blocks = 2**17, sequences.BLOCKS
    monkeypatch.setattr(sequences, "LONGEST", longest)
    text = "".join(f"{number:07d} " for number in range(longest // 4))
    spread, first = (sequences.thin_text(Content(text, "a text"), spread=spread).text for spread in (True, False))
    assert len(spread) == longest + blocks - 1
    assert spread.endswith(text[-100:])
    assert spread.startswith(text[: longest // blocks] + "\n")
    assert first == text[:longest]
    assert sequences.thin_text(Content(first, "a text"), spread=True).text == first


def test_repeated_share_counts_tokens_in_runs_of_several_sequences():
    model = reader("gpt2")
    once = cut(model, numbered(600), tokens=32, sequences=10).ids
    again = cut(model, "and so on and so forth, " * 99, tokens=32, sequences=40).ids
    assert texts.repeated_share(model.tokenizer, once) == 0
    assert texts.repeated_share(model.tokenizer, [*once, once[0]]) == pytest.approx(2 / 11)
    assert texts.repeated_share(model.tokenizer, again) > 0.5


def test_a_foreign_text_is_refused_unless_allowed_even_beside_readable_ones():
    model, foreign = reader("bert"), Content("ж ш щ " * 40, "foreign.txt")
    several = [Content(PROSE, "one.txt"), foreign, Content(PROSE * 2, "two.txt")]
    for contents in (foreign, several):
        error = refused(TextError, cut, model, contents, tokens=16, sequences=6)
        assert "88% of the tokens of foreign.txt" in error.problem
        assert "--allow-foreign-text" in error.remedy
    assert cut(model, foreign, tokens=16, allow_foreign=True).unknown == {"foreign.txt": pytest.approx(14 / 16)}
    unknown = cut(model, several, tokens=16, sequences=6, allow_foreign=True).unknown
    assert sum(unknown.values()) / 3 < 0.5, "pooled, it would pass"
    assert texts.foreign_notes(unknown) == [
        "88% of the tokens of foreign.txt are unknown to the tokenizer: "
        "the text may be in a language or domain that the model does not cover."
    ]
    assert 0.1 < cut(model, "the ж cat щ " * 40, tokens=10).unknown["a text"] < 0.5, "control: below the limit"
    assert len(texts.foreign_notes({"at": 0.1, "below": 0.0999})) == 1


def test_a_text_is_tokenized_once_until_it_is_cut_another_way(monkeypatch):
    calls, original = [], sequences.cut_windows
    monkeypatch.setattr(sequences, "cut_windows", lambda *args, **more: calls.append(more) or original(*args, **more))
    text, model = Content(PROSE, "a text"), reader("gpt2")
    options = {"tokens": 16, "sequences": 4, "placement": "spread"}
    evaluated = cut(model, text, **options)
    beside = cut(model, text, apart=evaluated, **options | {"sequences": 8})
    assert len(calls) == 1
    assert not set(evaluated.texts[0].windows) & set(beside.texts[0].windows)
    assert cut(reader("bert"), text, **options).ids != evaluated.ids
    assert cut(model, text, **options | {"tokens": 8}).tokens == 8
    assert cut(model, text, **options).ids == evaluated.ids
    assert len(calls) == 4, "another tokenizer, another length, and the first ones again"


@pytest.mark.parametrize("name", WRAPS)
def test_windows_and_lines_are_wrapped_as_the_tokenizer_wraps_a_text(name):
    tokenizer, model, (before, after) = tiny.tokenizer(name), reader(name), WRAPS[name]
    bare, whole = (tokenizer(PROSE, add_special_tokens=special)["input_ids"] for special in (False, True))
    assert whole[before : len(whole) - after] == bare
    batches, room = cut(model, PROSE, tokens=16, sequences=10, batch_size=4), 16 - before - after
    assert [len(batch.lengths) for batch in batches] == [4, 4, 2]
    assert (batches.sequences, batches.tokens) == (10, 16)
    pieces = [bare[room * number : room * (number + 1)] for number in range(10)]
    assert rows(batches) == [[*whole[:before], *piece, *whole[len(whole) - after :]] for piece in pieces]
    assert all(batch.inputs["attention_mask"].all() and {*batch.lengths} == {16} for batch in batches)
    sentence = tokenizer("the cat sat on the mat.")["input_ids"]
    assert rows(cut(model, "the cat sat on the mat.", tokens=len(sentence))) == [sentence]
    lines = ["a cat", "the dog lay by the door", "he", "and so on and on, no end"]
    expected = [tokenizer(line, truncation=True, max_length=14)["input_ids"] for line in lines]
    assert len({len(row) for row in expected}) > 1
    batches = cut(model, LINES, tokens=14, batch_size=3, pack=False)
    assert batches.sequences == 4
    assert [length for batch in batches for length in batch.lengths] == [len(row) for row in expected]
    for batch, wanted in zip(batches, (expected[:3], expected[3:]), strict=True):
        ids, mask, width = batch.inputs["input_ids"], batch.inputs["attention_mask"], max(map(len, wanted))
        assert mask.tolist() == [[1] * len(row) + [0] * (width - len(row)) for row in wanted]
        assert [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)] == wanted
    assert batches.tokens == max(map(len, expected)) <= 14
    assert cut(model, LINES, tokens=14, pack=False, sequences=2).sequences == 2


def test_a_short_text_gives_fewer_windows_with_a_note_and_short_lines_are_left_out():
    for letters, windows in ((10, 1), (39, 3), (40, 4)):
        batches = cut(reader("gpt2"), "a" * letters, tokens=10)
        assert (batches.sequences, batches.tokens, len(batches)) == (windows, 10, 1)
        assert batches.notes == (f"The text has only {windows} of the 32 requested windows.",)
    assert cut(reader("gpt2"), "a" * 40, tokens=10, sequences=4).notes == ()
    assert [batch.lengths for batch in cut(reader("gpt2"), "a\nbc\n\nd\nefg\n", pack=False)] == [(2, 3)]


def test_padded_lines_give_the_outputs_of_each_line_alone_whatever_the_tokenizer_pads_with():
    unknown = tiny.tokenizer("gpt2")
    unknown.add_special_tokens({"pad_token": "[PAD]"})
    small = tiny.gpt2(vocab_size=len(unknown) - 1)
    assert unknown.pad_token_id == small.config.vocab_size, "the id of padding is the first that the model lacks"
    for model in (loaded("bert", tiny.tokenizer("bert")), loaded("gpt2", unknown, small), reader("gpt2")):
        (batch,), alone = cut(model, LINES, pack=False), cut(model, LINES, pack=False, batch_size=1)
        assert not batch.inputs["attention_mask"].all()
        logits = model.model(**batch.inputs).logits
        for row, length, one in zip(logits, batch.lengths, alone, strict=True):
            assert torch.allclose(row[:length], model.model(**one.inputs).logits[0], atol=1e-5)
    assert model.tokenizer.pad_token_id is None, "it pads with its end instead"
    assert {*batch.inputs["input_ids"][batch.inputs["attention_mask"] == 0].tolist()} == {model.tokenizer.eos_token_id}


def test_unusable_lengths_and_tokenizers_are_refused():
    gpt2, bert, missing = reader("gpt2"), reader("bert"), "no usable tokenizer: its files are missing"
    largest = max(max(row) for row in rows(cut(gpt2, PROSE, tokens=16)))
    for kind, words, model, text, options in (
        (UsageError, "at most 32 tokens", gpt2, PROSE, {"tokens": 33}),
        (UsageError, "special tokens need 2", bert, PROSE, {"tokens": 2}),
        (UsageError, "special tokens need 2", bert, PROSE, {"tokens": 2, "pack": False}),
        (TextError, "has 1 token,", gpt2, "a", {"tokens": 10}),
        (TextError, "has 9 tokens", gpt2, "abcdefghi", {"tokens": 10}),
        (TextError, "No line", gpt2, "a\nb\n", {"pack": False}),
        *((TextError, missing, loaded(name), PROSE, {}) for name in ("gpt2", "t5", "clip", "whisper")),
        *((TextError, f"has only {n}", reader("gpt2", vocab_size=n), PROSE, {"tokens": 16}) for n in (60, largest)),
    ):
        assert words in refused(kind, cut, model, text, **options).problem
    assert cut(bert, PROSE, tokens=3).tokens == 3, "control: room for one token"
    assert cut(reader("gpt2", vocab_size=largest + 1), PROSE, tokens=16)
    for option, number in (("windows", 0), ("batch_size", 0), ("length", 0), ("length", 1)):
        with pytest.raises(UsageError, match=option):
            attnlens.inspect("demo", **{option: number})


def test_default_length_is_the_models_limit_up_to_128():
    assert cut(reader("gpt2"), PROSE).tokens == 32
    assert cut(reader("gpt2", n_positions=200), PROSE).tokens == 128
    assert sequences.position_limit(families.build("t5")) is None, "its positions are relative"
    for name in ("bert", "roberta", "gpt2", "opt", "bart", "clip", "whisper", "distilbert"):
        model = families.build(name)
        limit = sequences.position_limit(model)
        assert limit == (62 if name == "roberta" else 64), name
        model(**families.inputs(name, model, tokens=limit))
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            model(**families.inputs(name, model, tokens=limit + 3))


def test_a_decoder_reads_the_same_text_shifted():
    t5, bare = families.build("t5"), transformers.BartModel(families.build("bart").config)
    for name, start, model in (("t5", 0, t5), ("bart", 2, None), ("bart", 2, bare)):
        model = loaded(name, tiny.tokenizer("t5"), model)
        windows, lines = (cut(model, LINES * 9, tokens=10, pack=pack, batch_size=4) for pack in (True, False))
        for batch in (*windows, *lines):
            ids, shifted = batch.inputs["input_ids"], batch.inputs["decoder_input_ids"]
            real = batch.inputs["decoder_attention_mask"].bool()
            assert (shifted[:, 0] == start).all()
            assert torch.equal(shifted[:, 1:][real[:, 1:]], ids[:, :-1][real[:, 1:]])
            assert real.sum(1).tolist() == list(batch.lengths)
            model.model(**batch.inputs)
    t5.config.decoder_start_token_id = t5.generation_config.decoder_start_token_id = None
    error = refused(TextError, texts.placeholder, loaded("t5", tiny.tokenizer("t5"), t5), 9, 0)
    assert "valid start token" in error.problem


def test_pixels_are_noise_that_depends_on_seed_and_number_alone():
    model = loaded("vit")
    batches = cut(model, "", sequences=5, batch_size=2)
    pixels = torch.cat([batch.inputs["pixel_values"] for batch in batches])
    assert pixels.shape == (5, 3, 12, 12)
    assert pixels.std() == pytest.approx(1, abs=0.1)
    assert (batches.sequences, batches.tokens, batches.texts[0].name) == (5, 0, "random pixels")
    assert all(batch.lengths == () for batch in batches)
    again, other = (cut(model, "", sequences=5, seed=seed) for seed in (0, 1))
    assert torch.equal(again.batches[0].inputs["pixel_values"], pixels)
    assert again.texts == batches.texts != other.texts
    behind = cut(model, "", sequences=3, skip_noise=2).batches[0].inputs["pixel_values"]
    assert torch.equal(pixels[2:], behind)
    model.model(**batches.batches[0].inputs)
    half = loaded("vit", model=families.build("vit").bfloat16())
    assert cut(half, "", sequences=2).batches[0].inputs["pixel_values"].dtype == torch.bfloat16


def test_special_tokens_are_never_masked_even_if_a_line_has_no_others():
    model = support.family("bert")
    special = torch.tensor(model.tokenizer.all_special_ids)[None]
    inputs, wanted = targets._mask_tokens(model, {"input_ids": special}, torch.Generator().manual_seed(0))
    assert torch.equal(inputs["input_ids"], special)
    assert bool((wanted == targets.NOTHING).all())
    (chosen,) = targets._mask_tokens(model, {"input_ids": special.max() + special + 1}, torch.Generator())[1]
    assert bool((chosen != targets.NOTHING).any()), "the control"


def test_whispers_decoder_reads_the_text_as_it_is_beside_noise():
    whisper = loaded("whisper", tiny.tokenizer("bert"))
    (batch,) = batches = cut(whisper, PROSE, tokens=10, sequences=3)
    assert batch.inputs["input_features"].shape == (3, 8, 30)
    beginning = whisper.tokenizer(PROSE, truncation=True, max_length=10)["input_ids"]
    assert batch.inputs["decoder_input_ids"][0].tolist() == beginning
    assert [text.name for text in batches.texts] == ["a text", "random sound"]
    whisper.model(**batch.inputs)


@windows_and_lines
def test_a_tokenizer_with_dropout_cuts_a_text_the_same_way_each_time(pack, capfd):
    model = reader("gpt2")
    backend, words = model.tokenizer.backend_tokenizer, {**model.tokenizer.get_vocab(), "ab": 257}
    backend.model = tokenizers.models.BPE(words, [("a", "b")], dropout=0.5)
    first, *others = [rows(cut(model, "abababababab\n" * 40, tokens=8, sequences=4, pack=pack)) for _ in range(3)]
    assert all(other == first for other in others)
    assert any(257 in row for row in first)
    assert backend.model.dropout == 0.5
    model.tokenizer.model_max_length = 32
    cut(model, PROSE, tokens=16)
    assert capfd.readouterr() == ("", ""), "transformers does not warn about the length"


ROWS = [{"id": 1, "text": "In the beginning\n", "content": 3}, {"id": 2, "text": "the earth\u2028was void"}]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.jsonl",
            "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
            "In the beginning\nthe earth\u2028was void\n",
        ),
        ("a.txt", json.dumps(ROWS), "In the beginning\nthe earth\u2028was void\n"),
        ("a.json", '{"content": "alone"}', "alone\n"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "label": 1}', "its fields are: prompt, label"),
        ("a.jsonl", '{"text": "a"}\n{"text": 3}', "neither `text` nor `content` contains a string in every row"),
        ("a.jsonl", '{"text": "a"}\nprose', "is not JSON lines"),
        ("a.txt", "{braces} are prose\n[so are brackets]\n", None),
        ("a.txt", "[" * 100_000, None),
    ],
)
def test_json_rows_are_read_by_their_text_field_and_prose_as_it_is(tmp_path, name, text, expected) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    if expected and expected.endswith("\n"):
        content = texts.read(str(tmp_path / name))
        assert content.text == expected
        assert re.fullmatch(r"a\.\w+ \(field (text|content)\)", content.name)
    elif expected:
        assert expected in refused(TextError, texts.read, str(tmp_path / name)).problem
    else:
        assert texts.read(str(tmp_path / name)) == texts.Content(text, name)


def test_a_placeholder_needs_no_tokenizer_and_fits_every_family():
    for name in families.FAMILIES:
        model = loaded(name)
        assert texts.reads_text(model) is (name != "vit"), name
        batches, again, other = (texts.placeholder(model, 9, seed, sequences=2) for seed in (0, 0, 1))
        assert (batches.texts, batches.sequences) == (again.texts, 2), name
        assert batches.texts[0].sha256 != other.texts[0].sha256
        assert "random" in batches.texts[0].name
        (batch,) = batches
        assert batch.lengths == (() if name == "vit" else (9, 9)), name
        assert all(len(tensor) == 2 for tensor in batch.inputs.values()), name
        model.model(**batch.inputs)


def test_an_image_size_of_a_hostile_config_is_refused():
    assert texts.media_of(families.build("vit")).names == {"pixel_values"}, "control"
    for size in (100_000, -1, 2.5, "many", [3, None]):
        model = loaded("vit")
        model.model.config.__dict__["image_size"] = size
        assert "The config requires pixel_values" in refused(TextError, texts.placeholder, model, 2, 0).problem


def test_some_passes_lie_evenly_among_all():
    batches = cut(reader("gpt2"), PROSE, sequences=9, tokens=8, batch_size=2)
    for wanted, sizes in ((1, [2]), (5, [2, 2, 2]), (9, [2, 2, 2, 2, 1]), (99, [2, 2, 2, 2, 1])):
        some = batches.some(wanted)
        assert ([batch.size for batch in some], some.sequences) == (sizes, sum(sizes))
        places = [next(at for at, batch in enumerate(batches) if batch is one) for one in some]
        assert places == [index * len(batches) // len(sizes) for index in range(len(sizes))]
