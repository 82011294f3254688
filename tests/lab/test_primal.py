"""Tests that the primal module is the paper's attention, its J the paper's loss, and that its models train."""

import copy
import gc
import itertools
import math
import subprocess
import sys
import warnings
import weakref

import families
import pytest
import torch
import transformers as tf
from safetensors.torch import load_model
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from watch import unwatched

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.lab import primal
from attnlens.lab.primal import PrimalAttention, PrimalHeads
from attnlens.maths import ksvd

pytestmark = pytest.mark.filterwarnings("ignore:.*limits the rank")
BATCH, HEADS, TOKENS, DIM, SCORES = 2, 3, 9, 5, 4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def drawn(tokens=TOKENS, dtype=torch.float64):
    return [torch.randn(BATCH, HEADS, tokens, DIM, dtype=dtype) + 0.3 for _ in range(3)]


def heads_of(scores=SCORES, samples=0):
    return PrimalHeads(HEADS, DIM, scores, value_dim=6, samples=samples).double()


def naive(heads, q, k, causal=False, rows=None):
    """Token by token, head by head."""
    tokens, projection = q.shape[2], torch.eye(DIM, dtype=torch.float64)
    result = torch.zeros(BATCH, HEADS, tokens, heads.output.out_features, dtype=torch.float64)
    for b, h, i in itertools.product(range(BATCH), range(HEADS), range(tokens)):
        if rows is not None:
            projection = rows[b, h, [at * (tokens - 1) // (heads.samples - 1) for at in range(heads.samples)]]
        x, y = (z[b, h, : i + 1].mean(0) if causal else z[b, h, i] for z in (q, k))
        e = heads.query_map[h].mT @ projection @ (x / x.norm())
        r = heads.key_map[h].mT @ projection @ (y / y.norm())
        result[b, h, i] = heads.output.weight @ torch.cat([e, r]) + heads.output.bias
    return result


# --- the module ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("way", "scores"), [("plain", 1), ("causal", SCORES), ("sampled", DIM + 3)])
def test_it_is_its_formula(way, scores):
    causal, heads, (q, k, x) = way == "causal", heads_of(scores, samples=4 if way == "sampled" else 0), drawn()
    rows = x if way == "sampled" else None
    output = heads(q, k, causal=causal, rows=rows)
    assert_close(output, naive(heads, q, k, causal, rows), rtol=1e-12, atol=1e-12)
    assert (output - naive(heads, q, k, not causal, rows)).abs().max() > 1e-2, "the control: another way differs"


def test_initial_values_are_the_published_ones():
    heads = PrimalHeads(HEADS, DIM, SCORES)
    for part in (heads.query_map, heads.key_map):
        flat = part.flatten(1)
        assert_close(flat @ flat.mT, torch.eye(HEADS), rtol=0, atol=1e-5)
    multipliers = heads.log_multipliers.exp()
    assert ((multipliers > 0) & (multipliers < 1)).all()
    assert heads.output.weight.shape == (DIM, 2 * SCORES)


def test_causal_never_looks_ahead_and_sampled_rows_do():
    q, k, x = drawn()
    later = [torch.cat([z[:, :, :5], torch.randn_like(z[:, :, 5:])], 2) for z in (q, k, x)]
    heads = heads_of()
    same = heads(q, k, causal=True)[:, :, :5], heads(later[0], later[1], causal=True)[:, :, :5]
    assert torch.equal(*same)
    assert (heads(q, k, causal=True) - heads(*later[:2], causal=True))[:, :, 5:].abs().max() > 1e-2
    sampled = heads_of(samples=4)
    own, other = (sampled(z[0], z[1], rows=z[2])[:, :, :5] for z in ((q, k, x), later))
    assert (own - other).abs().max() > 1e-2, "the control: F = X' reads the whole text"
    order = torch.randperm(TOKENS)
    assert torch.equal(heads(q[:, :, order], k[:, :, order]), heads(q, k)[:, :, order]), "without a mask: only itself"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("way", ["causal", "sampled"])
def test_padding_does_not_matter(way, side):
    q, k, x = drawn()
    fill = [torch.randn(BATCH, HEADS, 3, DIM, dtype=torch.float64) for _ in range(3)]
    causal, heads = way == "causal", heads_of(samples=0 if way == "causal" else 4)
    padded = [torch.cat([f, z] if side == "left" else [z, f], 2) for z, f in zip((q, k, x), fill, strict=True)]
    real = slice(3, None) if side == "left" else slice(TOKENS)
    mask = torch.zeros(BATCH, 1, TOKENS + 3, dtype=torch.bool)
    mask[..., real] = True
    expected = heads(q, k, causal=causal, rows=x)
    plain = {c: heads.objectives(c) for c in ("paper", "code")}
    output = heads(*padded[:2], causal=causal, real=mask, rows=padded[2])
    assert_close(output[:, :, real], expected, rtol=1e-12, atol=1e-12)
    for convention, own in plain.items():
        assert_close(heads.objectives(convention), own, rtol=1e-12, atol=1e-12)
    blind = heads(*padded[:2], causal=causal, rows=padded[2])
    assert (heads.objectives() - plain["paper"]).abs().max() > 1e-2, "the control: without the mask it does"
    if (way, side) != ("causal", "right"):
        assert (blind[:, :, real] - expected).abs().max() > 1e-3


def test_gradients_are_right_and_finite_where_a_query_is_zero():
    heads, (q, k, x) = heads_of(2, samples=3), drawn(4)
    names = [name for name, _ in heads.named_parameters()]

    def of(q, k, x, *parts):
        output = torch.func.functional_call(heads, dict(zip(names, parts, strict=True)), (q, k), {"rows": x})
        return output, heads.objectives("paper"), heads.objectives("code")

    inputs = [z.requires_grad_() for z in (q, k, x)] + [p.detach().clone().requires_grad_() for p in heads.parameters()]
    assert torch.autograd.gradcheck(of, inputs)
    causal, (q, k, _) = heads_of(), drawn()
    q[:, :, 0] = 0.0
    q.requires_grad_()
    causal(q, k, causal=True).square().sum().backward()
    assert q.grad.isfinite().all()
    assert q.grad.abs().max() < 1e3


def saved_bytes(work):
    """How many bytes autograd keeps for the backward pass, each storage once."""
    alive = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: alive.append(tensor) or tensor, lambda tensor: tensor):
        work()
    storages = [tensor.untyped_storage() for tensor in alive]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_memory_for_the_backward_pass_grows_with_the_tokens_alone():
    heads = heads_of()

    def primal_bytes(tokens):
        q, k, _ = (z.requires_grad_() for z in drawn(tokens))
        return saved_bytes(lambda: heads(q, k, causal=True))

    def eager_bytes(tokens):
        q, k, v = (z.requires_grad_() for z in drawn(tokens))
        return saved_bytes(lambda: (q @ k.mT).softmax(-1) @ v)

    first, second, third = map(primal_bytes, (128, 256, 512))
    assert third - second == pytest.approx(2 * (second - first), rel=1e-3)
    assert third < 2.01 * second
    assert eager_bytes(512) > 3.5 * eager_bytes(256), "the control"


def test_the_whole_layer_projects_masks_and_splits():
    layer = PrimalAttention(12, 3, 4, samples=3).double()
    x = torch.randn(BATCH, 7, 12, dtype=torch.float64)
    real = torch.ones(BATCH, 7, dtype=torch.bool)
    real[1, 5:] = False
    output = layer(x, real)
    assert_close(output[1:, :5], layer(x[1:, :5]), rtol=1e-12, atol=1e-12)
    assert_close(output[1, 5], layer.out.bias)
    split = [part(x[:1]).reshape(1, 7, 3, 4).transpose(1, 2) for part in (layer.query, layer.key)]
    rows = x[:1].reshape(1, 7, 3, 4).transpose(1, 2)
    expected = layer.out(layer.heads(*split, rows=rows).transpose(1, 2).reshape(1, 7, 12))
    assert_close(output[:1], expected)


LEAK = "future tokens would leak"
REFUSED = {
    "scores must be a whole number of at least 1, not 0": lambda: PrimalHeads(2, 4, 0),
    "scores must be a whole number of at least 1, not 1.5": lambda: PrimalHeads(2, 4, 1.5),
    "scores must be a whole number of at least 1, not '4'": lambda: PrimalAttention(12, 3, "4"),
    "samples must be a whole number of at least 0, not -1": lambda: PrimalHeads(2, 4, 3, samples=-1),
    "samples must be a whole number of at least 0, not 2.0": lambda: PrimalHeads(2, 4, 3, samples=2.0),
    "scores must be a whole number": lambda: primal.build(families.build("bert"), scores=1.5),
    "heads must be a positive divisor of d_model=10, not 3": lambda: PrimalAttention(10, 3, 4),
    LEAK: lambda: PrimalAttention(12, 3, 4, causal=True, samples=2),
    f"{LEAK}.*": lambda: heads_of(samples=3)(*drawn()[:2], causal=True, rows=drawn()[2]),
    f".*{LEAK}": lambda: primal.build(families.build("llama"), samples=3),
    "needs inputs to sample from": lambda: heads_of(samples=3)(*drawn()[:2]),
    "none is stored": lambda: heads_of().objectives(),
    "no primal attention": lambda: primal.regulariser(torch.nn.Linear(2, 2)),
    "lacks layer 7": lambda: primal.build(families.build("bert"), [0, 7]),
    "Cannot parse the layers": lambda: primal.build(families.build("bert"), "first"),
    "already has primal attention": lambda: primal.build(primal.build(families.build("bert"), [0])),
    "neither causal": lambda: primal.build(families.build("mistral"))(input_ids=torch.full((1, 12), 5)),
}


@pytest.mark.parametrize("says", REFUSED)
def test_refusals(says):
    with pytest.raises(UsageError, match=says) as refusal:
        REFUSED[says]()
    assert refusal.value.remedy


WARNED = {
    "Of 12 scores, 7 have no effect, because head_dim limits the rank to 5": lambda: PrimalHeads(2, 5, 12),
    "6 .*the number of samples limits the rank to 4": lambda: PrimalHeads(2, 8, 6, samples=4),
    "9 .*head_dim limits the rank to 8": lambda: PrimalHeads(2, 8, 9, samples=20),
    "6 .*head_dim limits the rank to 5": lambda: PrimalAttention(10, 2, 6),
    "500 .*head_dim limits": lambda: primal.build(families.build("bert"), "last", scores=500),
    "samples limits the rank to 2": lambda: primal.build(families.build("bert"), "last", scores=3, samples=2),
}


@pytest.mark.parametrize("says", WARNED)
def test_more_scores_than_the_rank_can_be_are_allowed_with_a_warning(says):
    with pytest.warns(UserWarning, match=says) as warned:
        WARNED[says]()
    assert "\n" not in str(warned[0].message)
    own_line = __file__, WARNED[says].__code__.co_firstlineno
    assert (warned[0].filename, warned[0].lineno) == own_line, "it points at the caller's line"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads_of(DIM), heads_of(4, samples=4)


# --- the loss --------------------------------------------------------------------------------------------------------
@torch.no_grad()
@pytest.mark.parametrize(("convention", "other"), [("paper", "code"), ("code", "paper")])
def test_the_regulariser_is_the_naive_sum(convention, other):
    layers, paper = torch.nn.ModuleList([heads_of(), heads_of(2)]), convention == "paper"
    by_layer = []
    for layer in layers:
        layer(*drawn()[:2], causal=True)
        e, r, _ = layer.last
        lam = layer.log_multipliers.exp()
        each = torch.zeros(BATCH, HEADS, dtype=torch.float64)
        for b, h in itertools.product(range(BATCH), range(HEADS)):
            weight = torch.diag(lam[h] if paper else lam[h] ** 2)
            total = sum(z[b, h, i] @ weight @ z[b, h, i] for z in (e, r) for i in range(TOKENS)) / 2
            each[b, h] = (total if paper else total / TOKENS) - torch.trace(layer.query_map[h].mT @ layer.key_map[h])
        by_layer.append((each**2).sum(1).mean() if paper else (each.mean(1) ** 2).mean())
    expected = sum(by_layer) if paper else sum(by_layer) / 2
    assert_close(primal.regulariser(layers, convention), expected, rtol=1e-12, atol=1e-12)
    assert (primal.regulariser(layers, other) - expected).abs() > 1e-3


@torch.no_grad()
def test_the_regulariser_is_zero_at_the_kernel_svd_and_not_beside_it():
    heads, (q, k, _) = heads_of(), [z[:1].expand(BATCH, -1, -1, -1) for z in drawn(40)]
    features = [ksvd.cosine_features(z[0]) for z in (q, k)]
    solution = ksvd.primal(ksvd.dual(*features, SCORES), *features)
    heads.query_map.copy_(solution.query_weight)
    heads.key_map.copy_(solution.key_weight)
    heads.log_multipliers.copy_(solution.multipliers.log())
    heads(q, k)
    assert primal.regulariser(heads) < 1e-20
    heads.log_multipliers.copy_((solution.multipliers.log() + math.log(40)) / 2)
    assert primal.regulariser(heads, "code") < 1e-20, "there Λ² is n/σ"
    assert primal.regulariser(heads) > 1e-2
    heads.log_multipliers.copy_(solution.multipliers.log())
    heads.query_map += 0.1 * torch.randn_like(heads.query_map)
    heads(q, k)
    assert primal.regulariser(heads) > 1e-4, "the control: perturbed it is not zero"


class Holding(torch.autograd.Function):
    """The identity, whose node in the graph holds a thing."""

    @staticmethod
    def forward(ctx, x, thing):
        ctx.thing = thing
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def passed_through(heads):
    """An output, and a weak reference to a thing that lives as long as the graph below queries does."""
    (q, k, _), thing = drawn(), torch.nn.Module()
    return heads(Holding.apply(q.requires_grad_(), thing), k), weakref.ref(thing)


def test_no_graph_outlives_the_step_or_another_pass():
    heads = heads_of()
    output, alive = passed_through(heads)
    output.sum().backward(retain_graph=True)
    del output
    gc.collect()
    assert alive() is not None, "the control: the graph waits for the regulariser"
    primal.regulariser(heads).backward()
    gc.collect()
    assert alive() is heads.last is None
    assert heads.log_multipliers.grad.isfinite().all()
    with pytest.raises(UsageError, match="`regulariser` deletes the last one"):
        primal.regulariser(heads)
    before, now = (passed_through(heads)[1] for _ in range(2))
    gc.collect()
    assert before() is None
    assert now() is not None


def test_in_eval_mode_the_scores_stay_without_their_graph_and_are_not_trained_through():
    heads = heads_of().eval()
    output, alive = passed_through(heads)
    e, r, _ = heads.last
    assert output.grad_fn is not None
    del output
    gc.collect()
    assert alive() is None
    assert e.grad_fn is r.grad_fn is None
    with torch.no_grad():
        assert torch.equal(primal.regulariser(heads), primal.regulariser(heads))
        assert primal.regulariser(heads) > 0
        assert heads.last[0] is e
    with pytest.raises(UsageError, match="recorded no gradients"):
        primal.regulariser(heads)
    with torch.no_grad():
        passed_through(heads.train())
    with pytest.raises(UsageError, match="recorded no gradients"):
        primal.regulariser(heads)


@unwatched()
@torch.no_grad()
def test_an_unknown_convention_is_refused_by_name():
    heads = heads_of()
    heads(*drawn()[:2])
    for convention in ("papr", "Paper", "", None):
        with pytest.raises(UsageError, match=f"^Unknown convention of the objective J: {convention!r}") as refusal:
            primal.regulariser(heads, convention)
        assert all(name in refusal.value.remedy for name in ("paper", "code"))
    assert primal.regulariser(heads, "paper").isfinite(), "the control"


def test_reentrant_checkpointing_is_named_where_it_records_no_gradients():
    heads, (q, k, _) = heads_of().train(), [z.requires_grad_() for z in drawn()]
    checkpoint(heads, q, k, use_reentrant=True)
    with pytest.raises(UsageError, match="eval mode, no_grad or reentrant checkpointing") as refusal:
        primal.regulariser(heads)
    assert "use_reentrant=False" in refusal.value.remedy
    checkpoint(heads, q, k, use_reentrant=False)
    primal.regulariser(heads).backward()
    assert heads.query_map.grad.abs().max() > 0, "the remedy helps"


# --- models that own it ----------------------------------------------------------------------------------------------
def inputs_of(model, tokens=10):
    ids = torch.randint(families.FIRST_WORD, families.VOCABULARY, (4, tokens))
    return {"input_ids": ids, "labels": ids}


def config(name):
    model = families.build(name)
    model.config.architectures = [type(model).__name__]
    return model.config


@pytest.mark.parametrize(
    ("name", "layers", "samples", "convention"),
    [("bert", "all", 0, "code"), ("bert", "last", 4, "paper"), ("llama", "all", 0, "paper")],
)
def test_training_makes_the_loss_fall(name, layers, samples, convention):
    model = primal.build(config(name), layers, scores=6, samples=samples).train()
    owners = [path for path, part in model.named_modules() if isinstance(part, PrimalHeads)]
    assert len(owners) == (model.config.num_hidden_layers if layers == "all" else 1)
    assert str(model.config.num_hidden_layers - 1) in owners[-1].split(".")
    optimiser, batch, losses = torch.optim.AdamW(model.parameters(), lr=5e-3), inputs_of(model), []
    for _ in range(12):
        optimiser.zero_grad()
        task, penalty = model(**batch).loss, primal.regulariser(model, convention)
        (task + 0.01 * penalty).backward()
        assert all(part.grad is not None for path in owners for part in model.get_submodule(path).parameters())
        optimiser.step()
        losses.append((task.item(), penalty.item()))
    assert losses[-1][0] < losses[0][0] - 0.3
    assert losses[-1][1] < losses[0][1] or convention == "code"


def test_a_model_can_be_copied_and_its_primal_layers_ignore_values():
    model = primal.build(config("llama"), "last", scores=6).eval()
    batch = inputs_of(model)
    with torch.no_grad():
        own = model(**batch).logits
        assert torch.equal(copy.deepcopy(model)(**batch).logits, own)
        model.model.layers[-1].self_attn.v_proj.weight.mul_(3)
        assert torch.equal(model(**batch).logits, own), "values have no effect in a primal layer"
        model.model.layers[0].self_attn.v_proj.weight.mul_(3)
        assert not torch.equal(model(**batch).logits, own), "the control: in another they have"


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_saved_one_is_refused_by_from_pretrained_and_comes_back_by_build(name, tmp_path):
    canonical, made = families.build(name), config(name)
    canonical.save_pretrained(tmp_path / "own")
    type(canonical).from_pretrained(tmp_path / "own")  # the control
    model = primal.build(made, "last", scores=6).eval()
    assert not hasattr(made, "attnlens_primal"), "the caller's config is left alone"
    type(canonical)(made)
    model.save_pretrained(tmp_path / "primal")
    for loader in (type(canonical), tf.AutoModel):
        with pytest.raises(ValueError, match=r"attnlens\.lab\.primal\.build"):
            loader.from_pretrained(tmp_path / "primal")
    with pytest.raises(ModelError, match="Primal-Attention layers"):
        attnlens.load(tmp_path / "primal")
    saved = tf.AutoConfig.from_pretrained(tmp_path / "primal")
    assert saved.attnlens_primal == [{"layer": 1, "scores": 6, "samples": 0}]
    again, batch = primal.build(saved, [1], scores=6).eval(), inputs_of(model)
    with torch.no_grad():
        assert not torch.equal(again(**batch).logits, model(**batch).logits), "the control: other random weights"
        load_model(again, tmp_path / "primal" / "model.safetensors")
        assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_the_record_grows_with_another_part_and_is_of_the_model_alone():
    model = primal.build(families.build("bert"), [1], scores=6, samples=4)
    primal.build(model, [0], scores=3)
    both = [{"layer": 0, "scores": 3, "samples": 0}, {"layer": 1, "scores": 6, "samples": 4}]
    assert model.config.attnlens_primal == both
    model.config.architectures = ["BertForMaskedLM"]
    assert primal.build(model.config, [0], scores=5).config.attnlens_primal == [{"layer": 0, "scores": 5, "samples": 0}]
    assert model.config.attnlens_primal == both


def test_a_causal_model_never_looks_ahead_and_padding_does_not_matter():
    model = primal.build(config("llama"), "all", scores=6).eval()
    ids = inputs_of(model)["input_ids"]
    other = torch.cat([ids[:, :5], ids[:, 5:].flip(0)], 1)
    with torch.no_grad():
        first, second = model(input_ids=ids).logits, model(input_ids=other).logits
        assert torch.equal(first[:, :5], second[:, :5])
        assert not torch.equal(first[:, 5:], second[:, 5:])
        fill = torch.full((4, 3), 7)
        mask = torch.cat([torch.zeros(4, 3), torch.ones(4, 10)], 1).long()
        places = (mask.cumsum(1) - 1).clamp_min(0)
        padded = {"input_ids": torch.cat([fill, ids], 1), "attention_mask": mask, "position_ids": places}
        assert_close(model(**padded).logits[:, 3:], first, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "layers", "says", "of"),
    [
        ("bart", "all", r"decoder\.layers\.0\.encoder_attn is cross-attention", "config"),
        ("whisper", "all", r"decoder\.layers\.0\.encoder_attn is cross-attention", "model"),
        ("whisper", "last", r"decoder\.layers\.1\.encoder_attn is cross-attention", "config"),
        ("t5", "all", r"encoder\.block\.0.*adds a position bias to its scores \(as in T5\)", "model"),
        ("t5", [2], r"decoder\.block\.0.*adds a position bias", "config"),
        ("albert", "all", "more than once", "model"),
    ],
)
def test_families_that_cannot_be_primal_are_refused_with_the_reason(name, layers, says, of):
    model = families.build(name)
    with pytest.raises(ModelError, match=says) as refusal:
        primal.build(model if of == "model" else config(name), layers)
    assert len(str(refusal.value).splitlines()) == 2
    assert not any(isinstance(part, PrimalHeads) for part in model.modules())


