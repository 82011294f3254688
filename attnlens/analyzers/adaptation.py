"""How far an adapter moved each head's bilinear form, and in how many directions."""

from __future__ import annotations

from functools import partial

from attnlens.analyzers.registry import MeasureInfo, Readings, analyzer, linalg
from attnlens.records import QueryKey

NO_ADAPTER = "no adapter was given, or the matrix is zero without it"
adapter_measure = partial(MeasureInfo, low=0, self_only=False, missing=NO_ADAPTER, has_null=False)
MEASURES = (
    adapter_measure(
        "adapter.change",
        "relative change of M due to the adapter; under RoPE M is that of equal positions",
        "‖M' − M‖_F/‖M‖_F, M of the base and M' with the adapter",
        headline=True,
        ends="largest",
        use="The largest values are in the heads that fine-tuning changed; near 0, a head does not need the adapter.",
    ),
    adapter_measure(
        "adapter.change_rank",
        "rank of the change of M due to the adapter; at most 2r if queries and keys are adapted",
        "number of σ(M' − M) above eps·n·max(‖M‖_F, ‖M' − M‖_F)",
        use="Below 2r, the adapter does not use its full rank r.",
    ),
)


@analyzer("adaptation", source="weights", measures=MEASURES, by_default=False, needs_base=True)
def of_weights(query_key: QueryKey) -> Readings:
    """How much did an adapter change a head's bilinear form, and in how many directions?

    M = s·W_Q W_Kᵀ of the base and M' with the adapter (LoRA of rank r) merged; σ are singular values.
    """
    if query_key.base is None:
        nothing = query_key.query.new_full(query_key.query.shape[:-2], float("nan")).double()
        return {info.name: nothing for info in MEASURES}
    size, rank = linalg.change(query_key, query_key.base)
    return {"adapter.change": size, "adapter.change_rank": rank}
