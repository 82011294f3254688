"""Tests what models are fed beside text: images and sounds, made up or from files, and pairs of texts."""

from __future__ import annotations

import json
import struct
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import model_types
import numpy as np
import processors
import program
import pytest
import tiny
import torch
import transformers
from loaded import loaded
from PIL import Image

import attnlens
from attnlens.errors import ModelError, TextError, UsageError
from attnlens.models import hooks, texts
from attnlens.models.texts import media
from attnlens.models.texts.media import Feed
from attnlens.models.texts.targets import NOTHING, feed

PROSE = texts.Content("In the beginning God created the heaven and the earth. " * 20, "a text")


def of_type(name: str) -> Any:
    return loaded(model_types.build(name), tiny.tokenizer("roberta"))


def with_processor(name: str, folder: Path) -> Any:
    """A tiny model, and the folder of its processor."""
    given = of_type(name)
    processors.save(given.model, folder)
    return replace(given, folder=folder)


def changed(folder: Path, settings: dict[str, Any]) -> None:
    """Write other settings of the processor in a folder."""
    path = folder / processors.SETTINGS
    path.write_text(json.dumps({key: one | settings for key, one in json.loads(path.read_text()).items()}))


# what is made up

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "vit": {"pixel_values": (2, 3, 32, 32)},
    "videomae": {"pixel_values": (2, 16, 3, 32, 32)},
    "siglip2_vision_model": {"pixel_values": (2, 256, 192), "pixel_attention_mask": (2, 256), "spatial_shapes": (2, 2)},
    "clap": {"input_features": (2, 1, 1001, 64), "is_longer": (2, 1)},
    "audio-spectrogram-transformer": {"input_values": (2, 64, 16)},
    "parakeet_encoder": {"input_features": (2, 101, 80), "attention_mask": (2, 101)},
    "speech_to_text": {"input_features": (2, 98, 80)},
    "wav2vec2-bert": {"input_features": (2, 49, 160)},
    "vilt": {"pixel_values": (2, 3, 32, 32)},
}
"""What two sequences of nine ids stand beside."""


@pytest.mark.parametrize("name", SHAPES)
def test_the_processor_makes_the_inputs_and_the_model_runs_on_them(name: str, tmp_path: Path) -> None:
    given = with_processor(name, tmp_path)
    found = texts.media_of(given.model, tmp_path)
    assert all(found.processors.values())
    assert not found.notes
    (batch,) = texts.placeholder(given, 9, 0, sequences=2)
    assert SHAPES[name].items() <= {key: tuple(value.shape) for key, value in batch.inputs.items()}.items()
    with torch.no_grad():
        given.model(**batch.inputs)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("vit", (3, 32, 32)), ("vivit", (32, 3, 32, 32)), ("whisper", (80, 100)), ("wav2vec2", (16_000,))],
)
def test_without_a_processor_random_numbers_have_the_shape_in_the_config_and_a_note_says_so(
    name: str, shape: tuple[int, ...]
) -> None:
    given = of_type(name)
    found = texts.batches(given, [PROSE], texts.Cut(sequences=2, tokens=9))
    modality = "audio" if name[0] == "w" else "image"
    (note,) = found.notes
    assert note.startswith(
        f"Each {modality} consists of random numbers in the shape given by config.json. No processor: "
    )
    assert tuple(found.batches[0].inputs[given.model.main_input_name].shape) == (2, *shape)


def test_a_made_up_image_is_not_uniform_and_depends_on_seed_and_number_alone(tmp_path: Path) -> None:
    given = with_processor("vit", tmp_path)
    feed = [Feed(given.model, texts.media_of(given.model, tmp_path), seed) for seed in (0, 0, 1)]
    first, second, other = (one.take(range(3))["pixel_values"] for one in feed)
    assert torch.equal(first, second)
    assert torch.equal(first[2], feed[0].take([2])["pixel_values"][0])
    assert not torch.equal(first, other)
    patches = first.unfold(2, 8, 8).unfold(3, 8, 8).mean((4, 5)).flatten(2)
    assert (patches.std(2) > 0.05).all(), "patches differ from each other"
    assert (first.flatten(1).std(1) > 0.4).all()


