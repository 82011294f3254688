"""Tests that fit and heal train only W_Q and W_K of swapped heads, on text of their own, and reduce the distance."""

import copy
import itertools
import math
from dataclasses import replace

import families
import pytest
import tiny
import torch
from loaded import BARE, apart, family, loaded, outputs, sites_of, swap_or_heal
from safetensors.torch import load_file
from swap_batches import watched
from torch.nn.functional import normalize
from torch.testing import assert_close

import attnlens
from attnlens.cli.entry import exit_code
from attnlens.errors import ModelError, TextError, UsageError
from attnlens.kernels import OWN, parsed
from attnlens.kernels.attention import attend
from attnlens.lab.heal import healer as healing
from attnlens.lab.heal import pipeline
from attnlens.lab.heal.healer import Healer, Trained, adamw, descend, transfer
from attnlens.models import hooks, texts
from attnlens.models.texts.targets import Fed
from attnlens.records import HealingRate
from attnlens.report.report import read_report
from attnlens.report.sections.plans import healing_lines
from attnlens.requests.swap import Amount, HealRequest
from attnlens.runs.progress import Interrupted
from attnlens.runs.swap.fit import SHARES, Search, fit
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sites import SwapSetup

READ = {"windows": 4, "length": 24, "batch_size": 4} | BARE
BOOK = texts.sample("demo")
DECREE = "And it came to pass in those days, that there went out a decree. "
PATH = "transformer.h.{}.attn.c_attn.weight"


def quiet(_amount):
    pass


def make(model, words="rbf", heads=None, task="causal", *, fitted=False, seed=0, steps=3, size=8, sequences=16, **more):
    """A healer of all sites with these options, and the batches of that size that it reads."""
    fed = texts.batches(model, BOOK, texts.Cut(tokens=16, sequences=sequences, batch_size=size))
    sites = sites_of(model.model, fed.batches[0].inputs)
    swaps = dict.fromkeys(sites, hooks.Replacement(parsed(words), heads))
    if fitted:
        swaps = fit(SwapSetup(model, sites, swaps), fed, quiet)
    return Healer(model, sites, swaps, task, seed, options=HealRequest(train=Amount(steps, "steps"), **more)), fed


def prepared(*args, **options):
    healer, fed = make(*args, **options)
    healer.prepare(fed.batches[0])
    return healer, fed


def heal(model, *args, evaluate=lambda: None, steps=6, **options):
    """A healer after its training, and the record."""
    healer, fed = make(model, *args, steps=steps, size=4, **options)
    measure = lambda: hooks.forward(model.model, fed.batches[0].inputs) and evaluate()  # noqa: E731
    return healer, pipeline.run_training(healer, fed, measure, quiet)


def gradients(healer, work):
    for leaf in healer.leaves:
        leaf.grad = None
    work()
    return [leaf.grad.clone() for leaf in healer.leaves]


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "inputs"), [("vit", "pixel_values"), ("whisper", "input_features")])
def test_calibration_noise_is_never_the_evaluated_noise(name, inputs, tmp_path, monkeypatch):
    (tmp_path / "other.txt").write_text(DECREE * 40)
    read = READ | {"calibration": str(tmp_path / "other.txt")} if name == "whisper" else {"windows": 4, "batch_size": 4}
    cut = watched(monkeypatch)
    swap_kernel(family(name), "rbf", part="encoder", fit=True, **read)
    rows = [torch.cat([batch.inputs[inputs] for batch in batches]).flatten(1) for batches in cut]
    assert 4 == len(rows[0]) < len(rows[1])
    assert not (rows[0][:, None] == rows[1][None]).any(), "not one number is equal"


def test_calibration_lines_are_those_that_are_not_evaluated(demo, tmp_path, monkeypatch):
    text = tmp_path / "long.txt"
    names = ("abba", "zadok", "esau", "moses", "aaron", "ruth", "naomi", "boaz")
    text.write_text("\r\n\n".join(f"{name} in the beginning created " + f"the {name} " * 60 for name in names))
    cut = watched(monkeypatch)
    report = attnlens.heal(demo, text=str(text), pack=False, windows=3, length=16, batch_size=2, train=1, **BARE)
    assert [batch.lengths for batch in cut[0]] == [(16, 16), (16,)]
    own, other = (batches.texts[0].windows for batches in cut)
    assert sorted([*own, *other]) == list(range(cut[0].texts[0].available))
    assert not set(cut[0].ids) & set(cut[1].ids)
    assert report.settings.calibration.sha256 == report.settings.text.sha256


