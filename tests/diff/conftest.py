"""Two recordings and what ``needlepoint diff`` says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from needlepoint.verify.recording.results import load_result
from needlepoint.verify.schema.result import FirstDivergence, Result, StageResult

Cli = Callable[..., CompletedProcess[str]]


@pytest.fixture
def difference(cli: Cli) -> Callable[..., Result]:
    """Return a function that judges recording B against A and checks exit code and report."""

    def judge(a: Path, b: Path, *options: object) -> Result:
        done = cli("diff", a, b, "--json", "r.json", "--force", *options)
        result = load_result(Path("r.json"))
        assert done.returncode == {"match": 0, "differ": 1, "cannot-judge": 2}[result.verdict]
        assert done.stdout.startswith(result.verdict)
        return result

    return judge


@pytest.fixture(scope="session")
def divergence() -> Callable[[Result], FirstDivergence]:
    """Return a function that gives the first divergence, which there must be."""

    def first(result: Result) -> FirstDivergence:
        found = result.candidates[0].first_divergence
        assert found is not None
        return found

    return first


@pytest.fixture(scope="session")
def stage_of() -> Callable[..., StageResult]:
    """Return a function that gives one stage of a layer."""

    def find(result: Result, path: str, stage: str, layer: int = 0) -> StageResult:
        for entry in result.candidates[0].layers:
            for part in entry.stages:
                if (entry.layer, part.path, part.stage) == (layer, path, stage):
                    return part
        raise AssertionError((layer, path, stage))

    return find
