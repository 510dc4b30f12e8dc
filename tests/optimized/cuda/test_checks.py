"""Bad arguments of the CUDA operations are refused by name, before any device is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.cuda.checks import require_same_device, require_tensor
from needlepoint.optimized.cuda.faults import (
    new_faults,
    require_no_query_faults,
    require_no_store_faults,
)
from needlepoint.optimized.cuda.query import require_query
from needlepoint.optimized.cuda.steps import store_in_steps
from needlepoint.optimized.cuda.store import (
    PagedPool,
    new_state,
    require_inputs,
    require_store,
    store,
)
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.emulation.exact32 import fma
from needlepoint.optimized.emulation.specification import LOG2_E, LOWEST_EXPONENT, SCORE_LIMIT
from needlepoint.optimized.serving.plan import Chunks, StorePlan, plan_store

TOKENS, WIDTH = 20, 256
FP32, BF16 = torch.float32, torch.bfloat16


def weights(positions: int = 32) -> StoreWeights:
    table = torch.zeros(positions, 32, 2)
    return StoreWeights.prepare(4, torch.zeros(4, WIDTH), torch.ones(128), table, 1e-6)


def plan(*, keep_state: bool = False) -> StorePlan:
    table = torch.arange(2, dtype=torch.int32).view(1, 2)
    return plan_store(4, Chunks.whole((TOKENS,)), table, 4, keep_state=keep_state)


def pool(layout: str = "index-fp8", pages: int = 2, page_size: int = 4) -> PagedPool:
    size = {"index-fp8": 132, "index-bf16": 256, "main-bf16": 1024}[layout] * page_size
    return PagedPool(layout, torch.zeros(pages, size, dtype=torch.uint8), page_size)


def rows(tokens: int = TOKENS, width: int = WIDTH, dtype: torch.dtype = FP32) -> Tensor:
    return torch.zeros(tokens, width, dtype=dtype)


def test_good_arguments_name_their_variant() -> None:
    joined = rows(width=2 * WIDTH, dtype=BF16)
    kv, score = joined[:, :WIDTH], joined[:, WIDTH:]

    name = require_store(kv, score, weights(), plan(), pool(), None)
    assert name == "store_prefill_r4_d128_bf16_fp8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv": rows(dtype=torch.float16)}, "kv: dtype torch.float16, expected torch.float32 or"),
        ({"kv": rows(width=128)}, r"kv: shape \(20, 128\), expected \(any, 256\)"),
        ({"score": rows(width=2 * WIDTH)[:, ::2]}, "score: strides .* expected each row contig"),
        ({"score": rows(dtype=BF16)}, "score: dtype torch.bfloat16, expected torch.float32 like"),
        ({"kv": rows(tokens=19)}, "kv: 19 rows, expected at least 20"),
        ({"kv": rows(width=WIDTH + 1)[:, 1:]}, "kv: starts at an address of remainder 4"),
        ({"kv": rows(tokens=1).expand(TOKENS, WIDTH)}, "kv: rows 0 elements apart"),
        ({"pool": pool(pages=1)}, "pool: 1 pages, expected at least 2"),
        ({"pool": pool(page_size=8)}, "pool: page_size 8, expected a power of two equal to"),
        ({"pool": pool("main-bf16")}, "pool: layout main-bf16 holds rows of 512 dims, expected 12"),
        ({"pool": replace(pool(), layout="index-fp6")}, "pool: layout 'index-fp6', expected one"),
        ({"pool": replace(pool(), pages=pool().pages[:, 4:])}, r"pool: shape \(2, 524\), expected"),
        ({"pool": replace(pool(), pages=pool().pages.char())}, "pool: dtype torch.int8"),
        ({"weights": weights(16)}, "rope_table: 16 positions, expected at least 17"),
        ({"plan": plan(keep_state=True)}, "state: None, but the plan keeps or reads tokens"),
        ({"plan": replace(plan(), ratio=128)}, "plan: ratio 128, expected 4 like the weights"),
        ({"state": new_state(1, 4, 512, FP32, "cpu")}, r"state: shape \(1, 16, 2, 1024\), expec"),
        (
            {"state": new_state(0, 4, 128, FP32, "cpu"), "plan": plan(keep_state=True)},
            "state: 0 requests, expected at least 1",
        ),
    ],
)
def test_bad_store_arguments_are_named(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "kv": rows(),
        "score": rows(),
        "weights": weights(),
        "plan": plan(),
        "pool": pool(),
        "state": None,
    }
    with pytest.raises(ValueError, match=message):
        require_store(**(arguments | changes))  # type: ignore[arg-type]


def test_pools_are_aligned_to_the_widest_store_of_a_row() -> None:
    table = torch.zeros(32, 32, 2)
    main = StoreWeights.prepare(4, torch.zeros(4, 1024), torch.ones(512), table, 1e-6)
    aligned = torch.zeros(2 * 4096 + 16, dtype=torch.uint8)
    given = rows(width=1024)
    for offset in (0, 16):
        pages = PagedPool("main-bf16", aligned[offset:][: 2 * 4096].view(2, 4096), 4)
        require_store(given, given, main, plan(), pages, None)
    pages = PagedPool("main-bf16", aligned[8:][: 2 * 4096].view(2, 4096), 4)
    with pytest.raises(ValueError, match=r"pool: starts at .* remainder 8 .* of 16 bytes"):
        require_store(given, given, main, plan(), pages, None)


def test_inputs_are_aligned_to_the_widest_read() -> None:
    """Of four channels at ratio 4, and of 16 bytes at ratio 128."""
    table = torch.zeros(129, 32, 2)
    weights128 = StoreWeights.prepare(128, torch.zeros(128, 512), torch.ones(512), table, 1e-6)
    windows = Chunks.whole((128,))
    pages = torch.zeros(1, 1, dtype=torch.int32)
    own = PagedPool("main-bf16", torch.zeros(1, 1024, dtype=torch.uint8), 1)
    wide = rows(tokens=128, width=2 * 512, dtype=BF16)
    planned = plan_store(128, windows, pages, 1, keep_state=False)
    require_store(wide[:, 8:520], wide[:, 512:], weights128, planned, own, None)
    with pytest.raises(ValueError, match=r"kv: starts at .* remainder 8 .* of 16 bytes"):
        require_store(wide[:, 4:516], wide[:, 512:], weights128, planned, own, None)

    wide = rows(width=2 * WIDTH, dtype=BF16)
    require_store(wide[:, 4 : WIDTH + 4], wide[:, WIDTH:], weights(), plan(), pool(), None)
    with pytest.raises(ValueError, match=r"kv: starts at .* remainder 4 .* of 8 bytes"):
        require_store(wide[:, 2 : WIDTH + 2], wide[:, WIDTH:], weights(), plan(), pool(), None)


@pytest.mark.parametrize(("ratio", "head_dim", "bits"), [(4, 128, 32), (128, 512, 25)])
def test_rows_too_far_apart_for_the_arithmetic_of_addresses(
    ratio: int, head_dim: int, bits: int
) -> None:
    """A window of 128 tokens counts elements from its first one in 32 bits."""
    width = head_dim * (2 if ratio == 4 else 1)
    table = torch.zeros(129, 32, 2)
    given = StoreWeights.prepare(
        ratio, torch.zeros(ratio, width), torch.ones(head_dim), table, 1e-6
    )
    planned = plan_store(ratio, Chunks.whole((1,)), torch.zeros(1, 1, dtype=torch.int32), 1)
    near = torch.zeros(1, width).as_strided((1, width), (2**bits - 16, 1))
    far = near.as_strided((1, width), (2**bits, 1))

    require_inputs(near, near, given, planned, new_state(1, ratio, head_dim, FP32, "cpu"))
    with pytest.raises(ValueError, match=rf"kv: rows {2**bits} elements apart, .* 2\*\*{bits} at"):
        require_inputs(far, near, given, planned, new_state(1, ratio, head_dim, FP32, "cpu"))


def test_the_device_is_checked_before_a_launch() -> None:
    with pytest.raises(ValueError, match="kv: on cpu, expected a CUDA device"):
        store(rows(), rows(), weights(), plan(), pool())
    with pytest.raises(ValueError, match="no tensors"):
        require_same_device()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**60])
@pytest.mark.parametrize("name", ["ape", "norm_weight", "rope_table"])
def test_parameters_outside_the_preconditions_are_named(name: str, bad: float) -> None:
    given = {
        "ape": torch.zeros(4, WIDTH),
        "norm_weight": torch.ones(128),
        "rope_table": torch.zeros(8, 32, 2),
    }
    given[name].view(-1)[17] = bad
    with pytest.raises(ValueError, match=f"^{name}: a magnitude of "):
        StoreWeights.prepare(4, **given, norm_eps=1e-6)


@pytest.mark.parametrize("largest", [0.0, 0.7, 40.0, 43.0, 44.0, 2.90722e6])
def test_small_scores_keep_the_precondition_and_stay_above_the_clamp(largest: float) -> None:
    ape = torch.zeros(4, WIDTH)
    ape[2, 5] = -largest
    made = StoreWeights.prepare(4, ape, torch.ones(128), torch.zeros(8, 32, 2), 1e-6)
    small = np.float32(made.score_small)
    most = made.ape.abs().max().numpy()

    assert (small > 0) == (largest < 43.5)
    if small > 0:
        highest, lowest = fma(small, LOG2_E, most), fma(-small, LOG2_E, -most)
        assert max(highest, -lowest) < SCORE_LIMIT
        assert lowest - highest >= LOWEST_EXPONENT


def faults(first: int, second: int) -> Tensor:
    return torch.tensor([first, second], dtype=torch.int32)


def test_what_a_launch_found_is_named() -> None:
    none = int(new_faults("cpu")[0])
    require_no_store_faults(new_faults("cpu"), plan())
    require_no_query_faults(new_faults("cpu"))
    with pytest.raises(ValueError, match=r"^score: the window that ends at row 15 \(entry 3"):
        require_no_store_faults(faults(3, none), plan())
    with pytest.raises(ValueError, match=r"^kv: the window that ends at row 3 \(entry 0"):
        require_no_store_faults(faults(none, 0), plan())
    with pytest.raises(ValueError, match=r"^q: token 7 holds a number that is not finite"):
        require_no_query_faults(faults(7, none))
    with pytest.raises(ValueError, match=r"^weights: token 2 holds"):
        require_no_query_faults(faults(none, 2))


def test_what_a_decode_launch_found_is_named_by_its_chunk() -> None:
    start = np.array([6, 7, 11])
    chunks = Chunks(np.arange(3), start, np.ones(3, np.int64), np.zeros(3, np.int64))
    step = plan_store(4, chunks, torch.zeros(3, 1, dtype=torch.int32), 4, decode=True)
    with pytest.raises(ValueError, match=r"^score: the window that ends at row 2 \(entry 2"):
        require_no_store_faults(faults(2, 2), step)


def test_separate_steps_refuse_decode_plans() -> None:
    table = torch.zeros(1, 2, dtype=torch.int32)
    one = plan_store(4, Chunks.whole((1,)), table, 4, keep_state=False, decode=True)
    with pytest.raises(ValueError, match="plan: made for decode"):
        store_in_steps(rows(), rows(), weights(), one, pool())


@pytest.mark.parametrize(
    ("ape", "norm", "eps", "message"),
    [
        (torch.zeros(4, 128), torch.ones(128), 1e-6, "ape: shape"),
        (torch.zeros(4, WIDTH), torch.ones(64), 1e-6, "ratio 4 with head_dim 64: supported are"),
        (torch.zeros(4, WIDTH), torch.ones(128), 0.0, "norm_eps 0.0: expected finite and at least"),
        (torch.zeros(4, WIDTH).bfloat16(), torch.ones(128), 1e-6, "ape: dtype torch.bfloat16"),
    ],
)
def test_bad_parameters_are_named(ape: Tensor, norm: Tensor, eps: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoreWeights.prepare(4, ape, norm, torch.zeros(8, 32, 2), eps)


def test_the_position_embedding_is_prescaled_once() -> None:
    ape = torch.full((4, WIDTH), 3.0)
    made = StoreWeights.prepare(4, ape, torch.ones(128), torch.zeros(8, 32, 2), 1e-6)
    log2_e = torch.tensor(0x3FB8AA3B, dtype=torch.int32).view(torch.float32)

    assert torch.equal(made.ape, ape * log2_e)


@pytest.mark.parametrize(
    ("q", "w", "positions", "row", "message"),
    [
        ((5, 8, 64), (5, 8), torch.int32, "fp8", "q: shape"),
        ((5, 8, 128), (5, 7), torch.int32, "fp8", r"weights: shape \(5, 7\), expected \(5, 8\)"),
        ((5, 8, 128), (5, 8), torch.int64, "fp8", "positions: dtype torch.int64"),
        ((5, 0, 128), (5, 0), torch.int32, "fp8", "expected at least one head"),
        ((5, 8, 128), (5, 8), torch.int32, "584", "query of fp32 to 584: supported inputs"),
    ],
)
def test_bad_query_arguments_are_named(
    q: tuple[int, ...], w: tuple[int, ...], positions: torch.dtype, row: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        require_query(
            torch.zeros(q),
            torch.zeros(w),
            torch.zeros(5, dtype=positions),
            torch.zeros(8, 32, 2),
            row,
        )


def test_strided_queries_are_accepted() -> None:
    q = torch.zeros(5, 16, 128)[:, :8]
    positions = torch.zeros(5, dtype=torch.int32)
    name = require_query(q, torch.zeros(5, 8), positions, torch.zeros(8, 32, 2), "fp4")

    assert name == "query_fp32_fp4"
    require_tensor("empty", torch.zeros(0, 4), (None, 4), (FP32,), rows_strided=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("name", ["cuda:fused-bf16", "cuda:fused-fp4", "cuda:unfused-bf16"])
def test_candidates_say_that_there_is_no_device(name: str) -> None:
    with pytest.raises(ValueError, match=r"no CUDA device: torch .* sees none"):
        create(name)
