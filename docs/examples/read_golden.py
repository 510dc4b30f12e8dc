"""Read a golden of the checkout and compare it with what the reference computes today."""

import sys

from needlepoint.verify.goldens.compute import compute, differing
from needlepoint.verify.goldens.manifest import load_golden

loaded = load_golden("reference-bf16")
changed = differing(loaded.tensors, compute(loaded.golden.definition))
sys.exit(f"other bytes of {', '.join(changed)}" if changed else 0)
