"""``verify --scenario``: one file, or random histories for some time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.optimized.protocol.serving import StatefulCandidate
from needlepoint.verify.base.atomic import write_files
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.cli.options import parse_number
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


@dataclass(frozen=True)
class ScenarioRequest:
    """Options of ``verify --scenario``.

    Attributes
    ----------
    source
        Path of a file, or ``all``.
    seconds
        Time of ``all``.
    candidates
        Names.
    seed
        Of the histories and token values of ``all``.
    contract
        Stands in the result.
    """

    source: str
    seconds: int
    candidates: tuple[str, ...]
    seed: int
    contract: str


def parse_scenario_options(
    source: str | None,
    seconds: str | None,
    *,
    seed: int | None,
    candidates: tuple[str, ...],
    contract: str,
    named: Sequence[str],
) -> ScenarioRequest | None:
    """Return the options of ``--scenario``, or None without it.

    Parameters
    ----------
    source, seconds
        ``--scenario`` and ``--seconds`` as given.
    seed, candidates, contract
        As in :class:`ScenarioRequest`.
    named
        Options that stand on the command line.

    Raises
    ------
    ValueError
        Where the options do not belong together, or the time is no whole number of seconds.
    """
    if source is None:
        if seconds is not None:
            raise ValueError("--seconds: is the time of --scenario all; give both or neither")
        return None
    for option in _OF_AN_INPUT:
        if option in named:
            raise ValueError(
                f"--{option}: is for whole prompts, and a scenario brings its own tokens; "
                "leave it out"
            )
    if source != ALL and seconds is not None:
        raise ValueError("--seconds: is the time of --scenario all; a file is run once")
    if source != ALL and seed is not None and "seed" in named:
        raise ValueError("--seed: a scenario file has its own seed; leave it out")
    time = DEFAULT_SECONDS if seconds is None else parse_number("--seconds", seconds, 1)
    return ScenarioRequest(source, time, candidates, seed or 0, contract)


def run_scenarios(request: ScenarioRequest, progress: Progress) -> PipelineOutput:
    """Drive candidates through scenarios and judge every request after every event.

    Raises
    ------
    ValueError
        If the file or a candidate is not usable, an event is not possible (named by its index), or
        a candidate raises.
    """
    candidates = tuple(create(name) for name in request.candidates)
    for candidate in candidates:
        profile_of(candidate.info)
    serving = [c for c in candidates if isinstance(c, StatefulCandidate) and not not_covering(c)]
    names = [
        name
        for name, candidate in zip(request.candidates, candidates, strict=True)
        if candidate in serving
    ]
    if request.source == ALL:
        tally = Tally()
        if serving:
            tally = sweep(names, serving, request.seconds, request.seed, progress)
        gaps = _gaps(candidates, serving, tally)
        run = ScenarioRun(tally, candidates, gaps, request.seed, None)
        return scenario_output(run, request.contract)
    scenario = load_scenario(Path(request.source))
    tally = Tally()
    tally.run(scenario, serving, progress=progress)
    gaps = _gaps(candidates, serving, tally)
    run = ScenarioRun(tally, candidates, gaps, scenario.seed, scenario)
    return scenario_output(run, request.contract)


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


def check_failures(folder: Path | None, *, force: bool) -> None:
    """Refuse a folder for failing histories before the run, not after it.

    Raises
    ------
    ValueError
        If it cannot be written, or holds histories already and ``force`` is not set.
    """
    if folder is None:
        return
    check_failures_folder(folder)
    held = sorted(folder.glob("scenario-*.toml")) if folder.exists() else []
    if held and not force:
        raise ValueError(
            f"--save-failures {folder}: holds {held[0].name} already; pass --force to overwrite "
            "histories, or name another folder"
        )


def save_failures(result: Result, folder: Path | None, *, force: bool) -> None:
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
