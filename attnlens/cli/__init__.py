"""Starts the program: from its first line on, and while it is being imported, an interruption ends it with 130."""

from __future__ import annotations

import gc
import os
import signal

INTERRUPTED = 130
"""Exit code of an interrupted command."""


def main() -> None:
    """Run the program, and end it with the exit code that the contract says."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the caller has it ignored
        signal.signal(signal.SIGINT, leave)
    gc.disable()  # until the work begins: what imports make stays
    from attnlens.cli.entry import run

    run()


def leave(_signal: int = signal.SIGINT, _frame: object = None) -> None:
    """End at once: nothing is begun that would have to be put in order."""
    os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)
