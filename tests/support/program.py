"""Run the program, and check how it refuses."""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import forkserver
import typer.main

DEMO = Path(__file__).parents[2] / "attnlens" / "models" / "demo"
SMALL = ("--windows", "4", "--length", "32", "--no-progress")
built_once = functools.cache(typer.main.get_command)
"""Typer's commands, built once for all command lines."""


def environment_with(**changed):
    """Return the environment without the variables that attnlens and rich read, and offline."""
    ours = ("ATTNLENS_", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours) and name != "CI"}
    return env | {"HF_HUB_OFFLINE": "1"} | changed


def attnlens(*words, cwd=None, stdin=None, **environment):
    """Run the program in another process; return its returncode, stdout and stderr."""
    return python("-m", "attnlens", *words, cwd=cwd, stdin=stdin, **environment)


def invoke(*words, cwd=None, stdin="", **environment):
    """Run the program in this process, if only arguments, outputs and the exit code matter."""
    from attnlens.cli.entry import exit_code

    out, err, text = (io.TextIOWrapper(io.BytesIO(content), "utf-8") for content in (b"", b"", stdin.encode()))
    with (
        mock.patch.dict(os.environ, environment_with(**environment), clear=True),
        mock.patch.object(sys, "stdin", text),
        mock.patch.object(typer.main, "get_command", built_once),
        warnings.catch_warnings(),
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = exit_code([*map(str, words)])
    shown = []
    for stream in (out, err):
        stream.flush()
        shown.append(stream.buffer.getvalue().decode())
    return subprocess.CompletedProcess(words, code, *shown)


def python(*words, cwd=None, stdin=None, **environment):
    """Run another Python, forked after the imports of torch and transformers if this environment allows it."""
    env = environment_with(**environment)
    executable = forkserver.commands() / "python" if forkserver.takes(env) else sys.executable
    return captured([executable, *map(str, words)], cwd, env, stdin)


def captured(command, cwd, env, stdin=None):
    """Run a command with this text or nothing on stdin, and capture its outputs."""
    source = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(command, cwd=cwd, env=env, **source, capture_output=True, text=True, timeout=600, check=False)


def without_torch(*words, cwd=None):
    """Run the program where torch can't be imported, so that it can only answer before the work."""
    return python("-c", WITHOUT_TORCH, *words, cwd=cwd)


WITHOUT_TORCH = """
import sys
there = dict(sys.modules)
for name in there:
    if name.partition(".")[0] in ("attnlens", "torch", "transformers"):
        del sys.modules[name]
sys.modules["torch"] = None
sys.argv[0] = "attnlens"
from attnlens.cli import main
main()
"""
"""Program that forgets all imports before it runs attnlens."""


def in_shell(line, cwd=None, *, afresh=False, **environment):
    """Run lines of bash; with `afresh`, `attnlens` is not forked, for tests of its imports."""
    env = environment_with(**environment)
    folders = [Path(sys.executable).parent] if afresh else [forkserver.commands(), Path(sys.executable).parent]
    env["PATH"] = os.pathsep.join([*map(str, folders), env["PATH"]])
    return captured(["bash", "-c", line], cwd, env)


def answers_nothing(stdout, stderr):
    """Return True if a failed command's stdout is empty or, after `--json -`, its error as JSON."""
    if not stdout:
        return True
    error = json.loads(stdout)["error"]
    problem, remedy = stderr[stderr.rindex("Error: ") + 7 :].splitlines()
    return set(error) == {"code", "problem", "remedy"} and (error["problem"], error["remedy"]) == (problem, remedy)


def refused(result, *words):
    """Check for exit 2, two lines on stderr from «Error:» on, at most the error on stdout, and no traceback."""
    assert result.returncode == 2, result.stderr
    assert answers_nothing(result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    lines = result.stderr[result.stderr.index("Error: ") :].strip().splitlines()
    assert len(lines) == 2, result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
