"""Decode stores under a CUDA graph: captured once at full width, replayed for any fewer requests.

Everything that changes from call to call lies in buffers that the graph reads: tokens, segments,
slots and writes. A replay copies the call into them and fills what is left with entries that the
kernel skips, so that nothing of an earlier call can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from needlepoint.optimized.cuda.faults import new_faults
from needlepoint.optimized.cuda.store import PagedPool, launch_store, require_store
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.serving.plan import StorePlan

_stream = cast(Callable[..., Any], torch.cuda.Stream)


class GraphedDecode:
    """The decode store of one path at a fixed width.

    Parameters
    ----------
    weights
        Of the compressor.
    pool
        Pages that are written.
    state
        State of the slots.
    plan
        Any decode plan of at most ``width`` chunks: what all replays have in common.
    width
        Largest number of requests of a call.
    dtype
        Of the tokens.

    Raises
    ------
    ValueError
        If an argument does not fit, as :func:`~needlepoint.optimized.cuda.store.store`.
    """

    def __init__(
        self,
        weights: StoreWeights,
        pool: PagedPool,
        state: Tensor,
        plan: StorePlan,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        require_decode(plan, width)
        columns = state.shape[-1]
        device = state.device
        self.width = width
        self.faults = new_faults(device)
        self._kv = torch.zeros(width, columns, dtype=dtype, device=device)
        self._score = torch.zeros_like(self._kv)
        empty = replace(
            plan, segments=plan.segments[:0], slots=plan.slots[:0], writes=plan.writes[:0]
        )
        self._plan = padded_plan(empty, width, width).to(device)
        name = require_store(self._kv, self._score, weights, self._plan, pool, state)

        def launch() -> None:
            launch_store(
                name,
                self._kv,
                self._score,
                weights,
                self._plan,
                pool,
                state,
                self.faults,
                overlap=False,
            )

        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            launch()  # the module loads outside the capture; every entry is skipped
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            launch()

    def replay(self, plan: StorePlan, kv: Tensor, score: Tensor) -> None:
        """Store a call on the current stream.

        Parameters
        ----------
        plan
            A decode plan of at most ``width`` chunks, on the CPU.
        kv, score
            Its tokens.

        Raises
        ------
        ValueError
            If the plan is not for decode, too wide or does not fit what was captured.
        """
        require_decode(plan, self.width)
        if (plan.ratio, plan.page_size) != (self._plan.ratio, self._plan.page_size):
            raise ValueError(
                f"plan: ratio {plan.ratio} and page_size {plan.page_size}, captured with "
                f"{self._plan.ratio} and {self._plan.page_size}"
            )
        filled = padded_plan(plan, self.width, self.width)
        for name in ("segments", "slots", "writes"):
            getattr(self._plan, name).copy_(getattr(filled, name))
        self._kv[: len(kv)] = kv
        self._score[: len(score)] = score
        self._graph.replay()


def require_decode(plan: StorePlan, width: int) -> None:
    """Raise ``ValueError`` unless a plan is for decode and at most so wide."""
    if not plan.decode:
        raise ValueError("plan: made for chunks; a graph is captured for decode plans alone")
    if plan.slots.shape[0] > width or plan.writes.shape[0] > width:
        raise ValueError(
            f"plan: {plan.slots.shape[0]} requests, expected at most the {width} of the graph"
        )


def padded_plan(plan: StorePlan, slots: int, writes: int) -> StorePlan:
    """Return a plan with skipped entries added, as a captured graph of fixed size needs it.

    Raises
    ------
    ValueError
        If the plan is larger already.
    """
    more, kept = slots - plan.slots.shape[0], writes - plan.writes.shape[0]
    if more < 0 or kept < 0:
        raise ValueError(
            f"plan of {plan.slots.shape[0]} slots and {plan.writes.shape[0]} writes: cannot be "
            f"padded to {slots} and {writes}"
        )
    pad = torch.nn.functional.pad
    padded = replace(
        plan,
        segments=pad(plan.segments, (0, 0, 0, more)) if plan.decode else plan.segments,
        slots=pad(plan.slots, (0, more), value=-1),
        writes=pad(plan.writes, (0, 0, 0, kept), value=-1),
    )
    words = padded.workspace_words if plan.workspace.numel() else 0
    return replace(padded, workspace=plan.workspace.new_full((words,), -1))
