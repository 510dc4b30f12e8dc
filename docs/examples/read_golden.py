"""Read a golden of the checkout and compare it with what its sources give today."""

import sys

from needlepoint.verify.goldens.check import replay
from needlepoint.verify.goldens.manifest import load_golden

changed = replay(load_golden("reference-bf16"))
sys.exit("; ".join(changed) or 0)
