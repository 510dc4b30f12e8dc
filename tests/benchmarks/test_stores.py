"""The parts of the bench that need no card: what is compared, counted and printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from needlepoint.benchmarks.byte_sweep import SOURCES, ByteCount, differing_rows, projected
from needlepoint.benchmarks.cases import StoreCase
from needlepoint.benchmarks.gpu_report import main, markdown, totals, write
from needlepoint.benchmarks.stores import (
    QUERIES,
    BenchReport,
    BenchRow,
    decode_cases,
    prefill_cases,
    select,
)
from needlepoint.benchmarks.timing import Side, Timing, measure
from needlepoint.optimized.build.variants import MODULES
from needlepoint.optimized.engines.sglang import load_sglang
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.inputs.synthetic import VARIED
from needlepoint.verify.workloads.projections import KINDS, emulate, make_inputs

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


REPORT = BenchReport(
    date="2026-11-29",
    card="card",
    architecture="sm_90a",
    driver="580",
    torch="2.11",
    sglang=None,
    copy_4gib=4.2,
    product=790.0,
    rows=(row(1.5), row(None)),
)


def test_the_report_names_times_ratios_and_bytes() -> None:
    counts = [ByteCount("index-fp8", "fp32", kind, 8, 2, kind == "tied", 264) for kind in KINDS]
    sums = totals(counts)
    page = markdown(REPORT, counts)

    assert sums == {"index-fp8, fp32 in": {"rows": 16, "differing": 1, "bytes": 8 * 264}}
    assert totals(counts, by_kind=True)["index-fp8, fp32 in, tied"]["differing"] == 1
    assert "| index-fp8, fp32 in | 16 | 1 | 2112 |" in page
    assert "  1.50" in page
    assert "sglang absent" in page


def test_both_files_of_the_report_hold_every_time_and_count(tmp_path: Path) -> None:
    counts = [ByteCount("index-fp8", "fp32", "mini", 8, 2, 0, 264)]
    page = write(tmp_path, REPORT, counts)
    report = json.loads((tmp_path / "gpu-report.json").read_text())

    assert (tmp_path / "gpu-report.md").read_text() == page
    assert report["bench"] == json.loads(REPORT.json())
    assert report["bench"]["schema"] == "needlepoint.bench/1"
    assert report["bench"]["rows"][0]["ours"] == {
        "name": "ours",
        "median_us": 2.0,
        "low_us": 1.9,
        "high_us": 2.1,
    }
    assert report["bytes"]["index-fp8, fp32 in, mini"]["rows"] == 2
    assert set(report["sources_sha256"]) == set(MODULES)


def test_workloads_are_chosen_by_a_part_of_their_name() -> None:
    cases, queries = [*prefill_cases(), *decode_cases()], list(QUERIES)

    assert select(cases, queries, []) == (cases, queries)
    some, none = select(cases, queries, ["decode r128", "prefill r4 main-bf16 bf16 in, fp32"])
    assert {case.ratio for case in some} == {4, 128}
    assert not none
    assert select(cases, queries, ["query"]) == ([], queries)
    with pytest.raises(ValueError, match="workload 'decode r8': in no name; names look like"):
        select(cases, queries, ["decode r8"])


def test_every_compressor_of_an_input_is_compared_with_both_dtypes() -> None:
    seen = list(projected("synthetic:gaussian", tokens=300))

    assert [(given.ratio, given.main.norm_weight.shape[0]) for given in seen] == [
        *[(4, 128)] * 2,
        *[(4, 512)] * 2,
        *[(128, 512)] * 2,
    ]
    assert [given.main.kv.dtype for given in seen] == [FP32, torch.bfloat16] * 3
    assert torch.equal(seen[1].main.kv, seen[0].main.kv.bfloat16())
    assert SOURCES == ("mini", *(f"synthetic:{kind}" for kind in VARIED))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("options", [[], ["--device", "cuda"], ["--json", "FOLDER/bench.json"]])
def test_the_command_without_a_card_exits_2_and_writes_nothing(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [text.replace("FOLDER", str(tmp_path)) for text in options]

    assert run_app(app, ["bench", *given]) == 2
    assert "needlepoint: error: no CUDA device: torch" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu"], "--device 'cpu': expected cuda"),
        (["--only", "decode r8"], "workload 'decode r8': in no name"),
        (["--json", "no/such/folder.json"], "folder no/such does not exist"),
    ],
)
def test_the_command_refuses_bad_options(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["bench", *options]) == 2
    assert message in capsys.readouterr().err


def test_measuring_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a side with a call and 4 rounds"):
        measure([Side("empty", [])])
    with pytest.raises(ValueError, match="expected a side with a call and 4 rounds"):
        measure([Side("one", [lambda: None])], rounds=3)


def test_a_folder_without_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no SGLang 0\.5\.23 kernels"):
        load_sglang(tmp_path)


def sglang_folder(root: Path, compress: str = "") -> Path:
    """Write a package with the files that are looked for, and return its folder."""
    root /= "sglang"
    kernels = root / "kernels" / "jit" / "csrc" / "deepseek_v4"
    modules = root / "kernels" / "ops" / "attention" / "dsv4"
    for folder in (kernels, modules):
        folder.mkdir(parents=True)
    (kernels / "c4_v2.cuh").touch()
    for name in ("__init__.py", "norm_rope.py"):
        (modules / name).touch()
    (modules / "compress.py").write_text(compress)
    return root


def in_a_process(code: str) -> str:
    """Run Python code of its own: what is loaded stays loaded."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_several_candidates_share_one_sglang(tmp_path: Path) -> None:
    root = sglang_folder(tmp_path)
    out = in_a_process(
        "from pathlib import Path\n"
        "from needlepoint.optimized.engines.sglang import find_sglang, load_sglang\n"
        f"first = load_sglang(Path({str(root)!r}))\n"
        "assert load_sglang(find_sglang()) is first\n"
        "print(find_sglang())"
    )
    assert out.strip() == str(root)


def test_a_package_that_sglang_needs_is_named(tmp_path: Path) -> None:
    root = sglang_folder(tmp_path, "import not_there_at_all")
    out = in_a_process(
        "from pathlib import Path\n"
        "from needlepoint.optimized.engines.sglang import load_sglang\n"
        f"try: load_sglang(Path({str(root)!r}))\n"
        "except ValueError as error: print(error)"
    )
    assert "need the package not_there_at_all" in out
    assert "`pip install not_there_at_all`" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_card_the_report_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
