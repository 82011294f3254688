"""Tests that a swap's numbers are those of a naive computation, and that each option has its effect."""

import json
import math
import random
from dataclasses import replace
from itertools import count

import families
import pytest
import tiny
import torch
import transformers as tf
from loaded import BARE, SMALL, apart, family, loaded, outputs, sites_of, swap_or_heal
from reports import bytes_of
from torch.nn.functional import cosine_similarity, cross_entropy
from typer.testing import CliRunner

import attnlens
from attnlens.cli.commands import app
from attnlens.errors import IdentityError, ModelError, OutputError, TextError, UsageError
from attnlens.kernels import parsed
from attnlens.kernels.attention import attend, weights
from attnlens.kernels.registry import KERNELS, kernel
from attnlens.kernels.spelling import HeadShape
from attnlens.maths.statistics import Design, paired_difference
from attnlens.models import hooks, texts
from attnlens.models.texts.targets import NOTHING, feed, task_of
from attnlens.runs import differences as comparing
from attnlens.runs.outputs import divergence, enough_memory, speed
from attnlens.runs.swap import sites as gates
from attnlens.runs.swap.pipeline import swap_kernel

READ = {"windows": 4, "length": 24, "batch_size": 2} | BARE
LINES = ["in the beginning god created", "the heaven", "and the earth was without form and void", "and darkness"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join(LINES) + "\n")
    return str(path)


def batches(model, text=(), **cut):
    contents = texts.read_each(text) or texts.sample(model.info.id)
    return texts.batches(model, contents, texts.Cut(**{"tokens": 24, "sequences": 4, "batch_size": 2} | cut))


def under(model, inputs, words, layers=None, heads=None):
    """Return a context in which these heads of these layers have another kernel, written out densely."""
    sites, calls, chosen = len(sites_of(model, inputs)), count(), slice(None) if heads is None else heads

    def answer(call):
        output, new = attend(call, hooks.OWN, "eager").clone(), attend(call, parsed(words), "eager")
        if next(calls) % sites in (layers or range(sites)):
            output[:, :, chosen] = new[:, :, chosen]
        return output

    return hooks.answer_calls(model, answer)


def logits(model, inputs):
    with torch.no_grad():
        return hooks.forward(model, inputs).logits.double()


def naive_predictions(model, layers=None, heads=None, **cut):
    """Log probabilities at predicted positions, (predictions, classes): the model's own, and under RBF by hand."""
    pairs = []
    for fed in feed(model, batches(model, **cut), task_of(model.model), 0):
        chosen = ... if fed.targets is None else fed.targets != NOTHING
        own = logits(model.model, fed.inputs)[chosen]
        with under(model.model, fed.inputs, "rbf", layers, heads):
            pairs.append((own, logits(model.model, fed.inputs)[chosen]))
    return [torch.cat(part).log_softmax(-1) for part in zip(*pairs, strict=True)]


def mean_divergence(p, q):
    return pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_the_own_kernel_changes_no_number(name):
    swap = swap_kernel(family(name), "exponential", **SMALL).swap
    assert abs(swap.loss.delta) < 1e-5
    assert swap.loss.ci95[0] <= 0 <= swap.loss.ci95[1]
    assert abs(swap.kl) < 1e-6
    assert (swap.top1_agreement, swap.off_simplex) == (1, 0)
    assert (swap.hidden_cosine, swap.hidden_cka) == pytest.approx((1, 1), abs=1e-6)
    assert swap.perplexity.delta == pytest.approx(0, abs=1e-3 * swap.perplexity.before)
    assert max(site.output_error for site in swap.sites) < 1e-5


def test_several_kernels_are_compared_in_order_and_cost_a_trained_model_nats(demo):
    read = {"windows": 8, "length": 32} | BARE
    swaps = swap_kernel(demo, ["exponential", "rbf", "linear", "rbf+symmetric", "rbf:0.5", "hard"], **read).swaps
    spellings = ["exponential", "rbf:gamma=0.5", "linear", "rbf:gamma=0.5+symmetric", "hard"]
    assert [swap.kernel for swap in swaps] == spellings
    for swap in swaps:
        assert any("not that of asymmetry alone" in note for note in swap.notes) == ("symmetric" in swap.kernel)
        if swap.kernel in ("linear", "rbf:gamma=0.5+symmetric"):
            assert swap.loss == swap_kernel(demo, swap.kernel, **read).swap.loss
        if swap.kernel in ("rbf:gamma=0.5", "linear", "hard"):
            assert swap.loss.ci95[0] > 0
            assert min(swap.loss.delta, swap.kl) > 0.1
            assert swap.top1_agreement < 1
            assert max(swap.hidden_cosine, swap.hidden_cka) < 0.99


