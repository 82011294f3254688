"""The model gets exactly the text, in windows spread over it or line by line, with its own special tokens."""

from __future__ import annotations

import hashlib
import io
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import tokenizers
import torch
import transformers

import attnlens
from attnlens.errors import AttnlensError, TextError, UsageError
from attnlens.models import loading, texts
from attnlens.models.loading.configs import kind_of
from attnlens.models.texts import sequences
from attnlens.models.texts.sequences import BLOCKS, DEMO, LONGEST, position_limit, thin_text
from attnlens.records import ModelInfo

WRAPPED = ("bert", "roberta", "albert", "t5", "llama", "gpt2")
PROSE = "the cat sat on the mat, the dog lay by the door.\n\nit was a quiet evening, and no one came.\n" * 20
WORDS = {"the": 40, "cat": 1, "dog": 40}
"""Three texts of so many lines."""
LINES = "a cat\nthe dog lay by the door\n\n   \nhe\r\nand so on and on, no end\n"


def loaded(name: str, tokenizer: Any = None, model: Any = None) -> loading.Loaded:
    """A tiny model with that tokenizer, as `models.load` would hand it over."""
    model = model if model is not None else families.build(name)
    info = ModelInfo(id=name, architecture=type(model).__name__, parameters=0)
    problem = "" if tokenizer is not None else "its files are missing"
    return loading.Loaded(model, tokenizer, problem, info, kind_of(model))


def reading(name: str) -> loading.Loaded:
    """A small GPT-2 (whatever the tokenizer: it takes any ids), or T5 where a text is read twice."""
    if name == "t5":
        return loaded("t5", tiny.tokenizer("t5"))
    return loaded("gpt2", tiny.tokenizer(name), tiny.gpt2(vocab_size=300))


def content(text: str) -> texts.Content:
    return texts.Content(text, "a text")


def fed(
    model: loading.Loaded, contents: texts.Content | list[texts.Content], *, placement: Any = "first", **options: Any
) -> texts.Batches:
    """The first windows, where the test does not say otherwise; `skip_noise` and `apart_from` are the call's own."""
    own = {name: options.pop(name) for name in ("skip_noise", "apart_from") if name in options}
    several = [contents] if isinstance(contents, texts.Content) else contents
    return texts.batches(model, several, texts.Cut(placement=placement, **options), **own)


def rows(found: texts.Batches, name: str = "input_ids") -> list[list[int]]:
    return [row for batch in found for row in batch.inputs[name].tolist()]


def rejected(kind: type[AttnlensError], call: Any, *args: Any, **options: Any) -> AttnlensError:
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert "\n" not in caught.value.problem
    assert "\n" not in caught.value.remedy
    return caught.value


# where texts come from


