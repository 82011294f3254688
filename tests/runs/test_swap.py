"""Tests that a swap's numbers are those of a naive computation, and each option does what it says."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import families
import pytest
import tiny
import torch
import transformers as tf
from loaded import BARE, SMALL, apart, family, loaded, outputs, sites_of, swap_or_heal
from program import SMALL as WORDS
from program import attnlens as program
from program import refused
from reports import timeless
from torch.nn.functional import cosine_similarity, cross_entropy

import attnlens
from attnlens.errors import IdentityError, ModelError, OutputError, TextError, UsageError
from attnlens.kernels import parsed
from attnlens.kernels.attention import attend, weights
from attnlens.kernels.registry import KERNELS, kernel
from attnlens.maths.statistics import Design, paired_difference
from attnlens.models import hooks, texts
from attnlens.models.texts.targets import NOTHING, feed, task_of
from attnlens.report.report import read_report
from attnlens.runs import differences as comparing
from attnlens.runs import outputs as resources
from attnlens.runs.outputs import divergence
from attnlens.runs.swap import sites as gates
from attnlens.runs.swap.pipeline import swap_kernel

READ = {"windows": 4, "length": 24, "batch_size": 2} | BARE


@pytest.fixture(scope="module")
def demo():
    return attnlens.load("demo")


@pytest.fixture
def broken():
    """A kernel whose logarithm is not a number, for the time of one test."""

    @kernel("nan", formula="NaN", source="nobody", positive=True, symmetric=True, features="none", form="score")
    def nan(score):
        """Never finite."""
        return score * math.nan

    yield "nan"
    del KERNELS["nan"]


def batches(model, *, pack=True, text=(), **more):
    names = {"windows": "sequences", "length": "tokens"}
    given = {names.get(name, name): n for name, n in (READ | more).items() if name not in ("batch_size", *BARE)}
    contents = texts.read_each(text) or texts.sample(model.info.id)
    return texts.batches(model, contents, texts.Cut(batch_size=2, pack=pack, **given))


def under(model, inputs, words, **which):
    """Inside it the model has another kernel, by hand: the named heads of the named layers, written out densely."""
    sites = sites_of(model, inputs)
    layers, heads = which.get("layers", range(len(sites))), which.get("heads")

    def answer(call):
        found = attend(call, hooks.OWN, "eager").clone()
        layer = next(calls) % len(sites)
        if layer in layers:
            new = attend(call, parsed(words), "eager")
            for head in range(new.shape[2]) if heads is None else heads:
                found[:, :, head] = new[:, :, head]
        return found

    calls = iter(range(10**6))
    return hooks.answer_calls(model, answer)


def logits(model, inputs):
    with torch.no_grad():
        return hooks.forward(model, inputs).logits.double()


# --- the same kernel, and one known to hurt ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "bart"])
def test_the_own_kernel_changes_no_number(name):
    swap = swap_kernel(family(name), "exponential", **SMALL).swap
    assert abs(swap.loss.delta) < 1e-5
    low, high = swap.loss.ci95
    assert low <= 0 <= high
    assert abs(swap.kl) < 1e-6
    assert swap.top1_agreement == 1
    assert swap.hidden_cosine == pytest.approx(1, abs=1e-6)
    assert swap.hidden_cka == pytest.approx(1, abs=1e-6)
    assert swap.off_simplex == 0
    assert swap.perplexity.delta == pytest.approx(0, abs=1e-3 * swap.perplexity.before)
    assert max(site.output_error for site in swap.sites) < 1e-5


@pytest.mark.parametrize("words", ["hard", "linear", "rbf"])
def test_a_kernel_that_a_trained_model_never_saw_costs_it_nats(demo, words):
    swap = swap_kernel(demo, words, windows=8, length=32).swap
    assert swap.loss.delta > 0.1
    assert swap.loss.ci95[0] > 0
    assert swap.kl > 0.1
    assert swap.top1_agreement < 1
    assert swap.hidden_cosine < 0.99
    assert swap.hidden_cka < 0.99


def planted():
    """A hand-built GPT-2 of one layer and one head: each token looks at the first one and says that it comes next.

    Tokens and positions are one-hot; every query asks for position 0, with a score of about 57 (see the two lines).
    """
    vocabulary, positions, width = 257, 16, 320
    config = tf.GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=1, n_head=1, n_positions=positions, n_inner=4)
    model = tf.GPT2LMHeadModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    block = model.transformer.h[0]
    for norm in (block.ln_1, block.ln_2, model.transformer.ln_f):
        norm.weight.fill_(1)
    model.transformer.wte.weight[:, :vocabulary] = torch.eye(vocabulary)
    model.transformer.wpe.weight[:, vocabulary : vocabulary + positions] = torch.eye(positions)
    attention = block.attn
    attention.c_attn.bias[0] = 40.0  # every query
    attention.c_attn.weight[vocabulary, width] = 2.0  # the key of position 0
    attention.c_attn.weight[:vocabulary, 2 * width : 2 * width + vocabulary] = torch.eye(vocabulary)
    attention.c_proj.weight[:vocabulary, :vocabulary] = 3 * torch.eye(vocabulary)
    return loaded(model, tiny.tokenizer("gpt2"))


def test_a_planted_head_is_missed_when_it_can_no_longer_look_at_the_first_token(tmp_path):
    """In abacada the first letter comes after every other; a head that sees itself alone says b, c, d instead."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(first + first.join("mnopqr") for first in "abcdefgh"))
    read = {"text": str(text), "windows": 8, "length": 12, "pack": False}
    for words in ("sink-window:1,1", "hard"):
        fine = swap_kernel(planted(), words, **read).swap
        assert fine.loss.delta == pytest.approx(0, abs=1e-4), "the head needs no more than the first token"
    lost = swap_kernel(planted(), "window:1", **read).swap
    assert lost.loss.delta > 3
    assert lost.loss.ci95[0] > 3
    assert lost.top1_agreement < 0.7