def naive(model, passes, words):
    """Compute loss before and after, KL, agreement, cosine and CKA token by token in plain loops."""
    numbers, states = [], ([], [])
    for fed in passes:
        for row, targets in enumerate(fed.targets):
            inputs = {name: tensor[row : row + 1] for name, tensor in fed.inputs.items()}
            with torch.no_grad():
                own = hooks.forward(model, inputs, output_hidden_states=True)
                with under(model, inputs, words):
                    new = hooks.forward(model, inputs, output_hidden_states=True)
            for place, target in enumerate(targets.tolist()):
                if target != NOTHING:
                    p, q = (result.logits[0, place].double().log_softmax(-1) for result in (own, new))
                    numbers.append([-p[target], -q[target], (p.exp() * (p - q)).sum(), p.argmax() == q.argmax()])
            prefix = "decoder_" if "decoder_hidden_states" in own else ""
            mask = inputs[f"{prefix}attention_mask"][0].bool()
            for rows, result in zip(states, (own, new), strict=True):
                rows.append(result[f"{prefix}hidden_states"][-1][0, mask].double())
    x, y = map(torch.cat, states)
    cosine = float(cosine_similarity(x, y, dim=-1).mean())
    x, y = x - x.mean(0), y - y.mean(0)
    cka = float((x.mT @ y).norm() ** 2 / ((x.mT @ x).norm() * (y.mT @ y).norm()))
    return [*torch.tensor(numbers, dtype=torch.float64).mean(0).tolist(), cosine, cka]


@pytest.mark.parametrize(
    ("name", "words", "pack"),
    [
        ("gpt2", "rbf", False),
        ("llama", "polynomial", True),
        ("bert", "polynomial", False),
        ("albert", "rbf", True),
        ("t5", "rbf", False),
        ("bart", "polynomial", True),
    ],
)
def test_every_number_is_that_of_plain_loops(name, words, pack, lines):
    model, text = family(name), () if pack else (lines,)
    swap = swap_kernel(model, words, text=text, pack=pack, **READ).swap
    passes = feed(model, batches(model, pack=pack, text=text), task_of(model.model), 0)
    assert pack or any(int(fed.inputs["attention_mask"].min()) == 0 for fed in passes), "some line is padded"
    before, after, kl, agree, cosine, cka = naive(model.model, passes, words)
    assert (swap.loss.before, swap.loss.after) == pytest.approx((before, after), rel=1e-5)
    assert swap.loss.delta == pytest.approx(after - before, abs=2e-5)
    assert (swap.perplexity.before, swap.perplexity.after) == pytest.approx((math.exp(before), math.exp(after)), 1e-4)
    assert swap.kl == pytest.approx(kl, rel=1e-4)
    assert swap.kl > 1e-3
    assert swap.top1_agreement == pytest.approx(agree)
    assert (swap.hidden_cosine, swap.hidden_cka) == pytest.approx((cosine, cka), abs=1e-5)
    assert swap.loss.ci95[0] <= swap.loss.delta <= swap.loss.ci95[1]
    assert swap.kl_ci95[0] <= swap.kl <= swap.kl_ci95[1]
    assert swap.hidden_cosine_ci95[0] <= swap.hidden_cosine <= swap.hidden_cosine_ci95[1]


@pytest.mark.parametrize(("name", "pack"), [("demo", True), ("demo", False), ("t5", True)])
def test_the_loss_before_is_the_models_own(name, pack, demo):
    model, total, tokens = demo if name == "demo" else family(name), 0.0, 0
    for batch in batches(model, pack=pack):
        inputs = {key: batch.inputs[key] for key in batch.inputs if key != "decoder_input_ids"}
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, NOTHING)
        if name == "t5":  # attnlens predicts no token after the decoder's last one
            labels[:, -1] = NOTHING
        predicted = int((labels[:, name == "demo" :] != NOTHING).sum())
        total += float(model.model(**inputs, labels=labels).loss) * predicted
        tokens += predicted
    assert swap_kernel(model, "rbf", pack=pack, **READ).swap.loss.before == pytest.approx(total / tokens, rel=1e-5)


