"""Tests that a swap's numbers are those of a naive computation, and that each option has its effect."""

import copy
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
from program import invoke
from reports import bytes_of
from torch.nn.functional import cosine_similarity, cross_entropy

import attnlens
from attnlens.errors import IdentityError, ModelError, OutputError, TextError, UsageError
from attnlens.kernels import parsed
from attnlens.kernels.attention import attend
from attnlens.kernels.registry import KERNELS, kernel
from attnlens.kernels.spelling import HeadShape
from attnlens.maths.statistics import Design, paired_difference
from attnlens.models import hooks, texts
from attnlens.models.texts.targets import NOTHING, feed, task_of
from attnlens.runs import differences
from attnlens.runs.outputs import divergence, enough_memory, speed
from attnlens.runs.swap import sites as gates
from attnlens.runs.swap.pipeline import swap_kernel

READ = {"windows": 4, "length": 24, "batch_size": 2} | BARE
LINES = ["in the beginning god created", "the heaven", "and the earth was without form and void", "and darkness"]


@pytest.fixture
def lines(tmp_path):
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n")
    return str(tmp_path / "lines.txt")


def batches(model, text=(), **cut):
    contents = texts.read_each(text) or texts.sample(model.info.id)
    return texts.batches(model, contents, texts.Cut(**{"tokens": 24, "sequences": 4, "batch_size": 2} | cut))


def first_inputs(model, **cut):
    return batches(model, **cut).batches[0].inputs


def forward(model, inputs):
    with torch.no_grad():
        return hooks.forward(model, inputs, output_hidden_states=True)


def under(model, inputs, words, layers=None, heads=None):
    """Return a context in which these heads of these layers have another kernel, written out densely."""
    sites, calls, chosen = len(sites_of(model, inputs)), count(), slice(None) if heads is None else heads

    def answer(call):
        output, new = attend(call, hooks.OWN, "eager").clone(), attend(call, parsed(words), "eager")
        if next(calls) % sites in (layers or range(sites)):
            output[:, :, chosen] = new[:, :, chosen]
        return output

    return hooks.answer_calls(model, answer)


def naive(model, words="rbf", layers=None, heads=None, **cut):
    """Run each sequence alone, without and with another kernel; return p, q, targets, x, y.

    p and q are log probabilities, (predictions, classes), x and y the last states of real tokens.
    """
    logits, states, targets = ([], []), ([], []), []
    for fed in feed(model, batches(model, **cut), task_of(model.model), 0):
        for row in range(len(next(iter(fed.inputs.values())))):
            inputs = {name: tensor[row : row + 1] for name, tensor in fed.inputs.items()}
            own, wanted = forward(model.model, inputs), fed.targets[row] if fed.targets is not None else None
            with under(model.model, inputs, words, layers, heads):
                new = forward(model.model, inputs)
            prefix = "decoder_" if "decoder_hidden_states" in own else ""
            mask = inputs.get(f"{prefix}attention_mask")
            for result, rows, last in zip((own, new), logits, states, strict=True):
                classes = result.logits.double().flatten(0, -2)
                rows.append(classes if wanted is None else classes[wanted != NOTHING])
                hidden = result[f"{prefix}hidden_states"][-1][0].double()
                last.append(hidden if mask is None else hidden[mask[0].bool()])
            targets += [] if wanted is None else wanted[wanted != NOTHING].tolist()
    p, q = (torch.cat(rows).log_softmax(-1) for rows in logits)
    return p, q, torch.tensor(targets), *map(torch.cat, states)


def mean_divergence(p, q):
    return pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)


def agreement(p, q):
    return pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))


def test_several_kernels_are_compared_in_order_and_cost_a_trained_model_nats(demo):
    read = {"windows": 8, "length": 32} | BARE
    swaps = swap_kernel(demo, ["exponential", "rbf", "linear", "rbf+symmetric", "rbf:0.5", "hard"], **read).swaps
    assert " ".join(swap.kernel for swap in swaps) == "exponential rbf:gamma=0.5 linear rbf:gamma=0.5+symmetric hard"
    for swap in swaps:
        assert any("not only that of asymmetry" in note for note in swap.notes) == ("symmetric" in swap.kernel)
        if swap.kernel in ("linear", "rbf:gamma=0.5+symmetric"):
            assert swap.loss == swap_kernel(demo, swap.kernel, **read).swap.loss
        if swap.kernel in ("rbf:gamma=0.5", "linear", "hard"):
            assert swap.loss.ci95[0] > 0
            assert min(swap.loss.delta, swap.kl) > 0.1
            assert swap.top1_agreement < 1
            assert max(swap.hidden_cosine, swap.hidden_cka) < 0.99


