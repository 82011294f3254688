"""Tests every model family under swapped kernels: identity, leaks, paths, notes, reports and generation."""

import itertools
from dataclasses import replace

import families
import pytest
import torch
import transformers as tf
from loaded import BARE, SMALL, apart, family, loaded, outputs, sites_of, swap_or_heal

import attnlens
from attnlens.errors import IdentityError, ModelError, UsageError
from attnlens.kernels import parsed
from attnlens.kernels.attention import attend
from attnlens.models import hooks
from attnlens.runs.swap import sites as gates
from attnlens.runs.swap.fit import find_turns
from attnlens.runs.swap.pipeline import swap_kernel

ENCODERS = ["bert", "roberta", "distilbert", "albert", "mpnet", "deberta_v2"]
TASKS = dict.fromkeys(families.CAUSAL, "causal") | dict.fromkeys(ENCODERS, "masked")
TASKS |= dict.fromkeys(("t5", "bart", "whisper"), "seq2seq")
OTHERS = {
    **{"polynomial": ["gpt2", "t5"], "linear": ["llama", "bert"], "elu": ["gpt_oss", "bart"]},
    **{"window:4": ["gemma2", "albert"], "rbf+window:3": ["mistral", "whisper"]},
}
"""Two families for each kernel other than RBF, which every family gets."""
PAIRS = [(name, "rbf") for name in families.REACHED] + [(name, words) for words in OTHERS for name in OTHERS[words]]


def replaced(words, model, sites, path="auto"):
    """Swap a kernel into every self-attention and, if the kernel has no filter, into cross-attention."""
    kernel = parsed(words)
    chosen = [site for site in sites if site.part != "cross" or kernel.filter is None]
    return hooks.replace(model, sites, dict.fromkeys(chosen, hooks.Replacement(kernel)), path)


def swapped_outputs(words, model, sites, inputs, path="auto"):
    with replaced(words, model, sites, path):
        return outputs(model, inputs)


def side_of(name):
    return "left" if name in families.CAUSAL else "right"


