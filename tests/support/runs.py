"""A small model, the command line in an empty folder, and recordings to edit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import FACTORIES, create
from needlepoint.optimized.protocol.interface import (
    MAIN,
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT, Arithmetic
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.inputs.layer_inputs import GivenLayer
from needlepoint.verify.inputs.load import Inputs, load_inputs
from needlepoint.verify.judge.record import reference_observed
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.run.pipeline import verify

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "sliding_window": 128,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 8,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "compress_ratios": [4, 128, 0, 4],
}
"""Eight picks, so that a few dozen entries are a selection."""

RAGGED = "553"
"""Synthetic requests of 300, 130 and 123 tokens: two pages of 64 entries, and no window of 128."""


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.json"
    path.write_text(json.dumps(SMALL))
    return path


@pytest.fixture(scope="session")
def small_inputs(small_model: Path) -> Callable[..., Inputs]:
    """Return a loader of synthetic input for the small model."""

    def load(kind: str = "gaussian", tokens: int = 200, **options: object) -> Inputs:
        return load_inputs(f"synthetic:{kind}", model=str(small_model), tokens=tokens, **options)  # type: ignore[arg-type]

    return load


@pytest.fixture(scope="session")
def judge() -> Callable[..., PipelineOutput]:
    """Return the main job with the shipped limits."""

    def run(inputs: Inputs, *candidates: Candidate, **options: object) -> PipelineOutput:
        defaults: dict[str, object] = {
            "contract": BF16_CONTRACT,
            "limits": Limits.default(),
            "stages": None,
            "progress": NoProgress(),
        }
        return verify(inputs, candidates, **(defaults | options))  # type: ignore[arg-type]

    return run


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CompletedProcess[str]]:
    """Return the command line, run in this process in an empty folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.chdir(folder)

    def run(*arguments: object) -> CompletedProcess[str]:
        words = [str(argument) for argument in arguments]
        capsys.readouterr()
        code = run_app(app, words)
        captured = capsys.readouterr()
        return CompletedProcess(words, code, captured.out, captured.err)

    return run


@pytest.fixture
def candidate_named(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Candidate], str]:
    """Return a function that makes a candidate known to the command line."""

    def add(name: str, candidate: Candidate) -> str:
        monkeypatch.setitem(FACTORIES, name, lambda: candidate)
        return name

    return add


@pytest.fixture(scope="session")
def recordings(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that records a candidate, or the reference under a contract, once."""
    made: dict[tuple[str, ...], Path] = {}

    def record(who: str, *options: str) -> Path:
        key = (who, *options)
        if key not in made:
            out = tmp_path_factory.mktemp("recording") / "out"
            kind = "--candidate" if ":" in who else "--contract"
            words = ["record", "--out", str(out), "--input", "synthetic", kind, who, "--quiet"]
            words += ["--model", str(small_model)]
            words += options or ["--tokens", RAGGED]
            assert run_app(app, words) == 0
            made[key] = out
        return made[key]

    return record


@pytest.fixture
def recorded(recordings: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that gives a copy of a recording under another name, free to be edited."""

    def copy(who: str, name: str, *options: str) -> Path:
        return Path(shutil.copytree(recordings(who, *options), tmp_path / name))

    return copy


@pytest.fixture(scope="session")
def edit() -> Callable[[Path, str, Callable[[Tensor], Tensor | None]], None]:
    """Return a function that changes one tensor of a recording, in place or by a new one."""

    def change(recording: Path, name: str, by: Callable[[Tensor], Tensor | None]) -> None:
        file = recording / f"{name.split('.')[0]}.safetensors"
        tensors = load_file(file)
        changed = by(tensors[name])
        tensors[name] = tensors[name] if changed is None else changed
        save_file(tensors, file)

    return change


@pytest.fixture(scope="session")
def manifest() -> Callable[[Path, Callable[[dict[str, object]], None]], None]:
    """Return a function that changes the manifest of a recording in place."""

    def change(recording: Path, by: Callable[[dict[str, object]], None]) -> None:
        path = recording / "manifest.json"
        value = json.loads(path.read_text())
        by(value)
        path.write_text(json.dumps(value))

    return change


@dataclass(frozen=True)
class ReferenceCandidate:
    """An arithmetic as a candidate: every step in float64 from what is given, rounded once."""

    inputs: Inputs
    arithmetic: Arithmetic
    change: Callable[[Tensor], Tensor] | None = None

    @property
    def info(self) -> CandidateInfo:
        name = self.arithmetic.name
        return CandidateInfo(f"test:{name}", "bf16", "cpu", name, "float64", "0" * 64)

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return create("emulated:fused-bf16").stages(ratio)

    def run(self, given: LayerInputs) -> Observed:
        weights = self.inputs.weights(given.layer)
        layer = ReferenceLayer(self.inputs.config, given.layer, weights, self.arithmetic)
        tokens = sum(given.lengths)
        # Latent and window feed attention alone, which is not asked for.
        whole = GivenLayer(given, torch.zeros(tokens, 64), torch.zeros(tokens, 512))
        stages = [
            layer.forward_projected(
                whole.projected(request, 0, length),
                layer.new_request(),
                keep_scores=True,
                attend=False,
            )
            for request, length in enumerate(given.lengths)
        ]
        observed = reference_observed(stages, self.arithmetic)
        if self.change is None:
            return observed
        rows = self.change(observed.dense[MAIN, "normed"])
        return replace(observed, dense={**observed.dense, (MAIN, "normed"): rows})


@pytest.fixture(scope="session")
def as_candidate() -> Callable[..., Candidate]:
    """Return a function that makes a candidate of an arithmetic; it may change ``main.normed``."""
    return ReferenceCandidate
