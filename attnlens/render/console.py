"""Consoles on stdout and stderr, as wide as the terminal, or as is asked for."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import Any

from rich.console import Console

FILLING = re.compile(" +$", re.MULTILINE)
"""Blanks before the end of a line."""
PIPED = 100
"""Width of the page where the output is no terminal and COLUMNS says nothing."""


class _Page(Console):
    def print(self, *objects: Any, **settings: Any) -> None:
        """As rich prints; into a pipe or file without the blanks that fill its lines up to a table's width."""
        if self.is_terminal:
            super().print(*objects, **settings)
            return
        with self.capture() as printed:
            super().print(*objects, **settings)
        self.file.write(FILLING.sub("", printed.get()))
        self.file.flush()

    def on_broken_pipe(self) -> None:
        """Let the caller see that nobody reads any longer; rich would end the program with a code of its own."""
        raise  # noqa: PLE0704  # rich calls this while it handles the BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr, as wide as the terminal or COLUMNS says, 100 columns in a pipe; heeds NO_COLOR.

    COLUMNS=0 says nothing, and is what some schedulers set.
    """
    stream = sys.stderr if stderr else sys.stdout
    asked = os.environ.get("COLUMNS", "")
    width = int(asked) if asked.isdecimal() else 0
    if stream.isatty():
        # rich would take the 0 at its word; without a width it follows the terminal's
        unknown = asked.isdecimal() and not width
        return _Page(stderr=stderr, highlight=False, width=shutil.get_terminal_size().columns if unknown else None)
    # rich heeds a width under TERM=dumb only together with a height
    return _Page(stderr=stderr, highlight=False, width=width or PIPED, height=25)