def test_the_rotation_of_a_sites_keys_is_that_of_its_model():
    model, keys = family("llama"), []
    inputs = families.inputs("llama", model.model)
    reached = hooks.survey(model.model, inputs)[0]
    site, call = reached.site, reached.call
    hook = call.module.k_proj.register_forward_hook(lambda *args: keys.append(args[-1]))
    outputs(model.model, inputs)
    hook.remove()
    unrotated = keys[0].unflatten(-1, (-1, call.module.head_dim)).transpose(1, 2)
    torch.testing.assert_close(
        find_turns(model, [site])[site].rotate(unrotated, call.places), call.key, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", families.UNLIKE)
def test_exponential_changes_nothing_and_rbf_is_the_same_on_every_path(name):
    model = families.build(name)
    sites = sites_of(model, families.inputs(name, model))
    for padded in (True, False):
        inputs = families.inputs(name, model, padded=padded, side=side_of(name))
        eager = swapped_outputs("rbf:gamma=1", model, sites, inputs, "eager")
        assert apart(eager, swapped_outputs("rbf:gamma=1", model, sites, inputs)) <= 1e-5
        if name == "gpt_oss":
            with pytest.raises(UsageError, match="sinks"):
                swapped_outputs("rbf:gamma=1", model, sites, inputs, "fused")
        else:
            assert apart(eager, swapped_outputs("rbf:gamma=1", model, sites, inputs, "fused")) <= 1e-5
    hooks.allow_float64(model.double())
    # transformers' own Gemma 2 and Bloom give NaN at real tokens behind padding on the left
    side = "right" if name in ("gemma2", "bloom") else side_of(name)
    for padded in (True, False):
        precise = hooks.as_dtype(families.inputs(name, model, padded=padded, side=side), torch.float64)
        own = outputs(model, precise)
        for path in ("auto",) if padded else ("auto", "eager"):
            assert apart(own, swapped_outputs("exponential", model, sites, precise, path)) <= 2e-6
        assert apart(own, swapped_outputs("rbf", model, sites, precise)) > 1e-2, "another kernel"


@pytest.mark.parametrize(("name", "words"), [pair for pair in PAIRS if pair[0] != "vit"])
def test_outputs_depend_neither_on_later_tokens_nor_on_padding(name, words):
    model, early = families.build(name), 5
    if model._can_set_experts_implementation():  # others round by the number of an expert's tokens
        model.set_experts_implementation("batched_mm")
    inputs = families.inputs(name, model)
    sites = sites_of(model, inputs)
    ids = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    later = inputs[ids].clone()
    later[:, early:] = families.FIRST_WORD + (later[:, early:] + 17) % (families.VOCABULARY - families.FIRST_WORD)
    if name != "clip":
        with torch.no_grad(), replaced(words, model, sites):
            first, second = (hooks.forward(model, each).logits for each in (inputs, inputs | {ids: later}))
        assert torch.equal(first[:, :early], second[:, :early]) == (name not in ENCODERS)
        changed = slice(0, early) if name in ENCODERS else slice(early, None)
        assert not torch.allclose(first[:, changed], second[:, changed], atol=1e-2)
    inputs = families.inputs(name, model, padded=True, side=side_of(name))
    ids, mask = (("decoder_" if name == "whisper" else "") + part for part in ("input_ids", "attention_mask"))
    other = inputs | {ids: inputs[ids].masked_fill(inputs[mask] == 0, 77)}
    assert not torch.equal(other[ids], inputs[ids])
    own, again = (swapped_outputs(words, model, sites, each) for each in (inputs, other))
    assert apart(own, again) <= 1e-5
    if name not in ("whisper", "clip"):  # padding behind a causal decoder's tokens is hidden twice
        unmasked = other | {mask: torch.ones_like(inputs[mask])}
        with torch.no_grad(), replaced(words, model, sites):
            visible = hooks.real_outputs(hooks.forward(model, unmasked), inputs)
        assert apart(own, visible) > 1e-3, "the control: the same content, not masked"


@pytest.mark.parametrize(("name", "padded"), [("gpt2", False), ("llama", True), ("bert", True)])
def test_fused_rbf_has_the_gradients_of_eager_rbf(name, padded):
    model, by_path = families.build(name).requires_grad_(True), []
    inputs = families.inputs(name, model, padded=padded)
    for path in ("eager", "fused"):
        model.zero_grad()
        with replaced("rbf", model, sites_of(model, inputs), path):
            hooks.forward(model, inputs).logits.square().mean().backward()
        by_path.append({key: each.grad for key, each in model.named_parameters() if each.grad is not None})
    eager, fused = by_path
    assert eager.keys() == fused.keys()
    assert any(part in key for key in eager for part in families.QUERY_KEY)
    for key, gradient in eager.items():
        scale = max(float(gradient.norm()), 1e-4)  # a gradient that is 0 in exact arithmetic (W_K's bias in a softmax)
        assert float((gradient - fused[key]).norm()) <= 1e-4 * scale, key
    first, second = (torch.cat([part.flatten() for part in each.values()]) for each in by_path)
    assert apart([first], [second]) <= 1e-5


@pytest.mark.parametrize("name", families.UNLIKE)
def test_every_family_gets_a_complete_report(name):
    options = {key: number for key, number in SMALL.items() if name != "vit" or key != "length"}
    swap = swap_kernel(family(name), "rbf", **options).swap
    assert swap.task == TASKS.get(name, "hidden")
    assert swap.sites
    assert swap.identity_error <= 1e-5
    for field in ("causality_error", "mask_error"):
        error = getattr(swap, field)
        assert (error is None and field in swap.reasons) or error <= 1e-5
    for field in ("loss", "perplexity", "kl", "top1_agreement", "hidden_cosine", "hidden_cka"):
        assert (getattr(swap, field) is None) == (field in swap.reasons), field
    assert (swap.kl if swap.hidden_cosine is None else 1 - swap.hidden_cosine) > 1e-4


def test_rbf_behind_a_norm_of_unit_gain_is_the_exponential_in_every_type():
    for gain, dtype in itertools.product((1, 3), (torch.float32, torch.bfloat16)):
        model = families.build("qwen3")
        for key, parameter in model.named_parameters():
            if key.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.copy_(torch.linspace(1 / gain, gain, len(parameter)))
        swap = swap_kernel(loaded(model.to(dtype)), "rbf", **SMALL).swap
        notes, errors = [note for note in swap.notes if "QK-norm" in note], [site.output_error for site in swap.sites]
        if gain == 1:
            (note,) = notes
            assert note.startswith("All keys of a head have the same length at 2 of 2 sites")
            assert "exponential" in note
            assert max(abs(swap.loss.delta), *errors) < 1e-5 or dtype == torch.bfloat16
        else:
            assert notes == []
            assert min(errors) > 1e-2


def test_notes_name_what_a_model_adds_to_its_scores():
    phrases = ("caps its scores", "also replaces the cap", "applied to the capped scores", "position bias", "sinks")
    for name, words, expected in (
        ("llama", "rbf", ()),
        ("gemma2", "rbf", phrases[:2]),
        ("gemma2", "taylor:order=4", (phrases[0], phrases[2])),
        ("t5", "rbf", phrases[3:4]),
        ("gpt_oss", "rbf", phrases[4:]),
    ):
        notes = " ".join(swap_kernel(family(name), words, **SMALL).swap.notes)
        assert tuple(phrase for phrase in phrases if phrase in notes) == expected, name


def test_models_that_cannot_be_swapped_are_refused():
    for name, words, kind, match in (
        ("gpt_oss", "linear", UsageError, r"sinks(.|\n)*positive kernel"),
        ("yoso", "rbf", ModelError, "YosoForMaskedLM.*its own attention code"),
        ("mamba", "rbf", ModelError, "MambaForCausalLM.*no softmax attention"),
    ):
        with pytest.raises(kind, match=match):
            swap_kernel(family(name), words, **SMALL)


def test_a_head_without_a_loss_is_ignored_by_swap_sweep_and_healing():
    """Loss, sweep and healing all read the last hidden states, not the first output."""
    models = [families.build("bert").bert]
    for head in (tf.BertForQuestionAnswering, tf.BertForTokenClassification):
        models.append(head(tf.BertConfig(**families.ENCODER)).eval().requires_grad_(False))
        models[-1].bert.load_state_dict(models[0].state_dict(), strict=False)
    swaps = [swap_kernel(loaded(model), "rbf", sweep="layers", **SMALL).swap for model in models]
    healed = [attnlens.heal(loaded(model), "rbf", train=2, **SMALL).swap for model in models]
    assert {swap.task for swap in (*swaps, *healed)} == {"hidden"}
    effects = [[effect.delta for effect in swap.sweep] for swap in swaps]
    assert effects[1:] == [pytest.approx(effects[0], abs=1e-6)] * 2
    measured = [[swap.stages[0].hidden_cosine, swap.healing.curve[0].validation] for swap in healed]
    assert measured[1:] == [pytest.approx(measured[0], abs=1e-6)] * 2


def test_a_classifying_decoder_is_checked_for_causality():
    model = tf.GPT2ForSequenceClassification(families.build("gpt2").config).eval().requires_grad_(False)
    model.transformer.load_state_dict(families.build("gpt2").transformer.state_dict())
    swap = swap_kernel(loaded(model), "rbf", **SMALL).swap
    assert (swap.task, swap.causality_error) == ("classification", 0)

    def ahead():
        return hooks.answer_calls(model, lambda call: attend(replace(call, allowed=None, causal=False), hooks.OWN))

    with pytest.raises(IdentityError, match="later tokens"):
        gates.LeakTest(loaded(model), families.inputs("gpt2", model), ahead, 0).causality_error()


@pytest.mark.parametrize("more", [{"sweep": "layers"}, pytest.param({"train": 2}, marks=pytest.mark.full)], ids=str)
def test_clip_is_compared_by_its_embeddings_for_every_batch_size_and_healed_from_its_swap(more):
    """Its classes are the texts of a batch: no number depends on how many there are."""
    read = {"windows": 24 if "train" in more else 8, "length": 8} | BARE
    swap, alone = (swap_or_heal(family("clip"), "rbf", batch_size=size, **read, **more).swap for size in (8, 1))
    assert (swap.task, swap.causality_error) == ("hidden", 0)
    assert swap.hidden_cosine < 0.999
    assert swap.stages[0].hidden_cosine == pytest.approx(alone.stages[0].hidden_cosine, abs=1e-6)
    if "train" in more:  # which batches are kept back and in what order they come depends on their size
        assert min(swap.hidden_cosine, alone.hidden_cosine) > swap.stages[0].hidden_cosine
        return
    assert {effect.part for effect in swap.sweep} == {"vision", "decoder"}
    healed = attnlens.heal(family("clip"), "rbf", batch_size=4, train=1, **read).swap
    assert healed.stages[0].hidden_cosine == pytest.approx(swap.hidden_cosine, abs=1e-6)
    assert healed.hidden_cosine != healed.stages[0].hidden_cosine
    assert len(healed.sites) == len(swap.sites) == 4


def generate(model, inputs, words, *, cached):
    inputs = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    more = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 1, "use_cache": cached}
    with replaced(words, model, sites_of(model, inputs)):
        return model.generate(**inputs, **more)