# --- the numbers, naively ---------------------------------------------------------------------------------------------


def naive(model, fed, words):
    """Loss before and after, KL, agreement, cosine, CKA, token by token in plain loops."""
    losses, kl, agree, states = ([], []), [], [], ([], [])
    for one in fed:
        for row in range(one.targets.shape[0]):
            inputs = {name: tensor[row : row + 1] for name, tensor in one.inputs.items()}
            with torch.no_grad():
                own = hooks.forward(model, inputs, output_hidden_states=True)
                with under(model, inputs, words):
                    new = hooks.forward(model, inputs, output_hidden_states=True)
            for place, target in enumerate(one.targets[row].tolist()):
                if target != NOTHING:
                    p, q = (found.logits[0, place].double().log_softmax(-1) for found in (own, new))
                    losses[0].append(float(-p[target]))
                    losses[1].append(float(-q[target]))
                    kl.append(float((p.exp() * (p - q)).sum()))
                    agree.append(float(p.argmax() == q.argmax()))
            decoder = "decoder_hidden_states" in own
            mask = inputs["decoder_attention_mask" if decoder else "attention_mask"][0].bool()
            for store, found in zip(states, (own, new), strict=True):
                last = (found.decoder_hidden_states if decoder else found.hidden_states)[-1]
                store.append(last[0, mask].double())
    x, y = (torch.cat(found) for found in states)
    cosine = float(cosine_similarity(x, y, dim=-1).mean())
    x, y = x - x.mean(0), y - y.mean(0)
    cka = float((x.mT @ y).norm() ** 2 / ((x.mT @ x).norm() * (y.mT @ y).norm()))
    mean = lambda numbers: sum(numbers) / len(numbers)  # noqa: E731  # one expression
    return [*map(mean, losses), mean(kl), mean(agree), cosine, cka]


LINES = ["in the beginning god created", "the heaven", "and the earth was without form and void", "and darkness"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join(LINES) + "\n")
    return str(path)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "albert", "t5", "bart"])
@pytest.mark.parametrize("words", ["rbf", "polynomial"])
def test_every_number_is_that_of_plain_loops(name, pack, words, lines):
    model = family(name)
    text = () if pack else (lines,)
    swap = swap_kernel(model, words, text=text, pack=pack, **READ).swap
    fed = feed(model, batches(model, pack=pack, text=text), task_of(model.model), 0)
    if not pack:
        assert any(int(one.inputs["attention_mask"].min()) == 0 for one in fed), "some line is padded"
    before, after, kl, agree, cosine, cka = naive(model.model, fed, words)
    assert swap.loss.before == pytest.approx(before, rel=1e-5)
    assert swap.loss.after == pytest.approx(after, rel=1e-5)
    assert swap.loss.delta == pytest.approx(after - before, abs=2e-5)
    assert swap.loss.ci95[0] <= swap.loss.delta <= swap.loss.ci95[1]
    assert swap.kl == pytest.approx(kl, rel=1e-4)
    assert swap.kl > 1e-3
    assert swap.top1_agreement == pytest.approx(agree)
    assert swap.hidden_cosine == pytest.approx(cosine, abs=1e-5)
    assert swap.kl_ci95[0] <= swap.kl <= swap.kl_ci95[1]
    assert swap.hidden_cosine_ci95[0] <= swap.hidden_cosine <= swap.hidden_cosine_ci95[1]
    assert swap.hidden_cka == pytest.approx(cka, abs=1e-5)
    assert swap.perplexity.before == pytest.approx(math.exp(before), rel=1e-4)
    assert swap.perplexity.after == pytest.approx(math.exp(after), rel=1e-4)


@pytest.mark.parametrize("pack", [True, False])
def test_the_loss_before_is_the_models_own(demo, pack):
    swap = swap_kernel(demo, "rbf", pack=pack, **READ).swap
    sums, count = 0.0, 0
    for batch in batches(demo, pack=pack):
        labels = batch.inputs["input_ids"].masked_fill(batch.inputs["attention_mask"] == 0, -100)
        predicted = int((labels[:, 1:] != -100).sum())
        sums += float(demo.model(**batch.inputs, labels=labels).loss) * predicted
        count += predicted
    assert swap.loss.before == pytest.approx(sums / count, rel=1e-5)


def test_a_seq2seq_loss_is_the_models_own_without_its_last_token():
    model = family("t5")
    swap = swap_kernel(model, "rbf", **READ).swap
    sums, count = 0.0, 0
    for batch in batches(model):
        labels = batch.inputs["input_ids"].clone()
        labels[:, -1] = -100
        given = {name: batch.inputs[name] for name in ("input_ids", "attention_mask", "decoder_attention_mask")}
        sums += float(model.model(**given, labels=labels).loss) * int((labels != -100).sum())
        count += int((labels != -100).sum())
    assert swap.loss.before == pytest.approx(sums / count, rel=1e-5)


