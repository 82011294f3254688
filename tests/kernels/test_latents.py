"""Tests that latents shared by key heads are the best logits of their size, with keys after and before the rotation."""

from dataclasses import replace

import pytest
import torch
from attention_calls import fitted
from heads import random
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import BARE, apart, family, grouped, outputs, sites_of

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.kernels import OWN, pair_weights, parsed
from attnlens.kernels.attention import attend, route
from attnlens.kernels.lowrank import MapsFit, directions
from attnlens.kernels.pair_weights import output_weighted
from attnlens.lab.ranks.search import measure_losses
from attnlens.maths.statistics import Design
from attnlens.models import hooks, texts
from attnlens.models.texts import Cut
from attnlens.models.texts.targets import feed
from attnlens.records import Call
from attnlens.report.sections.swaps import formula
from attnlens.runs.swap.fit import fit
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sites import SwapSetup

SMALL = {"windows": 4, "length": 24, "batch_size": 4} | BARE


def drawn(seed=0, heads=4, tokens=40, head_dim=6, kv_heads=None):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, kv_heads or heads, kv_heads or heads)
    q, k, v = (torch.randn(2, n, tokens, head_dim, generator=generator, dtype=torch.float64) for n in shapes)
    return Call(q, k, v, head_dim**-0.5, causal=True)


def lost(call, *words, **options):
    """The relative error of the output."""
    return apart([attend(call, OWN)], [attend(call, fitted(*words, call, **options))])


def swapped(model, words):
    """The swap of every site, fitted on the built-in text, and the inputs of one batch."""
    batches = texts.batches(model, texts.sample("demo"), Cut(tokens=24, sequences=12, batch_size=4))
    sites = sites_of(model.model, batches.batches[0].inputs)
    setup = SwapSetup(model, sites, {site: hooks.Replacement(parsed(words)) for site in sites}, "causal")
    return sites, fit(setup, batches, lambda _: None), batches.batches[0].inputs


@pytest.mark.parametrize("form", ["1", "2", "all", "1,rotation=before", "all,rotation=before"])
def test_a_latent_of_full_size_is_the_model_itself_and_a_smaller_one_is_not(form):
    model = grouped()
    for rank, changes in ((10, False), (3, True)):
        sites, swaps, inputs = swapped(model, f"rank:{rank},group={form}")
        own = outputs(model.model, inputs)
        with hooks.replace(model.model, sites, swaps):
            error = apart(own, outputs(model.model, inputs))
        assert (error > 1e-3) if changes else (error <= 1e-5)


def test_groups_of_equal_keys_cost_nothing_at_half_the_cache():
    call = drawn()
    twins = replace(call, key=call.key[:, [0, 0, 2, 2]])
    assert lost(twins, "rank:3,group=2") < 1e-9
    assert lost(twins, "rank:3,group=1") > 1e-2
    assert lost(call, "rank:3,group=2") > 1e-2, "unequal keys pay"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 11), st.sampled_from([2, 3, 4]))
def test_the_maps_are_the_best_logits_of_their_size_in_their_metric(seed, size, group):
    """‖C_q^½ (K − K̂)ᵀ C_k^½‖ of the maps is the tail of the singular values, and random maps are not better."""
    generator, width = torch.Generator().manual_seed(seed), 4 * group
    blocks = [torch.randn(4, 9, generator=generator, dtype=torch.float64) for _ in range(group)]
    metric = torch.block_diag(*(block @ block.mT for block in blocks))
    rows = torch.randn(3 * width, width, generator=generator, dtype=torch.float64)
    keys, size = rows.mT @ rows, min(size, width)
    a, b = directions(metric, keys)

    def loss(key_map, query_map):
        error = torch.eye(width, dtype=torch.float64) - key_map @ query_map.mT
        return float(torch.trace(metric @ error.mT @ keys @ error))

    values = torch.linalg.svdvals(torch.linalg.cholesky(metric).mT @ torch.linalg.cholesky(keys))
    best = loss(b[:, :size], a[:, :size])
    assert best == pytest.approx(float(values[size:].square().sum()), rel=1e-6, abs=1e-6 * float(values[0] ** 2))
    other = torch.randn(width, size, generator=generator, dtype=torch.float64)
    assert loss(other, torch.linalg.pinv(other).mT) >= best - 1e-9 * float(values[0] ** 2)


