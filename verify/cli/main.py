"""The command line of a process: what it does before it knows what a command needs."""

from __future__ import annotations

import signal


def main() -> int:
    """Run the command line of this process and return its exit code.

    SIGTERM ends it as Ctrl-C does, so that nothing half-written is left behind.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from needlepoint.verify.cli.app import app, run_app

    return run_app(app)