@pytest.mark.parametrize("pack", [True, False])
def test_masked_tokens_follow_the_seed_and_are_never_special(pack, lines):
    model = family("bert")
    fed = batches(model, pack=pack, text=(lines,), tokens=12)
    first, again, other = (feed(model, fed, "masked", seed) for seed in (0, 0, 1))
    chosen = [torch.cat([one.targets.flatten() for one in found]) for found in (first, again, other)]
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])
    special = set(model.tokenizer.all_special_ids)
    for one, batch in zip(first, fed, strict=True):
        picked = one.targets != NOTHING
        ids = batch.inputs["input_ids"]
        assert picked.any(1).all(), "every sequence has something to guess"
        assert not special & set(ids[picked].tolist())
        assert torch.equal(one.targets[picked], ids[picked])
        assert (one.inputs["input_ids"][picked] == model.tokenizer.mask_token_id).all()
        assert torch.equal(one.inputs["input_ids"][~picked], ids[~picked])


def test_a_line_of_one_word_has_that_word_to_guess(tmp_path):
    """Whatever is drawn, never the tokens around it, and never the padding behind it."""
    text = tmp_path / "words.txt"
    text.write_text("a\nb c d\n")
    model = family("bert")
    fed = batches(model, text=(str(text),), pack=False, sequences=2)
    for seed in range(20):
        targets = feed(model, fed, "masked", seed)[0].targets
        assert (targets[0] != NOTHING).tolist() == [False, True, False, False, False]
        assert not (targets[1, [0, -1]] != NOTHING).any()
        assert (targets[1] != NOTHING).any()


def test_about_fifteen_percent_are_masked():
    model = family("bert")
    fed = feed(model, batches(model, sequences=64, tokens=60), "masked", 0)
    picked, real = (sum(int(part.sum()) for part in parts) for parts in zip(*map(_counts(model), fed), strict=True))
    assert 0.12 < picked / real < 0.18


def _counts(model):
    special = torch.tensor(model.tokenizer.all_special_ids)

    def of(one):
        picked = one.targets != NOTHING
        ids = torch.where(picked, one.targets, one.inputs["input_ids"])
        return picked, ~torch.isin(ids, special)

    return of


def test_a_masked_model_without_a_mask_token_is_refused():
    with pytest.raises(TextError, match="no mask token"):
        swap_kernel(loaded(families.build("bert"), tiny.tokenizer("llama")), "rbf", **READ)


def classifier(name):
    classes = {"bert": (tf.BertForSequenceClassification, tf.BertConfig, families.ENCODER)}
    model_class, config, sizes = classes[name]
    torch.manual_seed(0)
    model = model_class(config(**sizes, num_labels=5)).eval().requires_grad_(False)
    source = families.build(name)
    model.bert.load_state_dict(source.bert.state_dict(), strict=False)
    model.classifier.weight.normal_(std=0.4)
    return loaded(model)


def test_a_classifier_is_measured_against_its_own_choice():
    model = classifier("bert")
    swap = swap_kernel(model, "rbf", **READ).swap
    assert swap.task == "classification"
    own, new = [], []
    for batch in batches(model):
        own.append(logits(model.model, batch.inputs))
        with under(model.model, batch.inputs, "rbf"):
            new.append(logits(model.model, batch.inputs))
    own, new = torch.cat(own), torch.cat(new)
    choice = own.argmax(-1)
    assert swap.loss.before == pytest.approx(float(cross_entropy(own, choice)), rel=1e-5)
    assert swap.loss.after == pytest.approx(float(cross_entropy(new, choice)), rel=1e-5)
    assert swap.top1_agreement == pytest.approx(float((new.argmax(-1) == choice).double().mean()))


def test_a_headless_model_is_measured_by_its_hidden_states_alone():
    torch.manual_seed(0)
    model = loaded(families.build("bert").bert)
    swap = swap_kernel(model, "rbf", **READ).swap
    assert swap.task == "hidden"
    for name in ("loss", "perplexity", "kl", "top1_agreement"):
        assert getattr(swap, name) is None
        assert "no head" in swap.reasons[name]
    assert 0 < swap.hidden_cosine < 0.999
    assert 0 < swap.hidden_cka < 0.999
    assert any("no head" in note for note in swap.notes)


def test_distances_have_intervals_that_each_windows_numbers_give(tmp_path):
    """Of a headless model the hidden cosine, text by text too; of a masked one KL beside it."""
    paths = [tmp_path / f"{number}.txt" for number in range(2)]
    for number, path in enumerate(paths):
        path.write_text("\n".join(f"{word} and {word} again" for word in LINES[number:]) * 6)
    torch.manual_seed(0)
    whole = family("bert")
    for model in (loaded(whole.model.bert), whole):
        report = swap_kernel(model, "rbf", text=paths, windows=10, length=12)
        swap, rows = report.swap, list(report.windows.rows())
        for name, tokens in {"hidden_cosine": "hidden_tokens", "kl": "tokens"}.items():
            if name == "kl" and swap.task == "hidden":
                continue
            values, weights = (
                torch.tensor([row[what] for row in rows], dtype=torch.float64) for what in (name, tokens)
            )
            design = Design.of([row["text"] for row in rows])
            found = paired_difference(torch.zeros_like(values), values, design, weights=weights)
            assert getattr(swap, name) == pytest.approx(found.value, abs=1e-9)
            assert getattr(swap, f"{name}_ci95") == pytest.approx((found.low, min(found.high, 1.0)), abs=1e-7)
        assert [text.sequences for text in swap.hidden_cosine_by_text] == [5, 5]
        for text in swap.hidden_cosine_by_text:
            own = [row["hidden_cosine"] for row in rows if row["text"] == text.name]
            assert text.cosine == pytest.approx(sum(own) / 5, abs=1e-9)
            assert text.ci95[0] < text.cosine < text.ci95[1]
    alone = swap_kernel(whole, "rbf", text=paths[:1], windows=1, length=12).swap
    for name in ("kl_ci95", "hidden_cosine_ci95"):
        assert getattr(alone, name) is None
        assert alone.reasons[name] == "one window has no spread"