def test_fifteen_percent_of_the_tokens_are_masked_by_seed_and_never_special_ones(lines, tmp_path):
    model = family("bert")
    (tmp_path / "words.txt").write_text("a\nb c d\n")
    cut = batches(model, text=(str(tmp_path / "words.txt"),), pack=False, sequences=2)
    for seed in range(20):  # a line of one word has that word to guess, whatever is drawn
        masked = feed(model, cut, "masked", seed)[0].targets != NOTHING
        assert masked[0].tolist() == [False, True, False, False, False]
        assert not masked[1, [0, -1]].any()
        assert masked[1].any()
    special = torch.tensor(model.tokenizer.all_special_ids)
    for cut in ({"sequences": 64, "tokens": 60}, {"text": (lines,), "pack": False, "tokens": 12}):
        cut = batches(model, **cut)
        first, again, other = (feed(model, cut, "masked", seed) for seed in (0, 0, 1))
        chosen = [torch.cat([fed.targets.flatten() for fed in passes]) for passes in (first, again, other)]
        assert torch.equal(chosen[0], chosen[1])
        assert not torch.equal(chosen[0], chosen[2])
        picked, real = [], []
        for fed, batch in zip(first, cut, strict=True):
            masked, ids = fed.targets != NOTHING, batch.inputs["input_ids"]
            assert masked.any(1).all(), "every sequence has something to guess"
            assert not torch.isin(ids[masked], special).any()
            assert torch.equal(fed.targets[masked], ids[masked])
            assert (fed.inputs["input_ids"][masked] == model.tokenizer.mask_token_id).all()
            assert torch.equal(fed.inputs["input_ids"][~masked], ids[~masked])
            picked.append(masked.flatten())
            real.append(~torch.isin(ids, special).flatten())
        if len(first) > 2:
            assert 0.12 < float(torch.cat(picked).sum() / torch.cat(real).sum()) < 0.18
    with pytest.raises(TextError, match="no mask token"):
        swap_kernel(loaded(families.build("bert"), tiny.tokenizer("llama")), "rbf", **READ)


def classifier(model_class, config, body):
    """A classifier with a tiny model's attention."""
    torch.manual_seed(0)
    model = model_class(config).eval().requires_grad_(False)
    model.base_model.load_state_dict(body.state_dict(), strict=False)
    model.classifier.weight.normal_(std=0.4)
    return loaded(model)


def test_a_classifier_is_measured_against_its_own_choice():
    config = tf.BertConfig(**families.ENCODER, num_labels=5)
    model = classifier(tf.BertForSequenceClassification, config, families.build("bert").bert)
    swap = swap_kernel(model, "rbf", **READ).swap
    p, q = naive_predictions(model)
    choice = p.argmax(-1)
    assert swap.task == "classification"
    assert swap.loss.before == pytest.approx(float(cross_entropy(p, choice)), rel=1e-5)
    assert swap.loss.after == pytest.approx(float(cross_entropy(q, choice)), rel=1e-5)
    assert swap.top1_agreement == pytest.approx(float((q.argmax(-1) == choice).double().mean()))
    assert swap.mask_error is not None, "its hidden states have one row per token"
    assert swap.causality_error is None
    assert "every other" in swap.reasons["causality_error"]


def test_distances_have_intervals_over_windows_and_numbers_by_text(tmp_path):
    """A headless model has the hidden cosine, a masked one KL as well; two texts have a cosine each."""
    paths = [tmp_path / f"{number}.txt" for number in range(2)]
    for number, path in enumerate(paths):
        path.write_text("\n".join(f"{word} and {word} again" for word in LINES[number:]) * 6)
    masked = family("bert")
    for model in (loaded(masked.model.bert), masked):
        report = swap_kernel(model, "rbf", text=paths, windows=10, length=12, **BARE)
        swap, rows = report.swap, list(report.windows.rows())
        if swap.task == "hidden":
            for name in ("loss", "perplexity", "kl", "top1_agreement"):
                assert getattr(swap, name) is None
                assert "no head" in swap.reasons[name]
            assert any("no head" in note for note in swap.notes)
        assert (swap.task == "hidden") == (model is not masked)
        assert 0 < min(swap.hidden_cosine, swap.hidden_cka) <= max(swap.hidden_cosine, swap.hidden_cka) < 0.999
        design = Design.of([row["text"] for row in rows])
        for name, tokens in {"hidden_cosine": "hidden_tokens", **({"kl": "tokens"} if swap.loss else {})}.items():
            values, sizes = torch.tensor([[row[name], row[tokens]] for row in rows], dtype=torch.float64).T
            value, low, high = paired_difference(torch.zeros_like(values), values, design, weights=sizes)
            assert getattr(swap, name) == pytest.approx(value, abs=1e-9)
            assert getattr(swap, f"{name}_ci95") == pytest.approx((low, min(high, 1.0)), abs=1e-7)
        assert [text.sequences for text in swap.hidden_cosine_by_text] == [5, 5]
        for text in swap.hidden_cosine_by_text:
            cosines = [row["hidden_cosine"] for row in rows if row["text"] == text.name]
            assert text.cosine == pytest.approx(sum(cosines) / 5, abs=1e-9)
            assert text.ci95[0] < text.cosine < text.ci95[1]
    alone = swap_kernel(masked, "rbf", text=paths[:1], windows=1, length=12, **BARE).swap
    for name in ("kl_ci95", "hidden_cosine_ci95"):
        assert getattr(alone, name) is None
        assert alone.reasons[name] == "one window has no spread"


