"""The command ``rejudge``. Nothing here needs torch: a saved result is judged in two seconds."""

from __future__ import annotations

from needlepoint.verify.cli.options import RejudgeOptions
from needlepoint.verify.cli.outputs import Outputs, watched
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recording.results import load_result, load_rows
from needlepoint.verify.triage.rejudge import rejudge as judge_again


def rejudge(options: RejudgeOptions) -> int:
    """Run the command and return its exit code."""
    outputs = Outputs.create(options)
    with watched(quiet=True):
        saved, rows = load_result(options.result), load_rows(options.result)
        judged = judge_again(saved, rows, Limits.load(options.limits))
    return outputs.finish(judged, rows, limits=True)