# --- noise ------------------------------------------------------------------------------------------------------------


def of_images():
    """A classifier of images with a tiny model's attention."""
    torch.manual_seed(0)
    model = tf.ViTForImageClassification(tf.ViTConfig(**families.PIXELS, num_labels=5)).eval().requires_grad_(False)
    model.vit.load_state_dict(families.build("vit").state_dict(), strict=False)
    model.classifier.weight.normal_(std=0.4)
    return loaded(model)


NOISY = {"whisper": ("seq2seq", lambda: family("whisper")), "vit": ("classification", of_images)}


@pytest.mark.parametrize("name", NOISY)
def test_on_noise_there_is_no_loss_and_predictions_are_compared(name):
    task, made = NOISY[name]
    model, read = made(), {k: v for k, v in READ.items() if name != "vit" or k != "length"}
    swap = swap_kernel(model, "rbf", **read).swap
    assert swap.task == task
    assert swap.noise
    for field in ("loss", "perplexity"):
        assert getattr(swap, field) is None
        assert "noise" in swap.reasons[field]
    assert any("noise" in note for note in swap.notes)
    assert not any("loss: " in note for note in swap.notes), "the decoder repeats nothing that it could have heard"
    kl, agree = [], []
    for one in feed(model, batches(model, **({"length": None} if name == "vit" else {})), task, 0):
        own = logits_of(model.model, one.inputs)
        with under(model.model, one.inputs, "rbf"):
            new = logits_of(model.model, one.inputs)
        if one.targets is not None:
            own, new = (found[one.targets != NOTHING] for found in (own, new))
        p, q = (found.log_softmax(-1) for found in (own, new))
        kl.append((p.exp() * (p - q)).sum(-1))
        agree.append((own.argmax(-1) == new.argmax(-1)).double())
    assert swap.kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)
    assert swap.kl > 1e-3
    assert swap.top1_agreement == pytest.approx(float(torch.cat(agree).mean()))


def logits_of(model, inputs):
    with torch.no_grad():
        found = hooks.forward(model, inputs)
    return found.logits.double()


