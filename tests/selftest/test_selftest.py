"""The self-test: what it catches, that it can fail, and that every gate is needed."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.inputs.load import load_inputs
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recording.results import shipped_schema
from needlepoint.verify.report.selftest_report import print_selftest, verdict_line
from needlepoint.verify.schema.selftest_result import SelftestResult
from needlepoint.verify.selftest.command import selftest
from needlepoint.verify.selftest.faults.catalogue import CATALOGUE, CONTROLS, FAULTS
from needlepoint.verify.selftest.faults.fault import Case
from needlepoint.verify.selftest.gates import GATES
from needlepoint.verify.selftest.input import own_input, recorded_input
from needlepoint.verify.selftest.judge import ALONE


@pytest.fixture(scope="module")
def result() -> SelftestResult:
    """Return the whole self-test on its own input, at both scales."""
    return selftest(own_input(0), tuple(CATALOGUE.values()), Limits.default(), NoProgress())


def _some(*ids: str) -> tuple[Case, ...]:
    return tuple(CATALOGUE[id] for id in ids)


def test_every_fault_is_caught_and_no_control_is_flagged(result: SelftestResult) -> None:
    missed = [case.id for case in result.cases if case.kind == "fault" and not case.caught]
    flagged = [case.id for case in result.cases if case.kind == "control" and case.caught]

    assert missed == []
    assert flagged == []
    assert result.verdict == "match"
    assert result.faults == result.caught == sum(c.kind == "fault" for c in result.cases)
    assert result.controls == sum(case.kind == "control" for case in result.cases)
    assert (result.false_alarms, result.too_few_rows) == (0, 0)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_there_are_enough_of_both_at_either_scale(result: SelftestResult, scale: float) -> None:
    found = [case.kind for case in result.cases if case.scale == scale]

    assert found.count("fault") >= 80
    assert found.count("control") >= 12


def test_every_gate_is_the_only_one_to_catch_something(result: SelftestResult) -> None:
    alone = {case.gates[0] for case in result.cases if len(case.gates) == 1}

    assert alone == set(GATES)


def test_faults_cover_the_classes_of_the_fault_log(result: SelftestResult) -> None:
    assert {case.class_ for case in result.cases if case.kind == "fault"} == set(
        "ABCDEFGHIJKLMNOPQ"
    )


def test_the_page_has_the_figures(result: SelftestResult) -> None:
    page = (Path(__file__).parents[2] / "docs" / "selftest.md").read_text(encoding="utf-8")
    serving = sum(case.case.startswith("server-") for case in result.cases)

    assert verdict_line(result) in page
    assert f"{len(FAULTS)} faults are planted in the store and score kernels" in page
    assert f"and {serving} in servers that keep" in page


def test_ids_are_unique(result: SelftestResult) -> None:
    ids = [case.id for case in result.cases]

    assert len(set(ids)) == len(ids)
    assert len(CATALOGUE) == len(FAULTS) + len(CONTROLS)


def test_a_wrong_positive_constant_fails_scores_and_passes_topk(result: SelftestResult) -> None:
    gates = {case.id: case.gates for case in result.cases}

    for id in ("wrong-positive-constant", "wrong-positive-constant@1e-3"):
        assert "index.scores" in gates[id]
        assert not any(gate.startswith("topk") for gate in gates[id])


def test_usual_comparisons_miss_what_the_judge_catches(result: SelftestResult) -> None:
    """A needle of one query, a truncation and a gain pass all four of them."""
    said = {case.id: case.others for case in result.cases}

    for id in ("bf16-truncated", "bf16-gain-0.4%"):
        assert said[id].assert_close == said[id].calc_diff == said[id].cosine == "match", id
    assert said["needle-of-one-query-lost"].overlap == "match"
    caught = [case for case in result.cases if case.kind == "fault" and case.others.calc_diff]
    missed = [case for case in caught if case.others.calc_diff == "match"]
    assert len(missed) > len(caught) / 4


# --- It can fail ------------------------------------------------------------------------------

LOOSE = ("store-gain-0.4%", "rope-half-split", "overlap-missing", "scores-lean", "relu-missing")


def test_limits_a_million_times_as_wide_catch_nothing(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("scale = 1e6\n")

    found = selftest(
        own_input(0), _some(*LOOSE), Limits.load(path), NoProgress(), (1.0,), serving=False
    )

    assert found.verdict == "differ"
    assert found.caught == 0


def test_tight_limits_flag_a_control(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("scale = 0.05\n")
    found = selftest(
        own_input(0),
        _some("softmax-in-base-e"),
        Limits.load(path),
        NoProgress(),
        (1.0,),
        serving=False,
    )

    assert (found.verdict, found.false_alarms) == ("differ", 1)


def test_a_fault_that_changes_nothing_is_an_error() -> None:
    idle = replace(CATALOGUE["store-gain-0.4%"], plant=lambda ground: ground.observed)

    with pytest.raises(ValueError, match=r"store-gain-0.4% at scale 1 changed nothing"):
        selftest(own_input(0), [idle], Limits.default(), NoProgress(), (1.0,), serving=False)


def test_a_gate_that_must_stay_silent_is_not_caught() -> None:
    """A fault that moves picks as well is not the fault that moves scores alone."""
    strict = replace(CATALOGUE["keys-of-another-request"], clear=("index.scores",))

    found = selftest(own_input(0), [strict], Limits.default(), NoProgress(), (1.0,), serving=False)

    assert (found.verdict, found.caught) == ("differ", 0)


@pytest.mark.parametrize("seed", [1, 2])
def test_other_rows_catch_the_same(seed: int) -> None:
    cases = _some("bf16-truncated", "scores-lean", "pooled-leans", "ties-capped", "score-nan")

    found = selftest(own_input(seed), cases, Limits.default(), NoProgress(), (1.0,), serving=False)

    assert found.verdict == "match"


# --- A recording of the user's ----------------------------------------------------------------


def test_too_few_rows_are_named_and_never_caught() -> None:
    source = recorded_input(load_inputs("mini", tokens=64, layers=(0,)))
    cases = _some("tail-of-the-last-page", "best-entry-lost", "state-in-bf16", "store-gain-2%")

    found = selftest(source, cases, Limits.default(), NoProgress(), (1.0,), serving=False)
    said = {case.id: case for case in found.cases}
    out = io.StringIO()
    print_selftest(found, Console(file=out, width=80), brief=False)

    assert found.verdict == "cannot-judge"
    assert (found.caught, found.too_few_rows) == (1, 3)
    assert said["best-entry-lost"].needs == 2 * 128 + 8
    assert said["best-entry-lost"].caught is None
    assert said["best-entry-lost"].gates == ()
    assert "tail-of-the-last-page: needs at least 66 rows" in out.getvalue()
    assert "best-entry-lost: needs at least 264 rows" in out.getvalue()


def test_one_request_cannot_show_what_takes_two() -> None:
    source = recorded_input(load_inputs("mini", tokens=64, layers=(0,)))
    cases = [case for case in FAULTS if case.requests == 2 and case.gates[0][:4] != "topk"]

    found = selftest(source, cases, Limits.default(), NoProgress(), (1.0,), serving=False)
    out = io.StringIO()
    print_selftest(found, Console(file=out, width=80), brief=False)

    assert {case.needs_requests for case in found.cases} == {2}
    assert (found.caught, found.too_few_rows, found.verdict) == (0, len(cases), "cannot-judge")
    assert "page-of-two-requests: needs at least 2 requests" in out.getvalue()


def test_a_fault_that_these_rows_hide_needs_more_of_them() -> None:
    """Rows of one value have no neighbour to take a scale from."""
    source = recorded_input(load_inputs("synthetic:gaussian", tokens=80, layers=(0,)))
    idle = replace(CATALOGUE["store-gain-0.4%"], plant=lambda ground: ground.observed)

    found = selftest(source, [idle], Limits.default(), NoProgress(), (1.0,), serving=False)

    assert found.cases[0].needs == 21
    assert found.verdict == "cannot-judge"


# --- Command ----------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command plant three cases only."""
    for id in set(CATALOGUE) - {"store-gain-2%", "store-gain-0.4%", "picks-in-another-order"}:
        monkeypatch.delitem(CATALOGUE, id)


