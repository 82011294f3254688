"""Tests that lm-eval reads the log-likelihoods of a saved swap that attnlens computes itself."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (benchmarks/requirements.txt)")


def test_a_saved_swap_has_the_same_log_likelihoods_in_lm_eval_and_without_it_they_differ(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    result = importlib.import_module("lm_eval_client").compare_likelihoods("rbf")
    assert result["choices"] == 15
    assert {size: result["apart"][size] < 1e-4 for size in ("1", "4", "16")} == {"1": True, "4": True, "16": True}
    assert result["control"] > 0.1
