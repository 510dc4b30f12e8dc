"""Three kernels that usual comparisons pass, and one correct kernel that they fail."""

from __future__ import annotations

import sys

import torch

from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.layout.stored_rows import read_stored
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.schema.selftest_result import Others
from needlepoint.verify.selftest.command import selftest
from needlepoint.verify.selftest.faults.catalogue import CATALOGUE
from needlepoint.verify.selftest.faults.fault import Setting
from needlepoint.verify.selftest.faults.ground import picks_of
from needlepoint.verify.selftest.input import own_input
from needlepoint.verify.selftest.others import ask

WRONG = ("bf16-truncated", "bf16-gain-0.4%", "needle-of-one-query-lost")


def row(name: str, others: Others, judge: str) -> str:
    """Return one line of the table."""
    said = (others.assert_close, others.calc_diff, others.cosine, others.overlap)
    return f"{name:24} " + " ".join(f"{verdict or '-':12}" for verdict in said) + f" {judge}\n"


source, limits = own_input(0), Limits.default()
lines = [f"{'kernel':24} assert_close calc_diff    cosine       overlap      needlepoint\n"]
cases = [CATALOGUE[id] for id in WRONG]
for case in selftest(source, cases, limits, NoProgress(), (1.0,), serving=False).cases:
    lines.append(row(case.id, case.others, f"{case.verdict}: {' '.join(case.gates)}"))

# A correct fp8 kernel, beside the keys and picks of bf16 as a test without quantisation has them.
fp8, bf16 = (source.judge(Setting(name), 1.0, limits) for name in ("fp8", "bf16"))
keys = read_stored(fp8.ground.observed.stored["index"]).values.to(torch.bfloat16)
expected = fp8.keys["index"].stages["rotated"].value.to(torch.bfloat16)
picks = (picks_of(fp8.ground), picks_of(bf16.ground))
verdict = " ".join(fp8.sound().gates) or "match"
lines.append(row("correct-fp8", ask({"keys": (keys, expected)}, picks), verdict))
sys.stdout.writelines(lines)