def test_the_batches_that_choose_the_best_step_train_nothing(demo):
    fed = texts.batches(demo, BOOK, texts.Cut(tokens=16, sequences=40, batch_size=2))
    healer = Healer(demo, (), {}, "causal", options=HealRequest(train=Amount(200, "steps")))
    place_of = {id(batch.inputs): place for place, batch in enumerate(fed.batches)}
    train, held_out = ([place_of[id(one.inputs)] for one in part] for part in pipeline.split(healer, fed))
    assert (len(train), len(held_out)) == (18, 2)
    assert sorted([*train, *held_out]) == list(range(20))
    assert held_out[1] - held_out[0] == 10, "they lie over the whole text"


# --- refusals ---------------------------------------------------------------------------------------------------------
def headless():
    return loaded(families.build("bert").bert)


def broken():
    demo = attnlens.load("demo")
    demo.model.transformer.h[1].attn.c_attn.weight.data[3, 4] = math.nan
    return demo


@pytest.mark.parametrize(
    ("model", "kernel", "options", "says", "remedy"),
    [
        ("demo", "linear", {"fit": True} | READ, "no free parameter", ""),
        ("x/y", ["rbf", "cosine+tied-query"], {"fit": True}, "can't be fitted", "Leave out --fit"),
        ("x/y", "rbf+symmetric", {"fit": True}, "can't be fitted", "Leave out --fit"),
        ("x/y", "hard", {"train": 2}, "not differentiable", "swap-kernel"),
        ("x/y", "rbf", {"train": 2, "control": True}, "the original model would learn its own predictions", ""),
        ("x/y", "rbf", {"train": 2, "learn": "txt"}, "Unknown --learn 'txt'", ""),
        ("x/y", "rbf", {"train": 2, "rank": 0}, "rank=0 is not a whole number", ""),
        ("x/y", "rbf", {"train": 2, "batch": 0}, "batch=0 is not a whole number", ""),
        (headless, "rbf", {"train": 2, "learn": "text"} | READ, "predicts no tokens", ""),
        (lambda: family("albert"), "rbf", {"train": 1, "layers": [1]} | READ, "keys of the swapped heads", ""),
        (broken, "rbf", READ, r"h\.1\.attn\.c_attn\.weight contains NaN", ""),
        ("demo", "rbf", {"train": 1} | READ | {"batch_size": 8, "calibration": "few.txt"}, "two batches", ""),
    ],
)  # fmt: skip
def test_refusals(tmp_path, monkeypatch, model, kernel, options, says, remedy):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.txt").write_text(DECREE * 2)
    with pytest.raises((UsageError, ModelError, TextError), match=says) as refusal:
        swap_or_heal(model() if callable(model) else model, kernel, **options)
    assert remedy in refusal.value.remedy


RIGHT = {
    **{200: (200, "steps"), "200": (200, "steps"), "200 steps": (200, "steps"), "2Mtok": (2e6, "tokens")},
    **{"1.5ktok": (1500, "tokens"), "90s": (90, "seconds"), "30min": (1800, "seconds"), " 2h ": (7200, "seconds")},
}
WRONG = [0, "0", -1, "-1", 1.5, "1.5", True, None, "", "many", "2m", "2Gtok", "0tok", "0s", "1e3", "1e400tok", 10**30]


def test_amounts_are_steps_tokens_or_times():
    assert {value: Amount.of(value) for value in RIGHT} == {value: Amount(*amount) for value, amount in RIGHT.items()}
    for value in (*WRONG, "nan", "٣"):
        with pytest.raises(UsageError, match="--train: cannot parse") as refusal:
            Amount.of(value)
        assert "tokens (500ktok, 2Mtok), or a time (90s, 2h)" in refusal.value.remedy
        assert "\n" not in str(refusal.value.problem)


# --- fit --------------------------------------------------------------------------------------------------------------


def test_a_fitted_rbf_costs_less_than_a_plain_one(demo):
    swap = swap_kernel(demo, "rbf", fit=True, windows=8, length=32, **BARE).swap
    assert [stage.name for stage in swap.stages] == ["swapped", "fitted"]
    plain, fitted = swap.stages
    assert fitted.loss.after < plain.loss.after
    assert fitted.loss.before == plain.loss.before
    assert (swap.loss, swap.kl, swap.fitted) == (fitted.loss, fitted.kl, ["origin"]), "the last stage is the result"


def test_a_fit_reads_the_heads_own_queries_and_keys_despite_a_tie(demo):
    plain, tied = (make(demo, words, fitted=True)[0].swaps for words in ("rank:6", "rank:6+tied-query"))
    for site, swap in plain.items():
        assert all(torch.equal(part, tied[site].kernel.fitted[name]) for name, part in swap.kernel.fitted.items())


