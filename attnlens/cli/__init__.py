"""Command line: parse the arguments, make a report, and deliver it; start the program.

Contents: `entry` (one command line and its exit code), `commands/` (one function per command), `parameters` (options,
generated from `attnlens.requests`), `analyses` (the functions behind the commands), `outputs` (inputs, progress,
delivery), `show` (messages, interruptions, failures). This file defines the exit codes.
Inputs: the arguments, ATTNLENS_ variables and attnlens.toml. Outputs: tables on stdout, messages on stderr, files, exit
code. Importers: only `attnlens.__main__` and the installed script; no other package.

This file imports nothing heavy: from its first line on, even during imports, an interruption ends the program with 130.
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
READER_LEFT = 141  # Exit code if the reader of stdout closes it early, as `head` does: that of SIGPIPE


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
