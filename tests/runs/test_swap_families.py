"""Tests every family under every kernel: own outputs under its own, no leak, the same by every path."""

from dataclasses import replace

import families
import pytest
import torch
import transformers as tf
from loaded import SMALL, apart, family, loaded, outputs, sites_of, swap_or_heal

import attnlens
from attnlens.errors import IdentityError, ModelError, UsageError
from attnlens.kernels import parsed
from attnlens.kernels.attention import attend
from attnlens.models import hooks
from attnlens.models.texts.targets import task_of
from attnlens.runs.swap import sites as gates
from attnlens.runs.swap.pipeline import swap_kernel

DECODERS = families.CAUSAL
TWO_SIDED = ["t5", "bart", "whisper"]
ENCODERS = ["bert", "roberta", "distilbert", "albert"]
KERNELS = ["rbf", "polynomial", "linear", "elu", "window:4", "rbf+window:3"]
SINKS = ["gpt_oss"]


def swapped(name, words, model, inputs, path="auto"):
    """The outputs with that kernel in every self-attention; in cross-attention, too, where it has a meaning there."""
    sites = sites_of(model, inputs)
    kernel = parsed(words)
    chosen = [site for site in sites if site.part != "cross" or kernel.filter is None]
    with hooks.replace(model, sites, dict.fromkeys(chosen, hooks.Replacement(kernel)), path):
        return outputs(model, inputs)


def precise(name):
    model = families.build(name).double()
    hooks.allow_float64(model)
    return model


def side_of(name):
    return "left" if name in DECODERS else "right"


def bearable(name, words):
    """Signed kernels have no sinks to compete with; see test_a_signed_kernel_is_refused_beside_sinks."""
    return not (name in SINKS and words == "linear")


# --- identity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["auto", "eager"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", families.REACHED)
def test_the_own_kernel_swapped_in_changes_nothing(name, padded, path):
    model = precise(name)
    # transformers' own Gemma 2 and Bloom give NaN at real tokens behind padding on the left
    side = "right" if name in ("gemma2", "bloom") else side_of(name)
    inputs = hooks.as_dtype(families.inputs(name, model, padded=padded, side=side), torch.float64)
    assert apart(outputs(model, inputs), swapped(name, "exponential", model, inputs, path)) <= 2e-6


@pytest.mark.parametrize("name", families.REACHED)
def test_rbf_swapped_in_changes_every_family(name):
    model = precise(name)
    inputs = hooks.as_dtype(families.inputs(name, model, padded=True), torch.float64)
    assert apart(outputs(model, inputs), swapped(name, "rbf", model, inputs)) > 1e-2


# --- leaks ------------------------------------------------------------------------------------------------------------


def later_changed(name, inputs, kept):
    """The same inputs with other tokens from position `kept` on."""
    ids = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    other = inputs[ids].clone()
    other[:, kept:] = families.FIRST_WORD + (other[:, kept:] + 17) % (families.VOCABULARY - families.FIRST_WORD)
    assert not torch.equal(other[:, kept:], inputs[ids][:, kept:])
    return inputs | {ids: other}


def logits(name, words, model, inputs):
    sites = sites_of(model, inputs)
    kernel = parsed(words)
    chosen = [site for site in sites if site.part != "cross" or kernel.filter is None]
    with torch.no_grad(), hooks.replace(model, sites, dict.fromkeys(chosen, hooks.Replacement(kernel))):
        return hooks.forward(model, inputs).logits


@pytest.mark.parametrize("words", KERNELS)
@pytest.mark.parametrize("name", [*DECODERS, *TWO_SIDED])
def test_later_tokens_change_no_earlier_output(name, words):
    if not bearable(name, words):
        return
    model, kept = families.build(name), 5
    if model._can_set_experts_implementation():  # others round by the number of an expert's tokens
        model.set_experts_implementation("batched_mm")
    inputs = families.inputs(name, model)
    first, second = (logits(name, words, model, given) for given in (inputs, later_changed(name, inputs, kept)))
    assert torch.equal(first[:, :kept], second[:, :kept])
    assert not torch.allclose(first[:, kept:], second[:, kept:], atol=1e-2)