GENERATED = {
    **{"gpt2": ["rbf", "hard"], "llama": ["polynomial", "elu", "rbf+sink-window:2,3"]},
    **{"gpt_neox": ["linear", "window:4"], "bart": ["rbf"]},
}


@pytest.mark.parametrize(("name", "words"), [(name, words) for name in GENERATED for words in GENERATED[name]])
def test_generation_is_the_same_with_and_without_a_cache(name, words):
    padded = words not in ("polynomial", "hard")
    model = families.build(name)
    inputs = families.inputs(name, model, padded=padded, side="right" if name == "bart" else "left", batch=3)
    with_cache, without = (generate(model, inputs, words, cached=cached) for cached in (True, False))
    assert torch.equal(with_cache, without)
    own = generate(model, inputs, "exponential", cached=True)
    assert not torch.equal(own, with_cache), "the control: the model itself writes something else"


def test_ties_are_refused_with_a_cache_and_generate_without():
    model = families.build("llama")
    inputs = families.inputs("llama", model)
    for words in ("symmetric", "tied-key", "rbf+symmetric"):
        with pytest.raises(UsageError, match="needs queries and keys of the same tokens") as refusal:
            generate(model, inputs, words, cached=True)
        assert "without a key-value cache" in refusal.value.remedy
        assert generate(model, inputs, words, cached=False).shape[1] == 12 + 6
