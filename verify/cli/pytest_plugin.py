"""The pytest plugin: a kernel team judges its own kernel in its own suite.

pytest loads this module at every start, so it imports nothing but pytest and the standard library;
what judges (:mod:`needlepoint.verify.cli.pytest_judge`) is imported by the first test that does.
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pytest

from needlepoint.verify.base.atomic import check_writable, write_files

if TYPE_CHECKING:
    from needlepoint.verify.cli.pytest_judge import Judge

MARKER: Final = "needlepoint"
VERDICT: Final = "needlepoint_verdict"
"""Property of a judged test: verdict and headline."""
NO_DEVICE: Final = "needlepoint_no_device"
"""Property of a test that was skipped for want of a device: the reason."""
TARGET: Final = pytest.StashKey[Path]()
"""Where the results of all workers go; none in a worker."""
DEVICES: Final = ("auto", "cpu", "cuda")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("needlepoint", "needlepoint: judge kernels")
    group.addoption(
        "--needlepoint-candidate",
        action="append",
        default=[],
        metavar="NAME",
        help="Candidate for tests that take needlepoint_candidate; repeatable.",
    )
    group.addoption(
        "--needlepoint-profile",
        metavar="NAME",
        help="Judge by this profile in place of the one a candidate declares.",
    )
    group.addoption(
        "--needlepoint-contract",
        type=_contract,
        metavar="NAME",
        help="What cost is counted against: exact, bf16 or official.",
    )
    group.addoption(
        "--needlepoint-gate",
        action="append",
        default=[],
        metavar="PATH<=VALUE",
        help="Gate on every judged test, besides its own; repeatable.",
    )
    group.addoption(
        "--needlepoint-device",
        choices=DEVICES,
        default="auto",
        help="auto: skip a test whose device is missing; cuda: fail it; cpu: skip every test that "
        "needs a card.",
    )
    group.addoption(
        "--needlepoint-results",
        metavar="FILE",
        help="Write one JSON line a judged test: its id and its result.",
    )


def _contract(text: str) -> str:
    """Return the name of a contract; what knows them is loaded for one alone."""
    from needlepoint.verify.cli.options import CONTRACTS

    if text not in CONTRACTS:
        raise ArgumentTypeError(f"{text!r}: expected one of {', '.join(CONTRACTS)}")
    return text


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and check the output file before anything runs."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(candidates, **options): what needlepoint_judge runs over, by options of "
        "needlepoint.check.",
    )
    target = _results_file(config)
    if target is None or _is_worker(config):
        return
    try:
        check_writable(target, force=True)
    except ValueError as error:
        raise pytest.UsageError(f"--needlepoint-results: {error}") from error
    config.stash[TARGET] = target
    for part in _parts(target):  # of a run that died
        part.unlink()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``needlepoint_candidate`` once for each candidate."""
    if "needlepoint_candidate" in metafunc.fixturenames:
        names = _candidates(metafunc.definition, metafunc.config)
        # An error here would end the whole run; the fixture says it to the test alone.
        if not isinstance(names, str):
            metafunc.parametrize("needlepoint_candidate", names)


@pytest.fixture
def needlepoint_candidate(request: pytest.FixtureRequest) -> NoReturn:
    """Return one candidate of the marker or the command line; reached only where there is none."""
    pytest.fail(str(_candidates(request.node, request.config)), pytrace=False)


@pytest.fixture
def needlepoint_judge(request: pytest.FixtureRequest) -> Judge:
    """Return a function that judges a candidate and fails the test unless it is a match."""
    from needlepoint.verify.cli.pytest_judge import Judge, Wishes

    config = request.config
    marked: dict[str, Any] = {}
    for marker in request.node.iter_markers(MARKER):  # the closest comes first and wins
        if marker.args:
            pytest.fail(_positional(marker), pytrace=False)
        marked = {**marker.kwargs, **marked}
    marked.pop("candidates", None)
    wishes = Wishes(
        profile=config.getoption("--needlepoint-profile"),
        contract=config.getoption("--needlepoint-contract"),
        gates=tuple(config.getoption("--needlepoint-gate")),
        device=config.getoption("--needlepoint-device"),
        worker=_worker_number(config),
    )
    nodeid = request.node.nodeid
    return Judge(nodeid, _seen_from_here(config, nodeid), marked, wishes, _recorder(request))