def test_the_divergence_of_a_fit_counts_the_weight_of_a_sink():
    """KL over keys and sink; the sum over keys alone is another number."""
    model = families.build("gpt_oss")
    call = hooks.survey(model, families.inputs("gpt_oss", model))[0].call
    search = Search(parsed("cosine"), {"beta_of_head": 8.0}, {"beta_of_head": torch.full((6,), 2.0)})
    search.update(call)
    query, key = call.query.double(), call.paired_key.double()

    def rows(logits):
        sink = call.sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits.masked_fill(~call.visible(), -torch.inf), sink], -1).softmax(-1)

    own, cosine = rows(query @ key.mT * call.scale), normalize(query, dim=-1) @ normalize(key, dim=-1).mT
    for index, share in enumerate(SHARES):
        new = rows((8.0 + share * (2.0 - 8.0)) * cosine)
        kl = torch.where(own > 0, own * (own.clamp_min(1e-300).log() - new.clamp_min(1e-300).log()), 0.0)
        assert_close(search.divergence[index], kl.sum((0, 2, 3)), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(search.divergence[index], kl[..., :-1].sum((0, 2, 3)), rtol=0.05)


# --- trained numbers --------------------------------------------------------------------------------------------------
ALL = slice(None)
BERT, LLAMA = "bert.encoder.layer.1.attention.self", "model.layers.{}.self_attn"
BART, ALBERT = "model.decoder.layers.0.encoder_attn", "albert.encoder.albert_layer_groups.0.albert_layers.0.attention"
NEOX = "gpt_neox.layers.{}.attention.query_key_value.weight"


def of_head(head, size=10, start=0):
    return slice(start + head * size, start + (head + 1) * size)


def llama(queries, keys):
    masks = {f"{LLAMA}.q_proj.weight": ((60, 48), [(part, ALL) for part in queries])}
    return masks | ({f"{LLAMA}.k_proj.weight": ((20, 48), [(part, ALL) for part in keys])} if keys else {})


MASKS = [  # family, swapped heads and layers, trained rows and columns by weight
    ("gpt2", None, None, {PATH: ((40, 120), [(ALL, slice(80))])}),
    ("gpt2", (1, 3), None, {PATH: ((40, 120), [(ALL, of_head(head, start=at)) for head in (1, 3) for at in (0, 40)])}),
    ("gpt_neox", None, None, {NEOX: ((120, 40), [(slice(30 * head, 30 * head + 20), ALL) for head in range(4)])}),
    ("gpt_neox", (2,), None, {NEOX: ((120, 40), [(slice(60, 80), ALL)])}),
    ("llama", None, None, llama([ALL], [ALL])),
    ("llama", (0, 1, 2), None, llama([slice(30)], [slice(10)])),
    ("llama", (1, 3), None, llama([of_head(1), of_head(3)], [])),
    ("llama", (0, 3, 4, 5), None, llama([of_head(0), slice(30, 60)], [slice(10, 20)])),
    ("bert", (3,), [1], {f"{BERT}.{name}.weight": ((40, 40), [(of_head(3), ALL)]) for name in ("query", "key")}),
    ("phi3", None, None, {f"{LLAMA}.qkv_proj.weight": ((100, 60), [(slice(80), ALL)])}),
    ("phi3", (3, 4, 5), None, {f"{LLAMA}.qkv_proj.weight": ((100, 60), [(slice(30, 60), ALL), (slice(70, 80), ALL)])}),
    ("bart", (0,), [3], {f"{BART}.{name}_proj.weight": ((40, 40), [(of_head(0), ALL)]) for name in "qk"}),
    ("albert", None, None, {f"{ALBERT}.{name}.weight": ((40, 40), [(ALL, ALL)]) for name in ("query", "key")}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "heads", "layers", "expected"), MASKS)
def test_only_queries_and_keys_of_swapped_heads_are_trained(name, heads, layers, expected):
    """Keys only if all of their queries are swapped; a weight of several calls only if all of them are."""
    model = families.build(name)
    inputs = families.inputs(name, model)
    sites = sites_of(model, inputs)
    chosen = [site for site in sites if layers is None or site.layer in layers]
    masks = healing.trainable(model, sites, dict.fromkeys(chosen, hooks.Replacement(parsed("rbf"), heads)), inputs)
    assert masks.keys() == {path.format(layer) for path in expected for layer in (0, 1)}
    for path, (size, parts) in expected.items():
        mask = torch.zeros(size)
        for part in parts:
            mask[part] = 1
        assert all(torch.equal(masks[path.format(layer)], mask) for layer in (0, 1))


def test_only_swapped_heads_differ_after_healing(demo):
    before = copy.deepcopy(demo.model.state_dict())
    healer, _ = heal(demo, "rbf", (0, 5))
    columns = torch.zeros(384, dtype=torch.bool)
    for head in (0, 5):
        columns[of_head(head, 16)] = columns[of_head(head, 16, 128)] = True
    assert sorted(healer.values()) == [PATH.format(layer) for layer in range(4)]
    for name, value in healer.values().items():
        assert torch.equal((value != before[name]).any(0), columns)
        assert (value - before[name]).abs().max() > 1e-4
    assert all(torch.equal(before[name], tensor) for name, tensor in demo.model.state_dict().items())


TRAINED = [  # kernel, its parameter, the typed value (None: fitted), swapped heads, shape of the parameter
    ("rbf", "origin", 0.0, None, (8, 16)),
    ("cosine:beta=5", "beta_of_head", 5.0, (0, 5), (2,)),
    pytest.param("polynomial:offset=2", "offset_of_head", 2.0, None, (8,), marks=pytest.mark.full),
    ("rbf", "origin", None, None, (8, 16)),
    pytest.param("rank:1", "query_map", None, None, None, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("words", "name", "typed", "heads", "shape"), TRAINED)
def test_fitted_or_typed_parameters_are_trained_with_the_weights(demo, words, name, typed, heads, shape):
    few = typed is not None
    healer, record = heal(demo, words, heads, fitted=not few, steps=6 if few else 24, sequences=16 if shape else 64)
    for site, swap in healer.healed_swaps().items():
        start = healer.swaps[site].kernel.fitted[name]
        assert swap.kernel.fitted[name].shape == start.shape
        assert shape is None or start.shape == shape
        assert typed is None or (start == typed).all()
        assert not torch.equal(swap.kernel.fitted[name], start.float())
    trained = start.numel() if shape else 8 * 2 * 16
    assert record.parameters == 4 * (len(heads or range(8)) * 2 * 16 * 128 + trained)
    if typed is None:
        assert min(step.validation for step in record.curve) < 0.97 * record.curve[0].validation
        return
    fed = texts.batches(demo, BOOK, texts.Cut(tokens=16, sequences=2)).batches[0].inputs
    unhealed = []
    for swaps in (dict.fromkeys(healer.sites, hooks.Replacement(parsed(words), heads)), healer.swaps):
        with hooks.replace(demo.model, healer.sites, swaps):
            unhealed.append(outputs(demo.model, fed))
    assert apart(*unhealed) < 1e-5, "the same kernel before training"


def test_small_changes_of_bfloat16_weights_add_up(demo):
    healer, fed = prepared(replace(demo, model=copy.deepcopy(demo.model).bfloat16()))
    optimiser = adamw(healer.leaves, 1e-6)
    before = {name: part.value.clone() for name, part in healer.weights.items()}
    for _ in range(3):
        descend(healer, optimiser, [Fed(fed.batches[0].inputs, None)], "whole", 1e-6)
    for name, part in healer.weights.items():
        assert (part.change.dtype, part.value.dtype) == (torch.float32, torch.bfloat16)
        assert 0 < float(part.change.detach().abs().max()) < 1e-5
        large = part.start.abs() > 0.01  # whose spacing is at least 2^-15
        assert torch.equal(part.value[large], before[name][large]), "such a step alone is lost in the weight"
    with torch.no_grad():
        part.change += 1000 * part.change
    assert not torch.equal(part.value, before[name]), "the control: a thousand of them are not"


def test_a_low_rank_change_is_its_product_within_the_mask(demo):
    torch.manual_seed(0)
    start, mask = torch.randn(6, 8), torch.zeros(6, 8)
    mask[:4, 2:] = 1
    part = Trained.of_rank(start, mask, 2, seed=0)
    assert torch.equal(part.value, start), "unchanged at first"
    with torch.no_grad():
        part.change.normal_()
    assert_close(part.value, start + part.change.detach() @ part.right.detach().mT * mask)
    assert torch.linalg.matrix_rank((part.value - start)[:4, 2:].detach()) == 2
    assert torch.equal(part.value[mask == 0], start[mask == 0])
    assert (part.count, Trained.of(start, mask).count) == (2 * (4 + 6), 24)
    healers = [prepared(demo, rank=2, seed=seed)[0] for seed in (0, 0, 1)]
    assert healers[0].count == 4 * (2 * (128 + 256) + 8 * 16)
    first, again, other = ([part.right for part in healer.weights.values()] for healer in healers)
    assert len({part.shape for part in first}) == 1
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(first, 2)), "each weight has its own V"
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


@pytest.mark.parametrize(("rank", "steps"), [(2, 16), pytest.param(4, 40, marks=pytest.mark.full)])
def test_a_low_rank_healing_trains_few_directions_of_queries_and_keys_and_saves_them(demo, tmp_path, rank, steps):
    swap = attnlens.heal(demo, "rbf", train=steps, rank=rank, save=tmp_path / "model", **READ).swap
    assert (swap.healing.rank, swap.healing.parameters) == (rank, 4 * (rank * (128 + 256) + 8 * 16))
    assert steps < 40 or swap.stages[-1].kl < 0.95 * swap.stages[0].kl
    own, saved = demo.model.state_dict(), load_file(tmp_path / "model" / "model.safetensors")
    for name in map(PATH.format, range(4)):
        values = torch.linalg.svdvals((saved[name].double() - own[name].double())[:, :256])
        assert values[rank] < 1e-3 * values[rank - 1], "so many directions and no more"
        assert torch.equal(saved[name][:, 256:], own[name][:, 256:])
    attnlens.load_swapped(tmp_path / "model").close()


@pytest.mark.parametrize("words", ["rank:4,group=all,rotation=before", "rank:6,group=2"])
def test_shared_latents_are_trained_as_one(words):
    """After training, the query heads of one key head have one A and offset, the readers of a latent one B."""
    healer, fed = prepared(family("llama"), words, fitted=True)
    before = {site: swap.kernel.fitted for site, swap in healer.swaps.items()}
    descend(healer, adamw(healer.leaves, 1e-2), [Fed(fed.batches[0].inputs, None)], "transfer", 1e-2)
    for site, swap in healer.healed_swaps().items():
        fitted, start = swap.kernel.fitted, before[site]
        latents, keys = (len(set(map(str, start[name].tolist()))) for name in ("members", "key_head"))
        assert keys < len(start["key_head"])
        for name, count in (("key_map", latents), ("query_map", keys), ("offset", keys)):
            if name in swap.kernel.trainable and name in fitted:
                assert len({str(row.tolist()) for row in fitted[name]}) == count
                assert (fitted[name] != start[name]).any(), "the control: it was trained"
    count = sum(leaf.numel() for part in healer.parameters.values() for one in part.values() for leaf in one.leaves)
    assert count < sum(fitted[n].numel() for fitted in before.values() for n in ("query_map", "key_map"))


# --- gradients --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["demo", "llama", "bert", "falcon"])
def test_transfer_of_a_kernel_to_itself_has_no_loss(demo, name):
    """falcon computes its attention without an attention function."""
    model, task = (demo if name == "demo" else family(name)), "masked" if name == "bert" else "causal"
    (own, fed), (other, _) = (prepared(model, words, task=task) for words in ("exponential", "rbf"))
    inputs = fed.batches[0].inputs
    assert transfer(own, inputs) == pytest.approx(0, abs=1e-12)
    assert all(leaf.grad.abs().max() < 1e-6 for leaf in own.leaves if leaf.grad is not None)
    loss = transfer(other, inputs)
    assert loss > 1e-3, "the control"
    assert all(leaf.grad.abs().max() > 1e-6 for leaf in other.leaves)
    each = healing.transfer_errors(other, inputs)
    assert each.shape == (8,)
    assert float(each.mean()) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("name", ["demo", "llama"])
def test_transfer_and_its_gradient_are_those_of_a_plain_computation_in_float64(demo, name):
    """Site by site from the queries, keys and values of one pass of the whole model, derived by projections."""
    model = demo if name == "demo" else family(name)
    double, values = replace(model, model=copy.deepcopy(model.model).double()), []
    healer, fed = prepared(double)
    inputs = fed.batches[0].inputs
    ours = gradients(healer, lambda: values.append(transfer(healer, inputs)))
    leaves = {path: p for path, p in double.model.named_parameters() if path in healer.weights}
    double.model.requires_grad_(False)
    naive = 0.0
    for site in healer.sites:  # one pass per site, in which only its weights have gradients
        inside, seen = [p for path, p in leaves.items() if path.startswith(f"{site.path}.")], {}
        for p in inside:
            p.requires_grad_(True)
        with torch.enable_grad(), hooks.watch(double.model, healer.sites, seen.__setitem__):
            hooks.forward(double.model, inputs)
            own = attend(seen[site], OWN).detach()
            new = attend(seen[site], healer.healed_swaps()[site].kernel)
            loss = ((new - own).square().sum((1, 2, 3)) / own.square().sum((1, 2, 3))).mean()
            loss.backward()
        for p in inside:
            p.requires_grad_(False)
        naive += float(loss.detach())
    assert values[0] == pytest.approx(naive, rel=1e-6)
    for (path, part), gradient in zip(healer.weights.items(), ours, strict=False):
        expected = leaves[path].grad * part.mask
        assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(("steps", "share"), [(20, 0.9), pytest.param(30, 0.6, marks=pytest.mark.full)])
def test_transfer_reduces_the_whole_models_distance_more_than_as_many_steps_of_the_whole(demo, steps, share):
    """What the default rests on."""
    left = {}
    for stage, rate in (("transfer", 1e-2), ("whole", 3e-3)):
        healer, fed = prepared(demo)
        optimiser = adamw(healer.leaves, rate)
        for number in range(steps):
            descend(healer, optimiser, [Fed(fed.batches[number % 2].inputs, None)], stage, rate)
        left[stage] = float(healer.by_sequence(fed.batches[0].inputs)[0].mean())
    assert left["transfer"] < share * left["whole"]


@pytest.mark.parametrize("stage", ["transfer", "whole"])
def test_two_batches_of_four_make_the_step_of_one_of_eight(demo, stage):
    healer, fed = prepared(demo)
    whole = [Fed(fed.batches[0].inputs, None)]
    halves, per_step = pipeline.cut_parts(whole, 4)
    assert (len(halves), per_step) == (2, 1)
    assert pipeline.cut_parts(whole, 16) == (whole, 2)
    optimiser = torch.optim.SGD(healer.leaves, lr=0.0)
    one, two, half = (
        gradients(healer, lambda parts=parts: descend(healer, optimiser, parts, stage, 0.0))
        for parts in (whole, halves, halves[:1])
    )
    assert all((first - second).norm() < 1e-4 * first.norm() for first, second in zip(one, two, strict=True))
    assert float((half[0] - one[0]).norm()) > 2 * float((two[0] - one[0]).norm()), "the control"


def test_checkpointing_gives_the_same_gradient(demo):
    (plain, fed), (again, _) = (prepared(demo, checkpointing=checkpointing) for checkpointing in (False, True))
    assert len(again.blocks) == 4
    one, two = (gradients(h, lambda h=h: h.descend(fed.batches[0].inputs, None, 1.0)) for h in (plain, again))
    assert_close(one, two, rtol=1e-5, atol=1e-8)
    assert not any("forward" in vars(block) for block in again.blocks), "the model is as it was"


# --- healing ----------------------------------------------------------------------------------------------------------
def test_healing_brings_the_demo_nearer(demo):
    swap = attnlens.heal(demo, "rbf", train=32, seed=1, **READ).swap
    assert [stage.name for stage in swap.stages] == ["swapped", "healed"]
    swapped, healed = swap.stages
    assert healed.loss.before == swapped.loss.before
    assert healed.loss.after < swapped.loss.after - 0.1
    assert healed.kl < 0.7 * swapped.kl
    assert (swap.loss, swap.kl) == (healed.loss, healed.kl)
    curve = swap.healing.curve
    assert [step.step for step in curve] == sorted(step.step for step in curve)
    assert curve[0].step == 0
    (chosen,) = (step for step in curve if step.step == swap.healing.best)
    assert chosen.validation == min(step.validation for step in curve) < 0.7 * curve[0].validation
    assert curve[0].loss == pytest.approx(swapped.loss.after, rel=1e-5)
    assert chosen.loss == pytest.approx(healed.loss.after, rel=1e-5)
    assert swap.healing.steps == 32
    assert swap.healing.parameters == 4 * (128 * 2 * 128 + 8 * 16), "W_Q, W_K and an origin for each head"


@pytest.mark.parametrize(
    ("name", "task"), [("bert", "masked"), ("t5", "seq2seq"), pytest.param("llama", "causal", marks=pytest.mark.full)]
)
def test_other_families_heal(name, task):
    _, record = heal(family(name), task=task, steps=24)
    assert min(step.validation for step in record.curve) < 0.97 * record.curve[0].validation
    if name == "bert":
        swapped, healed = attnlens.heal(headless(), train=8, **READ).swap.stages
        assert healed.hidden_cosine > swapped.hidden_cosine, "a headless model"


def test_a_tokenizer_that_adds_special_tokens_can_be_healed():
    model, inputs = replace(family("gpt2"), tokenizer=tiny.tokenizer("llama")), {"input_ids": torch.arange(3, 12)[None]}
    own = outputs(model.model, inputs)
    assert attnlens.heal(model, "polynomial", train=2, **READ).swap.healing.curve[0].validation > 0
    assert torch.equal(own[0], outputs(model.model, inputs)[0])


def test_the_models_own_kernel_has_nothing_to_heal(demo):
    healer, record = heal(demo, "exponential")
    assert record.best == 0
    assert record.curve[0].validation == pytest.approx(0, abs=1e-6)
    assert not any(part.change.any() for part in healer.weights.values())


def test_tokens_and_seconds_end_a_healing(demo):
    short = {"windows": 4, "length": 16, "batch_size": 4, "layers": [0]} | BARE
    tokens, seconds = (attnlens.heal(demo, "rbf", train=train, **short).swap.healing for train in ("0.3ktok", "0.3s"))
    assert tokens.tokens < 300 + 16, "16 tokens per step"
    assert tokens.tokens >= 300 or any(stage.stopped for stage in tokens.stages)
    assert tokens.tokens == sum(stage.tokens for stage in tokens.stages) == tokens.curve[-1].tokens
    assert (tokens.amount, tokens.batch) == ("300 tokens", 1)
    assert 0.3 <= seconds.seconds < 30
    assert seconds.tokens > 0


def test_stages_end_early_if_nothing_improves(monkeypatch):
    model = family("gpt2")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "choose_rate", lambda *_: (1e-12, []))
        _, record = heal(model, steps=40)
    assert [stage.stopped for stage in record.stages] == [True, True]
    assert sum(stage.steps for stage in record.stages) == record.curve[-1].step < 40
    assert min(step.validation for step in record.curve) == pytest.approx(record.curve[0].validation, rel=1e-5)
    monkeypatch.setattr(healing, "RATES", {"transfer": (10.0,), "whole": (10.0,)})
    monkeypatch.setattr(healing, "LEAST", 10.0)
    healer, record = heal(model, steps=40)
    assert (record.best, len(record.curve)) == (0, 1)
    assert [(stage.steps, stage.learning_rate, stage.stopped) for stage in record.stages] == [(0, 0, True)] * 2
    assert not any(leaf.any() for leaf in healer.leaves), "a stage without a good rate is left out"


