"""Which faults show at prompt lengths of 3 modulo 4 alone: a prompt, then some decodes."""

import sys

from needlepoint.verify.selftest.faults.scenario import FAULTS, wrong_residues

NAMES = (
    "first-decode-stale newest-hidden tail-dropped overlap-lost bias-from-call rope-from-call "
    "state-in-bf16 unfinished-visible stale-metadata one-slot"
).split()
faults = {fault.id: fault for fault in FAULTS}
sys.stdout.write("wrong at lengths modulo 4   1 decode    8 decodes\n")
for name in NAMES:
    once, often = (wrong_residues(faults[name].server, n, range(5, 9)) for n in (1, 8))
    words = [" ".join(map(str, found)) or "never" for found in (once, often)]
    sys.stdout.write(f"  {name:<26}{words[0]:<12}{words[1]}\n")
