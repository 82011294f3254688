"""Tests what the measures of all analyzers share: names, shapes, ranges, batches, cross-attention."""

import pytest
import torch
from heads import query_key, random, rotary

from attnlens.analyzers.registry import Analyzer, list_analyzers, measure_sources, select_analyzers

ENTRIES = [entry for entry in list_analyzers() if isinstance(entry, Analyzer) and not entry.needs_base]
every_analyzer = pytest.mark.parametrize("entry", ENTRIES, ids=[f"{entry.name} of {entry.source}" for entry in ENTRIES])


def read(entry, *batch, member=None, **rest):
    """The measures of four query heads on two key heads, of all members of a batch or of one."""
    parts = [random(*batch, count, 20, 6, seed=seed) for seed, count in enumerate((4, 2, 2))]
    query, key, value = parts if member is None else (part[member] for part in parts)
    rest |= {"value": value} if entry.source == "tokens" else {}
    return entry.function(query_key(query, key, entry.source, **rest))


@every_analyzer
def test_measures_are_finite_and_in_range_and_do_not_depend_on_the_batch(entry):
    for batch, rotation in (((), None), ((2, 3), None), ((), rotary(5, 6))):
        if rotation is not None and (entry.name, entry.source) != ("symmetry", "weights"):
            continue
        readings = read(entry, *batch, rotation=rotation)
        infos = [info for info in entry.measures if info.name != "weights.symmetry_by_distance" or rotation]
        names = [info.name for info in infos]
        assert set(readings) == set(names)
        assert list(readings) == names or entry.name == "features"
        for info in infos:
            reading = readings[info.name]
            short = 5 if rotation else 6 if "cosine" in info.name or entry.source == "weights" else 20
            shape = (*batch, 4, *((short,) if info.curve else ()))
            assert (reading.shape, reading.dtype) == (shape, torch.float64), info.name
            assert reading.isfinite().all(), info.name
            assert info.low is None or (reading >= info.low - 1e-12).all(), info.name
            assert info.high is None or (reading <= info.high + 1e-12).all(), info.name
            assert measure_sources()[info.name] == entry.source
    together = read(entry, 3)
    for member in range(3):
        for name, reading in read(entry, 3, member=member).items():
            if not name.endswith("_by_chance"):  # drawn once for the whole batch
                torch.testing.assert_close(together[name][member], reading, rtol=1e-9, atol=1e-11, msg=name)
    assert entry in select_analyzers([entry.name], entry.source)


@every_analyzer
def test_cross_attention_lacks_only_measures_of_tokens_compared_with_themselves(entry):
    value = {"value": random(3, 12, 4, seed=2)} if entry.source == "tokens" else {}
    heads = query_key(random(3, 20, 4), random(3, 12, 4, seed=1), entry.source, part="cross", **value)
    readings = entry.function(heads)
    for info in entry.measures:
        if info.self_only:
            assert info.name not in readings or readings[info.name].isnan().all(), info.name
        else:
            assert readings[info.name].isfinite().all(), info.name
