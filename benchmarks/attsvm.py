"""Speed, accuracy and memory of the Att-SVM solvers, and of the experiments.

python benchmarks/attsvm.py [--quick]

Ours and the peer run in turn on the same problem, one thread each; medians of processor time are printed, which other
processes disturb less than the clock. Peers: scikit-learn's SVC on
the Gram matrix, a linear program (HiGHS), cvxpy with SCS (benchmarks/requirements.txt; a line says where one is
missing), and the published training loop, one trial at a time. Memory is a fresh process's.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import subjects

# A process begins with the peak memory of the one that started it: no torch before the others have been started.
if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.maths.attsvm import Problem

PEERS = {"sklearn": "scikit-learn", "cvxpy": "cvxpy"}


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="demo, small sizes, one round: does it still run?")
    parser.add_argument("--extra", metavar="MODEL", help="solve one head's problem alone, print its extra bytes")
    wanted = parser.parse_args()
    if wanted.extra:
        print(extra(wanted.extra))
        return
    print(subjects.machine())
    for name in (PEERS[package] for package in PEERS if find_spec(package) is None):
        print(f"{name} is not installed (pip install -r benchmarks/requirements.txt): its rows are left out.")
    name, model = subjects.main_model(quick=wanted.quick)
    whole(name, model, *((8, 2) if wanted.quick else (64, 32)))
    megabytes = int(finished(__file__, "--extra", model)) / 1e6

    import torch
    from threadpoolctl import threadpool_limits

    import attnlens.maths.attsvm  # noqa: F401  # its scipy brings a BLAS of its own, which must be there to be limited

    torch.set_num_threads(1)
    threadpool_limits(1)
    frobenius(name, model, megabytes, quick=wanted.quick)
    separability(20 if wanted.quick else 240)
    nuclear(((3, 4, 5),) if wanted.quick else ((6, 8, 10), (16, 12, 24), (32, 24, 48)), 1 if wanted.quick else 3)
    convergence(20 if wanted.quick else 1000, 10 if wanted.quick else 100, rounds=1 if wanted.quick else 3)
    accuracy(*((4, 200) if wanted.quick else (100, 10_000)))


# --- the whole program ----------------------------------------------------------------------------------------------


def whole(name: str, model: str, tokens: int, sequences: int) -> None:
    """`attnlens inspect MODEL --analyzer selection`, on two threads."""
    sizes = ("--length", str(tokens), "--windows", str(sequences), "--analyzer", "selection", "--no-progress")
    print(f"\nattnlens inspect {name} --analyzer selection, {sequences} sequences of {tokens} tokens, two threads")
    began = time.perf_counter()
    finished("-m", "attnlens", "inspect", model, *sizes, OMP_NUM_THREADS="2")
    taken = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of all children so far, and this was the first
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"  {taken:.1f} s with imports and loading ({used.ru_utime + used.ru_stime:.0f} s of processor time)", end="")
    print(f", peak memory {peak / 1e9:.2f} GB (targets < 120 s, < 2 GB)")


def finished(*arguments: str, **settings: str) -> str:
    """What a Python process prints."""
    command, environment = [sys.executable, *arguments], {**os.environ, **settings}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603  # ours
    return done.stdout


# --- least Frobenius norm -------------------------------------------------------------------------------------------


def frobenius(name: str, model: str, megabytes: float, *, quick: bool) -> None:
    """Real heads and random problems, against SVC with C = 1e10 on the precomputed Gram matrix."""
    sizes = [(6, 5, 6)] if quick else [(30, 30, 30), (64, 32, 64)]
    cases = {label: (problem, 30) for label, problem in heads(name, model, quick=quick)}
    cases |= {f"synthetic, {n} queries × {T} tokens, d = {d}": (random_problem(n, T, d), 4) for n, T, d in sizes}
    print(
        "\nleast Frobenius norm: ours and the peer from the problem to the answer, for the peer with its Gram matrix"
        "\nEvery other constraint is given to SVC as −u with the label −1; its intercept can't be switched off, so that"
        "\nits norm may be a little smaller: the ratio of norms says how much"
    )
    from attnlens.maths.attsvm import solve

    for label, (problem, target) in cases.items():
        print(f"  {label}: {len(problem.margins)} constraints (target ≥ {target})")
        for tolerance in (1e-3, 1e-9):
            peer = partial(svc, problem, tolerance) if find_spec("sklearn") else None
            seconds, (found, theirs) = medians(partial(solve, problem), peer, 1 if quick else 3)
            print(f"    {ratio(seconds)}; {found.status}, gap {found.gap:.0e} (target ≤ 1e-9)")
            if theirs is None:
                break
            norm, fitting = theirs
            print(f"      SVC to {tolerance:.0e}, {1e3 * fitting:.0f} ms without its Gram matrix,", end="")
            print(f" ‖W‖ {norm / found.norm:.6f} of ours")
    print(f"  extra memory of a fresh process for one head's problem: {megabytes:.0f} MB (target ≤ 200)")


def heads(name: str, model: str, *, quick: bool) -> Iterator[tuple[str, Problem]]:
    """One head in each of three layers: its own argmax at its 64 most decided queries among 128 tokens."""
    from attnlens.models import hooks, loading

    loaded = loading.load(model)
    batch = next(iter(subjects.batches(loaded, 32 if quick else 128, 1)))
    reached = hooks.survey(loaded.model, batch.inputs)
    for layer in [0] if quick else [0, len(reached) // 2, len(reached) - 1]:
        site = reached[layer]
        tokens = site.arguments[site.input_name][0].double()
        yield f"{name}, head {layer}.1", own_problem(tokens, site.call.query_key(site.site).logits[0, 1].double())


def own_problem(tokens: Tensor, logits: Tensor) -> Problem:
    """A head's own selection: u from the module's inputs, z the query's input with a 1 for the bias."""
    import torch

    from attnlens.maths.attsvm import selection

    decided = logits.softmax(-1).amax(-1).topk(min(64, len(tokens))).indices
    queries = torch.cat([tokens, torch.ones(len(tokens), 1, dtype=tokens.dtype)], dim=1)[decided]
    return selection(tokens.expand(len(decided), *tokens.shape), queries, logits[decided].argmax(-1))


