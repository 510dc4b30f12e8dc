"""``needlepoint doctor``: the reasons are those that judging would give."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from needlepoint.optimized.build.cache import CachedModule
from needlepoint.optimized.build.toolchain import FLAGS, BuildError
from needlepoint.optimized.candidates import catalogue as candidates
from needlepoint.optimized.candidates.catalogue import FACTORIES, create
from needlepoint.optimized.cuda.runtime import NoDevice
from needlepoint.optimized.protocol.interface import CandidateInfo
from needlepoint.verify.cli import doctor
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.cli.doctor import (
    CacheEntry,
    Diagnosis,
    candidate_status,
    diagnose,
    print_diagnosis,
)

OWN = tuple(name for name in FACTORIES if name.startswith(("emulated:", "cuda:")))
LISTED = vars(doctor)["names"]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEEDLEPOINT_KERNEL_CACHE", str(tmp_path / "cache"))
    # Making an engine's candidate may import the engine, which takes seconds.
    monkeypatch.setattr(doctor, "names", lambda: OWN)


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def printed(found: Diagnosis) -> str:
    out = io.StringIO()
    print_diagnosis(found, Console(file=out, width=100))
    return out.getvalue()


@pytest.mark.usefixtures("no_card")
def test_the_reason_is_the_error_that_judging_ends_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = candidate_status("cuda:fused-fp8")
    assert not status.runs
    assert status.reason is not None
    assert run_app(app, ["verify", "--candidate", "cuda:fused-fp8"]) == 2
    assert status.reason in capsys.readouterr().err
    assert run_app(app, ["doctor"]) == 0
    assert f"cannot run: {status.reason}" in capsys.readouterr().out


def test_every_candidate_is_listed_and_those_that_run_do() -> None:
    found = diagnose()
    assert LISTED is candidates.names
    assert [status.name for status in found.candidates] == list(OWN)
    for status in found.candidates:
        if status.runs:
            assert create(status.name).info.name == status.name
            assert status.reason is None
    assert sum(status.runs for status in found.candidates) >= 4


class OnACard:
    """A candidate that could be made: a card is there."""

    info = CandidateInfo("cuda:x", "fp8", "cuda", "needlepoint", "", "")


def test_a_card_without_a_compiler_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise BuildError("no nvcc: set CUDA_HOME")

    monkeypatch.setattr(doctor, "create", lambda name: OnACard())
    monkeypatch.setattr(doctor, "toolchain", missing)
    assert candidate_status("cuda:x").reason == "no nvcc: set CUDA_HOME"
    assert not diagnose().compiler.usable
    assert "kernel compiler: no nvcc: set CUDA_HOME" in printed(diagnose())


def test_a_foreign_factory_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "expected one of" in str(candidate_status("no.such:thing").reason)


def test_a_card_that_no_kernel_is_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise NoDevice("Old Card has compute capability 7.0")

    monkeypatch.setattr(doctor, "require_cuda", refuse)
    cuda = diagnose().cuda
    assert (cuda.usable, cuda.reason) == (False, "Old Card has compute capability 7.0")


def test_json_is_whole_and_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    assert run_app(app, ["doctor", "--quiet", "--json", str(path)]) == 0
    value = json.loads(path.read_text())
    assert value["schema"] == "needlepoint.doctor/1"
    assert value["cache"] is None
    assert Diagnosis.model_validate_json(path.read_text()).candidates
    assert run_app(app, ["doctor", "--json", str(path)]) == 2
    assert run_app(app, ["doctor", "--quiet", "--caches", "--json", str(path), "--force"]) == 0
    assert json.loads(path.read_text())["cache"]["entries"] == []


def entry(stale: str | None) -> CachedModule:
    folder = Path("query-sm_90a-0")
    return CachedModule(
        folder, "query", "90a", ("query_fp32_fp8",), "ab" * 32, FLAGS, 2 * 86400, stale
    )


def test_the_cache_is_listed_and_purged(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = entry("its sources changed")
    monkeypatch.setattr(doctor, "cached_modules", lambda: (entry(None), stale))
    monkeypatch.setattr(doctor, "purge_stale", lambda: (stale,))
    listed = printed(diagnose(caches=True))
    assert "2 modules, 1 stale, 0 removed" in listed
    assert "query sm_90a  stale: its sources changed" in listed
    assert "2.0 days old, sources abababababab, flags -std=c++17" in listed
    assert "query_fp32_fp8" in listed
    assert "--purge-stale removes stale modules" in listed
    purged = diagnose(purge=True)
    assert purged.cache is not None
    assert [type(removed) for removed in purged.cache.removed] == [CacheEntry]
    assert "removed query-sm_90a-0: its sources changed" in printed(purged)