def own_loss(model, **cut):
    """Return the mean loss per token that the model itself computes from labels."""
    total, tokens, decodes = 0.0, 0, model.model.config.is_encoder_decoder
    for batch in batches(model, **cut):
        inputs = {key: batch.inputs[key] for key in ("input_ids", "attention_mask")}
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, NOTHING)
        if decodes:  # attnlens predicts no token after the decoder's last one
            labels[:, -1] = NOTHING
        predicted = int((labels[:, not decodes :] != NOTHING).sum())
        total += float(model.model(**inputs, labels=labels).loss) * predicted
        tokens += predicted
    return total / tokens


PACKED, BY_LINE = {"llama": "polynomial", "albert": "rbf", "bart": "polynomial"}, {"gpt2": "rbf", "bert": "polynomial"}


@pytest.mark.parametrize(("name", "words"), [*PACKED.items(), *BY_LINE.items(), ("t5", "rbf")])
def test_every_number_is_that_of_separate_passes_and_the_own_kernel_changes_none(name, words, lines):
    model, cut = family(name), {} if name in PACKED else {"pack": False, "text": (lines,)}
    own, swap = swap_kernel(model, ["exponential", words], **cut, **READ).swaps
    assert abs(own.loss.delta) < 1e-5
    assert own.loss.ci95[0] <= 0 <= own.loss.ci95[1]
    assert abs(own.kl) < 1e-6
    assert (own.top1_agreement, own.off_simplex) == (1, 0)
    assert (own.hidden_cosine, own.hidden_cka) == pytest.approx((1, 1), abs=1e-6)
    assert own.perplexity.delta == pytest.approx(0, abs=1e-3 * own.perplexity.before)
    assert max(site.output_error for site in own.sites) < 1e-5
    padded = any(int(batch.inputs["attention_mask"].min()) == 0 for batch in batches(model, **cut))
    assert padded == (name not in PACKED)
    p, q, targets, x, y = naive(model, words, **cut)
    before, after = float(cross_entropy(p, targets)), float(cross_entropy(q, targets))
    assert (swap.loss.before, swap.loss.after) == pytest.approx((before, after), rel=1e-5)
    assert name in ("bert", "albert", "t5") or swap.loss.before == pytest.approx(own_loss(model, **cut), rel=1e-5)
    assert swap.loss.delta == pytest.approx(after - before, abs=2e-5)
    assert (swap.perplexity.before, swap.perplexity.after) == pytest.approx((math.exp(before), math.exp(after)), 1e-4)
    assert swap.kl == mean_divergence(p, q)
    assert swap.kl > 1e-3
    assert swap.top1_agreement == agreement(p, q)
    cosine, x, y = float(cosine_similarity(x, y, dim=-1).mean()), x - x.mean(0), y - y.mean(0)
    cka = float((x.mT @ y).norm() ** 2 / ((x.mT @ x).norm() * (y.mT @ y).norm()))
    assert (swap.hidden_cosine, swap.hidden_cka) == pytest.approx((cosine, cka), abs=1e-5)
    assert swap.loss.ci95[0] <= swap.loss.delta <= swap.loss.ci95[1]
    assert swap.kl_ci95[0] <= swap.kl <= swap.kl_ci95[1]
    assert swap.hidden_cosine_ci95[0] <= swap.hidden_cosine <= swap.hidden_cosine_ci95[1]


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
        passes = [feed(model, cut, "masked", seed) for seed in (0, 0, 1)]
        first, again, other = (torch.cat([fed.targets.flatten() for fed in each]) for each in passes)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        for fed, batch in zip(passes[0], cut, strict=True):
            masked, ids = fed.targets != NOTHING, batch.inputs["input_ids"]
            assert masked.any(1).all(), "every sequence has something to guess"
            assert not torch.isin(ids[masked], special).any()
            assert torch.equal(fed.targets[masked], ids[masked])
            assert (fed.inputs["input_ids"][masked] == model.tokenizer.mask_token_id).all()
            assert torch.equal(fed.inputs["input_ids"][~masked], ids[~masked])
        if len(passes[0]) > 2:
            words = sum(int((~torch.isin(batch.inputs["input_ids"], special)).sum()) for batch in cut)
            assert 0.12 < float((first != NOTHING).sum() / words) < 0.18
    with pytest.raises(TextError, match="no mask token"):
        swap_kernel(loaded(families.build("bert"), tiny.tokenizer("llama")), "rbf", **READ)


