"""Tests that the benchmarks still run; no timing is asserted."""

import sys
from pathlib import Path

import pytest
import torch
from program import python

FILES = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
SCRIPTS = [file for file in FILES if "__main__" in file.read_text()]


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_benchmark_runs_and_prints_its_rows(script):
    done = python(script, "--quick")
    if script.stem.startswith("gpu_") and not torch.cuda.is_available():
        assert (done.returncode, done.stdout) == (2, "")
        assert "no CUDA" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "ratio" in done.stdout
    if script.stem == "primal" and not torch.cuda.is_available():
        done = python(script, "--quick", "--device", "cuda")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "no CUDA device: not measured on a GPU\n")


def test_the_map_of_predictors_is_readable_and_hatches_missing_measures(monkeypatch, tmp_path):
    """Numbers are white on dark cells whether they are significant or not; the reason of a hatch is explained."""
    monkeypatch.syspath_prepend(str(FILES[0].parent))
    import study_predictors

    drawn = []
    monkeypatch.setattr(study_predictors.style, "encode_figure", lambda figure, _: drawn.append(figure) or b"")
    rows = {"a": {"rho": -0.8, "holds": False}, "b": {"rho": 0.1, "holds": True}}
    models = [
        {"model": name, "heads": 8, "windows": 4, "kernels": {"rbf": {"reliability": 1.0, "measures": measures}}}
        for name, measures in (("x", rows), ("y", {"a": rows["a"]}))
    ]
    study_predictors.draw_figure(models, str(tmp_path / "a.png"))
    whole, part = drawn[0].axes[:2]
    assert [text.get_color() for text in whole.texts] == ["white", study_predictors.style.INK]
    assert [len([patch for patch in axes.patches if patch.get_hatch()]) for axes in (whole, part)] == [0, 1]
    assert "Hatched: " in drawn[0].get_supxlabel()


def test_no_benchmark_hides_a_standard_module():
    """A script's folder comes first on the path: benchmarks/inspect.py would be imported for the standard inspect."""
    assert len(SCRIPTS) >= 3
    assert not {script.stem for script in FILES} & sys.stdlib_module_names
