"""Healing stage by stage: amounts, attention transfer, learning rates, states that are resumed, low rank, controls."""

import copy
import itertools
import math
import signal
import subprocess
import time
from dataclasses import replace

import forkserver
import pytest
import torch
from loaded import BARE, family, sites_of
from safetensors.torch import load_file

import attnlens
from attnlens.errors import UsageError
from attnlens.kernels import parsed
from attnlens.kernels.attention import attend
from attnlens.lab.heal import healer as students
from attnlens.lab.heal import pipeline
from attnlens.lab.heal.healer import (
    Distances,
    Healer,
    Trained,
    adamw,
    descend,
    measure_distances,
    transfer,
    transfer_errors,
)
from attnlens.lab.heal.pipeline import cut_parts, run_training, split
from attnlens.models import hooks, texts
from attnlens.models.hooks import OWN
from attnlens.models.texts.targets import Fed
from attnlens.records import HealingRate
from attnlens.report.report import read_report
from attnlens.report.sections.plans import healing_lines as healing_sentences
from attnlens.requests.swap import Amount, HealRequest
from attnlens.runs.swap.fit import fit
from attnlens.runs.swap.sites import SwapSetup

READ = {"windows": 4, "length": 24, "batch_size": 4} | BARE


STEPS = HealRequest(train=Amount(3, "steps"))


def prepared(model, words="rbf", task="causal", seed=0, **more):
    """A healer of all sites, and the batches that it reads."""
    fed = texts.batches(model, texts.sample("demo"), texts.Cut(tokens=16, sequences=16, batch_size=8))
    sites = sites_of(model.model, fed.batches[0].inputs)
    swaps = dict.fromkeys(sites, hooks.Replacement(parsed(words)))
    found = Healer(model, sites, swaps, task, seed, options=STEPS.with_options(**more))
    found.prepare(fed.batches[0])
    return found, fed


def gradients(healer, work):
    for leaf in healer.leaves:
        leaf.grad = None
    work()
    return [leaf.grad.clone() for leaf in healer.leaves]


# --- how long ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "number", "unit"),
    [
        (200, 200, "steps"),
        ("200", 200, "steps"),
        ("200 steps", 200, "steps"),
        ("2Mtok", 2e6, "tokens"),
        ("1.5ktok", 1500, "tokens"),
        ("90s", 90, "seconds"),
        ("30min", 1800, "seconds"),
        (" 2h ", 7200, "seconds"),
    ],
)
def test_an_amount_is_steps_tokens_or_a_time(given, number, unit):
    assert Amount.of(given) == Amount(number, unit)


