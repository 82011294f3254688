"""Speed and accuracy of the Att-SVM solvers, and speed of their gradient descent.

python benchmarks/attsvm.py [--quick]

Our code and its peer run in turn on the same problem, one thread each. Times are medians of processor time, because
other processes disturb it less than wall time. Peers: scikit-learn's SVC on the Gram matrix, cvxpy with SCS
(benchmarks/requirements.txt; missing packages are reported), and the published training loop, one trial at a time.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import subjects

# A process inherits the peak memory of its parent: import torch only after starting the others.
if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.maths.attsvm import Problem

PEERS = {"sklearn": "scikit-learn", "cvxpy": "cvxpy"}


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="demo, small sizes, one round: does it still run?")
    options = parser.parse_args()
    print(subjects.describe_machine())
    for name in (PEERS[package] for package in PEERS if find_spec(package) is None):
        print(f"{name} is not installed (pip install -r benchmarks/requirements.txt): its rows are omitted.")
    name, model = subjects.find_main_model(quick=options.quick)
    time_program(name, model, *((8, 2) if options.quick else (64, 32)))

    import torch
    from threadpoolctl import threadpool_limits

    import attnlens.maths.attsvm  # noqa: F401  # loads the BLAS of scipy before it is limited

    torch.set_num_threads(1)
    threadpool_limits(1)
    compare_frobenius(name, model, quick=options.quick)
    compare_nuclear(
        ((3, 4, 5),) if options.quick else ((6, 8, 10), (16, 12, 24), (32, 24, 48)), 1 if options.quick else 3
    )
    compare_descent(20 if options.quick else 1000, 10 if options.quick else 100, rounds=1 if options.quick else 3)


# --- the whole program ----------------------------------------------------------------------------------------------


def time_program(name: str, model: str, tokens: int, sequences: int) -> None:
    """Time `attnlens inspect MODEL --analyzer selection` on two threads."""
    sizes = ("--length", str(tokens), "--windows", str(sequences), "--analyzer", "selection", "--no-progress")
    print(f"\nattnlens inspect {name} --analyzer selection, {sequences} sequences of {tokens} tokens, two threads")
    start = time.perf_counter()
    subjects.run_python("-m", "attnlens", "inspect", model, *sizes, OMP_NUM_THREADS="2")
    seconds = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)  # covers all children so far; this was the first
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(
        f"  {seconds:.1f} s with imports and loading ({usage.ru_utime + usage.ru_stime:.0f} s of processor time)",
        end=", ",
    )
    print(f"peak memory {peak / 1e9:.2f} GB (targets < 120 s, < 2 GB)")


# --- least Frobenius norm -------------------------------------------------------------------------------------------


def compare_frobenius(name: str, model: str, *, quick: bool) -> None:
    """Compare real heads and random problems with SVC (C = 1e10) on the precomputed Gram matrix."""
    sizes = [(6, 5, 6)] if quick else [(30, 30, 30), (64, 32, 64)]
    cases = {label: (problem, 30) for label, problem in sample_problems(name, model, quick=quick)}
    cases |= {f"synthetic, {n} queries × {T} tokens, d = {d}": (draw_problem(n, T, d), 4) for n, T, d in sizes}
    print(
        "\nleast Frobenius norm: ours and the peer from the problem to the answer, for the peer with its Gram matrix"
        "\nSVC gets every other constraint as −u with the label −1; its intercept can't be switched off, so its norm"
        "\ncan be a little smaller: see the ratio of norms"
    )
    from attnlens.maths.attsvm import solve

    for label, (problem, target) in cases.items():
        print(f"  {label}: {len(problem.margins)} constraints (target ≥ {target})")
        for tolerance in (1e-3, 1e-9):
            peer = partial(fit_svc, problem, tolerance) if find_spec("sklearn") else None
            seconds, (solution, theirs) = time_with_peer(partial(solve, problem), peer, 1 if quick else 3)
            print(f"    {format_times(seconds)}; {solution.status}, gap {solution.gap:.0e} (target ≤ 1e-9)")
            if theirs is None:
                break
            norm, fitting = theirs
            print(f"      SVC to {tolerance:.0e}, {1e3 * fitting:.0f} ms without its Gram matrix,", end="")
            print(f" ‖W‖ {norm / solution.norm:.6f} of ours")


def sample_problems(name: str, model: str, *, quick: bool) -> Iterator[tuple[str, Problem]]:
    """Yield the problem of one head in each of three layers: its best tokens at the 64 most decided of 128 queries."""
    from attnlens.models import hooks, loading

    loaded = loading.load(model)
    batch = next(iter(subjects.build_batches(loaded, 32 if quick else 128, 1)))
    reached = hooks.survey(loaded.model, batch.inputs)
    for layer in [0] if quick else [0, len(reached) // 2, len(reached) - 1]:
        site = reached[layer]
        tokens = site.arguments[site.input_name][0].double()
        yield f"{name}, head {layer}.1", build_problem(tokens, site.call.query_key(site.site).logits[0, 1].double())


def build_problem(tokens: Tensor, logits: Tensor) -> Problem:
    """Build the problem of a head's own selection: u from the module's inputs, z the query's input and a 1 (bias)."""
    import torch

    from attnlens.maths.attsvm import selection

    decided = logits.softmax(-1).amax(-1).topk(min(64, len(tokens))).indices
    queries = torch.cat([tokens, torch.ones(len(tokens), 1, dtype=tokens.dtype)], dim=1)[decided]
    return selection(tokens.expand(len(decided), *tokens.shape), queries, logits[decided].argmax(-1))


