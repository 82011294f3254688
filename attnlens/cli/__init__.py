"""Command line: start the program, parse its arguments, make a report, and deliver the report.

Contents: `entry` (one command line and its exit code), `commands/` (one function per command), `parameters` (options,
generated from `attnlens.requests`), `analyses` (the functions behind the commands), `outputs` (inputs, progress,
delivery), `show` (messages, interruptions, failures), `short_help` (help on one screen), `exit_codes`.

This file imports only light modules, so that an interruption during later imports ends the program with code 130.
"""

from __future__ import annotations

import gc
import signal

from attnlens.cli.exit_codes import leave


def main() -> None:
    """Run the program and exit."""
    for stop, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(stop) is usual:  # otherwise the caller ignores or handles it
            signal.signal(stop, leave)
    gc.disable()  # until the work begins: imported objects stay alive
    from attnlens.cli.entry import run

    run()