def classifier(model_class, config, body):
    """Build a classifier with a tiny model's attention."""
    torch.manual_seed(0)
    model = model_class(config).eval().requires_grad_(False)
    model.base_model.load_state_dict(body.state_dict(), strict=False)
    model.classifier.weight.normal_(std=0.4)
    return loaded(model)


def test_a_classifier_is_measured_against_its_own_choice():
    config = tf.BertConfig(**families.ENCODER, num_labels=5)
    model = classifier(tf.BertForSequenceClassification, config, families.build("bert").bert)
    swap = swap_kernel(model, "rbf", **READ).swap
    p, q, *_ = naive(model)
    losses = [float(cross_entropy(each, p.argmax(-1))) for each in (p, q)]
    assert [swap.loss.before, swap.loss.after] == pytest.approx(losses, rel=1e-5)
    assert (swap.task, swap.top1_agreement, swap.causality_error) == ("classification", agreement(p, q), None)
    assert "every other" in swap.reasons["causality_error"]
    assert swap.mask_error is not None, "its hidden states have one row per token"


def test_distances_have_intervals_over_windows_and_numbers_by_text(tmp_path):
    """A headless model has a hidden cosine, a masked model also a KL; each of two texts has a cosine."""
    paths = [tmp_path / f"{number}.txt" for number in range(2)]
    for number, path in enumerate(paths):
        path.write_text("\n".join(f"{line} and {line} again" for line in LINES[number:]) * 6)
    masked = family("bert")
    for model in (loaded(masked.model.bert), masked):
        report = swap_kernel(model, "rbf", text=paths, windows=10, length=12, **BARE)
        swap, rows = report.swap, list(report.windows.rows())
        assert (swap.task == "hidden") == (model is not masked)
        if model is not masked:
            missing = ("loss", "perplexity", "kl", "top1_agreement")
            assert {getattr(swap, name) for name in missing} == {None}
            assert all("no head" in reason for reason in (*map(swap.reasons.get, missing), "\n".join(swap.notes)))
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
        assert (getattr(alone, name), alone.reasons[name]) == (None, "one window has no spread")


@pytest.mark.parametrize(("name", "task"), [("whisper", "seq2seq"), ("vit", "classification")])
def test_predictions_on_noise_are_compared_without_a_loss(name, task):
    cut, read, model = {}, READ, family(name)
    if name == "vit":
        model = classifier(tf.ViTForImageClassification, tf.ViTConfig(**families.PIXELS, num_labels=5), model.model)
        cut, read = {"tokens": None}, {key: number for key, number in READ.items() if key != "length"}
    swap = swap_kernel(model, "rbf", **read).swap
    assert (swap.task, swap.noise, swap.loss, swap.perplexity) == (task, True, None, None)
    assert all("noise" in swap.reasons[field] for field in ("loss", "perplexity"))
    assert any("noise" in note for note in swap.notes)
    assert not any("loss: " in note for note in swap.notes), "the decoder repeats nothing that it could have heard"
    p, q, *_ = naive(model, **cut)
    assert swap.kl == mean_divergence(p, q)
    assert swap.kl > 1e-3
    assert swap.top1_agreement == agreement(p, q)


def test_noise_is_named_and_neither_calibrates_nor_has_a_budget(lines):
    text, pixels = (swap_kernel(family(name), "rbf", windows=4, batch_size=2, **BARE).swap for name in ("bart", "vit"))
    assert (text.noise, pixels.noise) == (False, True)
    assert text.loss is not None
    assert not any("noise" in note for note in text.notes)
    assert "no head" in pixels.reasons["loss"]
    assert [("no head" in note, "noise" in note) for note in pixels.notes[:2]] == [(True, False), (False, True)]
    healed = attnlens.heal(family("whisper"), "rbf", train=2, **SMALL).swap
    assert [stage.name for stage in healed.stages] == ["swapped", "healed"]
    assert all(step.loss is None and step.validation > 0 for step in healed.healing.curve)
    with pytest.raises(UsageError, match=r"random noise generated by attnlens(.|\n)*--kernel rank:16"):
        attnlens.find_ranks(family("whisper"), budget="loss:1%", **READ)
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


