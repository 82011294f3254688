"""Tests that lm-eval reads the log-likelihoods of a saved swap that attnlens computes itself."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (benchmarks/requirements.txt)")


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        return importlib.import_module("lm_eval_client").compare_likelihoods("rbf")


@pytest.mark.parametrize("size", ["1", "4", "16"], ids=lambda size: f"batches of {size}")
def test_a_saved_swap_has_the_same_log_likelihoods_in_lm_eval(found, size):
    assert found["choices"] == 15
    assert found["apart"][size] < 1e-4


def test_without_the_swap_they_differ(found):
    assert found["control"] > 0.1
