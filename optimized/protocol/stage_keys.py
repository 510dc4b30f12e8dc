"""How a stage is named: by path and stage, without anything that holds a tensor."""

from __future__ import annotations

INDEX = "index"
MAIN = "main"
QUERY = "query"

StageKey = tuple[str, str]
"""(path, stage), for example ``("index", "pooled")``."""
