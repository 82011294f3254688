"""Tells padding from tokens in what attention is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from attnlens.choices import Part
from attnlens.records import Call, Site


def hiding_padding(call: Call, inputs: Mapping[str, Tensor]) -> Call:
    """The same computation, in which queries of padding see nothing.

    In self-attention they are the tokens that nobody sees; in cross-attention only the mask among the inputs tells.
    """
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    if not call.cross or mask is None or mask.shape != call.query.shape[::2] or bool(mask.all()):
        return call
    real = mask.bool()[:, None, :, None].expand(-1, 1, -1, call.key.shape[2])
    return replace(call, allowed=real if call.allowed is None else call.allowed & real)


def unpadded(call: Call, site: Site, inputs: Mapping[str, Tensor]) -> Iterator[Call]:
    """The same computation without padding: sequence by sequence, or whole where there is none."""
    hiding = hiding_padding(call, inputs)
    for batch, queries, keys in real_parts(hiding.allowed, call.query.shape[0], site.part):
        yield call if isinstance(queries, slice) else hiding.sequences(batch, queries, keys)


def real_parts(
    allowed: Tensor | None, sequences: int, part: Part
) -> Iterator[tuple[list[int], Tensor | slice, Tensor | slice]]:
    """Sequences of a batch with the queries and keys that are no padding; one in which no query sees a key is left out.

    A key that no query may see is padding, and in cross-attention a query that may see none.
    """
    every = list(range(sequences)), slice(None), slice(None)
    if allowed is None:
        yield every
        return
    keys = allowed.any(dim=-2).any(dim=-2).expand(sequences, -1)
    queries = allowed.any(dim=-1).any(dim=-2).expand(sequences, -1) if part == "cross" else keys
    if bool(keys.all()) and bool(queries.all()):
        yield every
        return
    for sequence in keys.any(-1).nonzero().flatten().tolist():
        yield [sequence], queries[sequence].nonzero().squeeze(-1), keys[sequence].nonzero().squeeze(-1)
