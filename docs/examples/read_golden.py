"""Read a golden of the checkout and compare it with what the reference computes today."""

import sys

from needlepoint.verify.goldens import load_golden
from needlepoint.verify.goldens_compute import compute, differing

loaded = load_golden("reference-bf16")
changed = differing(loaded.tensors, compute(loaded.golden.definition))
sys.exit(f"other bytes of {', '.join(changed)}" if changed else 0)
