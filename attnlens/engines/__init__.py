"""Runs functions on units of work: in processes here, as jobs of Slurm, or on a Ray cluster; without torch."""

from attnlens.engines.choice import check_engine, engine
from attnlens.engines.completion import Done, completed, tried
from attnlens.engines.workers import Workers

__all__ = ["Done", "Workers", "check_engine", "completed", "engine", "tried"]