@pytest.mark.parametrize("words", KERNELS)
@pytest.mark.parametrize("name", ENCODERS)
def test_later_tokens_do_change_an_encoders_earlier_outputs(name, words):
    model, kept = families.build(name), 5
    inputs = families.inputs(name, model)
    first, second = (logits(name, words, model, given) for given in (inputs, later_changed(name, inputs, kept)))
    assert not torch.allclose(first[:, :kept], second[:, :kept], atol=1e-2)


@pytest.mark.parametrize("words", KERNELS)
@pytest.mark.parametrize("name", [name for name in families.REACHED if name != "vit"])
def test_the_content_of_padding_changes_nothing(name, words):
    if not bearable(name, words):
        return
    model = families.build(name)
    inputs = families.inputs(name, model, padded=True, side=side_of(name))
    prefix = "decoder_" if name == "whisper" else ""
    ids, mask = f"{prefix}input_ids", f"{prefix}attention_mask"
    other = inputs | {ids: inputs[ids].masked_fill(inputs[mask] == 0, 77)}
    assert not torch.equal(other[ids], inputs[ids])
    own, again = (swapped(name, words, model, given) for given in (inputs, other))
    assert apart(own, again) <= 1e-5
    unmasked = other | {mask: torch.ones_like(inputs[mask])}
    if name not in ("whisper", "clip"):  # padding behind a causal decoder's tokens is hidden twice
        with torch.no_grad():
            seen = swapped_at(name, words, model, unmasked, inputs)
        assert apart(own, seen) > 1e-3, "the control: the same content seen"


def swapped_at(name, words, model, fed, real):
    """The outputs for `fed` at the real tokens of `real`."""
    sites = sites_of(model, fed)
    kernel = parsed(words)
    chosen = [site for site in sites if site.part != "cross" or kernel.filter is None]
    with hooks.replace(model, sites, dict.fromkeys(chosen, hooks.Replacement(kernel))):
        return hooks.real_outputs(hooks.forward(model, fed), real)


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", families.REACHED)
def test_rbf_fused_is_rbf_eager(name, padded):
    model = families.build(name)
    inputs = families.inputs(name, model, padded=padded, side=side_of(name))
    eager = swapped(name, "rbf:gamma=1", model, inputs, "eager")
    assert apart(eager, swapped(name, "rbf:gamma=1", model, inputs, "auto")) <= 1e-5
    if name in SINKS:
        with pytest.raises(UsageError, match="sinks"):
            swapped(name, "rbf:gamma=1", model, inputs, "fused")
    else:
        assert apart(eager, swapped(name, "rbf:gamma=1", model, inputs, "fused")) <= 1e-5


def gradients(name, model, inputs, path):
    """Of the sum of squared logits, by every parameter."""
    sites = sites_of(model, inputs)
    model.requires_grad_(True).zero_grad()
    with hooks.replace(model, sites, dict.fromkeys(sites, hooks.Replacement(parsed("rbf"))), path):
        hooks.forward(model, inputs).logits.square().mean().backward()
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_rbf_fused_has_the_gradients_of_rbf_eager(name, padded):
    model = families.build(name)
    inputs = families.inputs(name, model, padded=padded)
    eager, fused = (gradients(name, model, inputs, path) for path in ("eager", "fused"))
    assert eager.keys() == fused.keys()
    assert any(part in key for key in eager for part in families.QUERY_KEY)
    for key, found in eager.items():
        scale = max(float(found.norm()), 1e-4)  # a gradient that is 0 in exact arithmetic (W_K's bias in a softmax)
        assert float((found - fused[key]).norm()) <= 1e-4 * scale, key
    every = [torch.cat([part.flatten() for part in found.values()]) for found in (eager, fused)]
    assert apart(every[:1], every[1:]) <= 1e-5


# --- what a reader must know ------------------------------------------------------------------------------------------


def qwen3(gain):
    model = families.build("qwen3")
    for key, parameter in model.named_parameters():
        if key.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.copy_(torch.ones_like(parameter) if gain == 1 else torch.linspace(0.5, gain, len(parameter)))
    return loaded(model)


def test_behind_a_norm_of_unit_gain_rbf_is_the_exponential_and_the_report_says_so():
    swap = swap_kernel(qwen3(1), "rbf", **SMALL).swap
    assert any("exponential" in note and "QK-norm" in note for note in swap.notes)
    assert abs(swap.loss.delta) < 1e-5
    assert max(site.output_error for site in swap.sites) < 1e-5
    other = swap_kernel(qwen3(3), "rbf", **SMALL).swap
    assert not any("QK-norm" in note for note in other.notes)
    assert min(site.output_error for site in other.sites) > 1e-2


