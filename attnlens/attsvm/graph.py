"""Token-priority graphs of next-token prediction, posed as Att-SVM problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from attnlens.attsvm.builders import finite, posed
from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.attsvm.problem import Problem

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
