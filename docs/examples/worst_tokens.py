"""Print the worst tokens of a stage that are beyond its limit, from a result of ``--json``."""

import json
import sys
from pathlib import Path

file, wanted, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
result = json.loads(Path(file).read_text())
for layer in result["candidates"][0]["layers"]:
    for stage in layer["stages"]:
        if f"{stage['path']}.{stage['stage']}" == wanted:
            worst = stage["worst"][:count]
            beyond = [row for row in worst if row["error"] is None or row["error"] > 1]
            for row in sorted(beyond, key=lambda row: (row["request"], row["position"])):
                sys.stdout.write(f"request {row['request']} position {row['position']}\n")
            sys.stdout.write(f"{len(beyond)} of the worst {len(worst)} are beyond the limit\n")
