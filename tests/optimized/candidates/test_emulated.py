"""The emulated candidates as a whole: what they declare is what they return, on any machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy._core import _multiarray_umath as numpy_core  # type: ignore[attr-defined]

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.optimized.emulation import specification
from needlepoint.optimized.protocol.interface import (
    CompressorInputs,
    LayerInputs,
    Observed,
    QueryInputs,
)

Make = Callable[..., LayerInputs]
KINDS = [("bf16", Order.FUSED), ("fp8", Order.FUSED), ("fp4", Order.FUSED), ("bf16", Order.UNFUSED)]
ROOT = Path(__file__).parents[3]


def returned_stages(observed: Observed) -> set[tuple[str, str]]:
    stages = set(observed.dense) | {(path, "stored") for path in observed.stored}
    if observed.query is not None:
        stages |= {("query", "query"), ("query", "weights")}
    if observed.scores is not None:
        stages.add(("index", "scores"))
    if observed.topk is not None:
        stages.add(("index", "topk"))
    return stages


def digest(observed: Observed) -> str:
    """Return a digest of every byte that the specification fixes."""
    hashed = hashlib.sha256()
    for key in sorted(observed.dense):
        hashed.update(observed.dense[key].numpy().tobytes())
    for path in sorted(observed.stored):
        hashed.update(observed.stored[path].pool.numpy().tobytes())
    if observed.query is not None:
        hashed.update(observed.query.codes.view(torch.uint8).numpy().tobytes())
        hashed.update(observed.query.weights.numpy().tobytes())
    return hashed.hexdigest()


@pytest.mark.parametrize(("key_format", "order"), KINDS)
@pytest.mark.parametrize("ratio", [4, 128])
def test_every_declared_stage_is_returned_with_its_rows(
    make_inputs: Make, key_format: str, order: Order, ratio: int
) -> None:
    inputs = make_inputs(ratio, (300, 5, 129))
    candidate = EmulatedCandidate(key_format, order)
    observed = candidate.run(inputs)
    assert returned_stages(observed) == set(candidate.stages(ratio))
    entries = sum(n // ratio for n in inputs.lengths)
    for (path, _), rows in observed.dense.items():
        assert rows.shape == (entries, 128 if path == "index" else 512)
        assert rows.dtype == torch.float32
    for path, pages in observed.stored.items():
        assert pages.entries == tuple(n // ratio for n in inputs.lengths)
        assert pages.page_size == 256 // ratio
        expected = {"index": f"index-{key_format}"}.get(
            path, "main-bf16" if key_format == "bf16" else "main-584"
        )
        assert pages.layout == expected
    if ratio == 4:
        assert observed.topk is not None
        assert observed.topk.shape == (434, inputs.topk)


def test_ratio_0_declares_nothing() -> None:
    assert EmulatedCandidate("fp8", Order.FUSED).stages(0) == frozenset()


def test_fused_and_separate_steps_store_the_same_bytes(make_inputs: Make) -> None:
    inputs = make_inputs(4, (300, 5), torch.bfloat16)
    fused, separate = (EmulatedCandidate("bf16", order).run(inputs) for order in Order)
    assert digest(fused) == digest(separate)
    assert fused.topk is not None
    assert separate.topk is not None
    assert torch.equal(fused.topk, separate.topk)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize(("key_format", "order"), KINDS)
def test_prompts_shorter_than_a_window(
    make_inputs: Make, key_format: str, order: Order, ratio: int
) -> None:
    inputs = make_inputs(ratio, (1, 3))
    observed = EmulatedCandidate(key_format, order).run(inputs)
    assert all(bool((pages.pool == 0xFF).all()) for pages in observed.stored.values())
    if ratio == 4:
        assert observed.topk is not None
        assert bool((observed.topk == -1).all())
        assert observed.scores is not None
        assert observed.scores(1, 0, 3).shape == (3, 0)


def test_k_beyond_the_pool_is_padded(make_inputs: Make) -> None:
    inputs = make_inputs(4, (9,))
    observed = EmulatedCandidate("fp8", Order.FUSED).run(inputs)
    assert observed.topk is not None
    assert observed.topk.shape == (9, 4)
    assert observed.topk[8].tolist() == [0, 1, -1, -1]


def test_inputs_are_not_modified(make_inputs: Make) -> None:
    first, second = (make_inputs(4, (40, 6)) for _ in range(2))
    EmulatedCandidate("fp8", Order.FUSED).run(first)
    for a, b in zip(tensors(first), tensors(second), strict=True):
        assert torch.equal(a, b)


def tensors(inputs: LayerInputs) -> list[torch.Tensor]:
    out = [inputs.rope_table, inputs.hidden]
    for part in (inputs.index, inputs.main, inputs.query):
        if isinstance(part, CompressorInputs):
            out += [part.kv, part.score, part.ape, part.norm_weight]
        elif isinstance(part, QueryInputs):
            out += [part.q, part.weights]
    return out


def test_a_broken_precondition_is_refused(make_inputs: Make) -> None:
    inputs = make_inputs(128, (130,))
    inputs.main.kv[7, 7] = float("nan")
    with pytest.raises(ValueError, match=r"main\.kv: nan at request 0, position 7"):
        EmulatedCandidate("fp8", Order.FUSED).run(inputs)


def test_the_page_order_follows_the_seed(make_inputs: Make) -> None:
    inputs = make_inputs(4, (1100,))
    first = EmulatedCandidate("fp8", Order.FUSED).run(inputs)
    second = EmulatedCandidate("fp4", Order.FUSED).run(inputs)
    assert torch.equal(first.stored["index"].page_table[0], second.stored["index"].page_table[0])


def test_info_names_version_and_sources() -> None:
    info = EmulatedCandidate("fp4", Order.FUSED).info
    assert f"specification {specification.SPEC_VERSION}" in info.variant
    assert len(info.source_sha256) == 64


CHILD = """
import sys
import torch
sys.path.insert(0, "tests/optimized/candidates")
from test_emulated import KINDS, digest
from needlepoint.optimized.candidates.emulated import EmulatedCandidate
for inputs in torch.load(sys.argv[1], weights_only=False):
    for kind in KINDS:
        print(digest(EmulatedCandidate(*kind).run(inputs)))
