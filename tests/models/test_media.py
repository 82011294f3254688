"""Tests inputs beside plain text: images and sounds, random or from files, and pairs of texts."""

import json
import struct
import wave
from dataclasses import replace

import families
import model_types
import numpy as np
import processors
import pytest
import tiny
import torch
import transformers
from loaded import BARE, loaded
from PIL import Image

import attnlens
from attnlens.cli.entry import exit_code
from attnlens.errors import ModelError, TextError, UsageError
from attnlens.models import hooks, texts
from attnlens.models.texts import cutting, media, targets

PROSE = texts.Content("In the beginning God created the heaven and the earth. " * 20, "a text")
IMAGE, RATE = 300, 16_000


def build(name):
    return model_types.build(name, model_types.WAYS[:1])


def of_type(name, folder=None):
    """A tiny model, whose folder, if there is one, contains its processor."""
    model = loaded(build(name), tiny.tokenizer("roberta"))
    if folder:
        folder.mkdir(exist_ok=True)
        processors.save(model.model, folder)
    return replace(model, folder=folder or model.folder)


SIGLIP2 = {"pixel_values": (2, 256, 192), "pixel_attention_mask": (2, 256), "spatial_shapes": (2, 2)}
PREPARED = {
    "vit": ({"pixel_values": (2, 3, 32, 32)}, {"encoder"}),
    "videomae": ({"pixel_values": (2, 16, 3, 32, 32)}, {"encoder"}),
    "siglip2_vision_model": (SIGLIP2, {"encoder", "cross"}),
    "clap": ({"input_features": (2, 1, 1001, 64), "is_longer": (2, 1)}, {"audio", "text"}),
    "audio-spectrogram-transformer": ({"input_values": (2, 64, 16)}, {"encoder"}),
    "parakeet_encoder": ({"input_features": (2, 101, 80), "attention_mask": (2, 101)}, {"encoder"}),
    "speech_to_text": ({"input_features": (2, 98, 80)}, {"encoder", "decoder", "cross"}),
    "wav2vec2-bert": ({"input_features": (2, 49, 160)}, {"encoder"}),
    "vilt": ({"pixel_values": (2, 3, 32, 32)}, {"encoder"}),
    "llava": ({"pixel_values": (2, 3, 32, 32)}, {"vision", "decoder"}),
    "siglip": ({"pixel_values": (2, 3, 32, 32)}, {"vision", "cross", "text"}),
    "flava": ({}, {"vision", "text", "encoder"}),
    "whisper": ({"input_features": (2, 80, 100)}, {"encoder", "decoder", "cross"}),
    "vision-encoder-decoder": ({"pixel_values": (2, 3, 32, 32)}, {"encoder", "decoder", "cross"}),
    "bert": ({}, {"encoder"}),
}
"""Shapes of what two sequences of nine ids get besides, and the towers or stacks that run on them."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name == "wav2vec2-bert")) for name in PREPARED]
)
def test_a_model_runs_on_what_its_processor_makes_and_names_its_towers(name, tmp_path):
    model, (shapes, parts) = of_type(name, tmp_path), PREPARED[name]
    accepted = texts.media_of(model.model, tmp_path)
    assert all(accepted.processors.values()) or name == "vision-encoder-decoder", "transformers lists none for it"
    assert bool(accepted.notes) == (name == "vision-encoder-decoder")
    (batch,) = texts.placeholder(model, 9, 0, sequences=2)
    assert shapes.items() <= {key: tuple(value.shape) for key, value in batch.inputs.items()}.items()
    assert {reached.site.part for reached in hooks.survey(model.model, batch.inputs)} == parts


def test_without_a_processor_noise_has_the_shape_of_the_config_with_a_note():
    shapes = {"vit": (3, 32, 32), "vivit": (32, 3, 32, 32), "whisper": (80, 100), "wav2vec2": (16_000,)}
    for name, shape in shapes.items():
        model, modality = of_type(name), "audio" if name[0] == "w" else "image"
        batches = texts.batches(model, [PROSE], texts.Cut(sequences=2, tokens=9))
        start = f"The {modality} input is random numbers in the shape given by config.json. No processor: "
        assert [note.startswith(start) for note in batches.notes] == [True], name
        assert tuple(batches.batches[0].inputs[model.model.main_input_name].shape) == (2, *shape)


def test_a_random_image_is_not_uniform_and_depends_on_seed_and_number_alone(tmp_path):
    model = of_type("vit", tmp_path).model
    feeds = [media.Feed(model, texts.media_of(model, tmp_path), seed) for seed in (0, 0, 1)]
    first, second, other = (one.take(range(3))["pixel_values"] for one in feeds)
    assert torch.equal(first, second)
    assert torch.equal(first[2], feeds[0].take([2])["pixel_values"][0])
    assert not torch.equal(first, other)
    patches = first.unfold(2, 8, 8).unfold(3, 8, 8).mean((4, 5)).flatten(2)
    assert (patches.std(2) > 0.05).all(), "patches differ from each other"
    assert (first.flatten(1).std(1) > 0.4).all()


def test_a_model_in_memory_finds_the_processor_in_its_folder_once(tmp_path):
    of_type("vit", tmp_path).model.save_pretrained(tmp_path)
    model = transformers.ViTModel.from_pretrained(tmp_path)
    accepted = texts.media_of(model)
    assert accepted.processors["image"] is not None
    assert texts.media_of(model) is accepted
    assert "model" not in vars(accepted), "the cache does not keep the model"


def test_models_whose_patches_share_a_row_get_one_image_per_pass(tmp_path):
    model = of_type("qwen3_vl", tmp_path)
    batches = texts.placeholder(model, 9, 0, sequences=3)
    assert [batch.size for batch in batches] == [1, 1, 1]
    patches, grid = (batches.batches[0].inputs[name] for name in ("pixel_values", "image_grid_thw"))
    assert len(patches) == int(grid.prod())
    assert texts.first(batches.batches[0].inputs, 1)["pixel_values"] is patches
    report = attnlens.inspect(model, windows=2, length=9, analyzers=["spectrum"])
    assert report.coverage.complete
    assert report.settings.windows == 2


HUGE = {"size": {"height": 60_000, "width": 60_000}}
HOSTILE = {
    "vit": [{"size": "x"}, {"image_mean": [1]}, {"image_processor_type": 3}, HUGE],
    "wav2vec2": [{"sampling_rate": 10**12}, {"sampling_rate": "16000"}],
    "whisper": [{"chunk_length": 10**9}, {"n_fft": 10**8}, {"feature_size": -1}],
}


def test_a_processor_with_hostile_settings_is_left_out_with_a_note(tmp_path):
    for name, cases in HOSTILE.items():
        path = of_type(name, tmp_path / name).folder / processors.SETTINGS
        original = json.loads(path.read_text())
        for settings in cases:
            path.write_text(json.dumps({key: part | settings for key, part in original.items()}))
            model = replace(of_type(name), folder=path.parent)
            notes = "".join(texts.batches(model, [PROSE], texts.Cut(sequences=1, tokens=9)).notes)
            assert "No processor: " in notes, settings
            assert settings is not HUGE or "The model's processor fails on a random image" in notes


def test_each_text_follows_as_many_ids_as_the_tower_makes_parts():
    llava = of_type("llava")
    batches = texts.batches(llava, [PROSE], texts.Cut(tokens=10, sequences=4, batch_size=2))
    pixels = batches.batches[0].inputs["pixel_values"][:1]
    count = sum(len(part) for part in llava.model.model.get_image_features(pixels).pooler_output)
    for batch in batches:
        assert batch.start == count == 16
        assert torch.equal(batch.inputs["input_ids"] == IMAGE, (torch.arange(26) < count).expand(2, -1))
        assert batch.lengths == (count + 10,) * 2
    assert all(len(ids) == 10 and IMAGE not in ids for ids in batches.ids)
    assert [text.name for text in batches.texts] == ["a text", "random pixels"]
    predicted = targets.feed(llava, batches, "causal", 0)[0].targets
    assert bool((predicted[:, :15] == targets.NOTHING).all()), "nothing is predicted before the text"
    assert torch.equal(predicted[:, 15:25], batches.batches[0].inputs["input_ids"][:, 16:])
    (batch,) = texts.placeholder(llava, 100, 0, sequences=8)
    assert bool((batch.inputs["input_ids"][:, 16:] != IMAGE).all()), "random ids contain no placeholder"


def test_one_tower_is_swapped_alone_and_one_that_fails_on_noise_is_left_out_with_a_note(monkeypatch):
    model = of_type("llava")
    report = attnlens.swap_kernel(model, "rbf", part="vision", windows=2, length=12, **BARE)
    assert {site.part for site in report.swap.sites} == {"vision"}
    assert all("vision_tower" in site.site for site in report.swap.sites)
    assert report.swap.hidden_cosine < 1
    with pytest.raises(UsageError, match="No attention sites selected"):
        attnlens.swap_kernel(model, "rbf", part="audio", windows=2, length=12)

    def broken(*_args, **_more):
        raise ValueError("no such image")

    model = of_type("llava")  # which media a model takes is known once
    monkeypatch.setattr(model.model.model, "get_image_features", broken)
    report = attnlens.inspect(model, windows=2, length=12, analyzers=["spectrum"])
    (note,) = [note for note in report.settings.notes if "image" in note]
    assert note.startswith("No image is passed to the model: the model fails on it (ValueError: no such image).")
    assert {head.part for head in report.heads} == {"decoder"}
    reasons = {entry.reason for entry in report.coverage.skipped if "vision" in entry.site}
    assert reasons == {"it does not run on this input"}
    swapped = attnlens.swap_kernel(model, "rbf", windows=2, length=12, **BARE)
    assert {site.part for site in swapped.swap.sites} == {"decoder"}


def processed(folder, name):
    """A tiny model loaded from a folder with a processor."""
    sizes = {"height": 32, "width": 32}
    processor = transformers.ViTImageProcessor(size=sizes, crop_size=sizes)
    if name == "wav2vec2":
        processor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE)
    for part in (build(name), processor, tiny.tokenizer("roberta")):
        part.save_pretrained(folder)
    return attnlens.load(folder)


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    return processed(tmp_path_factory.mktemp("sees"), "vit")


@pytest.fixture(scope="module")
def hears(tmp_path_factory):
    return processed(tmp_path_factory.mktemp("hears"), "wav2vec2")


def picture(path, shade):
    Image.fromarray(np.full((40, 30, 3), shade, np.uint8)).save(path)
    return str(path)


def sound(path, samples, width=2, rate=RATE, channels=1):
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        shift = 128 if width == 1 else 0
        file.writeframes(b"".join(struct.pack("<i", int(sample) + shift)[:width] for sample in samples))
    return str(path)


def test_images_are_fed_as_the_processor_prepares_them(sees, tmp_path):
    files = [picture(tmp_path / f"{shade}.png", shade) for shade in (0, 255)]
    batches = texts.batches(sees, [], texts.Cut(image=tuple(files)))
    pixels = torch.cat([batch.inputs["pixel_values"] for batch in batches])
    assert pixels.shape == (2, 3, 32, 32)
    assert [image.unique().tolist() for image in pixels] == [[-1.0], [1.0]]
    report = attnlens.inspect(sees, image=files, analyzers=["spectrum"])
    assert (report.settings.noise, report.settings.windows) == (None, 2)
    assert [text.name for text in report.settings.texts] == ["0.png", "255.png"]


def test_each_window_follows_the_next_image(tmp_path):
    model = processed(tmp_path / "llava", "llava")
    files = tuple(picture(tmp_path / f"{shade}.png", shade) for shade in (0, 255))
    batches = texts.batches(model, [PROSE], texts.Cut(tokens=8, sequences=3, image=files))
    assert [batch.inputs["pixel_values"].mean().item() for batch in batches] == [-1.0, 1.0], "one sequence per file"
    assert batches.notes == ("Each sequence uses one file, so the number of sequences is 2 instead of 3.",)
    assert all(bool((batch.inputs["input_ids"][:, :16] == IMAGE).all()) for batch in batches)
    assert not batches.made_up
    assert texts.batches(model, [PROSE], texts.Cut(tokens=8, sequences=2, image=files)).notes == ()
    with pytest.raises(UsageError, match="2 files for --windows 1"):
        texts.batches(model, [PROSE], texts.Cut(tokens=8, sequences=1, image=files))
    with pytest.raises(UsageError, match="one file of each kind, but there are 2 for image and 1 for audio"):
        cutting._count_files({"image": files, "audio": files[:1]}, 9)


def test_sounds_of_any_width_are_fed_as_the_processor_prepares_them(hears, tmp_path):
    wanted = np.tile([0.5, -0.5, 0.25, -1.0], 2000)
    both = np.stack([wanted, 0 * wanted], 1).ravel()
    for width in (1, 2, 3, 4):
        for channels, samples in ((1, wanted), (2, both)):
            path = sound(tmp_path / "a.wav", samples * 2 ** (8 * width - 1), width, channels=channels)
            read = media._samples(path, (tmp_path / "a.wav").read_bytes(), RATE)
            assert np.allclose(read, wanted / channels, atol=1e-6), (width, channels)
    waves = (np.sin(np.arange(4000) / 10) * 20_000).astype(int)
    (batch,) = texts.batches(hears, [], texts.Cut(audio=(sound(tmp_path / "a.wav", waves),)))
    assert batch.inputs["input_values"].shape == (1, 4000)
    assert np.allclose(batch.inputs["input_values"][0], (waves - waves.mean()) / waves.std(), atol=1e-3)


def refused(error, words, model, **options):
    for command in (attnlens.inspect, attnlens.doctor, attnlens.swap_kernel):
        with pytest.raises(error, match=words):
            command(model, **options)


def test_unreadable_files_are_refused(sees, hears, tmp_path):
    broken, words = tmp_path / "broken.png", tmp_path / "words.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    words.write_text("words")
    slow, empty = sound(tmp_path / "slow.wav", [0] * 100, rate=8000), sound(tmp_path / "empty.wav", [])
    refused(TextError, "words.png can't be read as an image", sees, image=[words])
    refused(TextError, "words.png can't be read as an image", replace(sees, tokenizer=None), image=[words])
    refused(TextError, "broken.png can't be read as an image", sees, image=[broken])
    refused(TextError, "broken.png can't be read as an audio file", hears, audio=[broken])
    refused(TextError, "missing.png can't be read", sees, image=[tmp_path / "missing.png"])
    refused(TextError, "has 0 samples", hears, audio=[empty])
    refused(TextError, "has 8000 samples per second, but the model expects 16000", hears, audio=[slow])


def test_models_that_do_not_take_a_file_are_refused(sees, hears, tmp_path, capsys):
    path, text, bare = picture(tmp_path / "a.png", 3), tmp_path / "text.txt", tmp_path / "bare"
    text.write_text(PROSE.text)
    refused(UsageError, "does not read image input", hears, image=[path])
    refused(UsageError, "does not read audio input", sees, audio=[path])
    refused(UsageError, "takes pixels but no text", sees, text=[text])
    refused(ModelError, "ViTModel has no valid preprocessor_config.json", loaded(families.build("vit")), image=[path])
    families.build("vit").save_pretrained(bare)
    for settings, words in (
        ("", "has no valid preprocessor_config.json"),
        ({"auto_map": {"AutoImageProcessor": "own.Own"}}, "code in the checkpoint, which attnlens does not run"),
        ({"image_processor_type": "NoSuch"}, "The processor of .* can't be loaded"),
    ):
        if settings:
            (bare / "preprocessor_config.json").write_text(json.dumps(settings))
        refused(ModelError, words, attnlens.load(bare), image=[path])
    with pytest.raises(UsageError, match="would use the same images or sounds as the evaluation"):
        attnlens.swap_kernel(sees, "rank:4", image=[path])
    with pytest.raises(UsageError, match="`image` would be ignored"):
        attnlens.inspect(sees, image=[path], source="weights")
    assert exit_code(["inspect", "demo", "--image", path]) == 2
    assert "keyword of the function" in capsys.readouterr().err


def test_pairs_are_joined_by_the_tokenizer_with_their_types(tmp_path):
    model, file, plain = loaded(families.build("bert")), tmp_path / "pairs.tsv", tmp_path / "plain.txt"
    file.write_text("the dog\ta cat sat\n\nwho is it\tnobody\n")
    content = texts.read_each([str(file)])
    (batch,) = texts.batches(model, content, texts.Cut(pairs=True, pack=False, tokens=64))
    for row, pair in enumerate([("the dog", "a cat sat"), ("who is it", "nobody")]):
        encoded, length = model.tokenizer(*pair, return_token_type_ids=True), batch.lengths[row]
        assert set(encoded["token_type_ids"]) == {0, 1}, "control"
        for name in ("input_ids", "token_type_ids"):
            assert batch.inputs[name][row, :length].tolist() == encoded[name]
    report = attnlens.inspect(model, pairs=file, analyzers=["spectrum"])
    assert (report.settings.windows, report.settings.pack) == (2, False)
    plain.write_text("a b\n")
    refused(UsageError, "`text` and `pairs` cannot be combined", model, pairs=file, text=[plain])
    refused(UsageError, "A file of text pairs cannot be combined with other texts", model, text=[plain, file])
    for line in ("no tab at all", "a\tb\tc", "\tb", "a\t "):
        file.write_text(f"a\tb\n{line}\n")
        refused(TextError, "Line 2 of pairs.tsv is not a pair", model, pairs=file)