def sign_gram(problem: Problem) -> tuple[Any, Any]:
    """Return G with the sign of every other constraint flipped, and the signs."""
    import torch

    signs = torch.ones(len(problem.margins), dtype=torch.float64)
    signs[1::2] = -1
    return (problem.gram * signs * signs[:, None]).numpy(), signs.numpy()


def fit_svc(problem: Problem, tolerance: float) -> tuple[float, float]:
    """Fit scikit-learn's hard-margin SVC; return ‖w‖ and the seconds of the fit alone."""
    from sklearn.svm import SVC

    gram, signs = sign_gram(problem)
    start = time.process_time()
    fitted = SVC(kernel="precomputed", C=1e10, tol=tolerance, cache_size=1000).fit(gram, signs)
    seconds = time.process_time() - start
    weights, rows = fitted.dual_coef_[0], fitted.support_
    return float((weights @ gram[rows][:, rows] @ weights) ** 0.5), seconds


def draw_problem(n: int, tokens: int, d: int) -> Problem:
    """Build the selection problem of a random form on random tokens and queries."""
    import torch

    from attnlens.maths.attsvm import selection

    x, z, form = draw_normal(n, tokens, d, seed=0), draw_normal(n, d, seed=1), draw_normal(d, d, seed=2)
    return selection(x, z, torch.einsum("ntd,de,ne->nt", x, form, z).argmax(-1))


def draw_normal(*shape: int, seed: int) -> Tensor:
    """Draw standard normal numbers in float64."""
    import torch

    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- least nuclear norm ---------------------------------------------------------------------------------------------


def compare_nuclear(sizes: tuple[tuple[int, int, int], ...], rounds: int) -> None:
    """Compare with cvxpy and SCS on the same reduced problem, at gap 1e-4 and the eps that reaches it."""
    from attnlens.maths.attsvm import solve_nuclear

    print("\nleast nuclear norm at gap 1e-4, peer cvxpy + SCS on the same reduced problem")
    print("  (eps 1e-5: with 1e-4 its norm, made feasible, is up to 1e-3 off)")
    for n, tokens, d in sizes:
        problem = draw_problem(n, tokens, d)
        peer = partial(solve_scs, problem) if find_spec("cvxpy") else None
        seconds, (solution, theirs) = time_with_peer(partial(solve_nuclear, problem), peer, rounds)
        print(f"  {n} queries × {tokens} tokens, d = {d}: {format_times(seconds)} (target ≥ 10)")
        print(f"    ours {solution.status}, gap {solution.gap:.0e}", end="")
        print("" if theirs is None else f"; peer's norm, made feasible, is {theirs / solution.norm - 1:+.0e} of ours")