def test_query_heads_share_the_latent_of_their_key_head_and_moments_of_two_texts_add_up():
    kernel = fitted("rank:2,group=2", drawn(heads=5))
    fits, alone = kernel.fitted, kernel.select_head(3).fitted
    assert torch.equal(alone["key_map"], fits["key_map"][3:4])
    assert not alone["members"].any(), "a single head has a single key head"
    groups = [sorted(set(row)) for row in fits["members"].tolist()]
    assert groups == [[0, 1], [0, 1], [2, 3], [2, 3], [4]], "the last group may be smaller"
    assert (fits["key_map"] != 0).flatten(1, -2).any(-2).sum(-1).tolist() == [4, 4, 4, 4, 2]
    call = drawn(heads=6, kv_heads=2)
    maps = fitted("rank:3", call).fitted["key_map"]
    assert torch.equal(maps[0], maps[2])
    assert not torch.equal(maps[0], maps[3])
    alone = fitted("rank:3", call.select([0, 1, 2, 3, 4, 5])).fitted["key_map"]
    assert torch.allclose(alone, maps), "heads named one by one still share"
    fits = [MapsFit(3, group=2) for _ in range(3)]
    for at, seed in ((0, 1), (0, 2), (1, 1), (2, 2)):
        fits[at].update(drawn(seed))
    together = fits[1].plus(fits[2]).solve()
    for name, value in fits[0].solve().items():
        assert torch.allclose(value.double(), together[name].double(), atol=1e-9)


def test_sdpa_and_row_tiles_compute_the_scores_of_the_latents():
    call = drawn()
    kernel = fitted("rank:3,group=all", call)
    assert route(call, kernel) == "sdpa"
    assert apart([attend(call, kernel)], [attend(call, kernel, "eager")]) < 1e-9
    latent = sum(k[:, None] @ b for k, b in zip(call.key.unbind(1), kernel.fitted["key_map"][0], strict=True))
    scores = call.query @ kernel.fitted["query_map"] @ latent.mT * call.scale
    attention = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(-1)
    assert apart([(attention @ call.value).transpose(1, 2)], [attend(call, kernel)]) < 1e-9


def test_sampled_rows_are_evenly_spaced_and_include_the_last_query(monkeypatch):
    monkeypatch.setattr(pair_weights, "MOST_ROWS", 4)
    call = drawn(tokens=9)
    query, seen = pair_weights.sample_rows(call)
    torch.testing.assert_close(query, call.query[..., [2, 5, 8], :].double(), rtol=0, atol=0)
    assert torch.equal(seen, pair_weights.pairs_seen(call, slice(None))[..., [2, 5, 8], :])


def test_the_output_metric_is_the_effect_of_a_logit_on_the_output():
    """c_ij δ² against the squared change of W_O o_i if one logit moves by δ, for every pair of a few tokens."""
    call, step = drawn(tokens=5, heads=2), 1e-5
    outward = random(2, 6, 7, seed=1)
    weighted = output_weighted(call, outward @ outward.mT)
    scores = (call.query @ call.key.mT * call.scale).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    for i, j in torch.ones(5, 5).tril().nonzero().tolist():
        moved = scores.clone()
        moved[..., i, j] += step
        change = ((moved.softmax(-1) - scores.softmax(-1)) @ call.value @ outward)[..., i, :]
        naive = change.square().sum(-1) / step**2 * (i > 0)
        assert torch.allclose(weighted[..., i, j], naive, rtol=1e-3)


def test_the_output_metric_beats_the_plain_one_where_large_keys_carry_values_that_cancel():
    """Two kinds of keys in separate coordinates: the values of the larger ones are all 0."""
    query, key, value = random(3, 4, 1, 128, 8)
    value[:, :, ::2] = 0.0
    key[:, :, ::2] *= torch.tensor([2.0] * 4 + [0.0] * 4)
    key[:, :, 1::2] *= torch.tensor([0.0] * 4 + [1.5] * 4)
    call = Call(query, key, value, 8**-0.5)
    assert lost(call, "rank:4,metric=output", output=torch.eye(8).double()[None]) < 0.75 * lost(call, "rank:4")


def test_keys_before_the_rotation_are_those_of_a_cut_projection():
    """The swap against the same model with the rows of k_proj projected and its mean kept as a bias."""
    model = grouped()
    sites, swaps, inputs = swapped(model, "rank:4,group=all,rotation=before")
    own = outputs(model.model, inputs)
    with hooks.replace(model.model, sites, swaps):
        new = outputs(model.model, inputs)
    for site, swap in swaps.items():
        projection, fits = model.model.get_submodule(site.path).k_proj, swap.kernel.fitted
        leaders = fits["members"][0].tolist()
        down = torch.cat(list(fits["key_map"][0, : len(leaders)]))
        back, offset = (torch.cat([fits[name][head] for head in leaders]) for name in ("query_map", "offset"))
        bias = 0 if projection.bias is None else projection.bias.detach().double() @ down @ back.mT
        weight = projection.weight.detach().double()
        projection.weight.data = (back @ down.mT @ weight).to(projection.weight)
        projection.bias = torch.nn.Parameter((bias + offset).to(projection.weight))
    assert apart(outputs(model.model, inputs), new) <= 1e-5
    assert apart(own, new) > 1e-3


