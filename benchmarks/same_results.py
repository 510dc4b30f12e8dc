"""Compare two JSON documents that commands wrote, but for where, when and from what they ran.

``python -m needlepoint.benchmarks.same_results BEFORE.json AFTER.json`` prints every difference by
its path and exits 1 where there is one. Fields that say where, how fast and from which sources a
run was made are not compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

IGNORED = frozenset({"environment", "source_sha256"})
"""Fields that may differ wherever they stand."""
TIMES = ("seconds", "_s", "_ms", "_us")
"""How the names of fields end that hold a time."""


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401
    """Yield how two values of JSON differ, one line a place.

    Parameters
    ----------
    before, after
        Values as ``json.loads`` returns them. Numbers are compared to the last bit, with one
        exception: an integer and the same number as a float are equal.
    path
        Where they stand.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            place = f"{path}.{key}" if path else key
            if key in IGNORED or key.endswith(TIMES):
                continue
            if key not in after:
                yield f"{place}: only before ({_short(before[key])})"
            elif key not in before:
                yield f"{place}: only after ({_short(after[key])})"
            else:
                yield from differences(before[key], after[key], place)
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{path}: {len(before)} elements before, {len(after)} after"
        for index, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(before, bool) is not isinstance(after, bool) or before != after:
        yield f"{path}: {_short(before)} before, {_short(after)} after"


def main(arguments: Sequence[str]) -> int:
    """Compare two files and return the exit code: 0 equal, 1 different, 2 not readable."""
    if len(arguments) != 2:
        print("usage: same_results BEFORE.json AFTER.json", file=sys.stderr)
        return 2
    try:
        before, after = (json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments)
    except (OSError, ValueError) as error:
        print(f"same_results: {error}; give two JSON files that commands wrote", file=sys.stderr)
        return 2
    found = list(differences(before, after))
    for line in found:
        print(line)
    print(f"{len(found)} differences" if found else "equal but for environment and timing")
    return 1 if found else 0


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
