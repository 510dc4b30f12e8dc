"""A stage that is not in the shipped registry, added as docs/extend.md says; run by a test.

``python toy_stage.py ARGUMENTS`` is the command line with one entry more in the registry (what the
norm hands over to RoPE, as two kernels would) and the arithmetic of that stage.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

REGISTRY = "needlepoint.optimized.protocol.stages"

ENTRY = """
    Stage(
        "handed",
        kind="compared",
        feeds={4: _from("normed", MAIN, INDEX), 128: _from("normed", MAIN)},
        tensors=_dense(),
        canonical="rows as the RoPE kernel reads them",
        derivation="radius of normed: a copy loses nothing",
        dense=True,
        rows="entries",
        rounding="normed",
    ),
"""
BEHIND = """    Stage(
        "roped","""


class WithEntry(SourceFileLoader):
    """Reads the registry with one entry more."""

    def get_code(self, fullname: str) -> CodeType:
        head, mark, tail = Path(self.path).read_text(encoding="utf-8").partition(BEHIND)
        assert mark
        return compile(head.rstrip() + ENTRY + mark + tail, self.path, "exec")


class Finder:
    """Finds the registry."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != REGISTRY or path is None:
            return None
        file = next(iter(path)) + "/stages.py"
        return importlib.util.spec_from_file_location(name, file, loader=WithEntry(name, file))


def main() -> int:
    """Run the command line with the stage."""
    sys.meta_path.insert(0, Finder())
    from needlepoint.verify.cli.app import app, run_app
    from needlepoint.verify.numerics.error_bound import STEPS

    STEPS["handed"] = lambda row, path: row
    return run_app(app, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
