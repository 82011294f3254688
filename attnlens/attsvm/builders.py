"""Constraints of the Att-SVM problems, one family for each theorem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from attnlens.attsvm.problem import Problem, indices, real
from attnlens.errors import UnposedError, UsageError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped
    from torch import Tensor


def selection(
    tokens: Float[Tensor, "n tokens d"],
    queries: Float[Tensor, "n d_query"],
    chosen: Int[Tensor, " n"],
    allowed: Bool[Tensor, "n tokens"] | None = None,
    margins: Float[Tensor, " n"] | None = None,
) -> Problem:
    """(x_α − x_t)ᵀ W z ≥ b for every allowed t ≠ α: one token kept (Tarzanagh et al. 2023, Eq. Att-SVM).

    `margins` is b of each sample, 1 by default. A duplicate of the chosen token is a constraint that nothing meets.
    Raises UsageError for shapes or indices that don't fit, numbers that aren't finite, and a chosen token that is not
    allowed; UnposedError when no token is left to separate from.
    """
    tokens, queries = finite("tokens", tokens, 3), finite("queries", queries, 2)
    samples, length = tokens.shape[:2]
    seen = mask("allowed", allowed, samples, length)
    every = torch.arange(samples)
    chosen = indices("chosen tokens", chosen)
    if chosen.shape != (samples,) or queries.shape[0] != samples:
        raise UsageError(f"{samples} samples don't have one query and one chosen token each.", "Give one of each.")
    within = (chosen >= 0) & (chosen < length)
    if not within.all() or not seen[every, chosen].all():
        raise UsageError("A chosen token is none of the allowed ones.", "Choose among the tokens that the query sees.")
    rivals = seen.clone()
    rivals[every, chosen] = False
    row, rival = rivals.nonzero(as_tuple=True)
    bounds = torch.ones(samples).double() if margins is None else finite("margins", margins, 1)
    if bounds.shape != (samples,):
        raise UsageError(f"{len(bounds)} margins for {samples} samples.", "Give one margin a sample.")
    return posed(tokens[row, chosen[row]] - tokens[row, rival], queries, row, bounds[row])


def prompt(
    tokens: Float[Tensor, "n tokens d"], chosen: Int[Tensor, " n"], margins: Float[Tensor, " n"] | None = None
) -> Problem:
    """(k_α − k_t)ᵀ p ≥ b: the prompt p is W for the query 1 (Tarzanagh et al. 2023, Max-margin token selection).

    Raises what `selection` raises.
    """
    tokens = finite("tokens", tokens, 3)
    return selection(tokens, torch.ones(len(tokens), 1).double(), chosen, margins=margins)


def causal(
    tokens: Float[Tensor, "tokens d"],
    chosen: Int[Tensor, " tokens"],
    queries: Float[Tensor, "tokens d_query"] | None = None,
) -> Problem:
    """(x_{α(i)} − x_t)ᵀ W z_i ≥ 1 for every position i and t ≤ i, t ≠ α(i); z = x where no queries are given.

    Raises what `selection` raises; UnposedError for a sequence of one token.
    """
    tokens = finite("tokens", tokens, 2)
    length = len(tokens)
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    return selection(tokens.expand(length, *tokens.shape), tokens if queries is None else queries, chosen, sees)


def selection_sets(
    tokens: Float[Tensor, "n tokens d"],
    queries: Float[Tensor, "n d_query"],
    sets: Bool[Tensor, "n tokens"],
    allowed: Bool[Tensor, "n tokens"] | None = None,
) -> Problem:
    """Several tokens kept: u W z = 0 inside O_i, ≥ 1 from O_i to the rest (Tarzanagh et al. 2023, Gen-SVM).

    Exact duplicates count as one token, which is kept if any of them is. Every constraint starts at one representative
    of O_i. Raises UsageError as `selection` does and for an empty O_i; UnposedError when every token is kept.
    """
    tokens, queries = finite("tokens", tokens, 3), finite("queries", queries, 2)
    seen = mask("allowed", allowed, *tokens.shape[:2])
    sets, first = merged(tokens, checked_sets(tokens, queries, sets, seen), seen)
    keeper = sets.int().argmax(-1)
    others = first.clone()
    others[torch.arange(len(tokens)), keeper] = False
    if not (others & ~sets).any():
        raise UnposedError("Every token is kept.", "Keep fewer tokens, so that there is something to separate.")
    row, other = others.nonzero(as_tuple=True)
    inside = sets[row, other]
    return posed(tokens[row, keeper[row]] - tokens[row, other], queries, row, (~inside).double(), inside)


def finite_part(
    tokens: Float[Tensor, "n tokens d"],
    queries: Float[Tensor, "n d_query"],
    weights: Float[Tensor, "n tokens"],
    sets: Bool[Tensor, "n tokens"],
) -> Problem:
    """(x_r − x_t)ᵀ W z = log(s_r/s_t) inside O_i: W_fin, the part that stays finite (Tarzanagh et al. 2023, Eq. 8).

    `weights` are the attention weights s, > 0 inside O_i; duplicates of a token share the mean of theirs. Raises
    UsageError as `selection_sets` does and for a weight of 0 inside O_i; UnposedError when every O_i is one token.
    """
    tokens, queries, weights = finite("tokens", tokens, 3), finite("queries", queries, 2), finite("weights", weights, 2)
    sets = checked_sets(tokens, queries, sets, torch.ones(tokens.shape[:2], dtype=torch.bool))
    if weights.shape != sets.shape or not (weights[sets] > 0).all():
        raise UsageError("A token that is kept has no positive weight.", "Give the attention weights, one a token.")
    sets, first = merged(tokens, sets, torch.ones_like(sets))
    same = equal_tokens(tokens).double()
    logs = ((same @ weights[..., None]).squeeze(-1) / same.sum(-1)).log()
    keeper = sets.int().argmax(-1)
    inside = sets & first
    inside[torch.arange(len(tokens)), keeper] = False
    row, other = inside.nonzero(as_tuple=True)
    ratios = logs[row, keeper[row]] - logs[row, other]
    equal = torch.ones(len(row), dtype=torch.bool)
    return posed(tokens[row, keeper[row]] - tokens[row, other], queries, row, ratios, equal)


def posed(
    differences: Float[Tensor, "constraints d"],
    queries: Float[Tensor, "queries d_query"],
    query_of: Int[Tensor, " constraints"],
    margins: Float[Tensor, " constraints"],
    equal: Bool[Tensor, " constraints"] | None = None,
) -> Problem:
    """The problem of these constraints, none of them an equality by default; raises UnposedError when there is none."""
    if not len(differences):
        raise UnposedError("There is no other token to separate from.", "Give sequences of at least two tokens.")
    free = torch.zeros(len(differences), dtype=torch.bool) if equal is None else equal
    return Problem(differences, queries, query_of, margins, free)


def finite(name: str, numbers: Shaped[Tensor, "*shape"], axes: int) -> Float[Tensor, "*shape"]:
    """The numbers in float64; raises UsageError for other than real tensors, other axes, no width, or NaN and ∞."""
    numbers = real(name, numbers)
    if numbers.ndim != axes:
        raise UsageError(f"The {name} have {numbers.ndim} axes, not {axes}.", "Give them as documented.")
    if axes > 1 and not numbers.shape[-1]:
        raise UsageError(f"The {name} have no dimension (d = 0).", "Give at least one.")
    if not numbers.isfinite().all():
        raise UsageError(f"The {name} hold numbers that aren't finite.", "Look for an overflow where they come from.")
    return numbers.detach().double()


def mask(name: str, given: Bool[Tensor, "n tokens"] | None, samples: int, length: int) -> Bool[Tensor, "n tokens"]:
    """The mask, or all true; raises UsageError when its shape differs."""
    if given is None:
        return torch.ones(samples, length, dtype=torch.bool)
    if real(f"flags `{name}`", given).shape != (samples, length):
        raise UsageError(f"`{name}` has shape {tuple(given.shape)}, not {(samples, length)}.", "Give one flag a token.")
    return given.bool()


def checked_sets(
    tokens: Float[Tensor, "n tokens d"],
    queries: Float[Tensor, "n d_query"],
    sets: Bool[Tensor, "n tokens"],
    seen: Bool[Tensor, "n tokens"],
) -> Bool[Tensor, "n tokens"]:
    """The sets O_i of one query each, none of them empty and all of them seen; raises UsageError otherwise."""
    sets = mask("sets", sets, *tokens.shape[:2])
    if len(queries) != len(tokens):
        raise UsageError(f"{len(queries)} queries for {len(tokens)} samples.", "Give one query a sample.")
    if not sets.any(-1).all() or (sets & ~seen).any():
        raise UsageError("A set of kept tokens is empty, or has one that its query doesn't see.", "Keep one it sees.")
    return sets


def merged(
    tokens: Float[Tensor, "n tokens d"], sets: Bool[Tensor, "n tokens"], seen: Bool[Tensor, "n tokens"]
) -> tuple[Bool[Tensor, "n tokens"], Bool[Tensor, "n tokens"]]:
    """The sets with every copy of a kept token, and which seen token is the first of its copies."""
    same = equal_tokens(tokens) & seen[:, :, None] & seen[:, None]
    first = seen & ~same.tril(-1).any(-1)
    return (same & sets[:, None]).any(-1), first


def equal_tokens(tokens: Float[Tensor, "n tokens d"]) -> Bool[Tensor, "n tokens tokens"]:
    """Which two tokens of a sample are equal in every number."""
    # Adding 0 makes −0 and 0 the same row; comparing pairs of rows outright would take n · T² · d bytes.
    kinds = torch.stack([(sample + 0.0).unique(dim=0, return_inverse=True)[1] for sample in tokens])
    return kinds[:, :, None] == kinds[:, None]


Edges = set[tuple[int, int]]


def next_token(sequences: Sequence[Sequence[int]], embeddings: Float[Tensor, "vocab d"]) -> Problem:
    """(e_i − e_j)ᵀ W e_k = 0 inside a cycle of k's graph, ≥ 1 along its other edges (Li et al. 2024, Graph-SVM).

    A sequence is its input tokens and then its label. The graph of a last input token k has an edge from the label to
    each input token of every sequence that ends in k; a cycle is a strongly connected component. Raises UsageError for
    a sequence of fewer than two tokens or an id outside the vocabulary; UnposedError when no graph has an edge.
    """
    embeddings = finite("embeddings", embeddings, 2)
    graphs = priorities(sequences, len(embeddings))
    rows: list[tuple[int, int, int, bool]] = []
    for query, edges in enumerate(graphs.values()):
        rows += [(query, *row) for row in constraints_of(edges, len(embeddings))]
    query_of, upper, lower, equal = torch.tensor(rows, dtype=torch.long).reshape(-1, 4).unbind(1)
    differences = embeddings[upper] - embeddings[lower]
    queries = embeddings[torch.tensor(list(graphs), dtype=torch.long)]
    return posed(differences, queries, query_of, 1.0 - equal.double(), equal.bool())


def priorities(sequences: Sequence[Sequence[int]], vocabulary: int) -> dict[int, Edges]:
    """The edges (label, input token) of every last input token, without loops; raises UsageError as `next_token`."""
    graphs: dict[int, Edges] = defaultdict(set)
    for sequence in sequences:
        if len(sequence) < 2 or not all(0 <= token < vocabulary for token in sequence):
            raise UsageError(
                f"A sequence is no input and label of {vocabulary} tokens: {str(list(sequence))[:40]}",
                "Give at least one input token and the label, all of them in the vocabulary.",
            )
        *inputs, label = sequence
        graphs[inputs[-1]] |= {(label, token) for token in inputs if token != label}
    return graphs


def constraints_of(edges: Edges, vocabulary: int) -> list[tuple[int, int, bool]]:
    """(upper, lower, equal): each component's tokens against its first, then the edges between components."""
    if not edges:
        return []
    upper, lower = np.array(sorted(edges)).T
    graph = coo_array((np.ones(len(upper)), (upper, lower)), shape=(vocabulary, vocabulary))
    component = connected_components(graph, connection="strong")[1]
    first = {component[token]: token for token in range(vocabulary - 1, -1, -1)}
    tied = [(int(first[component[t]]), t, True) for t in range(vocabulary) if first[component[t]] != t]
    return tied + [(int(i), int(j), False) for i, j in zip(upper, lower, strict=True) if component[i] != component[j]]
