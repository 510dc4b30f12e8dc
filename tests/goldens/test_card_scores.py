"""Recordings of scores and picks: what a replay admits, and that each fault in one is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from needlepoint.optimized.emulation.select import select_topk
from needlepoint.verify.goldens.card_scores import K, given, golden_case, main, record, replay

FORMATS = ("bf16", "fp8", "fp4")
FILES = sorted((Path(__file__).parent / "data" / "scores").glob("*.safetensors"))


def recording() -> dict[str, Tensor]:
    """Return a recording as a card would make it: float64 scores of the same bytes, rounded."""
    tensors: dict[str, Tensor] = {}
    for row in FORMATS:
        case = golden_case(row, "cpu")
        found = torch.cat([scores for _, scores, _ in case.true_rows()]).float()
        tensors |= given(case)
        tensors[f"{row}.mma.scores"] = found
        tensors[f"{row}.mma.picks"] = select_topk(found, case.context_lens, K)
    return tensors


def test_there_is_a_recording() -> None:
    assert [path.stem for path in FILES] == ["h200"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_card_scored_and_picked_is_admitted(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}

    assert replay(tensors) == []
    assert {name.removesuffix(".scores") for name in tensors if name.endswith(".scores")} == {
        "bf16.mma",
        "bf16.wgmma",
        "fp8.mma",
        "fp8.wgmma",
        "fp4.mma",
    }
    assert facts.keys() >= {"card", "architecture", "torch", "date", "sources"}
    assert path.stat().st_size < 400 * 1024


def test_scores_of_the_same_bytes_are_admitted() -> None:
    assert replay(recording()) == []


@pytest.mark.parametrize("row", FORMATS)
def test_every_planted_fault_is_named(row: str) -> None:
    tensors = recording()
    scores, picks = tensors[f"{row}.mma.scores"], tensors[f"{row}.mma.picks"]

    def faults(name: str, changed: Tensor) -> list[str]:
        return replay(tensors | {f"{row}.mma.{name}": changed})

    gain = scores * 1.001
    assert f"{row}.mma: scores outside the bound" in faults("scores", gain)
    seen = scores.clone()
    seen[2, 3] = 0.0  # this row sees three columns
    assert f"{row}.mma: another set of columns is -inf" in faults("scores", seen)
    swapped = picks.clone()
    swapped[0, 0], swapped[0, 1] = picks[0, 1], picks[0, 0]
    assert faults("picks", swapped) == [f"{row}.mma: other picks than those of its own scores"]
    lost = scores.clone()
    lost[7, 5] = torch.nan
    assert f"{row}.mma: scores outside the bound" in faults("scores", lost)


def test_a_recording_without_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="no scores in the recording"):
        replay({"bf16.codes": torch.zeros(1)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_recording_needs_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        record()
    assert main(["scores.safetensors"]) == 2
    assert main([]) == 2
    assert "expected one argument" in capsys.readouterr().err
