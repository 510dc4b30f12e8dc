"""The pytest plugin, in suites of its own: verdicts, messages, devices, workers, results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Imported here although few tests or none name them: pytester forgets what its runs import, and
# torch, numpy and scipy cannot be imported twice.
import scipy.linalg  # noqa: F401

from needlepoint import check
from needlepoint.optimized.candidates.catalogue import create
from needlepoint.verify.cli.pytest_judge import Judge, Wishes, merged, replay_command
from needlepoint.verify.schema.result import Result

pytest_plugins = ["pytester"]

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

PLUGIN = "needlepoint.verify.cli.pytest_plugin"
PLAIN = "--strict-markers --assert=plain -p no:cacheprovider -p no:unraisableexception"
"""Options of inner runs: nothing that reads or rewrites what the outer run has loaded."""

KERNEL = """
import pytest
from my_candidate import MyKernel

@pytest.mark.needlepoint(tokens=40, layers=0)
def test_my_kernel(needlepoint_judge):
    needlepoint_judge(MyKernel)
"""

ON_A_CARD = """
import pytest

@pytest.mark.needlepoint(tokens=40, layers=0)
@pytest.mark.parametrize("name", ["cuda:fused-fp8", "cuda:fused-fp4"])
def test_on_a_card(needlepoint_judge, name):
    needlepoint_judge(name)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a folder with a kernel, as a kernel team has it; no card."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    shutil.copy(EXAMPLES / "my_candidate.py", pytester.path)
    pytester.makeini(f"[pytest]\naddopts = {PLAIN} -p {PLUGIN}\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("CI", "BUILD_NUMBER"):  # where these are set, pytest's summary repeats messages
        monkeypatch.delenv(name, raising=False)
    pytester.syspathinsert()
    monkeypatch.delitem(sys.modules, "my_candidate", raising=False)
    return pytester


def break_kernel(suite: pytest.Pytester) -> None:
    path = suite.path / "my_candidate.py"
    text = path.read_text()
    assert "torch.inf" in text
    path.write_text("".join(line for line in text.splitlines(True) if "torch.inf" not in line))


def test_a_sound_kernel_passes(suite: pytest.Pytester) -> None:
    suite.makepyfile(KERNEL)
    found = suite.runpytest_inprocess()
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["*= needlepoint =*", "judged 1: 1 match"])


def test_a_broken_kernel_fails_with_stage_token_and_replay(suite: pytest.Pytester) -> None:
    break_kernel(suite)
    suite.makepyfile(test_it=KERNEL)
    found = suite.runpytest_inprocess()
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(
        [
            "differ: layer 0 index.pooled, request 0 position 3 entry 0: * x limit",
            "  candidate mine: 1 of 10 rows beyond the limit",
            "  expected *, found * at dim *",
            "  input mini, 40 tokens in 1 requests, seed 0; contract bf16",
            "  replay: PYTHONPATH=. needlepoint verify --candidate my_candidate:MyKernel *",
            "  run again: pytest test_it.py::test_my_kernel",
            "judged 1: 1 differ",
            "test_it.py::test_my_kernel: differ: layer 0 index.pooled, *",
        ]
    )