@pytest.mark.parametrize(
    "given",
    [
        0,
        "0",
        -1,
        "-1",
        1.5,
        "1.5",
        True,
        None,
        "",
        "many",
        "2m",
        "2Gtok",
        "0tok",
        "0s",
        "1e3",
        "1e400tok",
        10**30,
        "nan",
        "٣",
    ],
)
def test_an_amount_that_makes_no_sense_is_refused_in_a_line(given):
    with pytest.raises(UsageError, match="--train: cannot parse") as refusal:
        Amount.of(given)
    assert "--train 200, 500ktok, 2Mtok, 90s or 2h" in refusal.value.remedy
    assert "\n" not in str(refusal.value.problem)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"control": True}, "the original model already makes its own predictions"),
        ({"learn": "txt"}, "no --learn 'txt'"),
        ({"rank": 0}, "rank=0 is not a whole number"),
        ({"batch": 0}, "batch=0 is not a whole number"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_the_work(given, problem):
    with pytest.raises(UsageError, match=problem):
        attnlens.heal("no/such/model", "rbf", **given)


def test_a_text_is_not_learned_by_a_model_that_predicts_none():
    import families
    from loaded import loaded

    with pytest.raises(UsageError, match="predicts no tokens"):
        attnlens.heal(loaded(families.build("bert").bert), "rbf", train=2, learn="text", **READ)


def test_tokens_and_seconds_end_a_healing(demo):
    short = {"windows": 4, "length": 16, "batch_size": 4} | BARE
    by_tokens = attnlens.heal(demo, "rbf", train="0.6ktok", **short).swap.healing
    assert by_tokens.tokens < 600 + 16, "16 tokens a step"
    assert by_tokens.tokens >= 600 or any(stage.stopped for stage in by_tokens.stages)
    assert by_tokens.tokens == sum(stage.tokens for stage in by_tokens.stages) == by_tokens.curve[-1].tokens
    assert (by_tokens.amount, by_tokens.batch) == ("600 tokens", 1)
    by_time = attnlens.heal(demo, "rbf", train="1s", **short).swap.healing
    assert 1 <= by_time.seconds < 30
    assert by_time.tokens > 0


# --- attention transfer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "llama", "bert", "falcon"])
def test_transfer_of_a_kernel_to_itself_keeps_no_loss(demo, name):
    """falcon computes its attention by hand. The control: another kernel has a loss and a gradient."""
    model, task = (demo if name == "demo" else family(name)), "masked" if name == "bert" else "causal"
    own, fed = prepared(model, "exponential", task)
    assert transfer(own, fed.batches[0].inputs) == pytest.approx(0, abs=1e-12)
    assert all(leaf.grad.abs().max() < 1e-6 for leaf in own.leaves if leaf.grad is not None)
    other, _ = prepared(model, "rbf", task)
    assert transfer(other, fed.batches[0].inputs) > 1e-3
    assert all(leaf.grad.abs().max() > 1e-6 for leaf in other.leaves)


@pytest.mark.parametrize("name", ["demo", "llama"])
def test_transfer_and_its_gradient_are_those_of_a_plain_computation_in_float64(demo, name):
    """Site by site from the queries, keys and values of one pass of the whole model, derived by projections."""
    model = demo if name == "demo" else family(name)
    double = replace(model, model=copy.deepcopy(model.model).double())
    healer, fed = prepared(double)
    inputs = fed.batches[0].inputs
    found = gradients(healer, lambda: values.append(transfer(healer, inputs))) if (values := []) is not None else []
    leaves = {path: p for path, p in double.model.named_parameters() if path in healer.weights}
    for p in double.model.parameters():
        p.requires_grad_(False)
    naive = 0.0
    for site in healer.sites:  # a pass for each site, in which its weights alone have gradients
        inside = {path: p for path, p in leaves.items() if path.startswith(f"{site.path}.")}
        for p in inside.values():
            p.requires_grad_(True)
        seen = {}
        with torch.enable_grad(), hooks.watch(double.model, healer.sites, seen.__setitem__):
            hooks.forward(double.model, inputs)
            call = seen[site]
            own = attend(call, OWN).detach()
            new = attend(call, healer.healed_swaps()[site].kernel)
            loss = ((new - own).square().sum((1, 2, 3)) / own.square().sum((1, 2, 3))).mean()
            loss.backward()
        for p in inside.values():
            p.requires_grad_(False)
        naive += float(loss)
    assert values[0] == pytest.approx(naive, rel=1e-6)
    for (path, part), gradient in zip(healer.weights.items(), found, strict=False):
        expected = leaves[path].grad * part.mask
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_the_held_out_transfer_is_the_trained_one_sequence_by_sequence(demo):
    healer, fed = prepared(demo)
    inputs = fed.batches[0].inputs
    each = transfer_errors(healer, inputs)
    assert each.shape == (8,)
    assert float(each.mean()) == pytest.approx(transfer(healer, inputs), rel=1e-5)


def test_transfer_alone_brings_the_whole_model_nearer_than_as_many_steps_of_the_whole(demo):
    """What the default rests on: at the same steps, attention transfer gains more than the whole model's distance."""
    left = {}
    for stage, rate in (("transfer", 1e-2), ("whole", 3e-3)):
        healer, fed = prepared(demo)
        optimiser = adamw(healer.leaves, rate)
        for number in range(30):
            descend(healer, optimiser, [Fed(fed.batches[number % 2].inputs, None)], stage, rate)
        left[stage] = float(healer.by_sequence(fed.batches[0].inputs)[0].mean())
    assert left["transfer"] < 0.6 * left["whole"]


# --- the numbers trained ----------------------------------------------------------------------------------------------


def test_changes_below_the_spacing_of_bfloat16_are_kept_and_add_up(demo):
    half = replace(demo, model=copy.deepcopy(demo.model).bfloat16())
    healer, fed = prepared(half)
    optimiser = adamw(healer.leaves, 1e-6)
    before = {name: part.value.clone() for name, part in healer.weights.items()}
    for _ in range(3):
        descend(healer, optimiser, [Fed(fed.batches[0].inputs, None)], "whole", 1e-6)
    for name, part in healer.weights.items():
        assert part.change.dtype == torch.float32
        assert 0 < float(part.change.abs().max()) < 1e-5
        assert part.value.dtype == torch.bfloat16
        large = part.start.abs() > 0.01  # whose spacing is 2^-15 at least
        assert torch.equal(part.value[large], before[name][large]), "such a step alone is lost in the weight"
    part = next(iter(healer.weights.values()))
    with torch.no_grad():
        part.change += 1000 * part.change
    assert not torch.equal(part.value, before[next(iter(healer.weights))]), "the control: a thousand of them are not"


@pytest.mark.parametrize("stage", ["transfer", "whole"])
def test_two_batches_of_four_make_the_step_of_one_of_eight(demo, stage):
    healer, fed = prepared(demo)
    whole = [Fed(fed.batches[0].inputs, None)]
    halves, per_step = cut_parts(whole, 4)
    assert (len(halves), per_step) == (2, 1)
    assert cut_parts(whole, 16) == (whole, 2)
    optimiser = torch.optim.SGD(healer.leaves, lr=0.0)
    one, two, half = (
        gradients(healer, lambda parts=parts: descend(healer, optimiser, parts, stage, 0.0))
        for parts in (whole, halves, halves[:1])
    )
    for first, second in zip(one, two, strict=True):
        assert float((first - second).norm()) < 1e-4 * float(first.norm())
    assert float((half[0] - one[0]).norm()) > 2 * float((two[0] - one[0]).norm()), "the control: one of them is not"


def test_a_low_rank_change_is_its_product_within_the_mask():
    torch.manual_seed(0)
    start, mask = torch.randn(6, 8), torch.zeros(6, 8)
    mask[:4, 2:] = 1
    part = Trained.of_rank(start, mask, 2, seed=0)
    assert torch.equal(part.value, start), "nothing is changed at first"
    with torch.no_grad():
        part.change.normal_()
    expected = part.change.detach() @ part.right.detach().mT * mask
    torch.testing.assert_close(part.value, start + expected)
    assert torch.linalg.matrix_rank((part.value - start)[:4, 2:].detach()) == 2
    assert torch.equal(part.value[mask == 0], start[mask == 0])
    assert part.count == 2 * (4 + 6)
    assert Trained.of(start, mask).count == 24


def test_no_two_weights_of_a_shape_draw_the_same_directions(demo):
    """The control: the same weight, drawn again, has the same, and another seed draws others."""
    found, again, other = (prepared(demo, rank=2, seed=seed)[0].weights for seed in (0, 0, 1))
    drawn = [part.right for part in found.values()]
    assert len({part.shape for part in drawn}) == 1
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(drawn, 2))
    assert all(torch.equal(found[name].right, again[name].right) for name in found)
    assert not any(torch.equal(found[name].right, other[name].right) for name in found)