def test_a_rank_kernel_gives_bytes_per_token_if_it_shrinks_all_keys_of_a_cache():
    config = family("llama").model.config
    layers, heads, size = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    assert heads < config.num_attention_heads
    report = swap_kernel(family("llama"), "rank:3", **READ)
    cache = report.swap.cache_bytes_per_token
    assert (cache.before, cache.after) == tuple(4 * layers * heads * (numbers + size) for numbers in (size, 3))
    finding = next(finding for finding in report.findings if finding.question == "Cache?")
    assert finding.answer.startswith(f"{cache.before:,.0f} → {cache.after:,.0f} bytes per token")
    for name, words, chosen in (("llama", "rank:3", {"heads": [0]}), ("bert", "rank:3", {}), ("llama", "rbf", {})):
        assert swap_kernel(family(name), words, **READ, **chosen).swap.cache_bytes_per_token is None


def test_site_errors_and_mass_outside_the_simplex_are_those_of_the_matrices(demo, tmp_path):
    """Sites are measured on the first sequence; with lines, it is shorter than the second, and padded.

    The models run in float64: rows of the linear kernel whose sum is close to zero amplify float32's rounding.
    """
    (tmp_path / "lines.txt").write_text("\n".join(sorted(LINES[:2], key=len)))
    padded = {"text": (str(tmp_path / "lines.txt"),), "pack": False, "placement": "first"}
    gpt2, bert = (replace(own, model=copy.deepcopy(own.model).double()) for own in (demo, family("bert")))
    for model, words, cut in ((gpt2, "linear", {}), (bert, "linear", padded), (bert, "rbf:gamma=0.5", padded)):
        swap = swap_kernel(model, words, **READ, **cut).swap
        fed = feed(model, batches(model, **cut), task_of(model.model), 0)[0]
        inputs = {name: tensor[:1] for name, tensor in fed.inputs.items()}
        real = inputs["attention_mask"][0].bool()
        assert bool(real.all()) == (model is gpt2)
        for site, reached in zip(swap.sites, hooks.survey(model.model, inputs), strict=True):
            query, key, value = (part.double() for part in (reached.call.query, reached.call.key, reached.call.value))
            seen, scores = reached.call.visible(), query @ key.mT * reached.call.scale
            closeness = scores - key.square().sum(-1)[..., None, :] * reached.call.scale / 2
            own, near = (each.masked_fill(~seen, -torch.inf).softmax(-1) for each in (scores, closeness))
            linear = scores.masked_fill(~seen, 0)
            mass = linear / linear.sum(-1, keepdim=True) if words == "linear" else near
            share = (-mass).clamp(min=0).sum(-1) / mass.abs().sum(-1)
            change, size = (mass - own) @ value, own @ value
            (outside, error), (all_outside, all_error) = (
                (float(share[..., rows].mean()), float(change[..., rows, :].norm() / size[..., rows, :].norm()))
                for rows in (real, slice(None))
            )
            assert site.off_simplex == pytest.approx(outside, rel=1e-9)
            assert site.output_error == pytest.approx(error, rel=1e-9)
            assert (site.off_simplex > 0.01) == (words == "linear")
            if model is bert:
                assert error != pytest.approx(all_error, rel=1e-2)
                assert outside != pytest.approx(all_outside, rel=1e-3) or words != "linear"
        assert swap.off_simplex == pytest.approx(sum(site.off_simplex for site in swap.sites) / len(swap.sites))
        assert any("not probabilities" in note for note in swap.notes) == (words == "linear")
    assert swap_kernel(demo, "polynomial:degree=3", allow_signed=True, **READ).swap.off_simplex > 0


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert", "t5", "bart"])
def test_a_kernel_that_leaks_the_future_or_padding_is_refused(name):
    """Padding after a causal sequence is never seen, so the test puts it before the sequence."""
    model, rbf, decoder = family(name), parsed("rbf"), name in families.CAUSAL
    fed = first_inputs(model)
    sites = sites_of(model.model, fed)

    def answered(change, kernel=hooks.OWN):
        return lambda: hooks.answer_calls(model.model, lambda call: attend(change(call), kernel))

    def opened(call):
        return replace(call, allowed=None, causal=False) if decoder or not call.module.is_causal else call

    if decoder:
        with pytest.raises(IdentityError, match="later tokens"):
            gates.LeakTest(model, fed, answered(opened), 0).causality_error()
        unmasked = answered(lambda call: replace(call, allowed=None, causal=True), rbf)
        assert gates.LeakTest(model, fed, unmasked, 0).causality_error() < 1e-5, "the future stays hidden"
        with pytest.raises(IdentityError, match="padding"):
            gates.LeakTest(model, fed, unmasked, 0).measure(sites)
        assert gates.LeakTest(model, fed, unmasked, 0).mask_error(left=False) < 1e-5, "the control: unseen on the right"
    else:
        with pytest.raises(IdentityError, match="padding"):
            gates.LeakTest(model, fed, answered(opened), 0).mask_error(left=False)
    swapped = lambda: hooks.replace(model.model, sites, dict.fromkeys(sites, hooks.Replacement(rbf)))  # noqa: E731
    assert gates.LeakTest(model, fed, swapped, 0).measure(sites)["mask_error"] < 1e-5


