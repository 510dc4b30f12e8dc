"""The commands in an empty folder, with a result in place of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from needlepoint.verify.base.progress import Progress
from needlepoint.verify.cli import commands
from needlepoint.verify.cli.options import VerifyOptions
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.schema.result import Result

Calls = list[tuple[VerifyOptions, Progress]]
ROWS = {"emulated:fused-fp8/layer2/index/stored/local": torch.tensor([0.5, 3.25])}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Callable[[Result], Calls]:
    """Return a function that replaces the run by a result and lists the requests it got."""

    def replace(result: Result) -> Calls:
        calls: Calls = []

        def run(request: VerifyOptions, progress: Progress) -> PipelineOutput:
            calls.append((request, progress))
            return PipelineOutput(result=result, rows=dict(ROWS))

        monkeypatch.setattr(commands, "run_verify", run)
        return calls

    return replace