@pytest.mark.parametrize(
    ("name", "words"),
    [("gemma2", "caps its scores"), ("t5", "position bias"), ("gpt_oss", "sinks")],
    ids=lambda part: part,
)
def test_what_a_model_adds_to_its_scores_is_said(name, words):
    assert any(words in note for note in swap_kernel(family(name), "rbf", **SMALL).swap.notes)
    assert not any(words in note for note in swap_kernel(family("llama"), "rbf", **SMALL).swap.notes)


def test_a_softcap_is_read_by_kernels_of_the_score_and_replaced_by_others():
    notes = {words: swap_kernel(family("gemma2"), words, **SMALL).swap.notes for words in ("rbf", "taylor:order=4")}
    assert any("replaces the cap too" in note for note in notes["rbf"])
    assert any("applied to the capped scores" in note for note in notes["taylor:order=4"])


@pytest.mark.parametrize("words", ["linear"])
def test_a_signed_kernel_is_refused_beside_sinks(words):
    with pytest.raises(UsageError, match="sinks") as refusal:
        swap_kernel(family("gpt_oss"), words, **SMALL)
    assert "positive kernel" in refusal.value.remedy


def fed(name):
    """How much is read; a model of pixels alone reads no tokens."""
    return {key: number for key, number in SMALL.items() if name != "vit" or key != "length"}


@pytest.mark.parametrize("name", families.REACHED)
def test_every_family_gets_a_whole_report(name):
    swap = swap_kernel(family(name), "rbf", **fed(name)).swap
    assert swap.sites
    assert swap.identity_error <= 1e-5
    for field in ("causality_error", "mask_error"):
        error = getattr(swap, field)
        assert (error is None and field in swap.reasons) or error <= 1e-5
    for field in ("loss", "perplexity", "kl", "top1_agreement", "hidden_cosine", "hidden_cka"):
        assert (getattr(swap, field) is None) == (field in swap.reasons), field
    found = swap.kl if swap.hidden_cosine is None else 1 - swap.hidden_cosine
    assert found > 1e-4, "no family is left without a measure"


TASKS = {
    **dict.fromkeys(DECODERS, "causal"),
    **dict.fromkeys(TWO_SIDED, "seq2seq"),
    **dict.fromkeys(ENCODERS, "masked"),
    "vit": "hidden",
    "clip": "hidden",
}


@pytest.mark.parametrize("name", TASKS)
def test_a_models_class_says_what_it_predicts(name):
    assert task_of(family(name).model) == TASKS[name]


def headed(model_class, config, **more):
    """A model with that head on the tiny model's attention."""
    model = model_class(config(**families.ENCODER, **more)).eval().requires_grad_(False)
    model.bert.load_state_dict(families.build("bert").bert.state_dict(), strict=False)
    return loaded(model)


@pytest.mark.parametrize("head", [tf.BertForQuestionAnswering, tf.BertForTokenClassification, tf.BertModel])
def test_a_head_that_attnlens_can_not_score_is_left_out_everywhere(head):
    """Loss, sweep and healing all look at the last hidden states, not at the first output."""
    model = loaded(families.build("bert").bert) if head is tf.BertModel else headed(head, tf.BertConfig)
    plain = loaded(families.build("bert").bert)
    swept, bare_swept = (swap_kernel(each, "rbf", sweep="layers", **SMALL).swap for each in (model, plain))
    assert [e.delta for e in swept.sweep] == pytest.approx([e.delta for e in bare_swept.sweep], abs=1e-6)
    swap, bare = (attnlens.heal(each, "rbf", train=2, **SMALL).swap for each in (model, plain))
    assert swap.task == swept.task == "hidden"
    assert swap.stages[0].hidden_cosine == pytest.approx(bare.stages[0].hidden_cosine, abs=1e-6)
    assert swap.healing.curve[0].validation == pytest.approx(bare.healing.curve[0].validation, abs=1e-6)


