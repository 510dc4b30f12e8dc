"""How often the judge flags a correct candidate, over seeded random cases: it must be never.

Each case is a small random model, input and emulated candidate through the whole pipeline. An
alarm is any verdict but `match`, a refusal to judge, or a pick that only a fault explains. Prints
one line of JSON and exits with 1 on any alarm; how to replay each is printed beside it.

    python -m needlepoint.benchmarks.false_alarms --cases 1000 --jobs 2
    python -m needlepoint.benchmarks.false_alarms --only 17
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from scipy.stats import beta

from needlepoint.benchmarks.random_cases import (
    LONGEST,
    CaseOutcome,
    faulty_swaps,
    judge_case,
    random_case,
)
from needlepoint.verify.schema.environment import collect_environment
from needlepoint.verify.schema.result import ErrorStats

CONFIDENCE = 0.95
INTERRUPTED = 130  # exit code of a shell command that Ctrl-C ended


@dataclass
class Tally:
    """Sums over cases.

    Attributes
    ----------
    cases, alarms
        Cases judged, and what was wrong with those that raised an alarm.
    rows, stages
        Rows and stages compared.
    worst
        ``path.stage`` to the largest local and accumulated error, in units of the limit.
    swaps
        Swaps by class, and invalid picks.
    residues
        Lengths modulo 4 and modulo 128 that some request had.
    """

    cases: int = 0
    alarms: list[dict[str, object]] = field(default_factory=list)
    rows: int = 0
    stages: int = 0
    worst: dict[str, dict[str, float]] = field(default_factory=dict)
    swaps: dict[str, int] = field(default_factory=dict)
    residues: dict[int, set[int]] = field(default_factory=lambda: {4: set(), 128: set()})

    def add(self, outcome: CaseOutcome) -> None:
        """Add one case."""
        self.cases += 1
        for modulus, seen in self.residues.items():
            seen |= {length % modulus for length in outcome.case.lengths}
        if outcome.alarm is not None:
            self.alarms.append({"case": outcome.case.index, "alarm": outcome.alarm})
        if outcome.result is None:
            return
        for layer in outcome.result.candidates[0].layers:
            for stage in layer.stages:
                if stage.local is None or stage.accumulated is None:
                    continue
                self.stages += 1
                self.rows += stage.rows_compared
                worst = self.worst.setdefault(f"{stage.path}.{stage.stage}", {})
                for name, errors in (("local", stage.local), ("accumulated", stage.accumulated)):
                    worst[name] = max(worst.get(name, 0.0), _largest(errors))
            if layer.topk is not None:
                counts = layer.topk.swaps
                found = {"tie": counts.tie, "explained": counts.explained, **faulty_swaps(layer)}
                for name, count in found.items():
                    self.swaps[name] = self.swaps.get(name, 0) + count

    def summary(self, seed: int) -> dict[str, object]:
        """Return the figures; an error that is not finite is null."""
        environment = collect_environment("cpu")
        return {
            "cases": self.cases,
            "false_alarms": len(self.alarms),
            "rate_upper_bound": upper_bound(len(self.alarms), self.cases),
            "confidence": CONFIDENCE,
            "seed": seed,
            "rows": self.rows,
            "stages": self.stages,
            "swaps": self.swaps,
            "residues": {str(modulus): len(seen) for modulus, seen in self.residues.items()},
            "worst": {
                stage: {name: _rounded(value) for name, value in errors.items()}
                for stage, errors in self.worst.items()
            },
            "alarms": self.alarms,
            "versions": {
                "needlepoint": environment.needlepoint,
                "python": environment.python,
                "torch": environment.torch,
                "numpy": environment.numpy,
                "platform": environment.platform,
            },
        }


def upper_bound(alarms: int, cases: int) -> float:
    """Return the one-sided Clopper-Pearson upper bound of the rate of alarms."""
    if alarms == cases:
        return 1.0
    return float(beta.ppf(CONFIDENCE, alarms + 1, cases - alarms))


def judge_index(index: int, seed: int, longest: int) -> CaseOutcome:
    """Judge one case by its number."""
    return judge_case(random_case(seed, index, longest))


def outcomes(cases: int, seed: int, longest: int, jobs: int) -> Iterator[CaseOutcome]:
    """Yield the outcome of every case, in order; ``jobs`` processes of one thread each."""
    judge = partial(judge_index, seed=seed, longest=longest)
    if jobs == 1:
        start_worker()
        yield from map(judge, range(cases))
        return
    # A forked child would inherit the locks of torch's threads in an unknown state.
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=start_worker, initargs=(True,)) as pool:
        yield from pool.map(judge, range(cases))


def start_worker(ignore_interrupt: bool = False) -> None:
    """Use one thread; leave Ctrl-C to the parent, which cancels what is still waiting."""
    torch.set_num_threads(1)
    if ignore_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def report_alarm(outcome: CaseOutcome, options: argparse.Namespace, console: Console) -> None:
    """Print what was flagged and the command that replays it."""
    tokens = "" if options.longest == LONGEST else f" --longest {options.longest}"
    console.print(f"{outcome.case.describe()}\n  {outcome.alarm}", markup=False, soft_wrap=True)
    console.print(
        f"  replay: python -m needlepoint.benchmarks.false_alarms --seed {options.seed} "
        f"--only {outcome.case.index}{tokens}",
        markup=False,
        soft_wrap=True,
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Judge every case; 1 on an alarm."""
    tally, code = Tally(), 0
    columns = (TextColumn("cases"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("cases", total=options.cases)
        try:
            for outcome in outcomes(options.cases, options.seed, options.longest, options.jobs):
                tally.add(outcome)
                progress.advance(task)
                if outcome.alarm is not None:
                    report_alarm(outcome, options, console)
        except KeyboardInterrupt:
            console.print(f"interrupted after {tally.cases} of {options.cases} cases")
            code = INTERRUPTED
    print(json.dumps(tally.summary(options.seed), allow_nan=False))
    return 1 if tally.alarms else code


def replay(options: argparse.Namespace, console: Console) -> int:
    """Judge one case and print all that was said of it; 1 on an alarm."""
    start_worker()
    outcome = judge_index(options.only, options.seed, options.longest)
    console.print(outcome.case.describe(), markup=False, soft_wrap=True)
    console.print(outcome.alarm or "match", markup=False, soft_wrap=True)
    if outcome.result is not None:
        print(outcome.result.model_dump_json())
    return 0 if outcome.alarm is None else 1


def main() -> int:
    """Run the benchmark; 1 if a correct candidate is flagged."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a request, at most")
    parser.add_argument("--only", type=int, metavar="K", help="replay case K and print its result")
    options = parser.parse_args()
    if min(options.cases, options.jobs) < 1:
        parser.error(f"--cases {options.cases} --jobs {options.jobs}: expected positive numbers")
    try:
        random_case(options.seed, options.only or 0, options.longest)
    except ValueError as error:
        parser.error(str(error))
    console = Console(stderr=True)
    return run(options, console) if options.only is None else replay(options, console)


def _largest(errors: ErrorStats) -> float:
    return math.inf if errors.error.max is None else errors.error.max


def _rounded(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


if __name__ == "__main__":
    sys.exit(main())