def test_the_command_to_run_again_is_that_of_the_folder_of_the_run(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_kernel(suite)
    folder = suite.mkdir("kernels")
    (folder / "test_it.py").write_text(KERNEL)
    monkeypatch.chdir(folder)
    found = suite.runpytest_inprocess("test_it.py")
    found.stdout.fnmatch_lines(
        [
            "  run again: pytest test_it.py::test_my_kernel",
            "test_it.py::test_my_kernel: differ: layer 0 index.pooled, *",
        ]
    )


def test_the_replay_command_gives_the_same_verdict(suite: pytest.Pytester) -> None:
    break_kernel(suite)
    suite.makepyfile(test_it=KERNEL)
    out = suite.runpytest_inprocess().stdout.str()
    (replay,) = re.findall(r"replay: (.*)", out)
    command = replay.replace("needlepoint", f"{sys.executable} -m needlepoint.verify", 1)
    command = command.replace("needlepoint.verify verify", "needlepoint.verify")
    done = subprocess.run(
        ["bash", "-c", command], cwd=suite.path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("differ: layer 0 index.pooled, request 0 position 3 entry 0")


def test_without_a_card_tests_are_skipped_and_counted(suite: pytest.Pytester) -> None:
    suite.makepyfile(ON_A_CARD)
    found = suite.runpytest_inprocess()
    found.assert_outcomes(skipped=2)
    found.stdout.fnmatch_lines(["skipped for want of a card: 2 tests", "  no CUDA device: *"])


def test_device_cuda_fails_without_a_card(suite: pytest.Pytester) -> None:
    suite.makepyfile(ON_A_CARD)
    found = suite.runpytest_inprocess("--needlepoint-device", "cuda")
    found.assert_outcomes(failed=2)
    found.stdout.fnmatch_lines(["*--needlepoint-device cuda: no CUDA device: *"])


def test_skipped_tests_marked_gpu_are_counted_too(suite: pytest.Pytester) -> None:
    suite.makeini(f"[pytest]\naddopts = {PLAIN} -p {PLUGIN}\nmarkers = gpu\n")
    suite.makepyfile(
        "import pytest\n@pytest.mark.gpu\ndef test_it():\n    pytest.skip('no card here')\n"
        "def test_other():\n    pytest.skip('not about cards')\n"
    )
    found = suite.runpytest_inprocess()
    found.assert_outcomes(skipped=2)
    found.stdout.fnmatch_lines(["skipped for want of a card: 1 tests", "  no card here"])


def test_a_suite_that_judges_nothing_hears_nothing(suite: pytest.Pytester) -> None:
    suite.makepyfile("def test_it():\n    pass\n")
    assert "needlepoint" not in suite.runpytest_inprocess("-q").stdout.str()


NAMED = """
import pytest

@pytest.mark.needlepoint(candidates=["emulated:fused-fp8"], tokens=40, layers=0, stages="stored")
def test_each(needlepoint_judge, needlepoint_candidate):
    result = needlepoint_judge(needlepoint_candidate)
    assert result.counts.compared == 2
"""


def test_candidates_come_from_marker_or_command_line(suite: pytest.Pytester) -> None:
    suite.makepyfile(NAMED)
    found = suite.runpytest_inprocess("-v")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["*test_each?emulated:fused-fp8? PASSED*"])
    chosen = ["--needlepoint-candidate", "emulated:fused-bf16"]
    chosen += ["--needlepoint-candidate", "emulated:fused-fp4"]
    found = suite.runpytest_inprocess("-v", *chosen)
    found.assert_outcomes(passed=2)
    found.stdout.fnmatch_lines(["*fused-bf16? PASSED*", "*fused-fp4? PASSED*"])


def test_a_test_without_candidates_fails_alone(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        "import pytest\n"
        "def test_none(needlepoint_candidate):\n    pass\n"
        "@pytest.mark.needlepoint(candidates=5)\n"
        "def test_wrong(needlepoint_candidate):\n    pass\n"
        "@pytest.mark.needlepoint(candidates=[None])\n"
        "def test_item(needlepoint_candidate):\n    pass\n"
        "@pytest.mark.needlepoint('mini')\n"
        "def test_positional(needlepoint_candidate):\n    pass\n"
        "@pytest.mark.needlepoint(candidates='emulated:fused-fp8')\n"
        "def test_one(needlepoint_candidate):\n    assert needlepoint_candidate[0] == 'e'\n"
        "@pytest.mark.parametrize('needlepoint_candidate', [1])\n"
        "def test_own(needlepoint_candidate):\n    assert needlepoint_candidate == 1\n"
    )
    found = suite.runpytest_inprocess()
    found.assert_outcomes(passed=2, errors=4)
    for message in (
        "no candidate; name one with --needlepoint-candidate or @pytest.mark.needlepoint(*",
        "needlepoint option candidates=5: expected a list of candidates",
        "needlepoint option candidates=[[]None[]]: expected a list of candidates",
        "@pytest.mark.needlepoint('mini'): expected options by name, for example tokens=40",
    ):
        found.stdout.fnmatch_lines([message])
    assert "Traceback" not in found.stdout.str()


def test_gates_contract_and_profile_come_from_the_command_line(suite: pytest.Pytester) -> None:
    suite.makepyfile(NAMED)
    gate = "format_cost.official.rel_mean<=0"
    found = suite.runpytest_inprocess("--needlepoint-gate", gate)
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines([f"*differ: gate {gate} exceeded*"])
    found = suite.runpytest_inprocess("--needlepoint-profile", "bf16")
    found.assert_outcomes(failed=1)
    assert "replay:" not in found.stdout.str()
    found = suite.runpytest_inprocess("--needlepoint-profile", "nobody")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*cannot judge: *nobody*"])


def test_an_unknown_contract_stops_the_run(suite: pytest.Pytester) -> None:
    found = suite.runpytest_inprocess("--needlepoint-contract", "fp64")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*--needlepoint-contract: 'fp64': expected one of exact, bf16, *"])


def test_what_cannot_be_judged_fails_with_one_message(suite: pytest.Pytester) -> None:
    calls = {
        "'none:such'": "cannot judge: candidate 'none:such': expected one of",
        "5": "cannot judge: candidate 5: expected a candidate, a class or function",
        "dict": "cannot judge: candidate <class 'dict'>: it made dict, which lacks info, stages",
        "'emulated:fused-fp8', tokens=2": "cannot judge: layer 0: ratio 4",
        "'emulated:fused-fp8', tokens='2'": "option tokens='2': expected a whole number",
        "'emulated:fused-fp8', token=2": "needlepoint option 'token': expected one of input",
        "'emulated:fused-fp8', gates=['x']": "expected PATH<=VALUE",
    }
    cases = [
        f"def test_{number}(needlepoint_judge):\n    needlepoint_judge({call})\n"
        for number, call in enumerate(calls)
    ]
    marked = "import pytest\n@pytest.mark.needlepoint('mini')\n"
    marked += "def test_marked(needlepoint_judge):\n    pass\n"
    suite.makepyfile(marked + "".join(cases))
    found = suite.runpytest_inprocess()
    found.assert_outcomes(failed=len(calls), errors=1)
    out = found.stdout.str()
    assert "@pytest.mark.needlepoint('mini'): expected options by name" in out
    for message in calls.values():
        assert out.count(message) == 1, message
    assert "exception" not in out  # that pytest joins a chain of errors with


ANY = Wishes(None, None, (), "auto", 0)


WRONG: dict[str, tuple[object, ...]] = {
    "layers": (1.5, True, [None], [[]]),
    "stages": (3, True, [None], [[]]),
    "gates": (1.5, [None], [[]]),
    "tokens": ("1", True, 1.0, [1]),
    "seed": ("1", True, 1.0, [1]),
    "input": (1, ["mini"], b"x"),
    "model": (1, ["mini"], b"x"),
    "limits": (1, ["mini"], b"x"),
    "contract": (1, ["bf16"]),
    "profile": (1, ["bf16"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_option_of_the_wrong_type_is_named(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ValueError, match="needlepoint option ") as caught:
            check("emulated:fused-fp8", **merged({name: value}, ANY))
        assert f"{name}={value!r}: expected " in str(caught.value)


def test_options_of_test_and_command_line_are_joined() -> None:
    wishes = Wishes("bf16", "exact", ("b<=0",), "auto", 0)
    assert merged({}, ANY) == merged({"model": None, "contract": None}, ANY) == {"gates": ()}
    assert merged({"gates": "a<=1"}, ANY) == {"gates": ("a<=1",)}
    asked = {"layers": [0, 2], "gates": ["a<=1"], "input": Path("x"), "contract": "official"}
    assert merged(asked, wishes) == {
        **asked,
        "gates": ("a<=1", "b<=0"),
        "contract": "exact",
        "profile": "bf16",
    }


def test_a_replay_names_what_the_test_asked_for() -> None:
    options = {"layers": [0, 2], "stages": ("query", "stored"), "tokens": 8, "input": Path("x y")}
    options |= {"contract": "exact", "limits": "l.toml", "json": "r.json"}
    asked = merged({**options, "gates": ["a<=1"]}, ANY)
    assert replay_command("a:b", asked, 2) == (
        "needlepoint verify --candidate a:b --input 'x y' --contract exact --layers 2 --tokens 8 "
        "--stages index.stored,main.stored,query.query --limits l.toml --gate 'a<=1'"
    )
    assert replay_command("a:b", {**asked, "profile": "bf16"}) is None
    assert replay_command(lambda: create("emulated:fused-fp8"), asked) is None


def test_results_are_lines_in_order_and_replace_older_ones(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_b=KERNEL, test_a=KERNEL)
    (suite.path / "out.jsonl").write_text("older\n")
    suite.runpytest_inprocess("--needlepoint-results", "out.jsonl").assert_outcomes(passed=2)
    lines = [json.loads(line) for line in (suite.path / "out.jsonl").read_text().splitlines()]
    assert [line["test"] for line in lines] == [
        "test_a.py::test_my_kernel",
        "test_b.py::test_my_kernel",
    ]
    for line in lines:
        assert Result.model_validate_json(json.dumps(line["result"])).verdict == "match"
    assert [path.name for path in suite.path.glob(".out*")] == []


def test_workers_write_files_of_their_own_that_are_joined(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one run that finds the plugin as users do, by its entry point."""
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    suite.makeini(f"[pytest]\naddopts = {PLAIN} -p no:cov\n")
    cases = "".join(
        f"def test_{i}(needlepoint_judge):\n"
        f"    needlepoint_judge('emulated:fused-fp8', tokens=40, layers=0, stages='stored')\n"
        for i in range(4)
    )
    suite.makepyfile(test_many=cases)
    found = suite.runpytest_subprocess(
        "-n", "2", "--needlepoint-results", "out.jsonl", "-p", "no:randomly"
    )
    found.assert_outcomes(passed=4)
    found.stdout.fnmatch_lines(["judged 4: 4 match"])
    lines = [json.loads(line) for line in (suite.path / "out.jsonl").read_text().splitlines()]
    assert [line["test"] for line in lines] == [f"test_many.py::test_{i}" for i in range(4)]
    assert [path.name for path in suite.path.glob(".out*")] == []


def test_a_half_line_of_a_dead_worker_is_left_out(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_it="def test_it():\n"
        "    with open('.out.jsonl.7.part', 'w') as file:\n"
        '        file.write(\'{"test": "a"}\\n{"test": \')\n'
    )
    suite.runpytest_inprocess("--needlepoint-results", "out.jsonl").assert_outcomes(passed=1)
    assert (suite.path / "out.jsonl").read_text() == '{"test": "a"}\n'


def test_results_that_cannot_be_written_stop_the_run(suite: pytest.Pytester) -> None:
    suite.makepyfile(KERNEL)
    for place, told in (
        ("none/out.jsonl", "folder */none does not exist; create it first"),
        (".", "is a folder; give the name of a file"),
        ("/proc/out.jsonl", "folder /proc is not writable"),
    ):
        found = suite.runpytest_inprocess("--needlepoint-results", place)
        assert found.ret == pytest.ExitCode.USAGE_ERROR
        found.stderr.fnmatch_lines([f"*--needlepoint-results: output *: {told}*"])


def test_a_worker_takes_the_card_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    for worker in range(5):
        wishes = Wishes(None, None, (), "auto", worker)
        judge = Judge("t", "t", {}, wishes, lambda name, value: None)
        judge("emulated:fused-fp8", tokens=8, layers=0, stages="stored")
    assert taken == [0, 1, 0, 1, 0]


def test_pytest_starts_without_what_judges() -> None:
    code = (
        "import sys, pytest; import needlepoint.verify.cli.pytest_plugin; "
        "print([m for m in ('torch', 'numpy', 'pydantic', 'rich', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
