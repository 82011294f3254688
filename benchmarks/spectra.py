"""Speed and accuracy of spectra, symmetry and definiteness of attention heads.

python benchmarks/spectra.py [--quick]

Our code and its peer run in turn on the same tensors, one thread each; medians are printed. The peer for
weights is TransformerLens's FactoredMatrix if it is installed (benchmarks/requirements.txt), else its algorithm written
out below; the peer is printed. The peer for definiteness is torch.linalg.eigvalsh.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import subjects
import torch
from torch import Tensor

from attnlens.maths import linalg
from attnlens.records import QueryKey, Site

try:
    from transformer_lens import FactoredMatrix

    PEER = f"TransformerLens {version('transformer_lens')} FactoredMatrix"
except (ImportError, PackageNotFoundError):
    PEER = "TransformerLens's algorithm, rewritten here (it is not installed)"

    class FactoredMatrix:  # type: ignore[no-redef]  # the installed one is preferred
        """A @ B, with the SVD of both factors and of their core, and the eigenvalues of B @ A."""

        def __init__(self, left: Tensor, right: Tensor) -> None:
            self.left, self.right = left, right

        def svd(self) -> tuple[Tensor, Tensor, Tensor]:
            """Return U, S, V with U diag(S) Vᵀ = A @ B."""
            u_left, s_left, v_left = torch.linalg.svd(self.left, full_matrices=False)
            u_right, s_right, v_right = torch.linalg.svd(self.right, full_matrices=False)
            middle = s_left[..., :, None] * v_left @ u_right * s_right[..., None, :]
            u, s, v = torch.linalg.svd(middle, full_matrices=False)
            return u_left @ u, s, v_right.mT @ v.mT

        @property
        def eigenvalues(self) -> Tensor:
            """Return the non-zero eigenvalues of A @ B."""
            values: Tensor = torch.linalg.eig(self.right @ self.left).eigenvalues
            return values


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: does it still run?")
    quick = parser.parse_args().quick
    print(f"{subjects.describe_machine()}\npeer: {PEER}")
    torch.set_num_threads(1)
    rounds = 1 if quick else 7
    compare_weights(24 if quick else 144, 768, 64, rounds)
    for tokens in (64, 160) if quick else (512, 2048):
        compare_verdicts(tokens, rounds=1 if quick or tokens > 1000 else 5)


def compare_weights(heads: int, d_model: int, head_dim: int, rounds: int) -> None:
    """Compare all spectra of M, with and without the symmetric part's eigenvalues."""
    print(f"\nspectra of W_Q W_Kᵀ: {heads} heads, d_model {d_model}, head_dim {head_dim}")
    query, key = (draw_random(heads, d_model, head_dim, seed=seed) for seed in (0, 1))
    exact = torch.linalg.svdvals(query[:4] @ key[:4].mT)[:, :head_dim]
    values = compute_spectra(query, key)[0][:4]
    print(
        f"  our largest error against the formed matrix: {float((values - exact).abs().max() / exact.max()):.0e}·σ_max"
    )
    for dtype in (torch.float64, torch.float32):
        factors = query.to(dtype), key.to(dtype)
        print(f"  factors and peer in {str(dtype).removeprefix('torch.')}, ours always in float64:")
        theirs = partial(run_peer, *factors)
        compare_times("singular values, eigenvalues, symmetry", partial(compute_spectra, *factors), theirs, rounds)
        compare_times(
            "with the symmetric part's eigenvalues", partial(compute_with_symmetric, *factors), theirs, rounds
        )


def compute_spectra(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """Compute our values: singular values, positivity (from the eigenvalues), symmetry."""
    form = linalg.Form(build_query_key(query, key))
    return form.singular_values, form.positivity, linalg.symmetry(form)


def compute_with_symmetric(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """Compute our values and the eigenvalues of the symmetric part."""
    form = linalg.Form(build_query_key(query, key))
    return form.singular_values, form.positivity, linalg.symmetry(form), form.symmetric_eigenvalues


def run_peer(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the peer's singular values and eigenvalues."""
    matrix = FactoredMatrix(query, key.mT)
    return matrix.svd()[1], matrix.eigenvalues


def compare_verdicts(tokens: int, rounds: int) -> None:
    """Compare the verdict on the token kernel with all its eigenvalues, starting from the logits."""
    heads, head_dim = (2 if tokens > 1000 else 8), 64
    print(f"\nis exp(L) positive semidefinite: {heads} heads, {tokens} tokens")
    factor = draw_random(heads, tokens, head_dim, seed=5)
    mercer = factor @ factor.mT / head_dim**0.5
    other = factor @ draw_random(heads, tokens, head_dim, seed=6).mT / head_dim**0.5
    nearly = mercer + mercer.diagonal(dim1=-2, dim2=-1).min() * 0.02 * draw_random(heads, tokens, tokens, seed=7)
    cases = {"independent queries and keys": other, "equal ones": mercer, "equal ones with noise": nearly}
    for name, logits in cases.items():
        verdicts, truth = linalg.definite(logits), judge_by_eigenvalues(logits)
        agree = int((verdicts == truth).sum())
        label = f"{name} ({agree} of {heads} verdicts agree, {int(verdicts.nansum())} positive)"
        compare_times(label, partial(linalg.definite, logits), partial(judge_by_eigenvalues, logits), rounds)


def judge_by_eigenvalues(logits: Tensor) -> Tensor:
    """Return 1 if the scaled kernel's least eigenvalue is at least −n·eps·λ_max, else 0; with linalg's row means."""
    logits = logits + (logits.mean(-2) - logits.mean(-1))[..., None]
    diagonal = logits.diagonal(dim1=-2, dim2=-1) / 2
    kernel = (logits - diagonal[..., None] - diagonal[..., None, :]).clamp(max=300).exp()
    values = torch.linalg.eigvalsh((kernel + kernel.mT) / 2)
    border = torch.finfo(values.dtype).eps * logits.shape[-1] * values[..., -1]
    return (values[..., 0] >= -border).double()


def compare_times(name: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> None:
    """Run both in turn and print their medians."""
    mine, other = (1e3 * seconds for seconds in subjects.time_in_turn((ours, theirs), rounds, warm=True)[0])
    print(f"  {name}: ours {mine:.1f} ms, peer {other:.1f} ms, ratio {other / mine:.1f}")


def build_query_key(query: Tensor, key: Tensor) -> QueryKey:
    """Build the QueryKey of one layer from the factors."""
    heads = tuple(range(len(query)))
    return QueryKey(query, key, 1.0, "weights", Site("attention", 0, 0, "encoder"), heads, heads)


def draw_random(*shape: int, seed: int) -> Tensor:
    """Draw standard normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    main()
