from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from needlepoint.benchmarks import false_alarms
from needlepoint.benchmarks.random_cases import CaseOutcome, RandomCase, judge_case

Main = Callable[..., int]


@pytest.fixture
def script() -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    yield false_alarms
    torch.set_num_threads(threads)


@pytest.fixture
def main(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Main:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["false_alarms.py", *arguments, "--longest", "130"])
        code = script.main()
        assert isinstance(code, int)
        return code

    return run


def flag(case: RandomCase) -> CaseOutcome:
    outcome = judge_case(case)
    return CaseOutcome(case, outcome.result, "differ: planted" if case.index == 1 else None)


def test_the_summary_is_one_line_of_what_was_compared(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--cases", "2", "--jobs", "1") == 0

    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["cases"], found["false_alarms"], found["alarms"]) == (2, 0, [])
    assert found["stages"] == 2 * 17  # 13 of the ratio-4 layer and 4 of the other
    assert found["rows"] > found["stages"]
    assert len(found["worst"]) == 13
    for errors in found["worst"].values():
        assert 0 <= errors["local"] <= 1
        assert 0 <= errors["accumulated"] <= 1
    assert found["worst"]["index.pooled"]["local"] > 0.01
    assert found["swaps"]["selector"] == found["swaps"]["invalid"] == 0


def test_an_alarm_exits_with_1_and_says_how_to_replay_it(
    script: ModuleType,
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "judge_case", flag)

    assert main("--cases", "2", "--jobs", "1", "--seed", "3") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["alarms"] == [{"case": 1, "alarm": "differ: planted"}]
    assert "differ: planted" in shown.err
    assert "needlepoint.benchmarks.false_alarms --seed 3 --only 1 --longest 130" in shown.err

    assert main("--only", "1", "--seed", "3") == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "match"  # the planted word is ours
    assert main("--only", "0", "--seed", "3") == 0


def test_a_refused_case_counts_as_an_alarm(
    script: ModuleType,
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "judge_case", lambda case: CaseOutcome(case, None, "refused: x"))

    assert main("--cases", "3", "--jobs", "1") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["cases"], found["false_alarms"], found["rows"]) == (3, 3, 0)
    assert found["rate_upper_bound"] == 1.0


def test_ctrl_c_reports_what_was_done(
    script: ModuleType,
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(case: RandomCase) -> CaseOutcome:
        if case.index == 1:
            raise KeyboardInterrupt
        return CaseOutcome(case, None, None)

    monkeypatch.setattr(script, "judge_case", interrupt)

    assert main("--cases", "5", "--jobs", "1") == 130
    shown = capsys.readouterr()
    assert "interrupted after 1 of 5 cases" in shown.err
    assert json.loads(shown.out)["cases"] == 1


@pytest.mark.parametrize(
    ("alarms", "cases", "bound"),
    # (1 - p)**n = 0.05; tables of Clopper and Pearson; nothing is known of a rate never passed.
    [(0, 1000, 1 - 0.05 ** (1 / 1000)), (0, 1, 0.95), (1, 20, 0.2161), (3, 3, 1.0)],
)
def test_upper_bound_of_the_rate(script: ModuleType, alarms: int, cases: int, bound: float) -> None:
    assert script.upper_bound(alarms, cases) == pytest.approx(bound, abs=5e-5)


@pytest.mark.parametrize(
    "arguments", [("--cases", "0"), ("--jobs", "0"), ("--seed", "-1"), ("--only", "-1")]
)
def test_arguments_out_of_range_are_refused(
    main: Main, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(*arguments)

    assert error.value.code == 2
    assert arguments[1] in capsys.readouterr().err