def test_patches_of_one_image_stand_in_a_row_and_go_through_alone(tmp_path: Path) -> None:
    given = with_processor("qwen3_vl", tmp_path)
    found = texts.placeholder(given, 9, 0, sequences=3)
    assert [batch.size for batch in found] == [1, 1, 1]
    patches, grid = (found.batches[0].inputs[name] for name in ("pixel_values", "image_grid_thw"))
    assert len(patches) == int(grid.prod())
    assert texts.first(found.batches[0].inputs, 1)["pixel_values"] is patches
    report = attnlens.inspect(given, windows=2, length=9, analyzers=["spectrum"])
    assert report.coverage.complete
    assert report.settings.windows == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mimi_decoder", "cannot generate latents for a MimiDecoderModel"),
        ("gemma4_audio", "cannot generate input_features for a Gemma4AudioModel"),
        ("patchtst", "cannot generate past_values for a PatchTSTModel"),
        ("qwen3_vl_vision", "cannot generate grid_thw for a Qwen3VLVisionModel"),
    ],
)
def test_what_no_processor_makes_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(TextError, match=words) as refusal:
        texts.placeholder(of_type(name), 9, 0)
    assert "preprocessor_config.json" in refusal.value.remedy
    assert "attnlens.capture" in refusal.value.remedy


def test_a_processor_that_asks_for_endless_memory_is_left_out_and_a_note_says_so(tmp_path: Path) -> None:
    given = with_processor("vit", tmp_path)
    changed(tmp_path, {"size": {"height": 60_000, "width": 60_000}})
    report = attnlens.inspect(given, windows=2, analyzers=["spectrum"])
    (note,) = [note for note in report.settings.notes if "No processor" in note]
    assert "The model's processor fails on a random image" in note


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vit", {"size": "x"}),
        ("vit", {"image_mean": [1]}),
        ("vit", {"image_processor_type": 3}),
        ("wav2vec2", {"sampling_rate": 10**12}),
        ("wav2vec2", {"sampling_rate": "16000"}),
        ("whisper", {"chunk_length": 10**9}),
        ("whisper", {"n_fft": 10**8}),
        ("whisper", {"feature_size": -1}),
    ],
)
def test_a_processor_of_hostile_settings_is_left_out_and_a_note_says_why(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    given = with_processor(name, tmp_path)
    changed(tmp_path, settings)
    found = texts.batches(given, [PROSE], texts.Cut(sequences=1, tokens=9))
    assert "No processor: " in "".join(found.notes)


def test_a_model_in_memory_finds_its_processor_by_the_folder_it_was_loaded_from(tmp_path: Path) -> None:
    model_types.build("vit").save_pretrained(tmp_path)
    processors.save(model_types.build("vit"), tmp_path)
    assert texts.media_of(transformers.ViTModel.from_pretrained(tmp_path)).processors["image"] is not None


# towers

IMAGE = 300


@pytest.fixture(scope="module")
def llava() -> Any:
    return of_type("llava")


def test_an_image_stands_before_each_text_as_many_ids_as_its_tower_makes_parts(llava: Any) -> None:
    cut = texts.Cut(tokens=10, sequences=4, batch_size=2)
    found = texts.batches(llava, [PROSE], cut)
    with torch.no_grad():
        pixels = found.batches[0].inputs["pixel_values"][:1]
        parts = llava.model.model.get_image_features(pixels).pooler_output
    count = sum(len(part) for part in parts)
    for batch in found:
        ids = batch.inputs["input_ids"]
        assert batch.start == count == 16
        assert bool((ids[:, :count] == IMAGE).all())
        assert not bool((ids[:, count:] == IMAGE).any())
        assert batch.lengths == (count + 10,) * 2
    assert all(len(said) == 10 and IMAGE not in said for said in found.ids)
    assert [text.name for text in found.texts] == ["a text", "random pixels"]


def test_nothing_is_predicted_before_the_text(llava: Any) -> None:
    found = texts.batches(llava, [PROSE], texts.Cut(tokens=10, sequences=2))
    targets = feed(llava, found, "causal", 0)[0].targets
    assert bool((targets[:, :15] == NOTHING).all())
    assert bool((targets[:, 15:25] != NOTHING).all())
    assert torch.equal(targets[:, 15:25], found.batches[0].inputs["input_ids"][:, 16:])


def test_random_ids_hold_none_that_stands_for_an_image(llava: Any) -> None:
    (batch,) = texts.placeholder(llava, 100, 0, sequences=8)
    assert bool((batch.inputs["input_ids"][:, 16:] != IMAGE).all())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llava", ["vision", "vision", "decoder", "decoder"]),
        ("siglip", ["vision", "vision", "cross", "text", "text"]),
        ("clap", ["audio", "text"]),
        ("flava", ["vision", "text", "encoder"]),
        ("whisper", ["encoder", "decoder", "cross"]),
        ("vision-encoder-decoder", ["encoder", "decoder", "cross"]),
        ("bert", ["encoder", "encoder"]),
    ],
)
def test_a_tower_has_a_name_where_there_are_several(name: str, parts: list[str], tmp_path: Path) -> None:
    given = with_processor(name, tmp_path)
    inputs = texts.placeholder(given, 9, 0, sequences=2).batches[0].inputs
    found = [reached.site.part for reached in hooks.survey(given.model, inputs)]
    assert set(found) == set(parts)