def signed_gram(problem: Problem) -> tuple[Any, Any]:
    """G with every other constraint's sign turned, and the signs."""
    import torch

    signs = torch.ones(len(problem.margins), dtype=torch.float64)
    signs[1::2] = -1
    return (problem.gram * signs * signs[:, None]).numpy(), signs.numpy()


def svc(problem: Problem, tolerance: float) -> tuple[float, float]:
    """‖w‖ of scikit-learn's hard-margin SVC, and the seconds of its fit alone."""
    from sklearn.svm import SVC

    gram, signs = signed_gram(problem)
    began = time.process_time()
    fitted = SVC(kernel="precomputed", C=1e10, tol=tolerance, cache_size=1000).fit(gram, signs)
    taken = time.process_time() - began
    weights, rows = fitted.dual_coef_[0], fitted.support_
    return float((weights @ gram[rows][:, rows] @ weights) ** 0.5), taken


def extra(model: str) -> int:
    """By how many bytes solving one head's problem raises this process's peak memory, the problem being there."""
    from attnlens.maths.attsvm import solve
    from attnlens.runs.provenance import peak_memory

    problem = next(heads("", model, quick=model == "demo"))[1]
    solve(random_problem(4, 4, 6))
    before = peak_memory()
    solve(problem)
    return peak_memory() - before


def random_problem(n: int, tokens: int, d: int, seed: int = 0) -> Problem:
    """What a random form selects among random tokens."""
    import torch

    from attnlens.maths.attsvm import selection

    x, z, form = normal(n, tokens, d, seed=seed), normal(n, d, seed=seed + 1), normal(d, d, seed=seed + 2)
    return selection(x, z, torch.einsum("ntd,de,ne->nt", x, form, z).argmax(-1))