def test_a_decoders_classifier_is_still_held_to_causality():
    model = tf.GPT2ForSequenceClassification(families.FAMILIES["gpt2"][1]()).eval().requires_grad_(False)
    model.transformer.load_state_dict(families.build("gpt2").transformer.state_dict())
    swap = swap_kernel(loaded(model), "rbf", **SMALL).swap
    assert swap.task == "classification"
    assert swap.causality_error == 0
    ahead = lambda: hooks.answer_calls(model, lambda call: attend(replace(call, allowed=None, causal=False), hooks.OWN))  # noqa: E731  # one expression
    with pytest.raises(IdentityError, match="later tokens"):
        gates.causality_error(loaded(model), families.inputs("gpt2", model), ahead, 0)


@pytest.mark.parametrize("more", [{"sweep": "layers"}, {"train": 2}])
def test_clip_is_compared_by_its_embeddings_whatever_texts_share_a_batch(more):
    """Its classes are the texts of a batch: what is said of it must not depend on how many there are."""
    swap, alone = (
        swap_or_heal(family("clip"), "rbf", windows=24, length=8, batch_size=size, **more).swap for size in (8, 1)
    )
    assert swap.task == "hidden"
    assert swap.causality_error == 0
    assert swap.hidden_cosine < 0.999
    assert swap.stages[0].hidden_cosine == pytest.approx(alone.stages[0].hidden_cosine, abs=1e-6)
    if "train" in more:  # which batches are kept back and in what order they come depends on their size
        assert min(swap.hidden_cosine, alone.hidden_cosine) > swap.stages[0].hidden_cosine
    if "sweep" in more:
        assert {effect.part for effect in swap.sweep} == {"vision", "decoder"}


@pytest.mark.parametrize(("name", "why"), [("yoso", "its own attention code"), ("mamba", "no softmax attention")])
def test_a_model_out_of_reach_is_refused_by_name(name, why):
    with pytest.raises(ModelError, match=why) as refusal:
        swap_kernel(family(name), "rbf", **SMALL)
    assert type(family(name).model).__name__ in refusal.value.problem


# --- generation -------------------------------------------------------------------------------------------------------


def generated(model, inputs, words, *, cached, new=6):
    sites = sites_of(model, inputs)
    with hooks.replace(model, sites, dict.fromkeys(sites, hooks.Replacement(parsed(words)))):
        return model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=cached)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("words", ["rbf", "polynomial", "linear", "elu", "hard", "window:4", "rbf+sink-window:2,3"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_generation_with_a_cache_is_generation_without_one(name, words, padded):
    model = families.build(name)
    inputs = families.inputs(name, model, padded=padded, side="left", batch=3)
    with_cache, without = (generated(model, inputs, words, cached=cached) for cached in (True, False))
    assert torch.equal(with_cache, without)
    own = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert not torch.equal(own, with_cache), "the control: the model itself writes something else"


@pytest.mark.parametrize("words", ["rbf", "window:4"])
def test_generation_of_the_demo_with_a_cache_is_generation_without_one(words):
    demo = attnlens.load("demo")
    ids = demo.tokenizer("And the LORD spake unto Moses, saying,")["input_ids"]
    rows = torch.tensor([ids, [0, 0, 0, *ids[:-3]]])
    mask = torch.ones_like(rows)
    mask[1, :3] = 0
    inputs = {"input_ids": rows, "attention_mask": mask}
    with_cache, without = (generated(demo.model, inputs, words, cached=cached, new=12) for cached in (True, False))
    assert torch.equal(with_cache, without)


def test_an_encoder_decoder_generates_under_another_kernel():
    model = families.build("bart")
    inputs = families.inputs("bart", model, padded=True)
    sites = sites_of(model, inputs)
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    found = []
    for cached in (True, False):
        with hooks.replace(model, sites, dict.fromkeys(sites, hooks.Replacement(parsed("rbf")))):
            found.append(
                model.generate(
                    **given, max_new_tokens=5, min_new_tokens=5, do_sample=False, num_beams=1, use_cache=cached
                )
            )
    assert torch.equal(*found)


@pytest.mark.parametrize("words", ["symmetric", "tied-key", "rbf+symmetric"])
def test_a_tie_under_a_cache_is_refused(words):
    model = families.build("llama")
    inputs = families.inputs("llama", model)
    with pytest.raises(UsageError, match="needs the queries and keys of the same tokens") as refusal:
        generated(model, inputs, words, cached=True)
    assert "without a key-value cache" in refusal.value.remedy
    assert generated(model, inputs, words, cached=False).shape[1] == 12 + 6