@pytest.mark.parametrize("left", [True, False])
def test_the_padding_of_the_gate_leaves_real_tokens_their_positions(demo, left, lines):
    fed = first_inputs(demo, pack=False, text=(lines,), tokens=20)
    padded = gates._pad_randomly(demo, fed, 1, left=left)
    assert padded["input_ids"].shape == fed["input_ids"].shape
    real, shorter = padded["attention_mask"].bool(), fed["attention_mask"][:, : -gates.PADDING].bool()
    columns = shorter.shape[1]
    assert torch.equal(padded["input_ids"][real], fed["input_ids"][:, :columns][shorter])
    short = gates._pad_randomly(demo, {name: part[:, :3] for name, part in fed.items()}, 1, left=left)
    assert torch.equal(short["attention_mask"].sum(1), fed["attention_mask"][:, :2].sum(1)), "at most half is padding"
    alone, new = forward(demo.model, fed).logits[:, :columns], forward(demo.model, padded).logits
    torch.testing.assert_close(new[real], alone[shorter], rtol=1e-4, atol=1e-4)


def test_attention_that_is_not_reproduced_not_readable_or_not_reached_is_not_swapped(demo, monkeypatch):
    for error, match in ((3e-4, r"3\.0e-04"), (math.nan, "nan")):
        with monkeypatch.context() as patch:
            patch.setattr(hooks, "identity_error", lambda *_, error=error: error)
            with pytest.raises(IdentityError, match=match):
                swap_kernel(demo, "rbf", **READ)

    class HandWrittenAttention(torch.nn.Module):
        def forward(self, x):
            return x

    model = family("bert")
    embeddings = model.model.bert.embeddings
    embeddings.by_hand = HandWrittenAttention()
    assert len(swap_kernel(model, "rbf", **READ).swap.sites) == 2, "it does not run"
    embeddings.register_forward_hook(lambda module, _args, output: module.by_hand(output))
    with pytest.raises(ModelError, match=r"bert\.embeddings\.by_hand can't be swapped(.|\n)*--layers 0-1"):
        swap_kernel(model, "rbf", **READ)
    assert len(swap_kernel(model, "rbf", layers=[0, 1], **READ).swap.sites) == 2
    # the first three passes (survey and identity) use a layer that no later one does
    model, passes = family("gpt2"), count()
    block = model.model.transformer.h[1]
    original = block.forward
    block.forward = lambda states, *rest, **more: original(states, *rest, **more) if next(passes) < 3 else states
    with pytest.raises(ModelError, match=r"never reached 1 of 2 swapped sites.*transformer\.h\.1\.attn(.|\n)*--layers"):
        swap_kernel(model, "rbf", **READ)


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
    assert swap.diverged
    for name in ("loss", "perplexity", "kl", "top1_agreement", "hidden_cosine", "hidden_cka"):
        assert getattr(swap, name) is None
        assert "diverged" in swap.reasons[name]
    assert {site.output_error for site in swap.sites} == {None}
    assert {(effect.delta, effect.significant) for effect in swap.sweep} == {(None, False)}
    assert "NaN" not in report.model_dump_json(exclude={"swap": {"formula"}})