def normal(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers in float64."""
    import torch

    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- separability ---------------------------------------------------------------------------------------------------


def separability(count: int) -> None:
    """The verdict by the min-norm point against a linear program's, where both verdicts are common."""
    import torch

    from attnlens.maths.attsvm import selection, separable

    problems = []
    for seed in range(count):
        d = 2 + seed % 3
        chosen = torch.randint(5, (5,), generator=torch.Generator().manual_seed(seed))
        problems.append(selection(normal(5, 5, d, seed=seed), normal(5, d, seed=seed + count), chosen))
    ours, theirs = ([], []), ([], [])
    for problem in problems:
        for (verdicts, seconds), judge in ((ours, lambda p: separable(p).verdict), (theirs, feasible)):
            began = time.process_time()
            verdicts.append(judge(problem))
            seconds.append(time.process_time() - began)
    agree = sum(one == other for one, other in zip(ours[0], theirs[0], strict=True))
    print(f"\nis there any W: {count} random problems, 5 queries × 5 tokens, d = 2 … 4, peer HiGHS")
    print(f"  {agree} of {count} verdicts agree (target: all), {sum(theirs[0])} separable")
    print(f"  {ratio([statistics.median(ours[1]), statistics.median(theirs[1])])} (no target)")


def feasible(problem: Problem) -> bool:
    """Whether a linear program finds a W."""
    import numpy as np
    from scipy.optimize import linprog

    rows = (problem.differences[:, :, None] * problem.paired_queries[:, None]).flatten(1).numpy()
    found = linprog(np.zeros(rows.shape[1]), A_ub=-rows, b_ub=-problem.margins.numpy(), bounds=(None, None))
    return bool(found.status == 0)


# --- least nuclear norm ---------------------------------------------------------------------------------------------


def nuclear(sizes: tuple[tuple[int, int, int], ...], rounds: int) -> None:
    """Gap 1e-4, against cvxpy with SCS on the same reduced problem, at the eps that comes within that gap."""
    from attnlens.maths.attsvm import solve_nuclear

    print("\nleast nuclear norm at gap 1e-4, peer cvxpy + SCS on the same reduced problem")
    print("  (eps 1e-5: with 1e-4 its norm, made feasible, is up to 1e-3 off)")
    for n, tokens, d in sizes:
        problem = random_problem(n, tokens, d)
        peer = partial(scs, problem) if find_spec("cvxpy") else None
        seconds, (found, theirs) = medians(partial(solve_nuclear, problem), peer, rounds)
        print(f"  {n} queries × {tokens} tokens, d = {d}: {ratio(seconds)} (target ≥ 10)")
        print(f"    ours {found.status}, gap {found.gap:.0e}", end="")
        print("" if theirs is None else f"; peer's norm, made feasible, is {theirs / found.norm - 1:+.0e} of ours")


def scs(problem: Problem) -> float:
    """‖W‖_* once W is scaled to its least margin."""
    import cvxpy
    import numpy as np

    from attnlens.maths.attsvm.solvers.nuclear import row_basis

    u = (problem.differences @ row_basis(problem.differences)).numpy()
    z = (problem.paired_queries @ row_basis(problem.queries)).numpy()
    W = cvxpy.Variable((u.shape[1], z.shape[1]))
    posed = cvxpy.Problem(
        cvxpy.Minimize(cvxpy.normNuc(W)), [cvxpy.sum(cvxpy.multiply(u @ W, z), axis=1) >= problem.margins.numpy()]
    )
    posed.solve(solver=cvxpy.SCS, eps=1e-5)
    least = float(((u @ W.value) * z).sum(1).min())
    return float(np.linalg.norm(W.value, "nuc")) / least


# --- convergence ----------------------------------------------------------------------------------------------------


def convergence(trials: int, iterations: int, rounds: int) -> None:
    """Batched descent against the published loop, which takes one trial at a time."""
    import torch

    from attnlens.maths.attsvm.descent import Instances, Linear, descend

    n, tokens, d, few = 6, 8, 10, 3
    x, z, v = unit(normal(trials, n, tokens, d, seed=0)), unit(normal(trials, n, d, seed=1)), normal(trials, d, seed=2)
    labels = torch.where(normal(trials, n, seed=3) > 0, 1.0, -1.0).double()
    start = torch.zeros(trials, d, d, dtype=torch.float64)
    ours = partial(descend, Instances(x, z, labels, Linear(unit(v))), start, iterations, lr=0.1)

    def published() -> Tensor:
        forms = [trained(x[trial], z[trial], labels[trial], unit(v)[trial], iterations) for trial in range(few)]
        return torch.stack(forms)

    seconds, (found, theirs) = medians(ours, published, rounds)
    apart = float((found.W[-1][:few] - theirs).abs().max())
    print(f"\ndescent: {trials} trials × {iterations} iterations, n = {n}, T = {tokens}, d = {d}")
    print(f"  peer: the published loop with autograd, measured on {few} trials and scaled to {trials}")
    print(f"  {ratio([seconds[0], seconds[1] * trials / few])} (target ≥ 50); largest difference in W {apart:.0e}")


def unit(vectors: Tensor) -> Tensor:
    """Of length 1."""
    return vectors / vectors.norm(dim=-1, keepdim=True)


def trained(x: Tensor, z: Tensor, labels: Tensor, v: Tensor, iterations: int) -> Tensor:
    """W after normalised gradient descent on the logistic loss, as published: torch autograd, one trial."""
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


def accuracy(trials: int, iterations: int) -> None:
    """Median correlation of the trained W with the SVM of the tokens that it has selected."""
    import torch

    from attnlens.maths.attsvm import selection, solve
    from attnlens.maths.attsvm.descent import Instances, Linear, descend

    x, z = unit(normal(trials, 6, 8, 10, seed=0)), unit(normal(trials, 6, 10, seed=1))
    instances = Instances(x, z, torch.ones(trials, 6).double(), Linear(unit(normal(trials, 10, seed=2))))
    steps = [iterations // 10, iterations // 2, iterations]
    began = time.process_time()
    found = descend(instances, torch.zeros(trials, 10, 10).double(), iterations, lr=0.1, record=steps)
    taken = time.process_time() - began
    answers = [solve(selection(x[trial], z[trial], found.chosen[-1, trial])) for trial in range(trials)]
    none = torch.full((10, 10), torch.nan, dtype=torch.float64)
    read = found.correlation(torch.stack([none if answer.W is None else answer.W for answer in answers]))
    medians_at = ", ".join(f"{value:.6f} at {at}" for at, value in zip(steps, read.nanmedian(1).values, strict=True))
    feasible_trials = sum(answer.W is not None for answer in answers)
    print(
        f"  correlation with the SVM, median of {feasible_trials} of {trials} trials that a W separates: {medians_at}"
    )
    print(f"    {taken:.1f} s (target ≥ 0.9999 at 10,000 iterations, where the textbook gradient falls to 0.455)")


# --- clocks ---------------------------------------------------------------------------------------------------------


def medians(ours: Callable[[], Any], peer: Callable[[], Any] | None, rounds: int) -> tuple[list[float], list[Any]]:
    """Median processor seconds of each, in turn after a first each, and what each returned; None: no peer."""
    for function in (ours, peer):
        if function is not None:
            function()  # imports and warms up
    seconds: tuple[list[float], list[float]] = ([], [])
    results: list[Any] = [None, None]
    for _ in range(rounds):
        for place, function in enumerate((ours, peer)):
            if function is not None:
                began = time.process_time()
                results[place] = function()
                seconds[place].append(time.process_time() - began)
    return [statistics.median(times) for times in seconds if times], results


def ratio(seconds: list[float]) -> str:
    """Ours, the peer's, how many times longer the peer took."""
    ours = f"ours {1e3 * seconds[0]:.1f} ms"
    return f"{ours}, peer {1e3 * seconds[1]:.1f} ms, ratio {seconds[1] / seconds[0]:.1f}" if seconds[1:] else ours


if __name__ == "__main__":
    main()