def test_too_large_steps_are_taken_back_and_smaller_ones_tried(demo, monkeypatch):
    tried = [HealingRate(rate=rate, validation=1.0) for rate in (0.05, 0.1)]
    monkeypatch.setattr(pipeline, "choose_rate", lambda *_: (0.1, tried))
    _, record = heal(demo, steps=24)
    first, second, *_ = distances = [step.validation for step in record.curve]
    assert second > first > min(distances)
    assert record.stages[0].lowered_from == 0.1
    assert record.stages[0].learning_rate in (pytest.approx(0.01), pytest.approx(0.001))
    assert record.best > 0
    monkeypatch.setattr(pipeline, "SLOWER", 1.0)
    assert heal(demo, steps=24)[1].best == 0, "the control: the same steps again improve nothing"


def test_the_learning_rate_rises_over_a_tenth_of_the_steps_and_falls_along_a_cosine():
    assert pipeline.shape(1, 1 / 20, 20) == pytest.approx(1.0, abs=0.02)
    assert pipeline.shape(0, 0, 200) < 0.1 < 0.9 < pipeline.shape(19, 19 / 200, 200)
    assert pipeline.shape(199, 199 / 200, 200) < 0.03


def test_a_healing_depends_on_its_seed_and_never_on_the_evaluation_loss():
    model = family("gpt2")
    lying = map(float, itertools.count())
    (honest, first), (other, again), (_, of_seed_1) = (
        heal(model, **options) for options in ({}, {"evaluate": lambda: next(lying)}, {"seed": 1})
    )
    assert first.tokens == 6 * 4 * 16
    assert (first.best, first.curve) == (again.best, [step.model_copy(update={"loss": None}) for step in again.curve])
    assert all(torch.equal(value, other.values()[name]) for name, value in honest.values().items())
    measured = [step.step for step in again.curve if step.loss is not None]
    assert (measured[0], measured[-1]) == (0, again.curve[-1].step)
    assert len(set(measured) - {again.best}) <= len(pipeline.DRAWN)
    assert first.curve[-1].validation != of_seed_1.curve[-1].validation