def test_a_healing_of_low_rank_trains_fewer_numbers_and_saves_them_in_the_weights(demo, tmp_path):
    import attnlens

    swap = attnlens.heal(demo, "rbf", train=40, rank=4, save=tmp_path / "model", **READ).swap
    assert swap.healing.rank == 4
    assert swap.healing.parameters == 4 * (4 * (128 + 256) + 8 * 16)
    assert swap.stages[-1].kl < 0.95 * swap.stages[0].kl
    own, saved = demo.model.state_dict(), load_file(tmp_path / "model" / "model.safetensors")
    for layer in range(4):
        name = f"transformer.h.{layer}.attn.c_attn.weight"
        change = (saved[name].double() - own[name].double())[:, :256]
        values = torch.linalg.svdvals(change)
        assert values[4] < 1e-3 * values[0], "no more than four directions"
        assert torch.equal(saved[name][:, 256:], own[name][:, 256:])
    attnlens.load_swapped(tmp_path / "model").close()


def test_the_maps_of_a_rank_are_trained_with_the_weights(demo):
    swap = attnlens.heal(demo, "rank:1", train=24, **READ).swap
    assert swap.healing.parameters == 4 * (128 * 256 + 8 * 2 * 16 * 1)
    distances = [step.validation for step in swap.healing.curve]
    assert min(distances) < 0.97 * distances[0]


