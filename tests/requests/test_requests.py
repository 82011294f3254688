"""Tests that options are read as documented and that requests refuse options which contradict each other."""

from pathlib import Path

import pytest

from attnlens.errors import UsageError
from attnlens.requests import InspectRequest, SwapRequest, fields
from attnlens.requests.swap import reads_calibration, swap_kernels


def test_numbers_are_sorted_and_other_values_are_refused():
    assert fields.numbers("heads", "8,1,0-1") == [0, 1, 8]
    assert fields.numbers("heads", [3, 1, 3]) == [3, 1]
    for value in ([True], [0, -1], [2**63], [0.5], []):
        with pytest.raises(UsageError, match="is not a list of whole numbers"):
            fields.numbers("heads", value)
    assert fields.positive("lr", 0.5) == 0.5
    for number in (0, -1.0, True, float("nan"), 2.0):
        with pytest.raises(UsageError, match="is not a positive number below 1"):
            fields.positive("rate", number, below=1)


def test_paths_with_a_nul_are_refused_and_a_file_of_pairs_is_found_whatever_its_type():
    with pytest.raises(UsageError, match="--save does not name a folder"):
        SwapRequest(save="a\0b")
    for name in ("a.tsv", Path("a.tsv")):
        request = InspectRequest(text=name)
        assert (request.text, request.pairs) == ((), "a.tsv")


def test_a_saved_swap_is_computed_in_one_process_and_some_kernels_always_need_calibration(tmp_path):
    for name, value in (("jobs", 2), ("shard", "1/2"), ("engine", "ray")):
        with pytest.raises(UsageError, match=f"in this process, which `{name}` prevents"):
            swap_kernels("rbf", SwapRequest(save=tmp_path / "new", **{name: value}))
    assert [reads_calibration(swap_kernels(name, SwapRequest()), False) for name in ("rank:4", "rbf")] == [True, False]
    assert swap_kernels("rank:4", SwapRequest(calibration="a.txt"))
