"""The one-launch store: projections of a call to cache bytes, on a CUDA device.

``compress -> norm -> RoPE -> Hadamard -> quantise -> paged store``; the arithmetic is
docs/specification.md, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.optimized.build.arguments import StoreArguments
from needlepoint.optimized.build.variants import store_name
from needlepoint.optimized.cuda.checks import (
    INPUT_DTYPES,
    require_same_device,
    require_same_dtype,
    require_tensor,
)
from needlepoint.optimized.cuda.faults import new_faults, require_no_store_faults
from needlepoint.optimized.cuda.runtime import launch
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.emulation.pages import LAYOUTS
from needlepoint.optimized.serving.plan import StorePlan, ring_rows, window_slots

ROWS = {
    "index-bf16": (128, "bf16"),
    "index-fp8": (128, "fp8"),
    "index-fp4": (128, "fp4"),
    "main-bf16": (512, "bf16"),
    "main-584": (512, "584"),
}
"""(head_dim, row format) of each page layout."""
_SHOWN = {"rope": "rope_table", "segments": "plan"}
"""What a caller calls an argument, where that differs."""
_STRIDE_BITS = {4: 32, 128: 25}
"""By ratio: a window of 128 tokens counts elements from its first one in 32 bits."""


@dataclass(frozen=True)
class PagedPool:
    """Pages that a store writes into.

    Attributes
    ----------
    layout
        Key of :data:`ROWS`.
    pages
        uint8 ``[pages, page bytes]``.
    page_size
        Rows a page, a power of two.
    """

    layout: str
    pages: Tensor
    page_size: int


def new_state(
    requests: int, ratio: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return an unwritten compressor state ``[requests, ring, 2, c * head_dim]``, kv then score."""
    width = head_dim * (2 if ratio == 4 else 1)
    shape = (requests, ring_rows(ratio), 2, width)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def store(
    kv: Tensor,
    score: Tensor,
    weights: StoreWeights,
    plan: StorePlan,
    pool: PagedPool,
    state: Tensor | None = None,
    *,
    faults: Tensor | None = None,
    overlap: bool = True,
) -> str:
    """Write the entries that a call completes into their pages, in one launch.

    Parameters
    ----------
    kv, score
        Projections ``[tokens, c * head_dim]``, fp32 or bf16; rows may be strided, so that both can
        be columns of one tensor. Rows start at multiples of four elements at ratio 4 and of 16
        bytes at ratio 128.
    weights
        From :meth:`StoreWeights.prepare`.
    plan
        From :func:`~needlepoint.optimized.serving.plan.plan_store`, on the device.
    pool
        Pages to write; no byte is written but those of the plan's entries.
    state
        From :func:`new_state`, fp32 or bf16; may be None if the plan needs none. A bf16 state
        rounds fp32 inputs that are kept in it.
    faults
        From :func:`~needlepoint.optimized.cuda.faults.new_faults`: the launch notes there what it
        finds outside the preconditions, and the caller reads it. With None this function waits for
        the launch and raises.
    overlap
        Whether the launch may overlap with its neighbours in the stream (programmatic dependent
        launch). A kernel that writes the plan or the weights and is followed by this launch must
        then not release it early; copies of torch do not.

    Returns
    -------
    str
        Name of the kernel variant that ran.

    Raises
    ------
    ValueError
        Before any launch, if an argument does not fit; the message names it. After it, without
        ``faults``, if a stored window lies outside the preconditions.
    RuntimeError
        If CUDA refuses the launch; the message names the kernel.
    """
    name = require_store(kv, score, weights, plan, pool, state)
    found = faults
    if found is None:
        found = new_faults(require_same_device(kv=kv))
    launch_store(name, kv, score, weights, plan, pool, state, found, overlap=overlap)
    if faults is None:
        require_no_store_faults(found, plan)
    return name


