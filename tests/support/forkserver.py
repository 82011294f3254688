"""A server that has imported attnlens and its libraries, and forks for each command, which saves the imports.

Each command is a process with its own streams, folder, environment and exit code, as if it were started by `python -m
attnlens`, `python SCRIPT` or `python -c PROGRAM`; only the imports of attnlens, torch, transformers and others are done
once. The processes that a command starts by `sys.executable` or multiprocessing are forked as well.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import dropwhile
from pathlib import Path
from typing import Any

import attnlens

LIBRARIES = """
attnlens.cli.commands attnlens.report.export attnlens.report.pictures matplotlib.backends.backend_agg matplotlib.figure
pandas pydantic rich.table scipy.optimize scipy.stats torch torch._decomp.decompositions_for_jvp torch._dynamo
transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto transformers.models.bert.modeling_bert
transformers.models.gpt2.modeling_gpt2 transformers.models.gpt2.tokenization_gpt2
transformers.models.llama.modeling_llama
""".split()  # noqa: SIM905
READ_ONCE = ("HF_", "HUGGINGFACE", "TRANSFORMERS_", "TORCH", "PYTHON", "MPL", "OMP_", "MKL_", "LD_", "SSL_")
"""Prefixes of variables that libraries read at import: with other values, a command can't be forked."""
OF_INTERPRETER = {"-B", "-u"}
"""Options of the interpreter that are ignored."""
LARGEST = 1 << 17
"""Maximum size of a request in bytes: its words and its environment."""
MOST, HIGH = 16, 200
"""Maximum number of open files that a command inherits, and a number above all of theirs."""
CLIENTS = {"attnlens": ("-m", "attnlens"), "python": ()}
"""Name of a command → words before its arguments."""
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
files = [number for number in map(int, os.listdir("/dev/fd")) if os.path.exists(f"/dev/fd/{{number}}")]
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
request = {{"words": [*{words!r}, *sys.argv[1:]], "cwd": os.getcwd(), "env": dict(os.environ), "files": files}}
socket.send_fds(server, [json.dumps(request).encode()], files)
child = int(server.recv(64))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(child, number))
code = int(server.recv(64))
if code < 0:
    for number in {{signal.SIGINT, signal.SIGTERM}} & {{-code}}:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
SHARED = "ATTNLENS_TESTS_SERVER"
"""Variable with the folder of a server that the parent process started."""
_folder: list[Path] = []


def takes(environment: Mapping[str, str]) -> bool:
    """Return True if a command with this environment can be forked: libraries see the same values at import."""
    ours = _environment()
    return all(
        ours.get(name) == value or (name == "PYTHONPATH" and _folders_before(value, ours.get(name, "")))
        for name, value in environment.items()
        if name.startswith(READ_ONCE)
    )


def _folders_before(path: str, own: str) -> list[str]:
    """Return the folders that a PYTHONPATH names before our own."""
    return path.removesuffix(own).strip(os.pathsep).split(os.pathsep) if path.endswith(own) and path != own else []


def commands() -> Path:
    """Return a folder with the commands `attnlens` and `python`, which the server of this process runs."""
    if not _folder:
        folder = Path(os.environ[SHARED]) if SHARED in os.environ else start()
        deadline = time.monotonic() + 120
        while not (folder / "ready").exists():
            assert time.monotonic() < deadline, "the server broke down"
            time.sleep(0.05)
        _folder.append(folder)
    return _folder[0]


def start() -> Path:
    """Start a server, which ends with this process, and return its folder. It can answer when `ready` exists there."""
    folder = Path(tempfile.mkdtemp(prefix="attnlens-tests-"))
    for name, words in CLIENTS.items():
        client = folder / name
        client.write_text(CLIENT.format(python=sys.executable, address=str(folder / "socket"), words=words))
        client.chmod(0o755)
    command, env = [sys.executable, __file__, str(folder / "socket")], _environment() | {"XDG_CACHE_HOME": str(folder)}
    server = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    return folder


def start_for_workers() -> None:
    """Start a server for the processes of pytest-xdist that this process will start."""
    os.environ[SHARED] = str(start())


@contextmanager
def workers() -> Iterator[None]:
    """Context manager: fork also what this process itself starts by `sys.executable` or multiprocessing."""
    python, before = str(commands() / "python"), sys.executable
    sys.executable = python
    multiprocessing.set_executable(python)
    try:
        yield
    finally:
        sys.executable = before
        multiprocessing.set_executable(before)


def _environment() -> dict[str, str]:
    """Return the server's environment: offline, and one thread, because one test runs per core."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _serve(address: Path) -> None:
    """Fork for every request, once to run the command and once to wait for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen()
        gc.disable()  # nearly all that imports create stays
        for library in LIBRARIES:
            importlib.import_module(library)
        for name in attnlens.__all__:
            getattr(attnlens, name)  # each is imported by its first use
        gc.freeze()  # nor need a command go through what was imported
        gc.enable()
        sys.executable = str(address.parent / "python")
        multiprocessing.set_executable(sys.executable)
        (address.parent / "ready").touch()
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # an interrupt of the tests ends the parent, and the loop below then ends
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        parent = os.getppid()
        listener.settimeout(2)
        while os.getppid() == parent:  # ends also if the tests are killed
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                continue
            if os.fork() == 0:
                listener.close()
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> None:
    """Run one command, send its process number and its exit code, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files, _, _ = socket.recv_fds(connection, LARGEST, MOST)
    child = os.fork()
    if child == 0:
        connection.close()
        _become(json.loads(request), files)
    for file in files:
        os.close(file)
    with suppress(BrokenPipeError):  # the client was killed meanwhile
        connection.send(str(child).encode())
    threading.Thread(target=_end_with, args=(connection, child), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        connection.send(str(code).encode())
    finally:
        os._exit(0)


def _end_with(connection: socket.socket, child: int) -> None:
    """Kill the command if its client was killed."""
    connection.recv(1)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _become(request: dict[str, Any], files: Sequence[int]) -> None:
    """Run the command in this process, and end with its exit code."""
    code = 0
    try:
        _take(files, request["files"])
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", closefd=False) if number in request["files"] else None  # noqa: SIM115
            for number, mode in enumerate(("r", "w", "w"))
        )
        os.chdir(request["cwd"])
        sys.path[1:1] = _folders_before(request["env"].get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", ""))
        os.environ.clear()
        os.environ.update(request["env"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        flag, *rest = dropwhile(OF_INTERPRETER.__contains__, request["words"])
        if flag == "-m":
            sys.argv, sys.path[0] = rest, request["cwd"]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif flag == "-c":
            sys.argv, sys.path[0] = ["-c", *rest[1:]], request["cwd"]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  # a test's program
        else:
            sys.argv, sys.path[0] = [flag, *rest], str(Path(flag).parent)
            runpy.run_path(flag, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code)


def _take(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give these files these numbers, and close all other standard streams."""
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for file in files]
    for file in (0, 1, 2, *files):
        os.close(file)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