@pytest.mark.parametrize("words", ["rbf", "rank:3"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_padding_never_enters_a_fit(tmp_path, name, words):
    """Lines of unequal length fit a kernel in one padded batch as they do one by one."""
    draw = random.Random(0)  # noqa: S311
    lines = ["".join(draw.choices("abcdefghij", k=draw.choice((4, 9, 30)))) for _ in range(24)]
    (tmp_path / "lines").write_text("\n".join(lines))
    asked = {"text": str(tmp_path / "lines"), "pack": False, "length": 48, "windows": 4, "fit": words == "rbf"}
    together, alone = (swap_kernel(family(name), words, batch_size=size, **asked).swap for size in (4, 1))
    assert together.kl == pytest.approx(alone.kl, rel=1e-3)


def test_a_calibration_text_that_noise_stands_for_is_refused(tmp_path):
    (tmp_path / "text").write_text("In the beginning was the word.\n" * 100)
    with pytest.raises(UsageError, match="pixels but no text"):
        swap_kernel(family("vit"), "rbf", fit=True, calibration=[str(tmp_path / "text")])


def test_text_is_no_noise_and_has_a_loss():
    swap = swap_kernel(family("bart"), "rbf", **READ).swap
    assert not swap.noise
    assert swap.loss is not None
    assert not any("noise" in note for note in swap.notes)


def test_a_headless_model_of_pixels_says_that_it_saw_noise():
    swap = swap_kernel(family("vit"), "rbf", windows=4, batch_size=2).swap
    assert swap.noise
    assert "no head" in swap.reasons["loss"]
    assert ["no head" in note for note in swap.notes[:2]] == [True, False]
    assert "noise" in swap.notes[1]


def test_on_noise_a_healing_is_measured_by_its_distance_alone():
    swap = attnlens.heal(family("whisper"), "rbf", train=2, **READ).swap
    assert [stage.name for stage in swap.stages] == ["swapped", "healed"]
    assert all(step.loss is None and step.validation > 0 for step in swap.healing.curve)


def test_on_noise_no_budget_can_be_spent():
    with pytest.raises(UsageError, match="random noise generated by attnlens") as refusal:
        attnlens.find_ranks(family("whisper"), budget="loss:1%", **READ)
    assert "--kernel rank:16" in refusal.value.remedy


# --- what stands beside them ------------------------------------------------------------------------------------------


def test_site_errors_and_mass_outside_the_simplex_are_those_of_the_matrices(demo):
    swap = swap_kernel(demo, "linear", **READ).swap
    inputs = {name: tensor[:1] for name, tensor in batches(demo).batches[0].inputs.items()}
    calls = [found.call for found in hooks.survey(demo.model, inputs)]
    for site, call in zip(swap.sites, calls, strict=True):
        scores = (call.query.double() @ call.key.double().mT * call.scale).tril()
        mass = scores / scores.sum(-1, keepdim=True)
        share = (-mass).clamp(min=0).sum(-1) / mass.abs().sum(-1)
        assert site.off_simplex == pytest.approx(float(share.mean()), rel=1e-4)
        assert site.off_simplex > 0.01
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        full = call.query.double() @ call.key.double().mT * call.scale
        own = full.masked_fill(~causal, -torch.inf).softmax(-1) @ call.value.double()
        new = mass @ call.value.double()
        assert site.output_error == pytest.approx(float((new - own).norm() / own.norm()), rel=1e-3)
    assert swap.off_simplex == pytest.approx(sum(site.off_simplex for site in swap.sites) / len(swap.sites))
    assert any("not probabilities" in note for note in swap.notes)


def test_padding_enters_no_sites_number(lines, tmp_path):
    """Sites are looked at on the first sequence, which is the shorter one here."""
    shorter = tmp_path / "lines.txt"
    shorter.write_text("\n".join(sorted(Path(lines).read_text().splitlines()[:2], key=len)))
    model = family("bert")
    read = {"text": (str(shorter),), "pack": False, "windows": 2, "length": 40}
    fed = feed(model, batches(model, placement="first", **read), "masked", 0)[0]
    one = {name: value[:1] for name, value in fed.inputs.items()}
    call = hooks.survey(model.model, one)[0].call
    real = one["attention_mask"].bool()
    assert not real.all()
    own, new = (attend(call, one, "eager").double() for one in (hooks.OWN, parsed("rbf")))
    expected, padded = (float((new[rows] - own[rows]).norm() / own[rows].norm()) for rows in (real, ...))
    found = swap_kernel(model, "rbf", batch_size=2, placement="first", **read).swap.sites[0].output_error
    assert found == pytest.approx(expected, rel=1e-4)
    assert found != pytest.approx(padded, rel=1e-2)
    rows = weights(call, parsed("linear")).double().transpose(1, 2)
    share = (-rows).clamp(min=0).sum(-1) / rows.abs().sum(-1)
    found = swap_kernel(model, "linear", batch_size=2, placement="first", **read).swap.sites[0].off_simplex
    assert found == pytest.approx(float(share[real].mean()), rel=1e-4)
    assert found != pytest.approx(float(share.mean()), rel=1e-3)


def test_a_leak_stops_everything(demo):
    """The controls of the gates: a kernel that looks ahead, and one that looks at padding."""
    fed = batches(demo).batches[0].inputs
    uncausal = lambda call: attend(replace(call, allowed=None, causal=False), hooks.OWN)  # noqa: E731  # one expression
    ahead = lambda: hooks.answer_calls(demo.model, uncausal)  # noqa: E731
    with pytest.raises(IdentityError, match="later tokens"):
        gates.causality_error(demo, fed, ahead, 0)
    bert = family("bert")
    fed = batches(bert).batches[0].inputs
    everything = lambda: hooks.answer_calls(bert.model, lambda call: attend(replace(call, allowed=None), hooks.OWN))  # noqa: E731  # one expression
    with pytest.raises(IdentityError, match="padding"):
        gates.mask_error(bert, fed, everything, 0, left=False)


@pytest.mark.parametrize("name", ["demo", "llama", "gpt2", "opt"])
def test_a_causal_kernel_that_drops_the_padding_mask_is_found_out(name):
    """Behind a causal sequence nothing could be seen: the padding stands before it."""
    model = attnlens.load("demo") if name == "demo" else family(name)
    fed = batches(model).batches[0].inputs
    causal = lambda call: replace(call, allowed=None, causal=True)  # noqa: E731  # one expression
    unmasked = lambda: hooks.answer_calls(model.model, lambda call: attend(causal(call), parsed("rbf")))  # noqa: E731
    sites = sites_of(model.model, fed)
    assert gates.causality_error(model, fed, unmasked, 0) < 1e-5, "the future stays hidden"
    with pytest.raises(IdentityError, match="padding"):
        gates.leaks(model, sites, fed, unmasked, 0)
    assert gates.mask_error(model, fed, unmasked, 0, left=False) < 1e-5, "the control: on the right it can't be seen"
    masked = lambda: hooks.replace(model.model, sites, dict.fromkeys(sites, hooks.Replacement(parsed("rbf"))))  # noqa: E731
    assert gates.leaks(model, sites, fed, masked, 0)["mask_error"] < 1e-5


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_that_drops_the_padding_mask_is_found_out(name):
    model = family(name)
    fed = batches(model).batches[0].inputs
    sites = sites_of(model.model, fed)
    part = lambda call: replace(call, allowed=None, causal=False) if not call.module.is_causal else call  # noqa: E731
    unmasked = lambda: hooks.answer_calls(model.model, lambda call: attend(part(call), hooks.OWN))  # noqa: E731
    with pytest.raises(IdentityError, match="padding"):
        gates.mask_error(model, fed, unmasked, 0, left=False)
    masked = lambda: hooks.replace(model.model, sites, dict.fromkeys(sites, hooks.Replacement(parsed("rbf"))))  # noqa: E731
    assert gates.leaks(model, sites, fed, masked, 0)["mask_error"] < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_gates_padding_leaves_real_tokens_their_positions(demo, side, lines):
    """What the model says of real tokens is what it says of them alone."""
    fed = batches(demo, pack=False, text=(lines,), tokens=20).batches[0].inputs
    padded = gates._pad_randomly(demo, fed, 1, left=side == "left")
    assert padded["input_ids"].shape == fed["input_ids"].shape
    kept = fed["attention_mask"][:, : -gates.PADDING].bool()
    assert torch.equal(padded["input_ids"][padded["attention_mask"].bool()], fed["input_ids"][:, : kept.shape[1]][kept])
    alone, found = logits(demo.model, fed), logits(demo.model, padded)
    torch.testing.assert_close(
        found[padded["attention_mask"].bool()], alone[:, : kept.shape[1]][kept], rtol=1e-4, atol=1e-4
    )


def test_gates_that_compare_nothing_say_so():
    model = classifier("bert")
    swap = swap_kernel(model, "rbf", **READ).swap
    assert swap.mask_error is not None, "its hidden states have a row a token"
    assert swap.causality_error is None
    assert "every other" in swap.reasons["causality_error"]


def test_a_door_that_reads_wrongly_swaps_nothing(demo, monkeypatch):
    monkeypatch.setattr(hooks, "identity_error", lambda *_: 3e-4)
    with pytest.raises(IdentityError, match=r"3\.0e-04"):
        swap_kernel(demo, "rbf", **READ)
    monkeypatch.setattr(hooks, "identity_error", lambda *_: math.nan)
    with pytest.raises(IdentityError):
        swap_kernel(demo, "rbf", **READ)


def test_a_diverged_model_gets_reasons_and_no_numbers(demo, broken):
    report = swap_kernel(demo, broken, sweep="layers", **READ)
    swap = report.swap
    for name in ("loss", "perplexity", "kl", "top1_agreement", "hidden_cosine", "hidden_cka"):
        assert getattr(swap, name) is None
        assert "diverged" in swap.reasons[name]
    assert swap.diverged
    assert all(site.output_error is None for site in swap.sites)
    assert all(effect.delta is None and not effect.significant for effect in swap.sweep)
    assert "NaN" not in report.model_dump_json(exclude={"swap": {"formula"}})


def test_a_diverged_model_is_not_healed(demo, broken):
    with pytest.raises(ModelError, match="not finite, so the model cannot be healed"):
        attnlens.heal(demo, broken, train=2, **READ)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not enough memory: x")])
def test_out_of_memory_asks_for_a_smaller_batch(demo, monkeypatch, error):
    honest = comparing.run

    def greedy(model, fed, task):
        if len(fed.inputs["input_ids"]) > 3:
            raise error
        return honest(model, fed, task)

    monkeypatch.setattr("attnlens.runs.swap.kernel_run.run", greedy)
    with pytest.raises(ModelError) as refusal:
        swap_kernel(demo, "rbf", windows=8, length=16, batch_size=8)
    assert refusal.value.problem == "Not enough memory for 8 sequences at once."
    assert refusal.value.remedy == "Use a smaller --batch-size."
    assert "\n" not in refusal.value.problem + refusal.value.remedy


def really_failing():
    torch.empty(2**58)


def test_what_torch_really_raises_is_recognised(demo, monkeypatch):
    fed = batches(demo).batches[0].inputs
    with pytest.raises(ModelError, match="Not enough memory for 2 sequences"), resources.enough_memory(fed):
        really_failing()
    monkeypatch.setattr("attnlens.runs.swap.kernel_run.run", lambda *_: really_failing())
    with pytest.raises(ModelError, match="Not enough memory for 2 sequences") as refusal:
        swap_kernel(demo, "rbf", **READ)
    assert refusal.value.remedy == "Use a smaller --batch-size."


def test_a_survey_without_memory_is_recognised(demo, monkeypatch):
    monkeypatch.setattr(hooks, "identity_error", lambda *_: really_failing())
    with pytest.raises(ModelError, match="Not enough memory for 2 sequences"):
        swap_kernel(demo, "rbf", **READ)


def test_a_healing_without_memory_promises_no_size(demo, monkeypatch):
    """A forward pass that fits says nothing of one that trains."""
    monkeypatch.setattr("attnlens.lab.heal.pipeline.run_training", lambda *_: really_failing())
    with pytest.raises(ModelError, match="to train on 2 sequences") as refusal:
        attnlens.heal(demo, "rbf", train=2, **READ)
    assert refusal.value.remedy == "Use a smaller --batch-size."


def test_other_errors_are_not_called_memory(demo, monkeypatch):
    def failing(*_):
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr("attnlens.runs.swap.kernel_run.run", failing)
    with pytest.raises(RuntimeError, match="sizes do not match"):
        swap_kernel(demo, "rbf", **READ)


def test_a_small_divergence_keeps_its_digits_in_float32():
    """Control: Σ p log(p/q), in the same type, holds the rounding of both normalisations."""
    made = torch.Generator().manual_seed(0)
    own = 3 * torch.randn(50, 5000, generator=made)
    new = own + 0.02 * torch.randn(50, 5000, generator=made)
    p, q = (one.log_softmax(-1) for one in (own, new))
    exact, plain = divergence(own.double(), new.double()), (p.exp() * (p - q)).sum(-1)
    assert (divergence(own, new) / exact - 1).abs().max() < 2e-3 < (plain / exact - 1).abs().max()


# --- which heads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layers", "heads"),
    [("gpt2", [1], None), ("gpt2", None, [0, 3]), ("llama", [0], [1, 4]), ("bert", [1], [2]), ("albert", [1], [0])],
)
def test_exactly_the_chosen_heads_are_swapped(name, layers, heads):
    model = family(name)
    report = swap_kernel(model, "rbf", layers=layers, heads=heads, **READ)
    swap, count = report.swap, len(sites_of(model.model, batches(model).batches[0].inputs))
    assert [site.layer for site in swap.sites] == (layers or list(range(count)))
    assert all(site.heads == (heads or list(range(4))) for site in swap.sites)
    assert report.coverage.heads == sum(len(site.heads) for site in swap.sites)
    which = {} if layers is None else {"layers": layers}
    kl = []
    for one in feed(model, batches(model), task_of(model.model), 0):
        there = one.targets != NOTHING
        own = logits(model.model, one.inputs)[there].log_softmax(-1)
        with under(model.model, one.inputs, "rbf", heads=heads, **which):
            new = logits(model.model, one.inputs)[there].log_softmax(-1)
        kl.append((own.exp() * (own - new)).sum(-1))
    assert swap.kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)
    assert swap.kl < swap_kernel(model, "rbf", **READ).swap.kl or layers is None


