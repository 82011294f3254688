"""Command line: parse the arguments, make a report, and deliver it; start the program.

Contents: `entry` (one command line and its exit code), `commands/` (one function per command), `parameters` (options,
generated from `attnlens.requests`), `analyses` (the functions behind the commands), `outputs` (inputs, progress,
delivery), `show` (messages, interruptions, failures, and the exit codes).
Inputs: the arguments, ATTNLENS_ variables and attnlens.toml. Outputs: tables on stdout, messages on stderr, files, exit
code. Importers: only `attnlens.__main__` and the installed script; no other package.

This file imports nothing heavy: from its first line on, even during imports, an interruption ends the program with 130.
"""

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
