"""Runs the program within this process, where only parsing, outputs and the exit code matter."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from subprocess import CompletedProcess

import pytest

from attnlens.cli.entry import exit_code


def attnlens(*words: object) -> CompletedProcess[str]:
    """Exit code, stdout and stderr of a command line."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err):
        for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "CI"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_HUB_OFFLINE", "1")
        code = exit_code([*map(str, words)])
    return CompletedProcess([*map(str, words)], code, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]