@pytest.mark.parametrize("name", ["whisper", "vit"])
def test_predictions_on_noise_are_compared_without_a_loss(name):
    cut, read, model = {}, READ, family(name)
    if name == "vit":
        model = classifier(tf.ViTForImageClassification, tf.ViTConfig(**families.PIXELS, num_labels=5), model.model)
        cut, read = {"tokens": None}, {key: number for key, number in READ.items() if key != "length"}
    swap = swap_kernel(model, "rbf", **read).swap
    assert swap.task == {"whisper": "seq2seq", "vit": "classification"}[name]
    assert swap.noise
    for field in ("loss", "perplexity"):
        assert getattr(swap, field) is None
        assert "noise" in swap.reasons[field]
    assert any("noise" in note for note in swap.notes)
    assert not any("loss: " in note for note in swap.notes), "the decoder repeats nothing that it could have heard"
    p, q = naive_predictions(model, **cut)
    assert swap.kl == mean_divergence(p, q)
    assert swap.kl > 1e-3
    assert swap.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))


def test_noise_is_named_and_neither_calibrates_nor_has_a_budget(lines):
    text, pixels = (swap_kernel(family(name), "rbf", windows=4, batch_size=2, **BARE).swap for name in ("bart", "vit"))
    assert (text.noise, pixels.noise) == (False, True)
    assert text.loss is not None
    assert not any("noise" in note for note in text.notes)
    assert "no head" in pixels.reasons["loss"]
    assert ["no head" in note for note in pixels.notes[:2]] == [True, False]
    assert "noise" in pixels.notes[1]
    healed = attnlens.heal(family("whisper"), "rbf", train=2, **READ).swap
    assert [stage.name for stage in healed.stages] == ["swapped", "healed"]
    assert all(step.loss is None and step.validation > 0 for step in healed.healing.curve)
    with pytest.raises(UsageError, match="random noise generated by attnlens") as refusal:
        attnlens.find_ranks(family("whisper"), budget="loss:1%", **READ)
    assert "--kernel rank:16" in refusal.value.remedy
    with pytest.raises(UsageError, match="pixels but no text"):
        swap_kernel(family("vit"), "rbf", fit=True, calibration=[lines])


@pytest.mark.parametrize(("name", "words"), [("llama", "rbf"), ("t5", "rank:3")])
def test_padding_never_enters_a_fit(tmp_path, name, words):
    """Lines of unequal length fit a kernel in one padded batch as they do one by one."""
    draw = random.Random(0)  # noqa: S311
    rows = ["".join(draw.choices("abcdefghij", k=draw.choice((4, 9, 30)))) for _ in range(16)]
    (tmp_path / "lines").write_text("\n".join(rows))
    read = {"text": str(tmp_path / "lines"), "pack": False, "length": 48, "windows": 4, "fit": words == "rbf"} | BARE
    together, alone = (swap_kernel(family(name), words, batch_size=size, **read).swap for size in (4, 1))
    assert together.kl == pytest.approx(alone.kl, rel=1e-3)


def test_site_errors_and_mass_outside_the_simplex_are_those_of_the_matrices(demo):
    swap = swap_kernel(demo, "linear", **READ).swap
    inputs = {name: tensor[:1] for name, tensor in batches(demo).batches[0].inputs.items()}
    for site, reached in zip(swap.sites, hooks.survey(demo.model, inputs), strict=True):
        call = reached.call
        scores = (call.query.double() @ call.key.double().mT * call.scale).tril()
        mass = scores / scores.sum(-1, keepdim=True)
        share = float(((-mass).clamp(min=0).sum(-1) / mass.abs().sum(-1)).mean())
        assert site.off_simplex == pytest.approx(share, rel=1e-4)
        assert site.off_simplex > 0.01
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        own = scores.masked_fill(future, -torch.inf).softmax(-1) @ call.value.double()
        new = mass @ call.value.double()
        assert site.output_error == pytest.approx(float((new - own).norm() / own.norm()), rel=1e-3)
    assert swap.off_simplex == pytest.approx(sum(site.off_simplex for site in swap.sites) / len(swap.sites))
    assert any("not probabilities" in note for note in swap.notes)
    odd = swap_kernel(demo, "polynomial:degree=3", allow_signed=True, **READ).swap
    assert odd.off_simplex > 0


def test_padding_enters_no_number_of_a_site(tmp_path):
    """Sites are measured on the first sequence, which is the shorter one here."""
    (tmp_path / "lines.txt").write_text("\n".join(sorted(LINES[:2], key=len)))
    model, cut = family("bert"), {"text": (str(tmp_path / "lines.txt"),), "pack": False, "placement": "first"}
    fed = feed(model, batches(model, sequences=2, tokens=40, **cut), "masked", 0)[0]
    inputs = {name: value[:1] for name, value in fed.inputs.items()}
    call, real = hooks.survey(model.model, inputs)[0].call, inputs["attention_mask"].bool()
    assert not real.all()
    own, new = (attend(call, each, "eager").double() for each in (hooks.OWN, parsed("rbf")))
    expected, padded = (float((new[rows] - own[rows]).norm() / own[rows].norm()) for rows in (real, ...))
    cut |= {"windows": 2, "length": 40, "batch_size": 2} | BARE
    rbf, linear = (swap_kernel(model, words, **cut).swap.sites[0] for words in ("rbf", "linear"))
    assert rbf.output_error == pytest.approx(expected, rel=1e-4)
    assert rbf.output_error != pytest.approx(padded, rel=1e-2)
    rows = weights(call, parsed("linear")).double().transpose(1, 2)
    share = (-rows).clamp(min=0).sum(-1) / rows.abs().sum(-1)
    assert linear.off_simplex == pytest.approx(float(share[real].mean()), rel=1e-4)
    assert linear.off_simplex != pytest.approx(float(share.mean()), rel=1e-3)


