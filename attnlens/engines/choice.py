"""Makes the engine of a name, with the settings that it takes."""

from __future__ import annotations

from os import PathLike

from attnlens.choices import ENGINES, Engine
from attnlens.engines.workers import Workers
from attnlens.errors import UsageError


def check_engine(name: Engine, address: str | None = None) -> None:
    """Raise UsageError now where workers could not be had later: a package, a program or a cluster is not there."""
    if address is not None and name != "ray":
        raise UsageError("--address is that of a Ray cluster.", "Leave it out, or add --engine ray.")
    if name == "ray":
        from attnlens.engines.ray_cluster import check_cluster

        check_cluster(address)
    elif name == "slurm":
        from attnlens.engines.slurm_jobs import check_programs

        check_programs()


def engine(
    name: Engine,
    *,
    jobs: int = 1,
    address: str | None = None,
    folder: str | PathLike[str] | None = None,
    threads: int = 1,
    gpus: int = 0,
) -> Workers:
    """Workers that run `jobs` functions at once, each with `threads` threads and, on a cluster, `gpus` devices.

    `address` is that of a Ray cluster; `folder` keeps what Slurm's jobs print and return, and all nodes must see it.
    Raises UsageError where the engine is unknown, not installed or not there, or gets what it does not take.
    """
    if address is not None and name != "ray":
        raise UsageError(f"The engine {name} has no address.", "Leave it out, or take the engine ray.")
    if name == "local":
        from attnlens.engines.local_processes import LocalWorkers

        return LocalWorkers(jobs, threads=threads)
    if name == "ray":
        from attnlens.engines.ray_cluster import RayWorkers

        return RayWorkers(jobs, address, threads=threads, gpus=gpus)
    if name == "slurm":
        from attnlens.engines.slurm_jobs import SlurmWorkers

        if folder is None:
            raise UsageError("Slurm's jobs need a folder.", "Name one that all nodes see.")
        return SlurmWorkers(folder, jobs, threads=threads, gpus=gpus)
    raise UsageError(f"There is no engine {name}.", f"Engines: {', '.join(ENGINES)}.")