def launch_store(
    name: str,
    kv: Tensor,
    score: Tensor,
    weights: StoreWeights,
    plan: StorePlan,
    pool: PagedPool,
    state: Tensor | None,
    faults: Tensor,
    *,
    overlap: bool = True,
) -> None:
    """Launch a variant on arguments that :func:`require_store` has accepted."""
    if state is None:
        state = kv.new_empty((0, ring_rows(weights.ratio), 2, 0))
    arguments = StoreArguments(
        kv=kv,
        score=score,
        ape=weights.ape,
        norm_weight=weights.norm_weight,
        rope=weights.rope_table,
        segments=plan.segments,
        slots=plan.slots,
        writes=plan.writes,
        state=state,
        pool=pool.pages,
        page_shift=pool.page_size.bit_length() - 1,
        faults=faults,
        workspace=plan.workspace,
        eps=weights.norm_eps,
        score_small=weights.score_small,
        overlap=overlap,
    )
    named = {_SHOWN.get(n, n): t for n, t in arguments._asdict().items() if isinstance(t, Tensor)}
    device = require_same_device(**named)
    if plan.workspace.numel() < plan.workspace_words:
        raise ValueError(
            f"plan: a workspace of {plan.workspace.numel()} words, expected "
            f"{plan.workspace_words}; call plan.to(device)"
        )
    launch(name, arguments, device)


def require_store(
    kv: Tensor,
    score: Tensor,
    weights: StoreWeights,
    plan: StorePlan,
    pool: PagedPool,
    state: Tensor | None,
) -> str:
    """Check the arguments of :func:`store` and return the variant's name."""
    if pool.layout not in ROWS:
        raise ValueError(f"pool: layout {pool.layout!r}, expected one of {sorted(ROWS)}")
    head_dim, row = ROWS[pool.layout]
    if head_dim != weights.head_dim:
        raise ValueError(
            f"pool: layout {pool.layout} holds rows of {head_dim} dims, expected "
            f"{weights.head_dim} like norm_weight"
        )
    size = pool.page_size
    if size < 1 or size & (size - 1) or size != plan.page_size:
        raise ValueError(
            f"pool: page_size {size}, expected a power of two equal to the plan's {plan.page_size}"
        )
    stride = LAYOUTS[pool.layout].page_bytes(size)
    align = 16 if pool.layout == "main-bf16" else 8  # the widest store of a row
    require_tensor("pool", pool.pages, (None, stride), (torch.uint8,), align=align)
    if pool.pages.shape[0] < plan.pages:
        raise ValueError(f"pool: {pool.pages.shape[0]} pages, expected at least {plan.pages}")
    require_inputs(kv, score, weights, plan, state)
    inputs = require_same_dtype("kv", kv, "score", score)
    mode = "decode" if plan.decode else "prefill"
    return store_name(mode, weights.ratio, head_dim, inputs, row)


def require_inputs(
    kv: Tensor, score: Tensor, weights: StoreWeights, plan: StorePlan, state: Tensor | None
) -> None:
    """Check everything of a store but its pool.

    Raises
    ------
    ValueError
        If an argument does not fit; the message names it.
    """
    if plan.ratio != weights.ratio:
        raise ValueError(f"plan: ratio {plan.ratio}, expected {weights.ratio} like the weights")
    width = weights.head_dim * (2 if weights.ratio == 4 else 1)
    for name, tensor in (("kv", kv), ("score", score)):
        align = 16 if weights.ratio == 128 else 4 * tensor.element_size()
        require_tensor(name, tensor, (None, width), INPUT_DTYPES, align=align, rows_strided=True)
        if tensor.stride(0) >= 2 ** _STRIDE_BITS[weights.ratio]:
            raise ValueError(
                f"{name}: rows {tensor.stride(0)} elements apart, expected less than "
                f"2**{_STRIDE_BITS[weights.ratio]} at ratio {weights.ratio}"
            )
        if tensor.shape[0] < plan.tokens:
            raise ValueError(
                f"{name}: {tensor.shape[0]} rows, expected at least {plan.tokens} for the plan"
            )
    if weights.rope_table.shape[0] < plan.positions:
        raise ValueError(
            f"rope_table: {weights.rope_table.shape[0]} positions, expected at least "
            f"{plan.positions}"
        )
    if state is None:
        if plan.state_requests:
            raise ValueError(
                "state: None, but the plan keeps or reads tokens; pass new_state(..), or plan with "
                "keep_state=False"
            )
        return
    ring = 2 * window_slots(weights.ratio)
    require_tensor("state", state, (None, ring, 2, width), INPUT_DTYPES)
    if state.shape[0] < plan.state_requests:
        raise ValueError(
            f"state: {state.shape[0]} requests, expected at least {plan.state_requests}"
        )