def answered(model, change, kernel=hooks.OWN):
    """A variant of the model whose attention gets changed calls."""
    return lambda: hooks.answer_calls(model.model, lambda call: attend(change(call), kernel))


def replaced(model, sites):
    return lambda: hooks.replace(model.model, sites, dict.fromkeys(sites, hooks.Replacement(parsed("rbf"))))


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_a_causal_kernel_that_leaks_is_refused(name):
    """Padding behind a causal sequence is never seen, so the gate puts it before."""
    model = family(name)
    fed = batches(model).batches[0].inputs
    sites = sites_of(model.model, fed)
    with pytest.raises(IdentityError, match="later tokens"):
        gates.causality_error(model, fed, answered(model, lambda call: replace(call, allowed=None, causal=False)), 0)
    unmasked = answered(model, lambda call: replace(call, allowed=None, causal=True), parsed("rbf"))
    assert gates.causality_error(model, fed, unmasked, 0) < 1e-5, "the future stays hidden"
    with pytest.raises(IdentityError, match="padding"):
        gates.leaks(model, sites, fed, unmasked, 0)
    assert gates.mask_error(model, fed, unmasked, 0, left=False) < 1e-5, "the control: on the right it can't be seen"
    assert gates.leaks(model, sites, fed, replaced(model, sites), 0)["mask_error"] < 1e-5


@pytest.mark.parametrize("name", ["bert", "t5", "bart"])
def test_an_encoder_that_drops_the_padding_mask_is_refused(name):
    model = family(name)
    fed = batches(model).batches[0].inputs
    sites = sites_of(model.model, fed)
    open_encoder = lambda call: call if call.module.is_causal else replace(call, allowed=None, causal=False)  # noqa: E731
    with pytest.raises(IdentityError, match="padding"):
        gates.mask_error(model, fed, answered(model, open_encoder), 0, left=False)
    assert gates.leaks(model, sites, fed, replaced(model, sites), 0)["mask_error"] < 1e-5


@pytest.mark.parametrize("left", [True, False])
def test_the_padding_of_the_gate_leaves_real_tokens_their_positions(demo, left, lines):
    fed = batches(demo, pack=False, text=(lines,), tokens=20).batches[0].inputs
    padded = gates._pad_randomly(demo, fed, 1, left=left)
    assert padded["input_ids"].shape == fed["input_ids"].shape
    real, shorter = padded["attention_mask"].bool(), fed["attention_mask"][:, : -gates.PADDING].bool()
    columns = shorter.shape[1]
    assert torch.equal(padded["input_ids"][real], fed["input_ids"][:, :columns][shorter])
    short = gates._pad_randomly(demo, {name: part[:, :3] for name, part in fed.items()}, 1, left=left)
    assert torch.equal(short["attention_mask"].sum(1), fed["attention_mask"][:, :2].sum(1)), "at most half is padding"
    alone, new = logits(demo.model, fed)[:, :columns], logits(demo.model, padded)
    torch.testing.assert_close(new[real], alone[shorter], rtol=1e-4, atol=1e-4)


def test_a_model_whose_attention_is_not_reproduced_is_not_swapped(demo, monkeypatch):
    for error, match in ((3e-4, r"3\.0e-04"), (math.nan, "nan")):
        monkeypatch.setattr(hooks, "identity_error", lambda *_, error=error: error)
        with pytest.raises(IdentityError, match=match):
            swap_kernel(demo, "rbf", **READ)


