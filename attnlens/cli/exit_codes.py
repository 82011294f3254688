"""Exit codes of the program, and a function that exits at once. This module imports only light modules."""

from __future__ import annotations

import os
import signal

FAILED = 1  # Exit code if a requested check failed
UNUSABLE = 2  # Exit code for invalid arguments or input
PARTLY = 3  # Exit code of --strict if part of the work could not be done
BUG = 70  # Exit code for an internal error
INTERRUPTED = 130  # Exit code of an interrupted command
READER_LEFT = 141  # Exit code (that of SIGPIPE) if the reader of stdout closes the pipe early, like `head`


STOPS = (signal.SIGINT, signal.SIGTERM)  # Signals that end a command; finished work is kept


def leave(_signal: int = signal.SIGINT, _frame: object = None) -> None:
    """Exit at once with the code INTERRUPTED, without cleaning up."""
    os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)