@pytest.mark.parametrize("heads", [(0,), (1, 4), (5, 2)])
def test_other_heads_outputs_are_untouched(heads):
    model = families.build("llama")
    inputs = families.inputs("llama", model, padded=True)
    call = hooks.survey(model, inputs)[0].call
    found = hooks.attend_swapped(call, hooks.Replacement(parsed("rbf"), heads))
    own, new = attend(call, hooks.OWN), attend(call, parsed("rbf"))
    for head in range(6):
        torch.testing.assert_close(found[:, :, head], (new if head in heads else own)[:, :, head])
        assert not torch.allclose(new[:, :, head], own[:, :, head], atol=1e-2)


@pytest.mark.parametrize(("part", "layers"), [("encoder", [0, 1]), ("decoder", [2, 4]), ("cross", [3, 5])])
def test_only_the_chosen_part_is_swapped(part, layers):
    swap = swap_kernel(family("bart"), "rbf", part=part, **READ).swap
    assert [site.layer for site in swap.sites] == layers
    assert {site.part for site in swap.sites} == {part}


def test_a_site_without_the_chosen_head_is_left_alone():
    torch.manual_seed(0)
    config = tf.CLIPConfig(
        text_config=families.ENCODER | {"num_attention_heads": 8, "projection_dim": 16},
        vision_config=families.PIXELS | {"projection_dim": 16},
        projection_dim=16,
    )
    model = loaded(tf.CLIPModel(config).eval().requires_grad_(False))
    swap = swap_kernel(model, "rbf", heads=[6], **READ).swap
    assert len(swap.sites) == 2
    assert all(site.heads == [6] and site.part == "decoder" for site in swap.sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_of_one_length_are_noted_in_every_type(dtype):
    torch.manual_seed(0)
    model = families.build("qwen3")
    for path, parameter in model.named_parameters():
        if path.endswith("k_norm.weight"):
            parameter.fill_(1.0)
    report = swap_kernel(loaded(model.to(dtype)), "rbf", **READ)
    assert any("All keys of a head have the same length at 2 of 2 sites" in note for note in report.swap.notes)
    other = swap_kernel(loaded(families.build("llama").to(dtype)), "rbf", **READ)
    assert not any("one length" in note for note in other.swap.notes)


REFUSALS = {
    "layer": ({"layers": [7]}, "There is no layer 7.", "layers 0 to 3"),
    "head": ({"heads": [0, 8]}, "There is no head 8.", "heads 0 to 7"),
    "part": ({"part": "cross"}, "No attention sites selected", "decoder"),
    "stdin twice": ({"text": "-", "calibration": "-", "fit": True}, "can read stdin", "Give files for the others"),
    "part's name": ({"part": "decodr"}, "no part 'decodr'", "Did you mean 'decoder'"),
    "path's name": ({"path": "fast"}, "no path 'fast'", "auto"),
    "sweep's name": ({"sweep": "head"}, "no sweep 'head'", "heads"),
    "option": ({"sweeps": "heads"}, "no option 'sweeps'", "Did you mean 'sweep'"),
    "calibration": ({"calibration": "a.txt"}, "no effect without --fit", "--fit"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_does_not_exist_is_refused(demo, what):
    given, problem, remedy = REFUSALS[what]
    with pytest.raises(UsageError) as refusal:
        swap_kernel(demo, "rbf", **READ, **given)
    assert problem in refusal.value.problem
    assert remedy in refusal.value.remedy


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("rbff", "no kernel 'rbff'"),
        ("polynomial:degree=3", "odd degree"),
        ("rbf:gamma=x", "must be a number"),
        ("rbf:gamma=-1", "must be finite and above 0"),
        ([], "No kernel given"),
    ],
)
def test_kernels_that_make_no_sense_are_refused_before_a_model_is_loaded(words, problem):
    with pytest.raises(UsageError, match=problem):
        swap_kernel("no/such/model", words)


def test_an_odd_power_is_allowed_when_asked_for(demo):
    swap = swap_kernel(demo, "polynomial:degree=3", allow_signed=True, **READ).swap
    assert swap.off_simplex > 0


@pytest.mark.parametrize("words", ["symmetric", "rbf+symmetric", "window:4", "rbf+tied-key"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_ties_and_filters_in_cross_attention_are_refused_and_possible_elsewhere(name, words):
    with pytest.raises(UsageError, match="is undefined in cross-attention") as refusal:
        swap_kernel(family(name), words, **READ)
    assert "--part encoder or --part decoder" in refusal.value.remedy
    for part in ("encoder", "decoder"):
        assert swap_kernel(family(name), words, part=part, **READ).swap.kl > 0


def test_attention_outside_the_interface_is_named_unless_layers_leave_it_out():
    model = family("bert")

    class HandWrittenAttention(torch.nn.Module):
        def forward(self, x):
            return x

    embeddings = model.model.bert.embeddings
    embeddings.by_hand = HandWrittenAttention()
    assert len(swap_kernel(model, "rbf", **READ).swap.sites) == 2, "what is not run is not in the way"
    embeddings.register_forward_hook(lambda module, _args, output: module.by_hand(output))
    with pytest.raises(ModelError, match=r"bert\.embeddings\.by_hand can't be swapped") as refusal:
        swap_kernel(model, "rbf", **READ)
    assert "--layers 0-1" in refusal.value.remedy
    assert len(swap_kernel(model, "rbf", layers=[0, 1], **READ).swap.sites) == 2


def test_a_swap_that_reaches_fewer_sites_than_asked_is_an_error():
    """A layer that the first three passes use (survey and identity), and no later one."""
    model, passes = family("gpt2"), iter(range(10**6))
    block = model.model.transformer.h[1]
    honest = block.forward
    block.forward = lambda states, *rest, **more: honest(states, *rest, **more) if next(passes) < 3 else states
    with pytest.raises(ModelError, match="never reached 1 of 2 sites") as refusal:
        swap_kernel(model, "rbf", **READ)
    assert "transformer.h.1.attn" in refusal.value.problem
    assert "--layers" in refusal.value.remedy


def test_several_kernels_are_neither_healed_nor_saved(tmp_path):
    with pytest.raises(UsageError, match="heal accepts a single kernel, not 2"):
        attnlens.heal("no/such/model", ["rbf", "cosine"])
    with pytest.raises(UsageError, match="--save accepts a single kernel, not 2"):
        swap_kernel("no/such/model", ["rbf", "cosine"], save=tmp_path / "model")


def test_a_path_that_cannot_be_forced_is_refused(demo):
    with pytest.raises(UsageError, match="No fused implementation"):
        swap_kernel(demo, "laplacian", path="fused", **READ)
    fused, eager = (swap_kernel(demo, "rbf", path=path, **READ).swap for path in ("fused", "eager"))
    assert {site.path for site in fused.sites} == {"sdpa"}
    assert {site.path for site in eager.sites} == {"row tiles"}
    assert fused.loss.after == pytest.approx(eager.loss.after, rel=1e-5)


def test_several_kernels_are_compared_as_they_were_asked_for(demo):
    asked = ["exponential", "rbf", "linear", "rbf+symmetric", "rbf:0.5"]
    report = swap_kernel(demo, asked, **READ)
    swaps = report.swaps
    assert [swap.kernel for swap in swaps] == ["exponential", "rbf:gamma=0.5", "linear", "rbf:gamma=0.5+symmetric"]
    for words, swap in zip(asked, swaps, strict=False):
        assert swap.loss == swap_kernel(demo, words, **READ).swap.loss
        assert any("not that of asymmetry alone" in note for note in swap.notes) == ("symmetric" in words)


# --- the report -------------------------------------------------------------------------------------------------------


FIELDS = (
    "kernel",
    "parameters",
    "sites",
    "identity_error",
    "causality_error",
    "loss",
    "perplexity",
    "kl",
    "top1_agreement",
    "hidden_cosine",
    "hidden_cka",
    "off_simplex",
    "tokens_per_second",
    "peak_memory_bytes",
)


def without_what_may_differ(report):
    """The report's bytes but for timings, environment, memory and speed."""
    found = timeless(json.loads(report.to_json()))
    return json.dumps(found)


@pytest.mark.full
def test_the_report_has_what_the_contract_says(demo, tmp_path):
    path = tmp_path / "report.json"
    done = program("swap-kernel", "--kernel", "rbf", *WORDS, "--json", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["command"] == "swap-kernel"
    assert all(name in found["swap"] for name in FIELDS)
    assert sorted(found["swap"]["loss"]) == ["after", "before", "ci95", "delta"]
    for name, value in found["swap"].items():
        assert value is not None or name in found["swap"]["reasons"] or name in ("healing", "prediction", "plan"), name
    called = swap_kernel(demo, "rbf", windows=4, length=32)
    assert without_what_may_differ(read_report(path)) == without_what_may_differ(called)


@pytest.mark.parametrize("more", [{}, {"sweep": "heads"}, {"fit": True}, {"train": 2}])
def test_the_same_inputs_and_seed_give_the_same_bytes(demo, more):
    first, second, other = (
        without_what_may_differ(swap_or_heal(demo, "rbf", layers=[1, 3], heads=[0, 5], seed=seed, **READ, **more))
        for seed in (5, 5, 6)
    )
    assert first == second != other


@pytest.mark.full
def test_the_program_refuses_in_two_lines(tmp_path):
    refused(program("swap-kernel", "--kernel", "rbff", *WORDS), "Did you mean 'rbf'")
    refused(program("swap-kernel", "--heads", "9", *WORDS), "There is no head 9")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    refused(program("swap-kernel", "--save", tmp_path / "full", *WORDS), "not an empty folder")


def test_nothing_is_left_behind_in_the_model(demo):
    before = {name: tensor.clone() for name, tensor in demo.model.state_dict().items()}
    inputs = batches(demo).batches[0].inputs
    own = outputs(demo.model, inputs)
    attnlens.heal(demo, "rbf", train=2, **READ)
    swap_kernel(demo, "rbf", sweep="layers", **READ)
    assert all(torch.equal(before[name], tensor) for name, tensor in demo.model.state_dict().items())
    assert apart(own, outputs(demo.model, inputs)) == 0
    assert not any(parameter.requires_grad for parameter in demo.model.parameters())
    with pytest.raises(OutputError):
        swap_kernel(demo, "rbf", save="/dev/null/model", **READ)
