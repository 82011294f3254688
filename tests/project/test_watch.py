"""Tests that the shapes and types of all calls in the maths packages are checked while tests run."""

import inspect
import sys
import typing
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch import ones, zeros
from watch import once, unwatched

from attnlens import kernels
from attnlens.analyzers.ksvd import _cumulative_curves
from attnlens.analyzers.selection import StoredSequence
from attnlens.kernels.attention import attend
from attnlens.kernels.attention.sums import running_means
from attnlens.maths import attsvm, ksvd, linalg, statistics
from attnlens.maths.attsvm.nuclear import Constraints
from attnlens.records import Call, QueryKey, Site

NAMES = ("analyzers", "kernels", "maths")
UNWATCHED = ("__init__", "scores", "primal_heads")
"""Of attention: FlexAttention counts parameters, which checks hide; and a warning names the line of its caller."""
MODULES = [
    module
    for name, module in sorted(sys.modules.items())
    if name.startswith("attnlens.") and name.split(".")[1] in NAMES
    if name not in {f"attnlens.kernels.attention.{file}" for file in UNWATCHED}
]
SITE = Site(path="attn", ordinal=0, layer=0, part="encoder")
QKV = zeros(1, 2, 5, 4), zeros(1, 2, 5, 4), zeros(1, 2, 6, 4)
WRONG = {
    "analyzers": lambda: _cumulative_curves("attention", zeros(())),
    "analyzers.selection": lambda: StoredSequence(0, zeros(2, 5, 4), zeros(5, 4), (), {}),
    "attention": lambda: running_means(zeros(1, 2, 5, 4), ones(1, 2, 6).bool()),
    "attention, laid out": lambda: attend(Call(*QKV, scale=1.0), kernels.parsed("rbf")),
    "attsvm": lambda: attsvm.selection(zeros(2, 3, 4), zeros(3, 4), torch.tensor([0, 0])),
    "attsvm.nuclear": lambda: attsvm.nuclear_rank(zeros(3)),
    "attsvm.nuclear, numpy": lambda: Constraints(*[zeros(3, 2).numpy()] * 4),
    "kernels": lambda: kernels.parsed("rbf").log(zeros(1, 2, 5, 4), zeros(1, 3, 5, 4), 1.0),
    "ksvd": lambda: ksvd.dual(zeros(5, 3), zeros(7, 4), s=1),
    "linalg": lambda: linalg.definite(zeros(2, 5, 4)),
    "records": lambda: QueryKey(zeros(2, 5, 4), zeros(1, 5, 3), 1.0, "tokens", SITE, (0, 1), (0, 0)),
    "statistics": lambda: statistics.paired_difference(zeros(4), zeros(5)),
}


def test_a_wrong_shape_raises_in_every_package_but_for_users():
    for wrong_call in WRONG.values():
        with pytest.raises(jaxtyping.TypeCheckError):
            wrong_call()
    with unwatched(), pytest.raises(RuntimeError):
        WRONG["ksvd"]()
    assert jaxtyping.jaxtyped is once, "it also decorates functions inside functions, at each call of the outer one"


def test_every_file_of_the_packages_is_watched_but_four():
    package = Path(sys.modules["attnlens"].__file__).parent
    files = {file for name in NAMES for file in (package / name).rglob("*.py")}
    files -= {package / "kernels" / "__init__.py"}
    files -= {package / "kernels" / "attention" / f"{name}.py" for name in UNWATCHED}
    watched = {Path(module.__file__) for module in MODULES if "Jaxtyping" in type(module.__spec__.loader).__name__}
    assert files == watched


def test_every_annotation_resolves():
    """An annotation that doesn't resolve is silently not checked."""
    for module in MODULES:
        for member in vars(module).values():
            if getattr(member, "__module__", None) != module.__name__:
                continue
            for each in (member, *(vars(member).values() if inspect.isclass(member) else ())):
                function = getattr(each, "fget", None) or getattr(each, "func", None) or each
                if inspect.isclass(function) or inspect.isfunction(function):
                    typing.get_type_hints(inspect.unwrap(function))
