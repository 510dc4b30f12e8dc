"""The compiled emulation against the readable one, byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from needlepoint.optimized.build.toolchain import BuildError
from needlepoint.optimized.emulation import compiled
from needlepoint.optimized.emulation.compiled import Parameters, compute_rows, encode_rows
from needlepoint.optimized.emulation.narrow import store_bf16, store_fp4, store_fp8, store_main_fp8
from needlepoint.optimized.emulation.pages import planes
from needlepoint.optimized.emulation.specification import LOG2_E
from needlepoint.verify.workloads.calls import window_tokens
from needlepoint.verify.workloads.projections import KINDS, emulate, make_inputs

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

STORES = {
    "index-bf16": store_bf16,
    "index-fp8": store_fp8,
    "index-fp4": store_fp4,
    "main-bf16": store_bf16,
    "main-584": store_main_fp8,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ratio", "head_dim"), [(4, 128), (4, 512), (128, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_bytes_are_those_of_the_readable_emulation(
    dtype: torch.dtype, ratio: int, head_dim: int, kind: str
) -> None:
    lengths = (1, 70, 23) if ratio == 4 else (130, 257)
    inputs = make_inputs(ratio, head_dim, lengths, dtype, kind, seed=4)
    dense, pools = emulate(inputs)
    given = inputs.main
    tokens, entries = window_tokens(ratio, lengths)
    rows = compute_rows(
        given.kv,
        given.score,
        tokens,
        entries,
        Parameters(
            ratio,
            given.ape * float(LOG2_E),
            given.norm_weight,
            inputs.rope_table,
            inputs.norm_eps,
        ),
    )
    wanted = dense["rotated" if head_dim == 128 else "roped"].numpy()
    assert np.array_equal(rows.view(np.uint32), wanted.view(np.uint32))
    for layout, paged in pools.items():
        stored = encode_rows(layout, rows)
        values, scales = planes(paged)
        found = [
            (int(table[entry // paged.page_size]), entry % paged.page_size)
            for table, count in zip(paged.page_table, paged.entries, strict=True)
            for entry in range(count)
        ]
        page, slot = np.array(found).T
        assert np.array_equal(stored.values, values[page, slot])
        assert np.array_equal(stored.scales, scales[page, slot])


@pytest.mark.parametrize("layout", sorted(STORES))
def test_every_finite_pattern_is_encoded_alike(layout: str) -> None:
    dim = 128 if layout.startswith("index") else 512
    words = np.random.default_rng(5).integers(0, 2**32, (400, dim), dtype=np.uint64)
    rows = words.astype(np.uint32).view(np.float32)
    rows[~(np.abs(rows) < 2.0**60)] = 0.0
    rows[::3] = np.random.default_rng(6).standard_normal((len(rows[::3]), dim))
    rows[7], rows[8] = 0.0, -0.0
    stored, wanted = encode_rows(layout, rows), STORES[layout](np.ascontiguousarray(rows.T))

    assert np.array_equal(stored.values, wanted.values)
    assert np.array_equal(stored.scales, wanted.scales)


def test_the_library_is_compiled_once_and_failures_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEEDLEPOINT_KERNEL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler 'no-such-compiler'"):
        compiled.compiled_library("no-such-compiler")
    with pytest.raises(BuildError, match=r"emulation\.cpp does not compile"):
        compiled.compiled_library("false")
    first = compiled.compiled_library()
    stamp = first.stat().st_mtime_ns

    assert compiled.compiled_library() == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in first.parent.iterdir()] == [first.name]