@pytest.mark.parametrize(
    ("name", "layers", "count"),
    [("bart", [0, 1, 2], 3), ("whisper", [0, 2], 2), ("clip", "all", 4), ("vit", "last", 1)],
)
def test_image_models_and_models_of_two_sides_are_built_where_a_side_attends_to_itself(name, layers, count):
    model, samples = families.build(name), 4 if name == "vit" else 0
    batch = families.inputs(name, model)
    output = {"clip": "text_embeds", "bart": "logits", "whisper": "logits", "vit": "last_hidden_state"}[name]
    with torch.no_grad():
        own = model(**batch)[output]
        built = primal.build(model, layers, scores=3, samples=samples).train()
        assert (built(**batch)[output] - own).abs().max() > 1e-3
    built(**batch)
    penalty = primal.regulariser(built)
    assert penalty.isfinite()
    penalty.backward()
    owners = [part for part in built.modules() if isinstance(part, PrimalHeads)]
    assert len(owners) == count
    assert all(part.query_map.grad.abs().max() > 0 for part in owners)


def test_inputs_that_cannot_be_made_up_are_refused():
    model = families.build("bert")
    model.main_input_name = "values"
    with pytest.raises(ModelError, match="attnlens cannot generate values for BertForMaskedLM"):
        primal.build(model)


def test_generation_needs_no_cache():
    causal = primal.build(families.build("llama"))
    with pytest.raises(UsageError, match="use_cache=False"):
        causal.generate(torch.full((1, 4), 5), max_new_tokens=2, use_cache=True)
    assert causal.generate(torch.full((1, 4), 5), max_new_tokens=2, min_new_tokens=2).shape == (1, 6)


@pytest.mark.full
def test_the_module_needs_no_transformers():
    script = "import sys; from attnlens.lab.primal import PrimalAttention; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
