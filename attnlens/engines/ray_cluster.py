"""Runs functions as tasks of a Ray cluster, or of one that is started on this machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from attnlens.engines.workers import T, Ts, WaitingThreads, headline
from attnlens.errors import UsageError

HERE = "local"
"""The address that starts a cluster of this machine alone."""
RETRIES = 1
"""Times that Ray itself runs a task again whose worker or node was lost."""
SECONDS = 5
"""Time to reach an address: Ray itself asks for two minutes, and ends the process then."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2, over which Ray talks, says first, and after it empty settings (RFC 9113, section 3.4)."""
SETTINGS = 4
"""The type of frame, its fourth byte, with which a server answers."""


class RayWorkers(WaitingThreads):
    """Tasks of a Ray cluster, at most `jobs` at a time, each with `threads` processors and `gpus` devices.

    `address` is HOST:PORT of a cluster, `auto` for the one that runs on this machine, or None: RAY_ADDRESS, else one is
    started with `jobs` workers, and ended after. Raises UsageError where Ray is not installed or no cluster answers.
    """

    def __init__(self, jobs: int, address: str | None = None, *, threads: int = 1, gpus: int = 0) -> None:
        super().__init__(jobs)
        check_cluster(address)
        self._ray: Any = import_module("ray")
        self._owned = not self._ray.is_initialized()
        if self._owned:
            _connect(self._ray, _named(address), jobs * threads)
        self._remote = self._ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=RETRIES)(_called)
        self._tasks: set[Any] = set()
        self._lock, self._stopped = Lock(), False

    def _outcome(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        with self._lock:
            if self._stopped:
                raise BrokenExecutor("The work was ended.")
            task = self._remote.remote(str(Path.cwd()), function, *arguments)
            self._tasks.add(task)
        try:
            found: T = self._ray.get(task)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause or error from None
        except self._ray.exceptions.RayError as error:
            raise BrokenExecutor(f"Ray brought no result: {headline(error)}") from error
        finally:
            self._tasks.discard(task)
        return found

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for task in list(self._tasks):
                self._ray.cancel(task, force=True)

    def _close(self) -> None:
        if self._owned:
            self._ray.shutdown()


def check_cluster(address: str | None) -> None:
    """Raise UsageError where Ray is not installed, or nothing listens at the address that says it is a Ray cluster."""
    if find_spec("ray") is None:
        raise UsageError("Ray is not installed.", 'Run: pip install "attnlens[ray]"')
    try:
        _reach(_named(address))
    except OSError as error:
        raise _refused(_named(address), error) from error


def _named(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or HERE


def _called(folder: str, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """In a worker, which begins where Ray was started: the value of a call whose paths are seen from that folder."""
    with suppress(OSError):  # a node that does not have it says what it lacks itself
        os.chdir(folder)
    return function(*arguments)


def _connect(ray: Any, address: str, processors: int) -> None:
    """Raises UsageError where there is no cluster at the address, or none can be started."""
    own = {"num_cpus": processors, "include_dashboard": False} if address == HERE else {}
    if own:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that we start tells nobody
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **own)
    except Exception as error:  # Ray raises Exception itself, and no narrower class, where its programs don't start
        raise _refused(address, error) from error
    _keep_from_stdout(ray._private.worker)


def _refused(address: str, error: Exception) -> UsageError:
    where = "can be started on this machine" if address == HERE else f"is at {address}"
    return UsageError(
        f"No Ray cluster {where}: {headline(error)}",
        "Start one with `ray start --head`, under the same token or RAY_AUTH_MODE as here, and name its HOST:PORT;"
        " or name no address to run Ray on this machine.",
    )


def _keep_from_stdout(worker: Any) -> None:
    """What Ray tells of lost workers goes to stderr, as a report may go to stdout; Ray itself has no such setting."""
    if printed := getattr(worker, "print_to_stdstream", None):
        worker.print_to_stdstream = lambda data, **named: printed(data | {"is_err": True}, **named)


def _reach(address: str) -> None:
    """Raises OSError where nobody listens at HOST:PORT, or what listens is no Ray: Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return
    with socket.create_connection((host, int(port)), SECONDS) as there:
        if os.environ.get("RAY_USE_TLS", "0") == "0":
            there.sendall(GREETING)
            if there.recv(9)[3:4] != bytes([SETTINGS]):
                raise OSError("what answers there is no Ray.")