@pytest.mark.usefixtures("few")
def test_the_command_writes_json_and_prints_the_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_app(app, ["selftest", "--json", "out.json"]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())

    assert found["schema"] == "needlepoint.selftest/1"
    assert found["faults"] == found["caught"] == 2 * 2 + 29
    assert SelftestResult.model_validate_json((tmp_path / "out.json").read_text())
    schema = jsonschema.Draft202012Validator(json.loads(shipped_schema("selftest")))
    schema.validate(found)
    found["cases"][0]["class"] = "Z"
    assert not schema.is_valid(found)
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "store-gain-0.4%" in out
    assert out.splitlines()[-1].startswith("match: 33 of 33 faults caught")
    assert run_app(app, ["selftest", "--json", "out.json"]) == 2


@pytest.mark.usefixtures("few")
def test_the_command_fails_with_loose_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "limits.toml").write_text("scale = 1e6\n")
    assert run_app(app, ["selftest", "--limits", "limits.toml", "--quiet"]) == 1
    assert capsys.readouterr().out.startswith("differ: 29 of 33 faults caught")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "9"], "belong to --input"),
        (["--seed", "x"], "--seed 'x'"),
        (["--input", "nowhere"], "nowhere"),
        (["--limits", "missing.toml"], "missing.toml"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_app(app, ["selftest", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_report_fits_80_columns_and_marks_what_is_missed(result: SelftestResult) -> None:
    first = result.cases[0]
    missed = first.model_copy(update={"caught": False, "gates": ()})
    flagged = next(case for case in result.cases if case.kind == "control").model_copy(
        update={"caught": True, "gates": ("index.stored",)}
    )
    rest = [case for case in result.cases if case.case not in (first.case, flagged.case)]
    out = io.StringIO()
    changed = result.model_copy(update={"cases": (missed, flagged, *rest)})
    print_selftest(changed, Console(file=out, width=80), brief=False)
    text = out.getvalue()

    assert max(map(len, text.splitlines())) <= 80
    assert f"{first.id}: missed; expected {first.expected[0]}, fired none" in text
    assert f"{flagged.id}: flagged by index.stored" in text
    assert all(case.case in text for case in result.cases)


def test_rows_are_those_of_the_stage_that_is_judged(result: SelftestResult) -> None:
    def rows(id: str) -> int:
        return next(case.rows for case in result.cases if case.id == id)

    assert rows("store-gain-2%") == 67 + 33 + 9
    assert rows("query-stale") == 268 + 132 + 39
    assert rows("state-in-bf16") == 2 + 1


def test_no_accumulated_error_is_alone(result: SelftestResult) -> None:
    """A row beyond its accumulated radius is beyond a local one: it is no gate of its own."""
    assert [case.id for case in result.cases if case.detail == ALONE] == []
