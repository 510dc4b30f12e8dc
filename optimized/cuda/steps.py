"""The store as separate launches, so that every stage can be observed; the bytes are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from needlepoint.optimized.build.arguments import StepArguments
from needlepoint.optimized.build.variants import step_name, store_name
from needlepoint.optimized.cuda.faults import new_faults, require_no_store_faults
from needlepoint.optimized.cuda.runtime import launch
from needlepoint.optimized.cuda.store import (
    ROWS,
    PagedPool,
    launch_store,
    require_store,
)
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.serving.plan import StorePlan


def store_in_steps(
    kv: Tensor,
    score: Tensor,
    weights: StoreWeights,
    plan: StorePlan,
    pool: PagedPool,
    state: Tensor | None = None,
) -> Mapping[str, Tensor]:
    """Do what :func:`~needlepoint.optimized.cuda.store.store` does, one launch a stage.

    Parameters
    ----------
    kv, score, weights, plan, pool, state
        As there.

    Returns
    -------
    Mapping
        fp32 ``[windows, head_dim]`` on the device by stage: ``pooled``, ``normed``, ``roped`` and,
        for index keys, ``rotated``. Rows of skipped entries hold NaN.

    Raises
    ------
    ValueError
        As there.
    """
    require_store(kv, score, weights, plan, pool, state)
    if plan.decode:
        raise ValueError("plan: made for decode; the separate steps take plans of decode=False")
    head_dim, row = ROWS[pool.layout]
    windows = plan.slots.shape[0]
    inputs = "fp32" if kv.dtype == torch.float32 else "bf16"
    # A pooled row goes to its place in the plan instead of its slot; skipped entries stay skipped.
    place = torch.where(plan.slots < 0, -1, torch.arange(windows, device=kv.device))
    positions = torch.from_numpy(plan.windows.entry * plan.ratio).to(kv.device, torch.int32)
    stages: dict[str, Tensor] = {}

    def fresh(stage: str) -> Tensor:
        stages[stage] = kv.new_full((windows, head_dim), float("nan"), dtype=torch.float32)
        return stages[stage]

    dense_plan = replace(plan, slots=place, page_size=1)
    dense = PagedPool(pool.layout, fresh("pooled").view(torch.uint8), 1)
    name = store_name("prefill", plan.ratio, head_dim, inputs, "fp32")
    faults = new_faults(kv.device)
    launch_store(name, kv, score, weights, dense_plan, dense, state, faults)
    require_no_store_faults(faults, plan)

    def step(name: str, rows: Tensor, slots: Tensor, target: Tensor, shift: int) -> None:
        arguments = StepArguments(
            rows=rows,
            norm_weight=weights.norm_weight,
            rope=weights.rope_table,
            positions=positions,
            slots=slots,
            pool=target,
            page_shift=shift,
            eps=weights.norm_eps,
        )
        launch(name, arguments, kv.device)

    rows = stages["pooled"]
    names = {"norm": "normed", "rope": "roped"}
    if head_dim == 128:
        names["hadamard"] = "rotated"
    for part, stage in names.items():
        target = fresh(stage)
        step(step_name(part, head_dim), rows, place, target.view(torch.uint8), 0)
        rows = target
    shift = pool.page_size.bit_length() - 1
    step(step_name("store", head_dim, row), rows, plan.slots, pool.pages, shift)
    return stages
