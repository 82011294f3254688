"""Command line: start the program, parse its arguments, make a report, and deliver the report.

Contents: `entry` (one command line and its exit code), `commands/` (one function per command), `parameters` (options,
generated from `attnlens.requests`), `analyses` (the functions behind the commands), `outputs` (inputs, progress,
delivery), `show` (messages, interruptions, failures). This file defines the exit codes.
Inputs: the arguments, ATTNLENS_ variables and attnlens.toml. Outputs: tables on stdout, messages on stderr, files, exit
code. Importers: only `attnlens.__main__` and the installed script; no other package.

This file imports only light modules, so that an interruption while others are imported ends the program with code 130.
"""

from __future__ import annotations

import gc
import os
import signal

FAILED = 1  # Exit code if a requested check failed
UNUSABLE = 2  # Exit code for invalid arguments or input
PARTLY = 3  # Exit code if a part could not be done, with --strict
BUG = 70  # Exit code for an internal error
INTERRUPTED = 130  # Exit code of an interrupted command
READER_LEFT = 141  # Exit code, as of SIGPIPE, if the reader of stdout closes the pipe early, as `head` does


def main() -> None:
    """Run the program, and exit with the documented exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise the caller ignores or handles it
        signal.signal(signal.SIGINT, leave)
    gc.disable()  # until the work begins: imported objects stay alive
    from attnlens.cli.entry import run

    run()


def leave(_signal: int = signal.SIGINT, _frame: object = None) -> None:
    """Exit immediately, because nothing needs cleaning up yet."""
    os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)