def _seen_from_here(config: pytest.Config, nodeid: str) -> str:
    """Return a test id as the command line takes it where pytest was started."""
    file, colons, test = nodeid.partition("::")
    path = os.path.relpath(config.rootpath / file, config.invocation_params.dir)
    return f"{Path(path).as_posix()}{colons}{test}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many candidates were judged, and how many tests were skipped for want of a card."""
    reports = [
        report
        for outcome in ("passed", "failed", "skipped", "error", "xfailed", "xpassed")
        for report in terminalreporter.stats.get(outcome, [])
        if isinstance(report, pytest.TestReport)
    ]
    verdicts = [
        (_seen_from_here(terminalreporter.config, report.nodeid), json.loads(str(value)))
        for report in reports
        if report.when == "call"
        for name, value in report.user_properties
        if name == VERDICT
    ]
    skipped = {report.nodeid: _why(report) for report in reports if _skipped_for_device(report)}
    if not verdicts and not skipped:
        return
    terminalreporter.section("needlepoint")
    if verdicts:
        counts: dict[str, int] = {}
        for _, found in verdicts:
            counts[found["verdict"]] = counts.get(found["verdict"], 0) + 1
        told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        terminalreporter.line(f"judged {len(verdicts)}: {told}")
        for nodeid, found in verdicts:
            if found["verdict"] != "match":
                terminalreporter.line(f"{nodeid}: {found['headline']}")
    if skipped:
        terminalreporter.line(f"skipped for want of a card: {len(skipped)} tests")
        for reason in sorted(set(skipped.values())):
            terminalreporter.line(f"  {reason}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Join what the workers wrote, in order of test ids, and put it in place at once."""
    target = config.stash.get(TARGET, None)
    if target is None:
        return
    lines: list[str] = []
    for part in _parts(target):
        # A worker that died may have left half a line.
        lines += [line for line in part.read_text().splitlines(keepends=True) if line[-1:] == "\n"]
        part.unlink()
    lines.sort(key=lambda line: str(json.loads(line)["test"]))
    write_files({target: "".join(lines).encode()}, force=True)


def _candidates(test: pytest.Item, config: pytest.Config) -> list[object] | str:
    """Return the candidates of a test, or in words why it has none."""
    named = config.getoption("--needlepoint-candidate")
    for marker in test.iter_markers(MARKER):  # the closest comes first and wins
        if marker.args:
            return _positional(marker)
        found = marker.kwargs.get("candidates", [])
        found = [found] if isinstance(found, str) else found
        if not isinstance(found, list | tuple) or any(
            not (isinstance(one, str) or callable(one) or hasattr(one, "run")) for one in found
        ):
            return f"needlepoint option candidates={found!r}: expected a list of candidates"
        named = named or list(found)
    return named or (
        "no candidate; name one with --needlepoint-candidate or "
        f"@pytest.mark.{MARKER}(candidates=[..])"
    )


def _positional(marker: pytest.Mark) -> str:
    """Return what is wrong with a marker that was given more than keywords."""
    given = ", ".join(map(repr, marker.args))
    return f"@pytest.mark.{MARKER}({given}): expected options by name, for example tokens=40"


def _recorder(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return what keeps a property of the test, or one line of its results."""
    target = _results_file(request.config)

    def keep(name: str, value: str) -> None:
        if name != "result":
            request.node.user_properties.append((name, value))
        elif target is not None:
            worker = _worker_number(request.config)
            with target.with_name(f".{target.name}.{worker}.part").open("a") as file:
                file.write(value + "\n")

    return keep


def _results_file(config: pytest.Config) -> Path | None:
    chosen = config.getoption("--needlepoint-results", None)
    return None if chosen is None else Path(config.invocation_params.dir) / str(chosen)


def _parts(target: Path) -> list[Path]:
    return sorted(target.parent.glob(f".{target.name}.*.part"))


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _worker_number(config: pytest.Config) -> int:
    """Return the number of this xdist worker, 0 without xdist."""
    if not _is_worker(config):
        return 0
    return int(config.workerinput["workerid"].removeprefix("gw"))  # type: ignore[attr-defined]


def _skipped_for_device(report: pytest.TestReport) -> bool:
    """Return whether a test was skipped by this plugin, or is marked ``gpu`` and was skipped."""
    named = any(name == NO_DEVICE for name, _ in report.user_properties)
    return report.skipped and (named or "gpu" in report.keywords)


def _why(report: pytest.TestReport) -> str:
    for name, value in report.user_properties:
        if name == NO_DEVICE:
            return str(value)
    where = report.longrepr
    return str(where[2]).removeprefix("Skipped: ") if isinstance(where, tuple) else "skipped"