def test_one_tower_is_swapped_alone(llava: Any) -> None:
    report = attnlens.swap_kernel(llava, "rbf", part="vision", windows=2, length=12)
    assert {site.part for site in report.swap.sites} == {"vision"}
    assert all("vision_tower" in site.site for site in report.swap.sites)
    assert report.swap.hidden_cosine < 1
    with pytest.raises(UsageError, match="No attention sites selected"):
        attnlens.swap_kernel(llava, "rbf", part="audio", windows=2, length=12)


def test_a_tower_that_fails_on_noise_is_told_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given = of_type("llava")

    def broken(*_given: Any, **_more: Any) -> Any:
        raise ValueError("no such image")

    monkeypatch.setattr(given.model.model, "get_image_features", broken)
    report = attnlens.inspect(given, windows=2, length=12, analyzers=["spectrum"])
    (note,) = [note for note in report.settings.notes if "image" in note]
    assert note.startswith("No image is passed to the model: the model fails on it (ValueError: no such image).")
    assert {head.part for head in report.heads} == {"decoder"}
    assert {entry.reason for entry in report.coverage.skipped if "vision" in entry.site} == {
        "it does not run on this input"
    }
    swapped = attnlens.swap_kernel(given, "rbf", windows=2, length=12)
    assert {site.part for site in swapped.swap.sites} == {"decoder"}


def test_what_was_found_is_not_kept_beyond_the_model() -> None:
    model = families.build("vit")
    assert texts.media_of(model) is texts.media_of(model)
    assert "model" not in vars(texts.media_of(model))


# files

RATE = 16_000


def processed(folder: Path, name: str) -> Any:
    """A tiny model in a folder with a processor beside it."""
    model = model_types.build(name)
    model.save_pretrained(folder)
    if name == "wav2vec2":
        transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE).save_pretrained(folder)
    else:
        sizes = {"height": 32, "width": 32}
        transformers.ViTImageProcessor(size=sizes, crop_size=sizes).save_pretrained(folder)
    tiny.tokenizer("roberta").save_pretrained(folder)
    return attnlens.load(folder)


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return processed(tmp_path_factory.mktemp("sees"), "vit")