def solve_scs(problem: Problem) -> float:
    """Solve the problem with SCS; return ‖W‖_* after scaling W to a least margin of 1."""
    import cvxpy
    import numpy as np

    from attnlens.maths.attsvm.nuclear import row_basis

    u = (problem.differences @ row_basis(problem.differences)).numpy()
    z = (problem.paired_queries @ row_basis(problem.queries)).numpy()
    W = cvxpy.Variable((u.shape[1], z.shape[1]))
    program = cvxpy.Problem(
        cvxpy.Minimize(cvxpy.normNuc(W)), [cvxpy.sum(cvxpy.multiply(u @ W, z), axis=1) >= problem.margins.numpy()]
    )
    program.solve(solver=cvxpy.SCS, eps=1e-5)
    least = float(((u @ W.value) * z).sum(1).min())
    return float(np.linalg.norm(W.value, "nuc")) / least


# --- convergence ----------------------------------------------------------------------------------------------------


def compare_descent(trials: int, iterations: int, rounds: int) -> None:
    """Compare batched descent with the published loop, which runs one trial at a time."""
    import torch

    from attnlens.maths.attsvm.descent import Instances, Linear, descend

    n, tokens, d, few = 6, 8, 10, 3
    x, z, v = (
        normalize(draw_normal(trials, n, tokens, d, seed=0)),
        normalize(draw_normal(trials, n, d, seed=1)),
        draw_normal(trials, d, seed=2),
    )
    labels = torch.where(draw_normal(trials, n, seed=3) > 0, 1.0, -1.0).double()
    start = torch.zeros(trials, d, d, dtype=torch.float64)
    ours = partial(descend, Instances(x, z, labels, Linear(normalize(v))), start, iterations, lr=0.1)

    def run_published() -> Tensor:
        forms = [
            train_published(x[trial], z[trial], labels[trial], normalize(v)[trial], iterations) for trial in range(few)
        ]
        return torch.stack(forms)

    seconds, (path, theirs) = time_with_peer(ours, run_published, rounds)
    difference = float((path.W[-1][:few] - theirs).abs().max())
    print(f"\ndescent: {trials} trials × {iterations} iterations, n = {n}, T = {tokens}, d = {d}")
    print(f"  peer: the published loop with autograd, measured on {few} trials and scaled to {trials}")
    print(f"  {format_times([seconds[0], seconds[1] * trials / few])} (target ≥ 50); ", end="")
    print(f"largest difference in W {difference:.0e}")


def normalize(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1."""
    return vectors / vectors.norm(dim=-1, keepdim=True)


def train_published(x: Tensor, z: Tensor, labels: Tensor, v: Tensor, iterations: int) -> Tensor:
    """Train W by normalised gradient descent on the logistic loss, as published: torch autograd, one trial."""
    import torch

    W = torch.zeros(x.shape[-1], z.shape[-1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([W], lr=0.1)
    for _ in range(iterations):
        optimizer.zero_grad()
        weights = (x @ W @ z[..., None]).squeeze(-1).softmax(-1)
        output = (weights[:, None] @ x @ v).squeeze(-1)
        torch.nn.functional.softplus(-labels * output).mean().backward()
        assert W.grad is not None
        W.grad /= W.grad.norm()
        optimizer.step()
    return W.detach()


def time_with_peer(
    ours: Callable[[], Any], peer: Callable[[], Any] | None, rounds: int
) -> tuple[list[float], list[Any]]:
    """Return the median processor seconds and the result of ours and of the peer; without a peer its result is None."""
    functions = [ours] if peer is None else [ours, peer]
    seconds, results = subjects.time_in_turn(functions, rounds, warm=True, clock=time.process_time)
    return seconds, [*results, None][:2]


def format_times(seconds: list[float]) -> str:
    """Format both times and the ratio of the peer to ours."""
    ours = f"ours {1e3 * seconds[0]:.1f} ms"
    return f"{ours}, peer {1e3 * seconds[1]:.1f} ms, ratio {seconds[1] / seconds[0]:.1f}" if seconds[1:] else ours


if __name__ == "__main__":
    main()