def test_a_diverged_model_has_reasons_instead_of_numbers_and_is_not_healed(demo):
    @kernel("nan", formula="NaN", source="nobody", positive=True, symmetric=True, features="none", form="score")
    def nan(score):
        """Never finite."""
        return score * math.nan

    try:
        report = swap_kernel(demo, "nan", sweep="layers", **READ)
        with pytest.raises(ModelError, match="not finite, so the model cannot be healed"):
            attnlens.heal(demo, "nan", train=2, **READ)
    finally:
        del KERNELS["nan"]
    swap = report.swap
    for name in ("loss", "perplexity", "kl", "top1_agreement", "hidden_cosine", "hidden_cka"):
        assert getattr(swap, name) is None
        assert "diverged" in swap.reasons[name]
    assert swap.diverged
    assert all(site.output_error is None for site in swap.sites)
    assert all(effect.delta is None and not effect.significant for effect in swap.sweep)
    assert "NaN" not in report.model_dump_json(exclude={"swap": {"formula"}})


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not enough memory: x"), RuntimeError("sizes")]
)
def test_out_of_memory_asks_for_a_smaller_batch_and_other_errors_pass(demo, monkeypatch, error):
    original = comparing.run

    def run(model, fed, task):
        if len(fed.inputs["input_ids"]) > 3:
            raise error
        return original(model, fed, task)

    monkeypatch.setattr("attnlens.runs.swap.kernel_run.run", run)
    with pytest.raises((ModelError, RuntimeError)) as refusal:
        swap_kernel(demo, "rbf", windows=8, length=16, batch_size=8)
    if "memory" in str(error):
        assert refusal.value.problem == "Not enough memory for 8 sequences at once."
        assert refusal.value.remedy == "Use a smaller --batch-size."
    else:
        assert refusal.value is error


def test_memory_errors_of_torch_are_recognised_at_every_stage(demo, monkeypatch):
    for place, run, more, purpose in (
        ("models.hooks.identity_error", swap_kernel, {}, "for"),
        ("runs.swap.kernel_run.run", swap_kernel, {}, "for"),
        ("lab.heal.pipeline.run_training", attnlens.heal, {"train": 2}, "to train on"),  # a forward pass alone fits
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"attnlens.{place}", lambda *_: torch.empty(2**58))
            with pytest.raises(ModelError) as refusal:
                run(demo, "rbf", **READ, **more)
        assert refusal.value.problem == f"Not enough memory {purpose} 2 sequences at once."
        assert refusal.value.remedy == "Use a smaller --batch-size."
    with pytest.raises(ModelError) as refusal, enough_memory({"input_ids": torch.ones(1, 9)}):
        torch.empty(2**58)
    assert refusal.value.remedy == "Use a smaller --length."


def test_a_small_divergence_keeps_its_digits_in_float32():
    """Control: Σ p log(p/q), in the same type, has the rounding errors of both normalisations."""
    generator = torch.Generator().manual_seed(0)
    own = 3 * torch.randn(50, 5000, generator=generator)
    new = own + 0.02 * torch.randn(50, 5000, generator=generator)
    p, q = (each.log_softmax(-1) for each in (own, new))
    exact, plain = divergence(own.double(), new.double()), (p.exp() * (p - q)).sum(-1)
    assert (divergence(own, new) / exact - 1).abs().max() < 2e-3 < (plain / exact - 1).abs().max()


def test_speed_is_the_median_over_passes_without_the_first():
    assert (speed([10], [5.0]), speed([10, 10, 10], [5.0, 1.0, 2.0])) == (2, 7.5)


@pytest.mark.parametrize(
    ("name", "layers", "heads"),
    [("gpt2", [1], None), ("bert", None, [0, 3]), ("llama", [0], [4, 1]), ("albert", [1], [0])],
)
def test_exactly_the_chosen_heads_are_swapped(name, layers, heads):
    model = family(name)
    report = swap_kernel(model, "rbf", layers=layers, heads=heads, **READ)
    swap, sites = report.swap, len(sites_of(model.model, batches(model).batches[0].inputs))
    assert [site.layer for site in swap.sites] == (layers or list(range(sites)))
    assert all(site.heads == (heads or list(range(4))) for site in swap.sites)
    assert report.coverage.heads == sum(len(site.heads) for site in swap.sites)
    assert swap.kl == mean_divergence(*naive_predictions(model, layers, heads))
    assert swap.kl < swap_kernel(model, "rbf", **READ).swap.kl or layers is None


def test_only_the_chosen_part_and_sites_with_the_chosen_heads_are_swapped():
    for part, layers in {"encoder": [0, 1], "decoder": [2, 4], "cross": [3, 5]}.items():
        sites = swap_kernel(family("bart"), "rbf", part=part, **READ).swap.sites
        assert [(site.layer, site.part) for site in sites] == [(layer, part) for layer in layers]
    text = families.ENCODER | {"num_attention_heads": 8, "projection_dim": 16}
    vision = families.PIXELS | {"projection_dim": 16}
    config = tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    torch.manual_seed(0)
    swap = swap_kernel(loaded(tf.CLIPModel(config).eval().requires_grad_(False)), "rbf", heads=[4], **READ).swap
    assert [(site.heads, site.part) for site in swap.sites] == [([4], "decoder")] * 2
    for name, causal in (("bert", False), ("llama", True)):
        model = families.build(name)
        reached = hooks.survey(model, families.inputs(name, model, padded=True))
        shapes = gates.head_shapes(reached, {reached[0].site: (1, 2)})
        assert list(shapes.values()) == [HeadShape(heads=2, head_dim=10, value_dim=10, tokens=12, causal=causal)]