@pytest.fixture(scope="module")
def hears(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return processed(tmp_path_factory.mktemp("hears"), "wav2vec2")


def picture(path: Path, shade: int, size: tuple[int, int] = (40, 30)) -> str:
    Image.fromarray(np.full((*size, 3), shade, np.uint8)).save(path)
    return str(path)


def sound(path: Path, samples: Any, width: int = 2, rate: int = RATE, channels: int = 1) -> str:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        shift = 128 if width == 1 else 0
        file.writeframes(b"".join(struct.pack("<i", int(one) + shift)[:width] for one in samples))
    return str(path)


def test_images_are_fed_as_the_processor_prepares_them(sees: Any, tmp_path: Path) -> None:
    files = [picture(tmp_path / f"{shade}.png", shade) for shade in (0, 255)]
    found = texts.batches(sees, [], texts.Cut(image=tuple(files)))
    pixels = torch.cat([batch.inputs["pixel_values"] for batch in found])
    assert pixels.shape == (2, 3, 32, 32)
    assert pixels[0].unique().tolist() == [-1.0]
    assert pixels[1].unique().tolist() == [1.0]
    report = attnlens.inspect(sees, image=files, analyzers=["spectrum"])
    assert (report.settings.noise, report.settings.windows) == (None, 2)
    assert [text.name for text in report.settings.texts] == ["0.png", "255.png"]


def test_each_window_stands_behind_the_next_image(tmp_path: Path) -> None:
    given = processed(tmp_path / "llava", "llava")
    files = tuple(picture(tmp_path / f"{shade}.png", shade) for shade in (0, 255))
    found = texts.batches(given, [PROSE], texts.Cut(tokens=8, sequences=3, image=files))
    assert [batch.inputs["pixel_values"].mean().item() for batch in found] == [-1.0, 1.0], "one sequence a file"
    assert found.notes == ("Each sequence uses one file: 2 sequences instead of 3.",)
    assert all(bool((batch.inputs["input_ids"][:, :16] == IMAGE).all()) for batch in found)
    assert not found.made_up
    with pytest.raises(UsageError, match="2 files are more than --windows 1"):
        texts.batches(given, [PROSE], texts.Cut(tokens=8, sequences=1, image=files))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_any_width_are_read(hears: Any, tmp_path: Path, width: int) -> None:
    most = 2 ** (8 * width - 1)
    expected = np.tile([0.5, -0.5, 0.25, -1.0], 2000)
    path = Path(sound(tmp_path / "one.wav", expected * most, width))
    found = media._samples(str(path), path.read_bytes(), RATE)
    assert np.allclose(found, expected, atol=1e-6)
    both = np.stack([expected, 0 * expected], 1).ravel()
    path = Path(sound(tmp_path / "two.wav", both * most, width, channels=2))
    assert np.allclose(media._samples(str(path), path.read_bytes(), RATE), expected / 2, atol=1e-6)


def test_sounds_are_fed_as_the_processor_prepares_them(hears: Any, tmp_path: Path) -> None:
    waves = np.sin(np.arange(4000) / 10) * 20_000
    path = sound(tmp_path / "a.wav", waves)
    (batch,) = texts.batches(hears, [], texts.Cut(audio=(path,)))
    heard = batch.inputs["input_values"]
    assert heard.shape == (1, 4000)
    expected = (waves.astype(int) - waves.astype(int).mean()) / waves.astype(int).std()
    assert np.allclose(heard[0], expected, atol=1e-3)


def refused(error: type[Exception], words: str, given: Any, **options: Any) -> None:
    for command in (attnlens.inspect, attnlens.doctor, attnlens.swap_kernel):
        with pytest.raises(error, match=words):
            command(given, **options)


def test_files_that_can_not_be_read_are_refused(sees: Any, hears: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    words = tmp_path / "words.png"
    words.write_text("words")
    refused(TextError, "words.png can't be read as an image", sees, image=[words])
    refused(TextError, "words.png can't be read as an image", replace(sees, tokenizer=None), image=[words])
    refused(TextError, "broken.png can't be read as an image", sees, image=[broken])
    refused(TextError, "broken.png can't be read as an audio file", hears, audio=[broken])
    refused(TextError, "missing.png can't be read", sees, image=[tmp_path / "missing.png"])
    refused(TextError, "has 0 samples", hears, audio=[sound(tmp_path / "empty.wav", [])])
    path = sound(tmp_path / "slow.wav", [0] * 100, rate=8000)
    refused(TextError, "has 8000 samples per second; the model expects 16000", hears, audio=[path])


def test_models_that_can_not_take_them_are_refused(sees: Any, hears: Any, tmp_path: Path) -> None:
    path, text = picture(tmp_path / "a.png", 3), tmp_path / "text.txt"
    text.write_text(PROSE.text)
    refused(UsageError, "does not take image input", hears, image=[path])
    refused(UsageError, "does not take audio input", sees, audio=[path])
    refused(UsageError, "takes pixels but no text", sees, text=[text])
    refused(ModelError, "ViTModel has no valid preprocessor_config.json", loaded(families.build("vit")), image=[path])
    bare = tmp_path / "bare"
    families.build("vit").save_pretrained(bare)
    refused(ModelError, "has no valid preprocessor_config.json", attnlens.load(bare), image=[path])
    (bare / "preprocessor_config.json").write_text(json.dumps({"auto_map": {"AutoImageProcessor": "own.Own"}}))
    refused(ModelError, "code in the checkpoint, which attnlens does not run", attnlens.load(bare), image=[path])
    (bare / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "NoSuch"}))
    refused(ModelError, "The processor of .* can't be loaded", attnlens.load(bare), image=[path])
    with pytest.raises(UsageError, match="would use the same images or sounds as the evaluation"):
        attnlens.swap_kernel(sees, "rank:4", image=[path])
    with pytest.raises(UsageError, match="image would be ignored"):
        attnlens.inspect(sees, image=[path], source="weights")