@pytest.mark.parametrize("words", ["rank:4,group=all,rotation=before", "rank:6,group=2"])
def test_a_latent_that_heads_share_is_trained_as_one(words):
    """After training, the query heads of one key head have one A and offset, the readers of a latent one B."""
    model = family("llama")
    fed = texts.batches(model, texts.sample("demo"), texts.Cut(tokens=16, sequences=16, batch_size=8))
    sites = sites_of(model.model, fed.batches[0].inputs)
    swaps = fit(SwapSetup(model, sites, dict.fromkeys(sites, hooks.Replacement(parsed(words)))), fed, lambda _: None)
    healer = Healer(model, sites, swaps, "causal", options=STEPS)
    healer.prepare(fed.batches[0])
    optimiser = adamw(healer.leaves, 1e-2)
    descend(healer, optimiser, [Fed(fed.batches[0].inputs, None)], "transfer", 1e-2)
    for site, swap in healer.healed_swaps().items():
        found, start = swap.kernel.fitted, swaps[site].kernel.fitted
        latents, keys = (len(set(map(str, start[name].tolist()))) for name in ("members", "key_head"))
        assert keys < len(start["key_head"]), "several query heads read a key head"
        for name, count in (("key_map", latents), ("query_map", keys), ("offset", keys)):
            if name in swap.kernel.trainable and name in found:
                assert len({str(row.tolist()) for row in found[name]}) == count
                assert (found[name] != start[name]).any(), "the control: it was trained"
    count = sum(leaf.numel() for part in healer.parameters.values() for one in part.values() for leaf in one.leaves)
    assert count < sum(swap.kernel.fitted[n].numel() for swap in swaps.values() for n in ("query_map", "key_map"))


def test_blocks_that_are_computed_again_give_the_same_gradient(demo):
    plain, fed = prepared(demo)
    again, _ = prepared(demo, checkpointing=True)
    assert len(again.blocks) == 4
    one, two = (gradients(h, lambda h=h: h.descend(fed.batches[0].inputs, None, 1.0)) for h in (plain, again))
    for first, second in zip(one, two, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-8)
    assert not any("forward" in vars(block) for block in again.blocks), "and the model is as it was"


# --- rates and ends ---------------------------------------------------------------------------------------------------


class Planted:
    """‖x − 1‖² of one number for each sequence: a rate of about 1/steps is right, 100 times more or less is not."""

    task, goal = "causal", "teacher"

    def __init__(self):
        self.leaves = [torch.zeros(4, requires_grad=True)]

    def descend(self, _inputs, _targets, weight):
        with torch.enable_grad():
            (weight * (self.leaves[0] - 1).square().sum()).backward()

    def by_sequence(self, _inputs, _targets=None):
        return (self.leaves[0].detach() - 1).square(), torch.ones(4)


def test_the_range_test_finds_a_rate_that_beats_a_hundredth_and_a_hundredfold(monkeypatch):
    monkeypatch.setattr(students, "RATES", {"whole": (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)})
    planted, fed = Planted(), [Fed({"input_ids": torch.zeros(1, 1)}, None)]
    rate, tried = students.choose_rate(planted, "whole", [fed] * 8, fed)
    assert not planted.leaves[0].any(), "the numbers are put back"
    assert all(isinstance(one, HealingRate) for one in tried)

    def left(rate):
        planted.leaves[0].data.zero_()
        optimiser = adamw(planted.leaves, rate)
        for _ in range(8):
            descend(planted, optimiser, fed, "whole", rate)
        return measure_distances(planted, fed).mean

    assert left(rate) < 0.5 * min(left(rate / 100), left(rate * 100))


