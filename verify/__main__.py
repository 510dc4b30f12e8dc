"""``python -m needlepoint.verify ...`` is ``needlepoint verify ...``; other commands by name."""

from __future__ import annotations

import sys

from needlepoint.verify.cli.app import app, run_app

if __name__ == "__main__":
    sys.exit(run_app(app, ["verify", *sys.argv[1:]]))