def test_out_of_memory_at_any_stage_asks_for_a_smaller_batch_and_other_errors_pass(demo, monkeypatch):
    sizes = RuntimeError("sizes")
    for place, error, more, purpose in (
        ("runs.swap.kernel_run.run", torch.OutOfMemoryError("CUDA out of memory"), {"batch_size": 4}, "for 4"),
        ("runs.swap.kernel_run.run", RuntimeError("not enough memory: x"), {}, "for 2"),
        ("runs.swap.kernel_run.run", None, {}, "for 2"),  # torch's own
        ("models.hooks.identity_error", None, {}, "for 2"),
        ("lab.heal.pipeline.run_training", None, {"train": 2}, "to train on 2"),  # a forward pass alone fits
        ("runs.swap.kernel_run.run", sizes, {}, ""),
    ):

        def fail(*_, error=error):
            if error is None:
                torch.empty(2**58)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(f"attnlens.{place}", fail)
            with pytest.raises((ModelError, RuntimeError)) as refusal:
                swap_or_heal(demo, "rbf", **READ | more)
        if error is sizes:
            assert refusal.value is error
        else:
            assert refusal.value.problem == f"Not enough memory {purpose} sequences at once."
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


def test_exactly_the_chosen_layers_heads_and_parts_are_swapped():
    cases = ("gpt2", [1], None), ("bert", None, [0, 3]), ("llama", [0], [4, 1]), ("albert", [1], [0])
    for name, layers, heads in cases:
        model = family(name)
        report = swap_kernel(model, "rbf", layers=layers, heads=heads, **READ)
        swap, sites = report.swap, len(sites_of(model.model, first_inputs(model)))
        assert [site.layer for site in swap.sites] == (layers or list(range(sites))), name
        assert all(site.heads == (heads or list(range(4))) for site in swap.sites), name
        assert report.coverage.heads == sum(len(site.heads) for site in swap.sites)
        p, q, *_ = naive(model, "rbf", layers, heads)
        assert swap.kl == mean_divergence(p, q), name
        assert layers is None or swap.kl < swap_kernel(model, "rbf", **READ).swap.kl, name
    for part, layers in {"encoder": [0, 1], "decoder": [2, 4], "cross": [3, 5]}.items():
        sites = swap_kernel(family("bart"), "rbf", part=part, **READ).swap.sites
        assert [(site.layer, site.part) for site in sites] == [(layer, part) for layer in layers]


def test_only_sites_with_the_chosen_heads_are_swapped_and_have_shapes():
    text = families.ENCODER | {"num_attention_heads": 8, "projection_dim": 16}
    config = tf.CLIPConfig(**families.CLIP | {"text_config": text})
    torch.manual_seed(0)
    swap = swap_kernel(loaded(tf.CLIPModel(config).eval().requires_grad_(False)), "rbf", heads=[4], **READ).swap
    assert [(site.heads, site.part) for site in swap.sites] == [([4], "decoder")] * 2
    for name, causal in (("bert", False), ("llama", True)):
        model = families.build(name)
        reached = hooks.survey(model, families.inputs(name, model, padded=True))
        shapes = gates.head_shapes(reached, {reached[0].site: (1, 2)})
        assert list(shapes.values()) == [HeadShape(heads=2, head_dim=10, value_dim=10, tokens=12, causal=causal)]


@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        ({"layers": [7]}, "The model lacks layer 7.", "layers 0 to 3"),
        ({"heads": [0, 8]}, "The model lacks head 8.", "heads 0 to 7"),
        ({"part": "cross"}, "No attention sites selected", "decoder"),
        ({"text": "-", "calibration": "-", "fit": True}, "can read stdin", "Give files for the others"),
        ({"part": "decodr"}, "Unknown part 'decodr'", "Did you mean 'decoder'"),
        ({"path": "fast"}, "Unknown path 'fast'", "auto"),
        ({"sweep": "predicted"}, "Unknown sweep 'predicted'", "heads"),
        ({"sweeps": "heads"}, "Unknown option 'sweeps'", "Did you mean 'sweep'"),
        ({"calibration": "a.txt"}, "no effect without --fit", "--fit"),
        ({"kernels": "laplacian", "path": "fused"}, "No fused implementation", ""),
        ({"kernels": "rbff"}, "Unknown kernel 'rbff'", "Did you mean 'rbf'"),
        ({"kernels": "polynomial:degree=3"}, "odd `degree`", ""),
        ({"kernels": "rbf:gamma=x"}, "must be a number", ""),
        ({"kernels": "rbf:gamma=-1"}, "must be finite and above 0", ""),
        ({"kernels": []}, "No kernel given", ""),
        ({"kernels": ["rbf", "cosine"], "save": "model"}, "--save accepts a single kernel, not 2", ""),
    ],
)
def test_invalid_options_are_refused(demo, options, problem, remedy):
    """Kernels are checked before a model is loaded."""
    model = "no/such/model" if "kernels" in options and "path" not in options else demo
    with pytest.raises(UsageError) as refusal:
        swap_kernel(model, **{"kernels": "rbf"} | READ | options)
    assert problem in refusal.value.problem
    assert remedy in refusal.value.remedy
    if "save" in options:
        with pytest.raises(UsageError, match="heal accepts a single kernel, not 2"):
            attnlens.heal("no/such/model", options["kernels"])


