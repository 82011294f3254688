"""Tests that latents which key heads share are the best logits of their size, of rotated keys and of keys before it."""

from dataclasses import replace

import families
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import BARE, apart, family, loaded, outputs, sites_of

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.kernels import OWN, parsed
from attnlens.kernels.attention import attend, route
from attnlens.kernels.lowrank import Grams, MapsFit, directions
from attnlens.kernels.pair_weights import output_weighted
from attnlens.lab.ranks.search import losses
from attnlens.maths.statistics import Design
from attnlens.models import hooks, texts
from attnlens.models.texts import Cut
from attnlens.models.texts.targets import feed
from attnlens.records import Call
from attnlens.report.sections.swaps import formula
from attnlens.runs.swap.fit import fit
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sites import SwapSetup

SMALL = {"windows": 4, "length": 24, "batch_size": 4}
FORMS = ["group=1", "group=2", "group=all", "group=1,rotation=before", "group=all,rotation=before"]


def rotated():
    """A tiny Llama of 6 query and 2 key heads whose attention is far from uniform."""
    model = families.build("llama")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(20)
    return loaded(model)


def drawn(seed=0, heads=4, tokens=40, head_dim=6, kv_heads=None):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, kv_heads or heads, kv_heads or heads)
    q, k, v = (torch.randn(2, n, tokens, head_dim, generator=generator, dtype=torch.float64) for n in shapes)
    return Call(q, k, v, head_dim**-0.5, causal=True)


def fitted(words, *calls, **given):
    kernel = parsed(words)
    found = kernel.info.fit(**kernel.parameters)
    for name, value in given.items():
        setattr(found, name, value)
    for call in calls:
        found.update(call)
    return kernel.with_fitted(found.solve())


def swapped(model, words, cut=None):
    """The swap of every site, fitted on the built-in text, and the inputs of one batch."""
    batches = texts.batches(model, texts.sample("demo"), cut or Cut(tokens=24, sequences=12, batch_size=4))
    sites = sites_of(model.model, batches.batches[0].inputs)
    swaps = {site: hooks.Replacement(parsed(words)) for site in sites}
    return sites, fit(SwapSetup(model, sites, swaps, "causal"), batches, lambda _: None), batches.batches[0].inputs


# --- what is exact ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_latent_that_keeps_everything_is_the_model_itself(form):
    model = rotated()
    for rank, changes in ((10, False), (3, True)):
        sites, swaps, inputs = swapped(model, f"rank:{rank},{form}")
        own = outputs(model.model, inputs)
        with hooks.replace(model.model, sites, swaps):
            found = apart(own, outputs(model.model, inputs))
        assert (found > 1e-3) if changes else (found <= 1e-5), form


def test_groups_of_equal_keys_cost_nothing_at_half_the_cache():
    call = drawn()
    twins = replace(call, key=call.key[:, [0, 0, 2, 2]])
    half = fitted("rank:3,group=2", twins)
    assert apart([attend(twins, OWN)], [attend(twins, half)]) < 1e-9
    assert apart([attend(twins, OWN)], [attend(twins, fitted("rank:3,group=1", twins))]) > 1e-2
    assert apart([attend(call, OWN)], [attend(call, fitted("rank:3,group=2", call))]) > 1e-2, "unequal keys pay"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 11), st.sampled_from([2, 3, 4]))