def test_weights_are_restored_after_an_error(demo):
    name = PATH.format(0)
    before = demo.model.state_dict()[name].clone()

    def fail():
        assert torch.equal(demo.model.state_dict()[name], before + 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), pipeline.changed_weights(demo.model, {name: before + 1}):
        fail()
    assert torch.equal(demo.model.state_dict()[name], before)


def test_a_healing_on_text_has_a_control_that_is_trained_as_long(demo):
    swap = attnlens.heal(demo, "rank:6", train=2, layers=[1], learn="text", control=True, **READ).swap
    (swapped, healed), record, control = swap.stages, swap.healing, swap.healing.control
    assert (swapped.name, healed.name) == ("swapped", "healed")
    assert (record.goal, record.tokens) == ("text", control.tokens)
    assert control.loss.before == pytest.approx(swapped.loss.before)
    assert control.ratio == pytest.approx(math.exp(healed.loss.after - control.loss.after), rel=1e-6)
    assert control.ratio_ci95[0] < control.ratio < control.ratio_ci95[1]


class Planted:
    """‖x − 1‖² of one number per sequence: a rate of about 1/steps is right, 100 times more or less is not."""

    task, goal = "causal", "teacher"

    def __init__(self):
        self.leaves = [torch.zeros(4, requires_grad=True)]

    def descend(self, _inputs, _targets, weight):
        with torch.enable_grad():
            (weight * (self.leaves[0] - 1).square().sum()).backward()

    def by_sequence(self, _inputs, _targets=None):
        return (self.leaves[0].detach() - 1).square(), torch.ones(4)


