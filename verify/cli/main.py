"""The command line of a process: what it does before it knows what a command needs."""

from __future__ import annotations

import signal
import sys

from needlepoint.verify.schema.version import own_version


def main() -> int:
    """Run the command line of this process and return its exit code.

    SIGTERM ends it as Ctrl-C does, so that nothing half-written is left behind.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.argv[1:] == ["--version"]:  # without what takes time to load
        sys.stdout.write(f"needlepoint {own_version()}\n")
        return 0
    from needlepoint.verify.cli.app import app, run_app

    return run_app(app)