def test_the_maps_are_the_best_logits_of_their_size_in_their_own_metric(seed, size, group):
    """‖C_q^½ (K − K̂)ᵀ C_k^½‖ of the maps is the tail of the singular values, and no random maps come below it."""
    generator = torch.Generator().manual_seed(seed)
    width = 4 * group
    blocks = [torch.randn(4, 9, generator=generator, dtype=torch.float64) for _ in range(group)]
    metric = torch.block_diag(*(block @ block.mT for block in blocks))
    rows = torch.randn(3 * width, width, generator=generator, dtype=torch.float64)
    keys = rows.mT @ rows
    a, b = directions(metric, keys)
    size = min(size, width)

    def lost(key_map, query_map):
        error = torch.eye(width, dtype=torch.float64) - key_map @ query_map.mT
        return float(torch.trace(metric @ error.mT @ keys @ error))

    values = torch.linalg.svdvals(torch.linalg.cholesky(metric).mT @ torch.linalg.cholesky(keys))
    best = lost(b[:, :size], a[:, :size])
    assert best == pytest.approx(float(values[size:].square().sum()), rel=1e-6, abs=1e-6 * float(values[0] ** 2))
    other = torch.randn(width, size, generator=generator, dtype=torch.float64)
    inverse = torch.linalg.pinv(other)
    assert lost(other, inverse.mT) >= best - 1e-9 * float(values[0] ** 2)


def test_a_remainder_group_has_what_is_left():
    call = drawn(heads=5)
    kernel = fitted("rank:2,group=2", call)
    members = kernel.fitted["members"].tolist()
    assert [sorted(set(row)) for row in members] == [[0, 1], [0, 1], [2, 3], [2, 3], [4]]
    kept = (kernel.fitted["key_map"] != 0).flatten(1, -2).any(-2).sum(-1).tolist()
    assert kept == [4, 4, 4, 4, 2]


def test_query_heads_of_one_key_head_share_its_latent():
    call = drawn(heads=6, kv_heads=2)
    maps = fitted("rank:3", call).fitted["key_map"]
    assert torch.equal(maps[0], maps[2])
    assert not torch.equal(maps[0], maps[3])
    alone = fitted("rank:3", call.select([0, 1, 2, 3, 4, 5])).fitted["key_map"]
    assert torch.allclose(alone, maps), "heads that were named one by one still share"


# --- by the output ----------------------------------------------------------------------------------------------------


def test_the_output_metric_is_what_an_error_of_a_logit_does_to_the_output():
    """c_ij δ² against the squared change of W_O o_i where one logit moves by δ, for every pair of a few tokens."""
    call = drawn(tokens=5, heads=2)
    generator = torch.Generator().manual_seed(1)
    outward = torch.randn(2, 6, 7, generator=generator, dtype=torch.float64)
    found = output_weighted(call, outward @ outward.mT)
    step = 1e-5
    for i in range(5):
        for j in range(i + 1):
            scores = (call.query @ call.key.mT * call.scale).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
            moved = scores.clone()
            moved[..., i, j] += step
            change = (moved.softmax(-1) - scores.softmax(-1)) @ call.value @ outward
            naive = change[..., i, :].square().sum(-1) / step**2
            expected = 0.0 if i == 0 else naive
            assert torch.allclose(found[..., i, j], torch.as_tensor(expected, dtype=torch.float64), rtol=1e-3)