def test_the_range_test_finds_a_rate_that_beats_a_hundredth_and_a_hundredfold(monkeypatch):
    monkeypatch.setattr(healing, "RATES", {"whole": (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)})
    planted, fed = Planted(), [Fed({"input_ids": torch.zeros(1, 1)}, None)]
    rate, tried = healing.choose_rate(planted, "whole", [fed] * 8, fed)
    assert not planted.leaves[0].any(), "the numbers are restored"
    assert all(isinstance(one, HealingRate) for one in tried)

    def left(rate):
        planted.leaves[0].data.zero_()
        optimiser = adamw(planted.leaves, rate)
        for _ in range(8):
            descend(planted, optimiser, fed, "whole", rate)
        return healing.measure_distances(planted, fed).mean

    assert left(rate) < 0.5 * min(left(rate / 100), left(rate * 100))


def test_a_fall_counts_only_beyond_its_paired_interval():
    torch.manual_seed(0)
    start, counts = 1 + torch.rand(16, dtype=torch.float64), torch.full((16,), 100.0, dtype=torch.float64)
    noise = 0.02 * torch.randn(16, dtype=torch.float64)
    before = healing.Distances(start, counts)
    assert healing.Distances(start - 0.05 + noise, counts).falls_from(before), "paired: far less than their spread"
    for other in (start - 0.001 + noise, start + 0.05 + noise, start * math.nan):
        assert not healing.Distances(other, counts).falls_from(before)
    few = [healing.Distances(each[:4], counts[:4]) for each in (start, start - 0.001 + noise.abs())]
    assert few[0].falls_from(few[1]) == (few[0].mean < few[1].mean), "of four sequences the fall itself counts"
    assert math.isinf(healing.Distances(start * math.nan, counts).mean)


