"""The bench of scores and top-k, as far as it goes without a card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from needlepoint.benchmarks.score_engines import ScoreEngines, find_engines, torch_scores
from needlepoint.benchmarks.scores import (
    ScoreReport,
    ScoreRow,
    run_score_bench,
    visible,
    workloads,
)
from needlepoint.benchmarks.timing import Timing
from needlepoint.verify.workloads.scores import make_case

NONE = ScoreEngines(None, None, ("DeepGEMM: absent",))


def test_every_format_and_shape_has_a_workload() -> None:
    names = list(workloads(NONE))

    assert len(names) == len(set(names)) == 4 + 2 + 9 + 5 + 4
    assert all(any(row in name for name in names) for row in ("bf16", "fp8", "fp4", "top-512"))


def test_a_report_puts_ratios_beside_ours() -> None:
    times = (Timing("ours", 50.0, 49.0, 51.0), Timing("DeepGEMM", 40.0, 39.0, 41.0))
    row = ScoreRow("paged decode", times, "2.70 TB/s")
    report = ScoreReport({"card": "X"}, (row,), "checked")

    assert "DeepGEMM 40.0 (0.80)" in row.line()
    assert report.table().splitlines() == ["card X", row.line(), "checked"]
    parsed = json.loads(report.json())
    assert parsed["schema"] == "needlepoint.bench-scores/1"
    assert parsed["rows"][0]["times"][1]["median_us"] == 40.0


def test_visible_pairs_are_those_within_the_context() -> None:
    case = make_case("fp8", 8, (4,), (20,), context_lens=[20, 3, 0, -1], device="cpu")

    assert visible(case) == 23


def test_the_unfused_side_computes_the_same_scores() -> None:
    case = make_case("bf16", 8, (6,), (50,), kind="integers", context_lens=[50] * 6, device="cpu")
    expected = torch.cat([scores for _, scores, _ in case.true_rows()])

    assert torch.allclose(torch_scores(case).double(), expected, rtol=2e-2, atol=4.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_card_or_engines_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        run_score_bench(NONE)
    engines = find_engines(tmp_path)
    assert engines.topk_module is None
    assert any("SGLang" in reason for reason in engines.absent)
    assert engines.ragged(make_case("fp8", 8, (1,), (4,), device="cpu")) is None