def test_a_fall_counts_beyond_its_paired_interval_alone():
    torch.manual_seed(0)
    start, counts = 1 + torch.rand(16, dtype=torch.float64), torch.full((16,), 100.0, dtype=torch.float64)
    noise = 0.02 * torch.randn(16, dtype=torch.float64)
    before = Distances(start, counts)
    assert Distances(start - 0.05 + noise, counts).falls_from(before), "paired: far less than their spread"
    assert not Distances(start - 0.001 + noise, counts).falls_from(before)
    assert not Distances(start + 0.05 + noise, counts).falls_from(before)
    assert not Distances(start * math.nan, counts).falls_from(before)
    few = [Distances(part.each[:4], counts[:4]) for part in (before, Distances(start - 0.001 + noise.abs(), counts))]
    assert few[0].falls_from(few[1]) == (few[0].mean < few[1].mean), "of four sequences the fall itself counts"
    assert math.isinf(Distances(start * math.nan, counts).mean)


# --- the text, and the control ----------------------------------------------------------------------------------------


def test_a_healing_on_the_text_has_a_control_that_is_trained_as_long(demo):
    swap = attnlens.heal(demo, "rank:6", train=16, learn="text", control=True, **READ).swap
    control, healing = swap.healing.control, swap.healing
    assert healing.goal == "text"
    assert control.tokens == healing.tokens
    assert control.loss.before == pytest.approx(swap.stages[0].loss.before)
    assert control.ratio == pytest.approx(math.exp(swap.stages[-1].loss.after - control.loss.after), rel=1e-6)
    assert control.ratio_ci95[0] < control.ratio < control.ratio_ci95[1]
    assert [stage.name for stage in swap.stages] == ["swapped", "healed"]


# --- states -----------------------------------------------------------------------------------------------------------

WORDS = ("heal", "demo", "--kernel", "rbf", "--train", "4000", "--windows", "4", "--length", "16")


def test_an_interrupted_healing_is_reported_as_far_as_it_came(tmp_path):
    """Far from its end; the control: a run that ended by itself is not interrupted."""
    work, report = tmp_path / "work", tmp_path / "r.json"
    words = [*WORDS, "--batch-size", "4", "--no-progress", "--quiet", "--work", str(work), "--json", str(report)]
    run = subprocess.Popen(
        [forkserver.commands() / "attnlens", *words],
        stderr=subprocess.PIPE,
        text=True,
        # a test run in the background inherits ignored interruptions, and would hand them on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while run.poll() is None and not list(work.glob("*/*/heal-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 130, said
    assert list(work.glob("*/*/heal-*.safetensors")), "its state stays"
    swap = read_report(report).swap
    assert swap.healing.interrupted
    assert any("done, interrupted, best step" in line for line in healing_sentences(swap.healing, "nats"))


def test_the_rate_that_was_lowered_is_kept(demo, monkeypatch):
    """Where no check is nearer than the start, the stage goes on with smaller steps from the rate first chosen."""
    tried = [HealingRate(rate=rate, validation=1.0) for rate in (1.0, 3.0)]
    monkeypatch.setattr(pipeline, "choose_rate", lambda *_args: (3.0, tried))
    found = attnlens.heal(demo, "rbf", train=12, **READ).swap.healing.stages[0]
    assert found.lowered_from == 3.0
    assert found.learning_rate in (pytest.approx(3.0 * 0.1**times) for times in range(1, 8))


def test_heal_and_split_keep_training_text_apart(demo):
    """The order of training is drawn from the training batches alone."""
    healer, fed = prepared(demo)
    train, back = split(healer, fed)
    assert not {id(one.inputs) for one in train} & {id(one.inputs) for one in back}
    found = run_training(healer, fed, lambda: hooks.forward(demo.model, fed.batches[0].inputs) and None, lambda _: None)
    assert found.tokens == 3 * 8 * 16
