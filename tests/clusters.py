"""A Slurm and a Ray cluster of this machine, for tests of what runs on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fake_slurm
import pytest
from attnlens.engines import slurm_jobs


def paths() -> str:
    """What other programs must have as PYTHONPATH to import what these tests import."""
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])


@contextmanager
def ray_cluster() -> Iterator[str]:
    """The address of a Ray cluster of this machine with three processors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", paths())
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the user's folder
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
        yield made.address
        made.shutdown()


def importing(patch: pytest.MonkeyPatch) -> None:
    """Jobs are programs of their own, and import what these tests do."""
    patch.setenv("PYTHONPATH", paths())
    patch.setattr(slurm_jobs, "PAUSE", 0.05)
    patch.setattr(slurm_jobs, "LATE", 0.5)


def slurm(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """The folder with the jobs and states of a Slurm of this machine, whose programs are found first."""
    importing(patch)
    states = folder / "states"
    states.mkdir()
    patch.setenv("FAKE_SLURM", str(states))
    patch.setenv("PATH", f"{fake_slurm.install(folder / 'bin')}{os.pathsep}{os.environ['PATH']}")
    return states
