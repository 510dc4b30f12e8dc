from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from needlepoint.reference.profile import BF16_CONTRACT, EXACT
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.cli.commands import run_diff, run_record, run_verify
from needlepoint.verify.cli.options import DiffOptions, RecordOptions, VerifyOptions
from needlepoint.verify.numerics.limits import Limits

INPUT: dict[str, Any] = {
    "input": "synthetic:ties",
    "model": "v4-pro",
    "layers": (2, 3),
    "tokens": 640,
    "seed": 7,
    "checkpoint": Path("weights"),
}
STAGES = frozenset({("index", "stored")})

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _spy(calls: list[Call], answer: object) -> Callable[..., object]:
    def spy(*args: object, **options: object) -> object:
        calls.append((args, options))
        return answer

    return spy


@pytest.fixture
def spies(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Call]]:
    """Replace everything a request reaches; each answers with its own name."""
    places = {
        "create": "needlepoint.verify.cli.commands.create",
        "inputs": "needlepoint.verify.cli.commands.load_inputs",
        "verify": "needlepoint.verify.run.pipeline.verify",
        "record": "needlepoint.verify.judge.record.record",
        "diff": "needlepoint.verify.diff.command.diff",
    }
    calls: dict[str, list[Call]] = {name: [] for name in places}
    for name, place in places.items():
        monkeypatch.setattr(place, _spy(calls[name], name))
    return calls


def test_verify_hands_everything_to_the_pipeline(
    spies: dict[str, list[Call]], tmp_path: Path
) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("scale = 2.0\n")
    progress = NoProgress()

    request = VerifyOptions(
        **INPUT, candidate=("a", "b"), contract="exact", limits=limits, stages=STAGES
    )
    output: object = run_verify(request, progress)

    assert output == "verify"
    assert spies["inputs"] == [
        (
            ("synthetic:ties",),
            {
                "model": "v4-pro",
                "layers": (2, 3),
                "tokens": 640,
                "seed": 7,
                "checkpoint": Path("weights"),
            },
        )
    ]
    assert [args for args, _ in spies["create"]] == [("a",), ("b",)]
    (args, options) = spies["verify"][0]
    assert args == ("inputs", ("create", "create"))
    assert options["contract"] is EXACT
    assert options["limits"] == Limits.load(limits)
    assert options["stages"] == STAGES
    assert options["progress"] is progress


def test_limits_are_the_shipped_table_unless_a_file_is_given(spies: dict[str, list[Call]]) -> None:
    run_verify(VerifyOptions(**INPUT, candidate=("a",)), NoProgress())

    assert spies["verify"][0][1]["limits"] == Limits.default()


def test_a_wrong_limits_file_stops_before_any_work(
    spies: dict[str, list[Call]], tmp_path: Path
) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("scale = -1\n")

    with pytest.raises(ValueError, match=r"limits\.toml"):
        run_verify(VerifyOptions(**INPUT, candidate=("a",), limits=limits), NoProgress())

    assert not any(spies.values())


@pytest.mark.parametrize(("candidate", "passed"), [(None, None), ("a", "create")])
def test_record_hands_reference_or_candidate_on(
    candidate: str | None, passed: str | None, spies: dict[str, list[Call]], tmp_path: Path
) -> None:
    out = tmp_path / "out"

    run_record(
        RecordOptions(**INPUT, candidate=(candidate,) if candidate else (), out=out, force=True),
        NoProgress(),
    )

    (args, options) = spies["record"][0]
    assert args == ("inputs", passed, out)
    assert options["contract"] is BF16_CONTRACT
    assert options["force"] is True


def test_record_refuses_its_folder_before_any_work(
    spies: dict[str, list[Call]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="none does not exist"):
        run_record(
            RecordOptions(**INPUT, candidate=("a",), out=tmp_path / "none" / "out"), NoProgress()
        )

    assert not any(spies.values())


def test_diff_hands_both_recordings_on(spies: dict[str, list[Call]]) -> None:
    request = DiffOptions(a=Path("a"), b=Path("b"), contract="exact", layers=(2,), stages=STAGES)
    output: object = run_diff(request, NoProgress())

    assert output == "diff"
    (args, options) = spies["diff"][0]
    assert args == (Path("a"), Path("b"))
    assert options["contract"] is EXACT
    assert options["layers"] == (2,)
    assert options["stages"] == STAGES
