"""``verify --scenario``: one file, or random histories for some time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.optimized.protocol.serving import StatefulCandidate
from needlepoint.verify.base.atomic import write_files
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.cli.options import VerifyOptions
from needlepoint.verify.judge.profiles import profile_of
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.run.failures_saved import check_failures_folder
from needlepoint.verify.scenario.file import load_scenario
from needlepoint.verify.scenario.result import ScenarioRun, scenario_output
from needlepoint.verify.scenario.sweep import Tally, sweep
from needlepoint.verify.scenario.trial import not_covering
from needlepoint.verify.schema.recall import ScenarioGap
from needlepoint.verify.schema.result import Result

ALL: Final = "all"
DEFAULT_SECONDS: Final = 60
_OF_AN_INPUT = (
    *("input", "model", "checkpoint", "layers", "tokens", "stages", "limits"),
    *("repeat", "swap", "shrink"),
)
_BF16 = "a bf16 state is judged for the needlepoint profile alone"


def check_options(options: VerifyOptions) -> None:
    """Refuse options of a scenario that do not go together, before anything runs.

    Raises
    ------
    ValueError
        Where they do not, or the folder for failing histories cannot be written.
    """
    if options.scenario is None:
        if options.seconds is not None:
            raise ValueError("--seconds: is the time of --scenario all; give both or neither")
        return
    for name in _OF_AN_INPUT:
        if options.asked(name):
            raise ValueError(
                f"--{name}: is for whole prompts, and a scenario brings its own tokens; leave it "
                "out"
            )
    if options.scenario != ALL and options.seconds is not None:
        raise ValueError("--seconds: is the time of --scenario all; a file is run once")
    if options.scenario != ALL and options.asked("seed"):
        raise ValueError("--seed: a scenario file has its own seed; leave it out")
    _check_failures(options.save_failures, force=options.force)


def run_scenarios(
    options: VerifyOptions, named: Mapping[str, Candidate], progress: Progress
) -> PipelineOutput:
    """Drive candidates by name through scenarios and judge every request after every event.

    Raises
    ------
    ValueError
        If the file or a candidate is not usable, an event is not possible (named by its index), or
        a candidate raises.
    """
    candidates = tuple(named.values())
    for candidate in candidates:
        profile_of(candidate.info)
    serving = [c for c in candidates if isinstance(c, StatefulCandidate) and not not_covering(c)]
    tally = Tally()
    scenario, seed = None, options.seed or 0
    if options.scenario != ALL:
        scenario = load_scenario(Path(options.scenario or ""))
        seed = scenario.seed
        tally.run(scenario, serving, progress=progress)
    elif serving:
        names = [name for name, candidate in named.items() if candidate in serving]
        seconds = DEFAULT_SECONDS if options.seconds is None else options.seconds
        tally = sweep(names, serving, seconds, seed, progress)
    gaps = _gaps(candidates, serving, tally)
    run = ScenarioRun(tally, candidates, gaps, seed, scenario)
    output = scenario_output(run, options.contract)
    _save_failures(output.result, options.save_failures, force=options.force)
    return output


def _gaps(
    candidates: Sequence[Candidate],
    serving: Sequence[StatefulCandidate],
    tally: Tally,
) -> list[ScenarioGap]:
    """Return who was not driven through what."""
    gaps = []
    for candidate in candidates:
        reason = not_covering(candidate)
        name = candidate.info.name
        if reason is not None:
            gaps.append(ScenarioGap(candidate=name, histories=tally.histories, reason=reason))
    for server in serving:
        left = tally.left_out[server.info.name]
        if left:
            gaps.append(ScenarioGap(candidate=server.info.name, histories=left, reason=_BF16))
    return gaps


def _check_failures(folder: Path | None, *, force: bool) -> None:
    """Refuse a folder that cannot be written, or holds histories that may not be replaced."""
    if folder is None:
        return
    check_failures_folder(folder)
    held = sorted(folder.glob("scenario-*.toml")) if folder.exists() else []
    if held and not force:
        raise ValueError(
            f"--save-failures {folder}: holds {held[0].name} already; pass --force to overwrite "
            "histories, or name another folder"
        )


def _save_failures(result: Result, folder: Path | None, *, force: bool) -> None:
    """Write the failing histories of a result as files of a folder, one a candidate."""
    found = () if result.scenario is None else result.scenario.failing
    if folder is None or not found:
        return
    folder.mkdir(exist_ok=True)
    files = {
        folder / f"scenario-{number}.toml": failure.history.encode()
        for number, failure in enumerate(found)
    }
    write_files(files, force=force)