"""


def child_digests(saved: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(saved)],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".typing"), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bytes_are_equal_under_every_cpu_capability_and_thread_count(
    make_inputs: Make, tmp_path: Path
) -> None:
    saved = tmp_path / "inputs.pt"  # torch's own cos and randn do depend on the capability
    torch.save([make_inputs(ratio, (300, 5), torch.bfloat16) for ratio in (4, 128)], saved)
    dispatched = " ".join(
        feature
        for feature in numpy_core.__cpu_dispatch__
        if numpy_core.__cpu_features__.get(feature, False)
    )
    plain = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    runs = [
        child_digests(saved, {**plain, "NPY_DISABLE_CPU_FEATURES": dispatched}),
        child_digests(saved, {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"}),
        child_digests(saved, {"ATEN_CPU_CAPABILITY": "avx512", "OMP_NUM_THREADS": "3"}),
    ]
    assert len(runs[0].split()) == 8
    assert runs[0] == runs[1] == runs[2]


def test_observed_rows_are_float32_numbers_of_the_pages(make_inputs: Make) -> None:
    """The stored bf16 row is the roped fp32 row rounded once."""
    inputs = make_inputs(4, (64,))
    observed = EmulatedCandidate("bf16", Order.FUSED).run(inputs)
    pages = observed.stored["main"]
    page = int(pages.page_table[0][0])
    rows = pages.pool[page].view(torch.bfloat16).view(64, 512)[:16]
    assert torch.equal(rows, observed.dense["main", "roped"].to(torch.bfloat16))
    assert np.all(pages.pool[page].numpy()[16 * 1024 :] == 0xFF)