def test_the_program_says_so_in_two_lines(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 3)
    done = program.attnlens("inspect", "demo", "--image", path)
    assert done.returncode == 2
    assert "keyword of the function" in done.stderr


def test_an_unprepared_input_is_named(sees: Any, tmp_path: Path) -> None:
    inputs, named = media.read_files(sees, "image", [picture(tmp_path / "a.png", 9)])
    assert [set(one) for one in inputs] == [{"pixel_values"}]
    assert [one.name for one in named] == ["a.png"]
    feed = Feed(sees.model, texts.media_of(sees.model), 0, files={"image": inputs})
    assert feed.texts == []
    assert torch.equal(feed.take([0])["pixel_values"], inputs[0]["pixel_values"])


# pairs


def test_pairs_are_joined_by_the_tokenizer_with_their_types(tmp_path: Path) -> None:
    given = loaded(families.build("bert"))
    file = tmp_path / "pairs.tsv"
    file.write_text("the dog\ta cat sat\n\nwho is it\tnobody\n")
    content = texts.read_each([str(file)])
    (batch,) = texts.batches(given, content, texts.Cut(pairs=True, pack=False, tokens=64))
    for row, (one, other) in enumerate([("the dog", "a cat sat"), ("who is it", "nobody")]):
        expected = given.tokenizer(one, other, return_token_type_ids=True)
        length = batch.lengths[row]
        assert batch.inputs["input_ids"][row, :length].tolist() == expected["input_ids"]
        assert batch.inputs["token_type_ids"][row, :length].tolist() == expected["token_type_ids"]
        assert set(expected["token_type_ids"]) == {0, 1}, "the control"
    report = attnlens.inspect(given, pairs=file, analyzers=["spectrum"])
    assert (report.settings.windows, report.settings.pack) == (2, False)


@pytest.mark.parametrize("line", ["no tab at all", "a\tb\tc", "\tb", "a\t "])
def test_a_line_that_is_no_pair_is_refused_with_its_number(line: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text(f"a\tb\n{line}\n")
    refused(TextError, "Line 2 of pairs.tsv is not a pair", loaded(families.build("bert")), pairs=file)


def test_pairs_stand_in_the_place_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("a\tb\n")
    model, plain = loaded(families.build("bert")), tmp_path / "plain.txt"
    plain.write_text("a b\n")
    refused(UsageError, "text and pairs cannot be combined", model, pairs=file, text=[plain])
    refused(UsageError, "A file of text pairs cannot be combined with other texts", model, text=[plain, file])
