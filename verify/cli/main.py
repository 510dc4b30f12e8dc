"""The command line of a process: what it does before it knows what a command needs."""

from __future__ import annotations

import signal
import sys

from needlepoint.verify.cli.run import run_app


def main() -> int:
    """Run the command line of this process and return its exit code.

    SIGTERM ends it as Ctrl-C does, so that nothing half-written is left behind.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.argv[1:2] == ["rejudge"]:  # without what only the other commands need
        from needlepoint.verify.cli.rejudge import app
    else:
        from needlepoint.verify.cli.app import app
    return run_app(app)