def test_forced_paths_are_reported_and_have_the_same_loss(demo):
    fused, eager = (swap_kernel(demo, "rbf", path=path, **READ).swap for path in ("fused", "eager"))
    assert [{site.path for site in swap.sites} for swap in (fused, eager)] == [{"sdpa"}, {"row tiles"}]
    assert fused.loss.after == pytest.approx(eager.loss.after, rel=1e-5)


def test_ties_and_filters_are_refused_in_cross_attention_alone():
    pairs = (("t5", "symmetric"), ("bart", "rbf+symmetric"), ("whisper", "window:4"), ("bart", "rbf+tied-key"))
    for name, words in pairs:
        model, part = family(name), "encoder" if name == "whisper" else "decoder"
        with pytest.raises(UsageError, match=r"is undefined in cross-attention(.|\n)*--part encoder or --part decoder"):
            swap_kernel(model, words, **SMALL)
        assert swap_kernel(model, words, part=part, **SMALL | {"windows": 2}).swap.kl > 0


def test_the_program_writes_the_report_of_the_function_with_a_reason_for_each_missing_number(swapped, tmp_path):
    path = tmp_path / "report.json"
    words = "swap-kernel", "--kernel", "rbf", "--windows", "8", "--length", "32", "--no-progress", "--json", path
    assert invoke(*words).returncode == 0
    report = json.loads(path.read_text())
    swap, fields = report["swap"], "kernel parameters sites identity_error causality_error loss perplexity kl "
    fields += "top1_agreement hidden_cosine hidden_cka off_simplex tokens_per_second peak_memory_bytes"
    assert report["command"] == "swap-kernel"
    assert set(fields.split()) <= set(swap)
    assert sorted(swap["loss"]) == ["after", "before", "ci95", "delta"]
    missing = {name for name, value in swap.items() if value is None}
    assert missing - {"healing", "prediction", "plan"} <= set(swap["reasons"])
    assert bytes_of(path) == bytes_of(swapped)


@pytest.mark.parametrize("more", [{"sweep": "heads", "fit": True}, {"train": 1}], ids=str)
def test_the_same_inputs_and_seed_give_the_same_bytes(demo, more):
    read = {"layers": [1], "heads": [0, 5]} | SMALL | {"windows": 2} | more
    first, second, other = (bytes_of(swap_or_heal(demo, "rbf", seed=seed, **read)) for seed in (5, 5, 6))
    assert first == second != other


def test_the_model_is_unchanged_after_every_run(demo):
    before = {name: tensor.clone() for name, tensor in demo.model.state_dict().items()}
    inputs = first_inputs(demo)
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
    negated, plain = (
        lambda factor=factor: hooks.answer_calls(
            demo.model, lambda call: attend(replace(call, value=factor * call.value), hooks.OWN)
        )
        for factor in (-30, 1)
    )
    measured = differences.compare(
        demo.model, fed, {"bad": negated, "same": plain}, "causal", lambda _: None, Design.plain(2)
    )
    bad, same = (measured[name].outcome(0, ["a"]) for name in ("bad", "same"))
    assert bad.loss.after > math.log(demo.model.config.vocab_size) > bad.loss.before
    assert (bad.destroyed, same.destroyed) == (True, False)
    pair = [torch.cat(part) for part in (measured["bad"].before, measured["bad"].after)]
    counts = torch.cat(measured["bad"].counts)
    assert len(set(counts.tolist())) == 1
    changes = pair[1] - pair[0]
    half = 12.7062 * float(changes.std()) / 2**0.5
    assert bad.loss.ci95[1] - bad.loss.delta == pytest.approx(half, rel=1e-4), "t with one degree of freedom"