def test_the_output_metric_beats_the_plain_one_where_large_keys_carry_values_that_cancel():
    """Two kinds of keys in coordinates of their own: the values of the larger ones are all 0."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens, dim = 128, 8
    query = normal(4, 1, tokens, dim)
    key, value = torch.zeros(4, 1, tokens, dim, dtype=torch.float64), normal(4, 1, tokens, dim)
    key[:, :, ::2, :4] = 2 * normal(4, 1, tokens // 2, 4)
    value[:, :, ::2] = 0.0
    key[:, :, 1::2, 4:] = 1.5 * normal(4, 1, tokens // 2, 4)
    call = Call(query, key, value, dim**-0.5)
    metric = torch.eye(dim, dtype=torch.float64)[None]
    own = attend(call, OWN)
    plain, weighted = (
        float((attend(call, fitted(words, call, **given)) - own).norm() / own.norm())
        for words, given in (("rank:4", {}), ("rank:4,metric=output", {"output": metric}))
    )
    assert weighted < 0.75 * plain


# --- before the rotation ----------------------------------------------------------------------------------------------


def test_keys_before_the_rotation_are_those_of_a_cut_projection():
    """The swap against the same model with k_proj's own rows projected and its mean kept as a bias."""
    model = rotated()
    sites, swaps, inputs = swapped(model, "rank:4,group=all,rotation=before")
    with hooks.replace(model.model, sites, swaps):
        found = outputs(model.model, inputs)
    own = outputs(model.model, inputs)
    for site, swap in swaps.items():
        module = model.model.get_submodule(site.path)
        of = swap.kernel.fitted
        leaders = of["members"][0].tolist()
        down = torch.cat([of["key_map"][0, at] for at in range(len(leaders))])
        back = torch.cat([of["query_map"][head] for head in leaders])
        offset = torch.cat([of["offset"][head] for head in leaders])
        weight = module.k_proj.weight.detach().double()
        bias = 0 if module.k_proj.bias is None else module.k_proj.bias.detach().double() @ down @ back.mT
        module.k_proj.weight.data = (back @ down.mT @ weight).to(module.k_proj.weight)
        module.k_proj.bias = torch.nn.Parameter((bias + offset).to(module.k_proj.weight))
    assert apart(outputs(model.model, inputs), found) <= 1e-5
    assert apart(own, found) > 1e-3


@pytest.mark.parametrize("form", ["group=all", "group=all,rotation=before"])
def test_a_key_value_cache_and_padding_on_the_left_change_nothing(form):
    model = rotated()
    sites, swaps, inputs = swapped(model, f"rank:4,{form}")
    ids = inputs["input_ids"][:1, :12]
    with torch.no_grad(), hooks.replace(model.model, sites, swaps):
        whole = model.model(input_ids=ids).logits
        first = model.model(input_ids=ids[:, :8], use_cache=True)
        then = [first.logits]
        for at in range(8, 12):
            first = model.model(input_ids=ids[:, at : at + 1], past_key_values=first.past_key_values, use_cache=True)
            then.append(first.logits)
        padded = torch.cat((ids[:, :3], ids), 1)
        mask = torch.ones_like(padded)
        mask[:, :3] = 0
        places = (mask.cumsum(1) - 1).clamp_min(0)
        left = model.model(input_ids=padded, attention_mask=mask, position_ids=places).logits[:, 3:]
    assert apart([whole], [torch.cat(then, 1)]) <= 1e-5
    assert apart([whole], [left]) <= 1e-5


def test_a_model_without_a_rotation_has_no_keys_before_it(demo):
    with pytest.raises(UsageError, match="keys before rotation are unknown: the keys are not rotated"):
        swap_kernel(demo, "rank:4,rotation=before", **SMALL, **BARE)


def test_attention_that_is_not_told_its_positions_is_refused():
    kernel = fitted("rank:2,group=2", drawn())
    turned = kernel.with_fitted(
        dict(kernel.fitted)
        | {"offset": torch.zeros(4, 6), "frequency": torch.zeros(4, 6), "partner": torch.arange(6).expand(4, -1)}
    )
    with pytest.raises(UsageError, match="does not pass token positions"):
        attend(drawn(), turned)


# --- as a kernel ------------------------------------------------------------------------------------------------------


def test_it_runs_through_sdpa_and_row_tiles_alike():
    call = drawn()
    kernel = fitted("rank:3,group=all", call)
    assert route(call, kernel) == "sdpa"
    assert apart([attend(call, kernel)], [attend(call, kernel, "eager")]) < 1e-9
    low = (
        call.query @ kernel.fitted["query_map"],
        sum(k[:, None] @ b for k, b in zip(call.key.unbind(1), kernel.fitted["key_map"][0], strict=True)),
    )
    scores = (low[0] @ low[1].mT * call.scale).masked_fill(~torch.ones(40, 40).tril().bool(), -torch.inf)
    assert apart([(scores.softmax(-1) @ call.value).transpose(1, 2)], [attend(call, kernel)]) < 1e-9