REFUSALS = {
    "layer": ({"layers": [7]}, "There is no layer 7.", "layers 0 to 3"),
    "head": ({"heads": [0, 8]}, "There is no head 8.", "heads 0 to 7"),
    "part": ({"part": "cross"}, "No attention sites selected", "decoder"),
    "stdin twice": ({"text": "-", "calibration": "-", "fit": True}, "can read stdin", "Give files for the others"),
    "part's name": ({"part": "decodr"}, "no part 'decodr'", "Did you mean 'decoder'"),
    "path's name": ({"path": "fast"}, "no path 'fast'", "auto"),
    "sweep's name": ({"sweep": "predicted"}, "no sweep 'predicted'", "heads"),
    "option": ({"sweeps": "heads"}, "no option 'sweeps'", "Did you mean 'sweep'"),
    "calibration": ({"calibration": "a.txt"}, "no effect without --fit", "--fit"),
    "path of a kernel": ({"kernels": "laplacian", "path": "fused"}, "No fused implementation", ""),
    "kernel": ({"kernels": "rbff"}, "no kernel 'rbff'", "Did you mean 'rbf'"),
    "signed": ({"kernels": "polynomial:degree=3"}, "odd degree", ""),
    "number": ({"kernels": "rbf:gamma=x"}, "must be a number", ""),
    "negative": ({"kernels": "rbf:gamma=-1"}, "must be finite and above 0", ""),
    "no kernel": ({"kernels": []}, "No kernel given", ""),
    "several saved": ({"kernels": ["rbf", "cosine"], "save": "model"}, "--save accepts a single kernel, not 2", ""),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_invalid_options_are_refused(demo, case):
    """Kernels are checked before a model is loaded."""
    options, problem, remedy = REFUSALS[case]
    model = "no/such/model" if "kernels" in options and "path" not in options else demo
    with pytest.raises(UsageError) as refusal:
        swap_kernel(model, **{"kernels": "rbf"} | READ | options)
    assert problem in refusal.value.problem
    assert remedy in refusal.value.remedy
    if case == "several saved":
        with pytest.raises(UsageError, match="heal accepts a single kernel, not 2"):
            attnlens.heal("no/such/model", ["rbf", "cosine"])


def test_forced_paths_are_reported_and_have_the_same_loss(demo):
    fused, eager = (swap_kernel(demo, "rbf", path=path, **READ).swap for path in ("fused", "eager"))
    assert {site.path for site in fused.sites} == {"sdpa"}
    assert {site.path for site in eager.sites} == {"row tiles"}
    assert fused.loss.after == pytest.approx(eager.loss.after, rel=1e-5)


def test_ties_and_filters_are_refused_in_cross_attention_alone():
    pairs = (("t5", "symmetric"), ("bart", "rbf+symmetric"), ("whisper", "window:4"), ("bart", "rbf+tied-key"))
    for name, words in pairs:
        with pytest.raises(UsageError, match="is undefined in cross-attention") as refusal:
            swap_kernel(family(name), words, **READ)
        assert "--part encoder or --part decoder" in refusal.value.remedy
        part = "encoder" if name == "whisper" else "decoder"
        assert swap_kernel(family(name), words, part=part, **READ).swap.kl > 0


def test_attention_outside_the_interface_is_refused_unless_layers_exclude_it():
    class HandWrittenAttention(torch.nn.Module):
        def forward(self, x):
            return x

    model = family("bert")
    embeddings = model.model.bert.embeddings
    embeddings.by_hand = HandWrittenAttention()
    assert len(swap_kernel(model, "rbf", **READ).swap.sites) == 2, "it does not run"
    embeddings.register_forward_hook(lambda module, _args, output: module.by_hand(output))
    with pytest.raises(ModelError, match=r"bert\.embeddings\.by_hand can't be swapped") as refusal:
        swap_kernel(model, "rbf", **READ)
    assert "--layers 0-1" in refusal.value.remedy
    assert len(swap_kernel(model, "rbf", layers=[0, 1], **READ).swap.sites) == 2


def test_a_swap_that_does_not_reach_every_site_is_refused():
    """The first three passes (survey and identity) use a layer that no later one does."""
    model, passes = family("gpt2"), count()
    block = model.model.transformer.h[1]
    original = block.forward
    block.forward = lambda states, *rest, **more: original(states, *rest, **more) if next(passes) < 3 else states
    with pytest.raises(ModelError, match="never reached 1 of 2 sites") as refusal:
        swap_kernel(model, "rbf", **READ)
    assert "transformer.h.1.attn" in refusal.value.problem
    assert "--layers" in refusal.value.remedy


def test_the_program_writes_the_report_of_the_function_with_a_reason_for_each_missing_number(swapped, tmp_path):
    path = tmp_path / "report.json"
    words = ["swap-kernel", "--kernel", "rbf", "--windows", "8", "--length", "32", "--no-progress"]
    assert CliRunner().invoke(app, [*words, "--json", str(path)]).exit_code == 0
    report = json.loads(path.read_text())
    assert report["command"] == "swap-kernel"
    fields = "kernel parameters sites identity_error causality_error loss perplexity kl top1_agreement hidden_cosine "
    fields += "hidden_cka off_simplex tokens_per_second peak_memory_bytes"
    assert set(fields.split()) <= set(report["swap"])
    assert sorted(report["swap"]["loss"]) == ["after", "before", "ci95", "delta"]
    for name, value in report["swap"].items():
        optional = name in ("healing", "prediction", "plan")
        assert value is not None or name in report["swap"]["reasons"] or optional, name
    assert bytes_of(path) == bytes_of(swapped)


@pytest.mark.parametrize("more", [{"sweep": "heads"}, {"fit": True}, {"train": 2}], ids=str)
def test_the_same_inputs_and_seed_give_the_same_bytes(demo, more):
    read = {"layers": [1], "heads": [0, 5]} | SMALL | more
    first, second, other = (bytes_of(swap_or_heal(demo, "rbf", seed=seed, **read)) for seed in (5, 5, 6))
    assert first == second != other


def test_the_model_is_unchanged_after_every_run(demo):
    before = {name: tensor.clone() for name, tensor in demo.model.state_dict().items()}
    inputs = batches(demo).batches[0].inputs
    own = outputs(demo.model, inputs)
    healed = attnlens.heal(demo, "rbf", train=2, **READ | {"controls": True}).swap
    assert "Controls are measured on the model before healing." in healed.notes
    swap_kernel(demo, "rbf", sweep="layers", **READ)
    with pytest.raises(OutputError):
        swap_kernel(demo, "rbf", save="/dev/null/model", **READ)
    assert all(torch.equal(before[name], tensor) for name, tensor in demo.model.state_dict().items())
    assert apart(own, outputs(demo.model, inputs)) == 0
    assert not any(parameter.requires_grad for parameter in demo.model.parameters())


USER = {"source": "a user", "features": "infinite", "positive": True, "symmetric": True}


@pytest.mark.parametrize(
    ("form", "function", "problem"),
    [
        ("score", lambda score: score / 2, None),
        ("score", lambda score: score + torch.randn(score.shape, generator=torch.Generator().manual_seed(0)), None),
        ("score", lambda score: score + torch.randn_like(score), "kernel mine is not deterministic"),
        ("features", lambda x, scale, side: torch.rand_like(x), "kernel mine is not deterministic"),
        ("score", lambda score: score * score.mean(-1, keepdim=True), "With your kernel mine, .* later tokens change"),
        ("score", lambda score: score.mean(-1), r"mine returns shape \(2, 8, 24\), not \(2, 8, 24, 24\)"),
        ("pair", lambda query, key, scale: query, r"mine returns shape \(2, 8, 24, 16\), not \(2, 8, 24, 24\)"),
        ("features", lambda x, scale, side: x[..., :1, :], r"mine returns shape .* not \(2, 8, 24, 16\)"),
    ],
)
def test_a_users_kernel_is_deterministic_blind_to_the_future_and_in_shape(demo, monkeypatch, form, function, problem):
    monkeypatch.setitem(KERNELS, "mine", KERNELS["rbf"])  # removed after the test
    kernel("mine", replace=True, formula="any", form=form, **USER)(function)
    if problem is None:
        assert math.isfinite(swap_kernel(demo, "mine", **READ).swap.loss.after)
        return
    with pytest.raises((IdentityError, UsageError), match=problem) as refusal:
        swap_kernel(demo, "mine", **READ)
    assert "report this" not in refusal.value.remedy


def test_a_loss_worse_than_an_even_guess_is_destroyed_and_two_windows_have_a_t_interval(demo):
    fed = feed(demo, batches(demo, sequences=2), "causal", 0)
    negated = answered(demo, lambda call: replace(call, value=-30 * call.value))
    plain = answered(demo, lambda call: call)
    found = comparing.compare(
        demo.model, fed, {"bad": negated, "same": plain}, "causal", lambda _: None, Design.plain(2)
    )
    bad, same = (found[name].outcome(0, ["a"]) for name in ("bad", "same"))
    assert bad.loss.after > math.log(demo.model.config.vocab_size) > bad.loss.before
    assert (bad.destroyed, same.destroyed) == (True, False)
    pair = [torch.cat(part) for part in (found["bad"].before, found["bad"].after)]
    counts = torch.cat(found["bad"].counts)
    assert len(set(counts.tolist())) == 1
    differences = pair[1] - pair[0]
    half = 12.7062 * float(differences.std()) / 2**0.5
    assert bad.loss.ci95[1] - bad.loss.delta == pytest.approx(half, rel=1e-4), "t with one degree of freedom"
