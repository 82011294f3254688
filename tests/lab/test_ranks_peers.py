"""Tests that the peers of the benchmark of ranks are what their papers say, and ours the optimum in its metric."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from loaded import loaded

from attnlens.kernels import parsed
from attnlens.kernels.lowrank import directions
from attnlens.maths import statistics
from attnlens.models import hooks, loading, texts
from attnlens.models.texts.targets import feed

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import rank_peers

sys.path.pop(0)
RANKS = (2, 12)


def falling(*shape, seed=0):
    """Columns of falling size, mixed."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(shape[-1], shape[-1], generator=generator, dtype=torch.float64)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.7 ** torch.arange(shape[-1]) @ mixed


@pytest.mark.parametrize("rank", RANKS)
def test_the_optimum_of_kq_svd_is_ours_where_all_pairs_weigh_alike(rank):
    """Lesens et al. 2025: K Qᵀ = UΣVᵀ, A = K⁺U_r, B = KᵀU_r, whose logits Q B Aᵀ Kᵀ are the best of rank r."""
    query, key = falling(90, 16, seed=1), falling(60, 16, seed=2) + 2
    left = torch.linalg.svd(key @ query.T, full_matrices=False).U[:, :rank]
    theirs = query @ (key.T @ left) @ (torch.linalg.pinv(key) @ left).T @ key.T
    query_map, key_map = (side[:, :rank] for side in directions(query.T @ query, key.T @ key))
    ours = (query @ query_map) @ (key @ key_map).T
    assert float((ours - theirs).abs().max()) <= 1e-8 * float(theirs.abs().max())
    centred = key - key.mean(0)
    query_map, key_map = (side[:, :rank] for side in directions(query.T @ query, centred.T @ centred))
    other = (query @ query_map) @ (key @ key_map).T
    assert float((other - theirs).abs().max()) > 1e-3 * float(theirs.abs().max()), "the control: centred keys"


@pytest.mark.parametrize("rank", RANKS)
def test_whitening_keys_as_palu_does_cuts_them_to_their_principal_directions(rank):
    """Chang et al. 2024: the SVD of SᵀW_K, S Sᵀ = XᵀX by Cholesky, cut, and S taken back."""
    inputs, weight = falling(80, 24, seed=3), falling(24, 16, seed=4)
    root = torch.linalg.cholesky(inputs.T @ inputs)
    left, values, right = torch.linalg.svd(root.T @ weight, full_matrices=False)
    cut = torch.linalg.solve(root.T, left[:, :rank] * values[:rank] @ right[:rank])
    key = inputs @ weight
    query_map, key_map = (side[:, :rank] for side in rank_peers.find_principal(key.T @ key))
    assert float((inputs @ cut - key @ key_map @ query_map.T).abs().max()) <= 1e-8 * float(key.abs().max())


@pytest.fixture(scope="module")
def reads():
    """What the peers are made of at every site of `demo`."""
    demo = loading.load("demo")
    batches = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=64, sequences=8))
    fed = feed(demo, batches, "causal", 0)
    sites = tuple(each.site for each in hooks.survey(demo.model, fed[0].inputs))
    return rank_peers.read_sites(demo, sites, fed)


def lost(read, sides, each):
    """Σ (⟨q, k⟩ − ⟨q, k̂⟩)² over all pairs of rotated queries and keys, where each key head has so many numbers."""
    size = read.after.queries.shape[-1]
    count = len(read.after.queries) // len(sides[0])
    maps = [
        key_map[:, : each * count] @ query_map[:, : each * count].T for query_map, key_map in zip(*sides, strict=True)
    ]
    left = torch.eye(len(read.after.keys), dtype=torch.float64) - torch.block_diag(*maps)
    assert left.shape == (size * len(read.after.queries),) * 2
    return float(torch.trace(torch.block_diag(*read.after.queries) @ left.T @ read.after.keys @ left))


@pytest.mark.parametrize("each", [4, 12])
def test_no_peer_has_better_logits_than_ours_at_uniform_weights(reads, each):
    """Trained keys; per head ours is KQ-SVD, and joint latents are better than those of single heads."""
    for read in reads.values():
        alone = directions(read.after.queries, read.after.blocks())
        joint = directions(torch.block_diag(*read.after.queries), read.after.keys)
        ours, best = lost(read, alone, each), lost(read, [side[None] for side in joint], each)
        losses = {name: lost(read, peer.sides(read), each) for name, peer in rank_peers.PEERS.items()}
        assert losses["KQ-SVD"] == pytest.approx(ours, rel=1e-8)
        assert best <= ours * (1 + 1e-9)
        joined = {name for name, peer in rank_peers.PEERS.items() if len(peer.sides(read)[0]) == 1}
        assert joined == {"SVD of W_K, all heads", "Palu J-LRD"}
        assert all(losses[name] >= best * (1 - 1e-9) for name in joined)
        assert all(losses[name] >= ours * (1 - 1e-9) for name in set(losses) - joined)
        assert max(losses.values()) > 1.05 * best, "the control: some are worse"


def test_a_peer_under_rope_and_biases_is_its_weights_changed_in_place():
    """Palu's joint SVD of W_K, as a swap of calls and as W_K Ŵ in the module: the same logits of the model."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads)).eval()
    module, inputs = model.model.layers[0].self_attn, {"input_ids": torch.randint(64, (2, 9))}
    torch.nn.init.normal_(module.k_proj.bias)
    torch.nn.init.normal_(module.k_proj.weight)
    sites = tuple(each.site for each in hooks.survey(model, inputs))
    reads = rank_peers.read_sites(loaded(model), sites, [SimpleNamespace(inputs=inputs)])
    basis = rank_peers.build_basis(rank_peers.PEERS["Palu J-LRD"], reads[sites[0]])
    kernel = parsed("rank:4,group=all,rotation=before").with_fitted(basis.latents.maps([8]))
    with torch.no_grad():
        own = model(**inputs).logits
        with hooks.replace(model, sites, {sites[0]: hooks.Replacement(kernel)}):
            swapped = model(**inputs).logits
        left = torch.linalg.eigh(reads[sites[0]].before.keys).eigenvectors[:, -8:]
        module.k_proj.weight.copy_((left @ left.T).float() @ module.k_proj.weight)
        assert torch.allclose(swapped, model(**inputs).logits, rtol=0, atol=1e-5)
    assert float((swapped - own).abs().max()) > 1e-3, "the control: something was cut"


def test_one_more_draw_stays_below_its_bound_as_often_as_said():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(1500, 6, generator=generator, dtype=torch.float64)
    below = [float(row[5]) <= statistics.prediction_bound(row[:5].tolist()) for row in draws]
    assert abs(sum(below) / len(below) - 0.95) < 3.5 * (0.95 * 0.05 / len(below)) ** 0.5
    mean = [float(row[5]) <= float(row[:5].mean() + 2.132 * row[:5].std() / 5**0.5) for row in draws]
    assert sum(mean) / len(mean) < 0.85, "the control: an interval of the mean"
    of_five = 3 + 2.131847 * 2.5**0.5 * 1.2**0.5  # the mean, Student's t, the deviation and √(1 + 1/n)
    assert statistics.prediction_bound([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(of_five, rel=1e-6)
    assert statistics.prediction_bound([0.1]) != statistics.prediction_bound([0.1])