def test_its_spelling_names_what_is_not_usual():
    assert parsed("rank:3").spelling == "rank:rank=3"
    for words in ("rank:rank=3,group=all,rotation=before,metric=output", "rank:rank=3,group=2"):
        assert parsed(words).spelling == words
    assert parsed("rank:3,all").spelling == "rank:rank=3,group=all"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("rank:3,group=0", "group must be at least 1"),
        ("rank:3,group=some", "group must be a whole number, not 'some'"),
        ("rank:3,rotation=sideways", "rotation must be after or before, not 'sideways'"),
        ("rank:3,metric=2", "metric must be attention or output, not '2'"),
        ("rank:3,group=2+symmetric", "ties each query to the key of its token"),
    ],
)
def test_words_that_make_no_sense_are_refused(words, told):
    with pytest.raises(UsageError, match=told):
        parsed(words)


def test_scores_of_one_head_alone_and_a_sweep_of_heads_are_refused(demo):
    kernel = fitted("rank:2,group=2", drawn())
    with pytest.raises(UsageError, match="share a latent"):
        kernel.log(drawn().query, drawn().key, 1.0)
    with pytest.raises(UsageError, match="share a latent"):
        swap_kernel(demo, "rank:4,group=2", sweep="heads", **SMALL, **BARE)


def test_a_head_whose_predictions_are_hidden_states_has_no_output_metric():
    with pytest.raises(ModelError, match="needs predictions with a gradient"):
        swap_kernel(family("vit"), "rank:2,metric=output", windows=2, batch_size=2, **BARE)


def test_moments_of_two_texts_add_up():
    first, second = drawn(1), drawn(2)
    both = MapsFit(3, group=2)
    both.update(first)
    both.update(second)
    apart_fits = [MapsFit(3, group=2) for _ in range(2)]
    for one, call in zip(apart_fits, (first, second), strict=True):
        one.update(call)
    together = apart_fits[0].plus(apart_fits[1])
    assert isinstance(together.grams, Grams)
    for name, value in both.solve().items():
        assert torch.allclose(value.double(), together.solve()[name].double(), atol=1e-9)


UNEVEN = "The last latent has fewer key heads than the others, or than group, at 4 of 4 sites."


@pytest.mark.parametrize(("group", "said"), [(3, [UNEVEN]), (4, []), (8, []), ("all", []), (99, [UNEVEN])])
def test_groups_that_do_not_fit_the_key_heads_are_told(demo, group, said):
    swap = swap_kernel(demo, f"rank:8,group={group}", **SMALL, **BARE).swap
    assert [note for note in swap.notes if "group" in note] == said


def test_what_is_fitted_is_told_without_tables_of_indices():
    swap = swap_kernel(rotated(), "rank:4,group=all,rotation=before", **SMALL, **BARE).swap
    assert swap.fitted == ["key_map", "offset", "query_map"]
    told = formula(swap)
    assert told.endswith("fitted per head: key map, offset, query map")
    assert "r·G columns" in told
    assert "rebuilt" in told


@pytest.mark.parametrize("form", ["group=all", "group=1,rotation=before"])
def test_healing_trains_the_maps_that_are_used_and_a_saved_model_has_them(form, tmp_path):
    model = rotated()
    report = attnlens.heal(
        model, f"rank:3,{form}", train=60, save=tmp_path / "cut", windows=4, length=16, batch_size=2, **BARE
    )
    healed = report.swap.stages[-1]
    assert healed.name == "healed"
    assert healed.loss.after != report.swap.stages[0].loss.after, "something was trained"
    again = attnlens.load_swapped(tmp_path / "cut")
    read = texts.batches(model, texts.sample("tiny"), Cut(tokens=16, sequences=4, batch_size=2))
    fed = feed(model, read, "causal", 0)
    try:
        own = losses(replace(model, model=again.model), fed, "causal", Design.plain(4))
    finally:
        again.close()
    assert own.mean == pytest.approx(report.swap.loss.after, rel=1e-4)
