"""The parts of the bench that need no card: what is compared, counted and printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from needlepoint.verify.bench import BenchReport, BenchRow, decode_cases, prefill_cases
from needlepoint.verify.bench_bytes import (
    KINDS,
    ByteCount,
    differing_rows,
    draw,
    emulate,
    make_inputs,
)
from needlepoint.verify.bench_cases import StoreCase
from needlepoint.verify.bench_sglang import load_sglang
from needlepoint.verify.bench_timing import Side, Timing, measure
from needlepoint.verify.gpu_report import main, markdown, totals

FP32 = torch.float32


@pytest.mark.parametrize(("ratio", "head_dim"), [(4, 128), (4, 512), (128, 512)])
def test_a_planted_byte_is_one_row_inside_and_every_row_outside(ratio: int, head_dim: int) -> None:
    lengths = (3 * ratio + 1, 5 * ratio)
    _, pools = emulate(make_inputs(ratio, head_dim, lengths, torch.bfloat16, "normal", seed=1))
    for expected in pools.values():
        assert differing_rows(expected.pool.clone(), expected) == 0
        found = expected.pool.clone()
        found[int(expected.page_table[1][0]), 0] ^= 1
        assert differing_rows(found, expected) == 1
        found = expected.pool.clone()
        owned = {int(page) for table in expected.page_table for page in table}
        spare = next(page for page in range(found.shape[0]) if page not in owned)
        found[spare, 5] ^= 1
        assert differing_rows(found, expected) == 8


def test_kinds_are_what_they_say() -> None:
    drawn = {kind: draw(kind, (64, 32), torch.Generator().manual_seed(0)) for kind in KINDS}

    assert set(drawn["tied"].flatten().tolist()) <= {-1.0, 0.0, 1.0}
    assert torch.equal(drawn["integers"], drawn["integers"].round())
    assert (drawn["sparse"] == 0).all(dim=1).any()
    assert drawn["tiny"].abs().max() < 1e-4 < 1e3 < drawn["huge"].abs().max()
    with pytest.raises(ValueError, match="kind 'flat': expected one of"):
        draw("flat", (1,), torch.Generator())


def test_the_floor_counts_each_byte_once() -> None:
    prefill = StoreCase("index-fp8", 4, FP32, FP32, 1, 0, 4096)
    kept = 4 * 2 * 256 * 4  # four tokens of the state, kv and score
    assert prefill.floor_bytes == 4096 * 2 * 256 * 4 + kept + 1024 * 132
    decode = StoreCase("main-584", 128, FP32, FP32, 2, 4223, 1)
    assert (decode.windows, decode.page_size) == (2, 2)
    assert decode.floor_bytes == 2 * (2 * 512 * 4 + 127 * 2 * 512 * 4 + 584)


def test_the_workloads_cover_what_the_table_promises() -> None:
    prefill, decode = list(prefill_cases()), list(decode_cases())

    assert {case.tokens for case in prefill} == {65472, 16384, 4096}
    assert {(case.ratio, case.windows > 0) for case in decode} == {
        (ratio, whole) for ratio in (4, 128) for whole in (True, False)
    }


def row(ratio: float | None) -> BenchRow:
    theirs = None if ratio is None else Timing("sglang", 2 * ratio, 2.0, 3.0)
    return BenchRow("prefill", Timing("ours", 2.0, 1.9, 2.1), theirs, ratio, 1.8, 4.0)


def test_the_report_names_times_ratios_and_bytes() -> None:
    bench = BenchReport("card", "2.11", None, 4.2, 790.0, (row(1.5), row(None)))
    counts = [ByteCount("index-fp8", "fp32", kind, 8, 2, kind == "tied", 264) for kind in KINDS]
    sums = totals(counts)
    page = markdown(bench, sums, {"card": "card"})

    assert sums == {"index-fp8, fp32 in": {"rows": 16, "differing": 1, "bytes": 8 * 264}}
    assert "| index-fp8, fp32 in | 16 | 1 | 2112 |" in page
    assert "  1.50" in page
    assert "sglang absent" in page


def test_measuring_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a side with a call and 4 rounds"):
        measure([Side("empty", [])])
    with pytest.raises(ValueError, match="expected a side with a call and 4 rounds"):
        measure([Side("one", [lambda: None])], rounds=3)


def test_a_folder_without_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no SGLang 0\.5\.23 kernels"):
        load_sglang(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_card_the_report_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