# --- interruptions ----------------------------------------------------------------------------------------------------
def stop(monkeypatch, at):
    """Interrupt after so many training steps."""
    advance = pipeline.Descent.advance

    def interrupted(self):
        if self.step == at:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(pipeline.Descent, "advance", interrupted)


def test_an_interrupted_healing_keeps_its_best_step(demo, monkeypatch, tmp_path):
    before = copy.deepcopy(demo.model.state_dict())
    stop(monkeypatch, 12)
    with pytest.raises(Interrupted) as interruption:
        attnlens.heal(demo, "rbf", train=20, layers=[1], save=tmp_path / "model", **READ)
    swap = interruption.value.report.swap
    assert 1 <= swap.healing.best <= 12
    assert swap.healing.curve[-1].step == 10, "the last check before it"
    assert swap.healing.stages[-1].steps == 12
    assert swap.stages[-1].kl < swap.stages[0].kl
    assert all(torch.equal(before[name], tensor) for name, tensor in demo.model.state_dict().items())
    attnlens.load_swapped(tmp_path / "model").close()
    stop(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt) as nothing:
        attnlens.heal(demo, "rbf", train=20, layers=[1], **READ)
    assert not isinstance(nothing.value, Interrupted), "before the first check there is nothing to keep"


def test_the_program_reports_what_was_healed_until_ctrl_c(monkeypatch, tmp_path):
    stop(monkeypatch, 12)
    words = ["heal", "demo", "--layers", "1", "--windows", "4", "--length", "16", "--batch-size", "4", "--no-progress"]
    monkeypatch.chdir(tmp_path)
    assert exit_code([*words, "--train", "20", "--work", "work", "--json", "r.json"]) == 130
    assert list((tmp_path / "work").glob("*/*/heal-*.safetensors")), "its state stays"
    record = read_report(tmp_path / "r.json").swap.healing
    assert (record.curve[-1].step, bool(record.interrupted)) == (10, True)
    assert any("done, interrupted, best step" in line for line in healing_lines(record))
