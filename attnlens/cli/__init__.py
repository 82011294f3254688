"""Start the program: an interruption ends it with 130 from its first line on, even during imports."""

from __future__ import annotations

import gc
import os
import signal

INTERRUPTED = 130
"""Exit code of an interrupted command."""


def main() -> None:
    """Run the program, and exit with the documented exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise the caller ignores it
        signal.signal(signal.SIGINT, leave)
    gc.disable()  # until the work begins: imported objects stay alive
    from attnlens.cli.entry import run

    run()


def leave(_signal: int = signal.SIGINT, _frame: object = None) -> None:
    """Exit immediately: nothing has started that needs cleaning up."""
    os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)