@pytest.mark.parametrize("form", ["group=all", "group=all,rotation=before"])
def test_a_key_value_cache_and_left_padding_change_nothing(form):
    model = grouped()
    sites, swaps, inputs = swapped(model, f"rank:4,{form}")
    ids = inputs["input_ids"][:1, :12]
    with torch.no_grad(), hooks.replace(model.model, sites, swaps):
        whole = model.model(input_ids=ids).logits
        step = model.model(input_ids=ids[:, :8], use_cache=True)
        cached = [step.logits]
        for at in range(8, 12):
            step = model.model(input_ids=ids[:, at : at + 1], past_key_values=step.past_key_values, use_cache=True)
            cached.append(step.logits)
        padded = torch.cat((ids[:, :3], ids), 1)
        mask = (torch.arange(15) >= 3).long()[None]
        places = (mask.cumsum(1) - 1).clamp_min(0)
        left = model.model(input_ids=padded, attention_mask=mask, position_ids=places).logits[:, 3:]
    assert apart([whole, whole], [torch.cat(cached, 1), left]) <= 1e-5


def test_runs_and_calls_without_a_meaning_are_refused(demo):
    kernel = fitted("rank:2,group=2", drawn())
    turn = {"offset": torch.zeros(4, 6), "frequency": torch.zeros(4, 6), "partner": torch.arange(6).expand(4, -1)}
    turned, vit = kernel.with_fitted(kernel.fitted | turn), family("vit")
    unrotated = "rotation=before cannot be used at .*: the keys are not rotated"
    unfit = "needs predictions with a gradient"
    for refused, error, problem in (
        (lambda: swap_kernel(demo, "rank:4,rotation=before", **SMALL), UsageError, unrotated),
        (lambda: attend(drawn(), turned), UsageError, "does not pass token positions"),
        (lambda: kernel.log(drawn().query, drawn().key, 1.0), UsageError, "share a latent"),
        (lambda: swap_kernel(demo, "rank:4,group=2", sweep="heads", **SMALL), UsageError, "share a latent"),
        (lambda: swap_kernel(vit, "rank:2,metric=output", windows=2, **BARE), ModelError, unfit),
    ):
        with pytest.raises(error, match=problem):
            refused()


def test_notes_name_uneven_groups_and_the_formula_names_what_is_fitted(demo):
    uneven = "The last latent has fewer key heads than `group` at 4 of 4 sites."
    for group, notes in ((3, [uneven]), (4, []), ("all", []), (99, [uneven])):
        swap = swap_kernel(demo, f"rank:8,group={group}", windows=1, length=16, **BARE).swap
        assert [note for note in swap.notes if "group" in note] == notes, group
    swap = swap_kernel(grouped(), "rank:4,group=all,rotation=before", **SMALL).swap
    assert swap.fitted == ["key_map", "offset", "query_map"]
    assert formula(swap).endswith("fitted per head: key map, offset, query map")
    assert "r·G columns" in formula(swap)
    assert "rebuilt" in formula(swap)


FORMS = [("group=all", 20), pytest.param("group=1,rotation=before", 60, marks=pytest.mark.full)]


@pytest.mark.parametrize(("form", "steps"), FORMS)
def test_healing_trains_the_maps_and_a_saved_model_has_them(form, steps, tmp_path):
    model = grouped()
    options = {"train": steps, "windows": 4, "length": 16, "batch_size": 2} | BARE
    swap = attnlens.heal(model, f"rank:3,{form}", save=tmp_path / "cut", **options).swap
    assert swap.stages[-1].name == "healed"
    assert swap.stages[-1].loss.after != swap.stages[0].loss.after, "something was trained"
    again = attnlens.load_swapped(tmp_path / "cut")
    read = texts.batches(model, texts.sample("tiny"), Cut(tokens=16, sequences=4, batch_size=2))
    try:
        own = measure_losses(
            replace(model, model=again.model), feed(model, read, "causal", 0), "causal", Design.plain(4)
        )
    finally:
        again.close()
    assert own.mean == pytest.approx(swap.loss.after, rel=1e-4)