def test_files_are_read_each_by_itself(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("first")
    (tmp_path / "two.txt").write_text("second\n")
    paths = [str(tmp_path / "one.txt"), str(tmp_path / "two.txt")]
    found = texts.read_each(paths)
    assert found == (texts.Content("first", "one.txt"), texts.Content("second\n", "two.txt"))
    assert texts.read_each([]) == ()


def test_a_text_counts_once_under_whatever_names(tmp_path: Path) -> None:
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("In the beginning. " * 50)
    one, two = str(tmp_path / "one.txt"), str(tmp_path / "two.txt")
    for paths in ([one, two], [one, one]):
        with pytest.raises(TextError, match="have the same content") as refusal:
            texts.read_each(paths)
        assert refusal.value.remedy == "Give each text only once."


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve\n".encode()), encoding="ascii"))
    assert texts.read_each(["-"]) == (texts.Content("naïve\n", "stdin"),)


def test_the_built_in_sample_is_of_three_kinds_and_for_demo_of_its_own() -> None:
    every = texts.sample("bert-base-uncased")
    assert [found.name for found in every] == ["King James passages", "attnlens documentation", "attnlens source code"]
    assert all(len(found.text.encode()) >= 30_000 for found in every)
    assert texts.sample("demo") == every[:1]
    assert texts.sample(str(DEMO / "checkpoints" / "step-00030")) == every[:1]


@pytest.mark.parametrize(
    ("stored", "words"),
    [(b"", "empty"), (b" \n\t\n", "empty"), (b"abc\0def", "binary"), (b"caf\xe9 au lait", "not UTF-8")],
)
def test_unusable_texts(stored: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(stored)
    assert words in rejected(TextError, texts.read_each, [str(path)]).problem


def test_unreadable_texts(tmp_path: Path) -> None:
    assert "No such file" in rejected(TextError, texts.read_each, [str(tmp_path / "nowhere.txt")]).problem
    assert "directory" in rejected(TextError, texts.read_each, [str(tmp_path)]).problem


# windows


@pytest.mark.parametrize("pack", [True, False], ids=["windows", "lines"])
def test_each_text_gives_its_share_and_a_short_one_all_that_it_has(pack: bool) -> None:
    model = reading("gpt2")
    parts = [texts.Content(f"{word} and so on, and on and on.\n" * lines, word) for word, lines in WORDS.items()]
    options: dict[str, Any] = {"tokens": 12, "batch_size": 4, "pack": pack}
    alone = [rows(fed(model, part, **options)) for part in parts]
    found = fed(model, parts, sequences=9, **options)
    short = len(alone[1])
    assert short < 3
    counts = [-(-(9 - short) // 2), short, (9 - short) // 2]
    assert found.parts == tuple(name for name, count in zip(WORDS, counts, strict=True) for _ in range(count))
    assert rows(found) == [row for part, count in zip(alone, counts, strict=True) for row in part[:count]]
    assert [(text.name, len(text.windows)) for text in found.texts] == list(zip(WORDS, counts, strict=True))
    assert found.texts[1].available == short


def numbered(count: int) -> texts.Content:
    """A text whose lines and windows of four letters are all different."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return content("".join(f"{letters[i // 26]}{letters[i % 26]}z\n" for i in range(count)))


@pytest.mark.parametrize("pack", [True, False], ids=["windows", "lines"])
def test_spread_windows_lie_evenly_over_the_text(pack: bool) -> None:
    """Systematic sampling: neighbours lie ⌊n/k⌋ or ⌈n/k⌉ apart, and over the seeds every window comes up alike."""
    model, options = reading("gpt2"), {"tokens": 4, "sequences": 10, "pack": pack, "placement": "spread"}
    times = [0] * 103
    for seed in range(60):
        (text,) = fed(model, numbered(103), seed=seed, **options).texts
        assert text.available == 103
        steps = {after - before for before, after in pairwise(text.windows)}
        assert steps <= {10, 11}
        assert text.windows[0] < 11
        assert text.windows[-1] >= 103 - 11
        for window in text.windows:
            times[window] += 1
    assert max(times) <= 6 * 60 * 10 / 103, "a window comes up far more often than chance"
    first = fed(model, numbered(103), **options | {"placement": "first"}).texts[0].windows
    assert first == list(range(10)), "the control: the first windows are the beginning alone"
    drawn = [fed(model, numbered(103), **options | {"placement": "random", "seed": seed}).texts[0] for seed in (0, 1)]
    assert drawn[0].windows != drawn[1].windows
    assert len({after - before for before, after in pairwise(drawn[0].windows)}) > 2


def test_windows_are_where_their_numbers_say() -> None:
    model, text = reading("gpt2"), numbered(50)
    every = rows(fed(model, text, tokens=4, sequences=50))
    found = fed(model, text, tokens=4, sequences=7, placement="spread", seed=3)
    assert rows(found) == [every[number] for number in found.texts[0].windows]


def test_other_windows_of_the_same_text_are_apart_and_turns_are_disjoint() -> None:
    model, text = reading("gpt2"), numbered(60)
    evaluated = fed(model, text, tokens=4, sequences=16, placement="spread")
    parts = [
        fed(model, text, tokens=4, sequences=36, placement="spread", apart_from=evaluated, turn=(turn, 3))
        for turn in range(3)
    ]
    taken = [set(part.texts[0].windows) for part in (evaluated, *parts)]
    assert [len(part) for part in taken] == [16, 12, 12, 12]
    assert len(set().union(*taken)) == 16 + 36
    spans = [max(part) - min(part) for part in taken]
    assert min(spans) > 40, "each part lies over the whole text"
    error = rejected(TextError, fed, model, text, tokens=4, apart_from=fed(model, text, tokens=4, sequences=60))
    assert "no windows besides" in error.problem


def test_a_very_long_text_is_read_in_blocks_spread_over_it() -> None:
    text = content("".join(f"{number:07d} " for number in range(LONGEST // 4)))
    spread, first = thin_text(text, spread=True).text, thin_text(text, spread=False).text
    assert len(spread) == LONGEST + BLOCKS - 1
    assert spread.endswith(text.text[-100:])
    assert first == text.text[:LONGEST]
    assert thin_text(content(PROSE), spread=True) == content(PROSE)


def test_repeated_text_is_told() -> None:
    model = reading("gpt2")
    once = fed(model, numbered(600), tokens=32, sequences=10)
    again = fed(model, content("and so on and so forth, " * 99), tokens=32, sequences=40)
    assert texts.repeated_share(model.tokenizer, once.ids) == 0
    assert texts.repeated_share(model.tokenizer, [*once.ids, once.ids[0]]) == pytest.approx(2 / 11)
    assert texts.repeated_share(model.tokenizer, again.ids) > 0.5


def test_a_foreign_text_is_refused_unless_it_is_allowed() -> None:
    model, foreign = reading("bert"), content("ж ш щ " * 40)
    error = rejected(TextError, fed, model, foreign, tokens=16)
    assert "88% of the tokens of a text" in error.problem
    assert "--allow-foreign-text" in error.remedy
    assert fed(model, foreign, tokens=16, allow_foreign=True).unknown == {"a text": pytest.approx(14 / 16)}
    half = content("the ж cat щ " * 40)
    assert fed(model, half, tokens=10, allow_foreign=True).unknown["a text"] < 0.5, "the control is below the limit"
    assert fed(model, half, tokens=10).sequences


def test_readable_texts_beside_a_foreign_one_do_not_let_it_in() -> None:
    model, foreign = reading("bert"), texts.Content("ж ш щ " * 40, "foreign.txt")
    several = [texts.Content(PROSE, "one.txt"), foreign, texts.Content(PROSE * 2, "two.txt")]
    error = rejected(TextError, fed, model, several, tokens=16, sequences=6)
    assert "88% of the tokens of foreign.txt" in error.problem
    allowed = fed(model, several, tokens=16, sequences=6, allow_foreign=True)
    (note,) = texts.foreign_notes(allowed.unknown)
    assert note == (
        "88% of the tokens of foreign.txt are unknown to the tokenizer: "
        "the text may be in a language or domain that the model does not cover."
    )
    assert sum(allowed.unknown.values()) / 3 < 0.5, "pooled, it would pass"


def test_a_text_is_tokenized_once_until_it_is_cut_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, honest = [], sequences.cut_windows
    monkeypatch.setattr(sequences, "cut_windows", lambda *given, **how: cut.append(how) or honest(*given, **how))
    text, model, other = content(PROSE), reading("gpt2"), reading("bert")
    first, rest = texts.Cut(tokens=16, sequences=4), texts.Cut(tokens=16, sequences=8)
    evaluated = texts.batches(model, [text], first)
    beside = texts.batches(model, [text], rest, apart_from=evaluated)
    assert len(cut) == 1
    assert not set(evaluated.texts[0].windows) & set(beside.texts[0].windows)
    assert texts.batches(other, [text], first).ids != evaluated.ids
    assert texts.batches(model, [text], texts.Cut(tokens=8, sequences=4)).tokens == 8
    assert texts.batches(model, [text], first).ids == evaluated.ids
    assert len(cut) == 4, "another tokenizer, another length, and the first ones again"


def test_texts_beyond_the_sequences_are_named() -> None:
    several = [texts.Content(PROSE * number, f"{number}.txt") for number in (1, 2, 3)]
    assert fed(reading("gpt2"), several, tokens=16, sequences=2).left_out == ("3.txt",)
    assert fed(reading("gpt2"), several, tokens=16, sequences=3).left_out == ()


@pytest.mark.parametrize("name", WRAPPED)
def test_each_window_is_wrapped_as_the_tokenizer_wraps_a_text(name: str) -> None:
    tokenizer = tiny.tokenizer(name)
    bare = tokenizer(PROSE, add_special_tokens=False)["input_ids"]
    whole = tokenizer(PROSE)["input_ids"]
    wraps = {"bert": (1, 1), "roberta": (1, 1), "albert": (1, 1), "t5": (0, 1), "llama": (1, 0), "gpt2": (0, 0)}
    before, after = wraps[name]
    assert whole[before : len(whole) - after] == bare
    found = fed(reading(name), content(PROSE), tokens=16, sequences=10, batch_size=4)
    room = 16 - before - after
    assert [len(batch.lengths) for batch in found] == [4, 4, 2]
    assert (found.sequences, found.tokens) == (10, 16)
    for number, row in enumerate(rows(found)):
        assert len(row) == 16
        assert row[:before] == whole[:before]
        assert row[16 - after :] == whole[len(whole) - after :]
        assert row[before : 16 - after] == bare[room * number : room * (number + 1)]
    assert all(batch.inputs["attention_mask"].all() for batch in found)
    assert all(length == 16 for batch in found for length in batch.lengths)


@pytest.mark.parametrize("name", WRAPPED)
def test_one_window_of_a_whole_text_is_what_the_tokenizer_says(name: str) -> None:
    text = "the cat sat on the mat."
    whole = tiny.tokenizer(name)(text)["input_ids"]
    assert rows(fed(reading(name), content(text), tokens=len(whole))) == [whole]


def test_a_short_text_gives_fewer_windows_and_says_how_many() -> None:
    found = fed(reading("gpt2"), content("a" * 35), tokens=10, sequences=32)
    assert (found.sequences, found.tokens, len(found)) == (3, 10, 1)


@pytest.mark.parametrize("text", ["a", "abcdefghi"])
def test_a_text_shorter_than_a_window_is_refused_with_its_length(text: str) -> None:
    error = rejected(TextError, fed, reading("gpt2"), content(text), tokens=10)
    assert f"has {len(text)} tokens" in error.problem


# lines


@pytest.mark.parametrize("name", WRAPPED)
def test_each_line_is_a_sequence_and_padding_is_masked(name: str) -> None:
    tokenizer = tiny.tokenizer(name)
    lines = ["a cat", "the dog lay by the door", "he", "and so on and on, no end"]
    expected = [tokenizer(line, truncation=True, max_length=14)["input_ids"] for line in lines]
    assert len({len(row) for row in expected}) > 1
    found = fed(reading(name), content(LINES), tokens=14, batch_size=3, pack=False)
    assert found.sequences == 4
    assert [length for batch in found for length in batch.lengths] == [len(row) for row in expected]
    for batch, wanted in zip(found, (expected[:3], expected[3:]), strict=True):
        mask = batch.inputs["attention_mask"]
        assert mask.shape == batch.inputs["input_ids"].shape == (len(wanted), max(map(len, wanted)))
        for row, kept, one in zip(batch.inputs["input_ids"], mask, wanted, strict=True):
            assert row[kept.bool()].tolist() == one
            assert kept.tolist() == [1] * len(one) + [0] * (mask.shape[1] - len(one))
    assert found.tokens == max(map(len, expected)) <= 14


def test_padded_lines_read_the_same_as_each_line_alone() -> None:
    for name in ("bert", "gpt2"):
        model = loaded(name, tiny.tokenizer(name), tiny.gpt2() if name == "gpt2" else None)
        together = fed(model, content(LINES), pack=False)
        alone = fed(model, content(LINES), pack=False, batch_size=1)
        (batch,) = together
        logits = model.model(**batch.inputs).logits
        for row, length, one in zip(logits, batch.lengths, alone, strict=True):
            assert torch.allclose(row[:length], model.model(**one.inputs).logits[0], atol=1e-5)


def test_a_tokenizer_without_padding_pads_with_its_end() -> None:
    assert tiny.tokenizer("gpt2").pad_token_id is None
    (batch,) = fed(reading("gpt2"), content(LINES), pack=False)
    end = tiny.tokenizer("gpt2").eos_token_id
    assert set(batch.inputs["input_ids"][batch.inputs["attention_mask"] == 0].tolist()) == {end}


def test_lines_without_a_pair_are_left_out() -> None:
    found = fed(reading("gpt2"), content("a\nbc\n\nd\nefg\n"), pack=False)
    assert [batch.lengths for batch in found] == [(2, 3)]
    error = rejected(TextError, fed, reading("gpt2"), content("a\nb\n"), pack=False)
    assert "No line" in error.problem


def test_only_as_many_lines_as_asked_for() -> None:
    assert fed(reading("gpt2"), content(LINES), pack=False, sequences=2).sequences == 2


# lengths


def test_windows_longer_than_the_model_reads() -> None:
    problem = rejected(UsageError, fed, reading("gpt2"), content(PROSE), tokens=33).problem
    assert "at most 32 tokens" in problem


def test_special_tokens_must_leave_room() -> None:
    for pack in (True, False):
        error = rejected(UsageError, fed, reading("bert"), content(PROSE), tokens=2, pack=pack)
        assert "special tokens need 2" in error.problem
    assert fed(reading("bert"), content(PROSE), tokens=3).tokens == 3


@pytest.mark.parametrize(("option", "number"), [("windows", 0), ("batch_size", 0), ("length", 0), ("length", 1)])
def test_numbers_below_the_least(option: str, number: int) -> None:
    with pytest.raises(UsageError, match=option):
        attnlens.inspect("demo", **{option: number})


def test_unasked_length_is_what_the_model_allows_up_to_128() -> None:
    assert fed(reading("gpt2"), content(PROSE)).tokens == 32
    longer = loaded("gpt2", tiny.tokenizer("gpt2"), tiny.gpt2(n_positions=200))
    assert fed(longer, content(PROSE)).tokens == 128


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "opt", "bart", "clip", "whisper", "distilbert"])
def test_the_position_limit_is_the_longest_input_that_the_model_takes(name: str) -> None:
    model = families.build(name)
    limit = position_limit(model)
    assert limit == (62 if name == "roberta" else 64)
    model(**families.inputs(name, model, tokens=limit))
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        model(**families.inputs(name, model, tokens=limit + 3))


def test_relative_positions_have_no_limit() -> None:
    assert position_limit(families.build("t5")) is None


# models that read something else, or twice


def test_a_decoder_reads_the_same_text_shifted() -> None:
    for name, start in (("t5", 0), ("bart", 2)):
        model = loaded(name, tiny.tokenizer("t5"))
        for pack in (True, False):
            found = fed(model, content(LINES * 9), tokens=10, pack=pack, batch_size=4)
            for batch in found:
                ids, shifted = batch.inputs["input_ids"], batch.inputs["decoder_input_ids"]
                real = batch.inputs["decoder_attention_mask"].bool()
                assert (shifted[:, 0] == start).all()
                assert torch.equal(shifted[:, 1:][real[:, 1:]], ids[:, :-1][real[:, 1:]])
                assert real.sum(1).tolist() == list(batch.lengths)
                model.model(**batch.inputs)


def test_a_decoder_without_a_start_token_is_refused() -> None:
    t5 = families.build("t5")
    t5.config.decoder_start_token_id = t5.generation_config.decoder_start_token_id = None
    error = rejected(TextError, texts.placeholder, loaded("t5", tiny.tokenizer("t5"), t5), 9, 0)
    assert "valid start token" in error.problem


@pytest.mark.parametrize(("name", "reads"), [("vit", False), ("bert", True), ("clip", True), ("whisper", True)])
def test_which_models_read_text(name: str, reads: bool) -> None:
    assert texts.reads_text(loaded(name)) is reads


def test_a_bare_encoder_decoder_is_fed_in_the_same_way() -> None:
    bare = transformers.BartModel(families.build("bart").config)
    headed = fed(loaded("bart", tiny.tokenizer("t5")), content(PROSE), tokens=10)
    found = fed(loaded("bart", tiny.tokenizer("t5"), bare), content(PROSE), tokens=10)
    assert rows(found, "decoder_input_ids") == rows(headed, "decoder_input_ids")


def test_pixels_are_seeded_noise_and_need_no_text() -> None:
    model = loaded("vit")
    found = fed(model, content(""), sequences=5, batch_size=2)
    pixels = torch.cat([batch.inputs["pixel_values"] for batch in found])
    assert pixels.shape == (5, 3, 12, 12)
    assert pixels.std() == pytest.approx(1, abs=0.1)
    assert (found.sequences, found.tokens, found.texts[0].name) == (5, 0, "random pixels")
    assert all(batch.lengths == () for batch in found)
    again, other = (fed(model, content(""), sequences=5, seed=seed) for seed in (0, 1))
    assert torch.equal(again.batches[0].inputs["pixel_values"], pixels)
    assert again.texts == found.texts
    assert other.texts != found.texts
    model.model(**found.batches[0].inputs)


def test_a_draw_of_noise_depends_on_its_number_alone() -> None:
    model = loaded("vit")
    whole = fed(model, content(""), sequences=7, batch_size=7).batches[0].inputs["pixel_values"]
    behind = fed(model, content(""), sequences=3, skip_noise=4).batches[0].inputs["pixel_values"]
    assert torch.equal(whole[4:], behind)


def test_clip_reads_pixels_and_text() -> None:
    model = loaded("clip", tiny.tokenizer("bert"))
    found = fed(model, content(PROSE), tokens=10, sequences=6, batch_size=4)
    assert [set(batch.inputs) for batch in found] == [{"pixel_values", "input_ids", "attention_mask"}] * 2
    assert [len(batch.inputs["pixel_values"]) for batch in found] == [4, 2]
    assert [text.name for text in found.texts] == ["a text", "random pixels"]
    model.model(**found.batches[0].inputs)


def test_whisper_hears_noise_and_writes_the_text() -> None:
    model = loaded("whisper", tiny.tokenizer("bert"))
    found = fed(model, content(PROSE), tokens=10, sequences=3)
    (batch,) = found
    assert batch.inputs["input_features"].shape == (3, 8, 30)
    whole = tiny.tokenizer("bert")(PROSE, truncation=True, max_length=10)["input_ids"]
    assert batch.inputs["decoder_input_ids"][0].tolist() == whole
    assert [text.name for text in found.texts] == ["a text", "random sound"]
    model.model(**batch.inputs)


def test_wav2vec2_hears_a_second_of_noise() -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    convolutions = {"conv_dim": (8,), "conv_stride": (160,), "conv_kernel": (400,), "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**sizes, **convolutions, num_feat_extract_layers=1, vocab_size=20)
    model = loaded("wav2vec2", model=transformers.Wav2Vec2Model(config).eval())
    found = fed(model, content(""), sequences=2)
    assert found.batches[0].inputs["input_values"].shape == (2, 16_000)
    model.model(**found.batches[0].inputs)


def test_inputs_have_the_type_of_the_model() -> None:
    half = loaded("vit", model=families.build("vit").bfloat16())
    (batch,) = fed(half, content(""), sequences=2)
    assert batch.inputs["pixel_values"].dtype == torch.bfloat16


# what goes wrong, and what is told


@pytest.mark.parametrize("name", ["gpt2", "t5", "clip", "whisper"])
def test_without_a_tokenizer_there_are_no_tokens(name: str) -> None:
    error = rejected(TextError, fed, loaded(name), content(PROSE))
    assert "no usable tokenizer: its files are missing" in error.problem


def test_a_tokenizer_of_another_model_is_found_out_before_the_embedding_fails() -> None:
    foreign = loaded("gpt2", tiny.tokenizer("gpt2"), tiny.gpt2(vocab_size=60))
    assert "has only 60" in rejected(TextError, fed, foreign, content(PROSE), tokens=16).problem


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(PROSE + "naïve\n", encoding="utf-8")
    found = fed(reading("gpt2"), list(texts.read_each([str(path)])), tokens=16)
    assert found.texts[0].name == "text.txt"
    assert found.texts[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("pack", [True, False])
def test_a_tokenizer_that_draws_cuts_a_text_the_same_way_each_time(pack: bool) -> None:
    tokenizer = tiny.tokenizer("gpt2")
    merged = tokenizers.models.BPE({**tokenizer.get_vocab(), "ab": 257}, [("a", "b")], dropout=0.5)
    tokenizer.backend_tokenizer.model = merged
    model = loaded("gpt2", tokenizer, tiny.gpt2(vocab_size=258))
    found = [rows(fed(model, content("abababababab\n" * 40), tokens=8, sequences=4, pack=pack)) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert any(257 in row for row in found[0])
    assert tokenizer.backend_tokenizer.model.dropout == 0.5


def test_long_texts_do_not_make_transformers_talk(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny.tokenizer("bert")
    tokenizer.model_max_length = 32
    fed(loaded("gpt2", tokenizer, tiny.gpt2()), content(PROSE), tokens=16)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_placeholder_needs_no_tokenizer_and_fits_every_family(name: str) -> None:
    model = loaded(name)
    found, again, other = (texts.placeholder(model, 9, seed, sequences=2) for seed in (0, 0, 1))
    assert (found.texts, found.sequences) == (again.texts, 2)
    assert found.texts[0].sha256 != other.texts[0].sha256
    assert "random" in found.texts[0].name
    (batch,) = found
    assert batch.lengths == (() if name == "vit" else (9, 9))
    assert all(len(tensor) == 2 for tensor in batch.inputs.values())
    model.model(**batch.inputs)


@pytest.mark.parametrize("size", [100_000, -1, 2.5, "many", [3, None]])
def test_an_image_of_any_size_that_a_config_asks_for_is_not_made(size: Any) -> None:
    model = loaded("vit")
    assert texts.media_of(model.model).names == {"pixel_values"}, "the control"
    other = loaded("vit", model=families.build("vit"))
    other.model.config.__dict__["image_size"] = size
    with pytest.raises(TextError, match="The config requires pixel_values"):
        texts.placeholder(other, 2, 0)


@pytest.mark.parametrize(("wanted", "read"), [(1, [2]), (5, [2, 2, 2]), (9, [2, 2, 2, 2, 1]), (99, [2, 2, 2, 2, 1])])
def test_some_passes_lie_evenly_among_all(wanted: int, read: list[int]) -> None:
    every = fed(reading("gpt2"), content(PROSE), sequences=9, tokens=8, batch_size=2)
    some = every.some(wanted)
    assert [batch.size for batch in some] == read
    assert some.sequences == sum(read)
    places = [next(at for at, batch in enumerate(every) if batch is one) for one in some]
    assert places == [index * len(every) // len(read) for index in range(len(read))]
