"""Kernel cases ``scores``: scores and picks of every unit, beside the bytes that give them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from needlepoint.optimized.build.score_variants import MMA, SCORE_ROWS, accumulator, default_unit
from needlepoint.optimized.cuda.scores import scores
from needlepoint.optimized.cuda.topk import topk
from needlepoint.optimized.emulation.narrow import StoredRows
from needlepoint.optimized.emulation.pages import allocate, write_rows
from needlepoint.optimized.emulation.readback import read_index_keys, read_queries
from needlepoint.optimized.emulation.scoring import fused_scores
from needlepoint.optimized.emulation.select import select_topk
from needlepoint.optimized.protocol.interface import QueryRows
from needlepoint.reference.profile import Accumulator
from needlepoint.verify.numerics.error_model import ACCUMULATORS
from needlepoint.verify.workloads.scores import ScoreCase, make_case

COUNTS, ENTRIES, HEADS, K = (5, 1, 9), (70, 33, 150), 8, 16
CONTEXT_LENS = (70, 69, 3, 0, 41, 33, 150, 150, 149, 100, 64, 63, 17, 16, 15)


def units(row: str, architecture: str) -> tuple[str, ...]:
    """Return every unit that scores a format on an architecture."""
    return tuple(dict.fromkeys((MMA, default_unit(row, architecture))))


def run(architecture: str) -> dict[str, Tensor]:
    """Return what this card scores and picks, beside the bytes that it did so from."""
    tensors: dict[str, Tensor] = {}
    for row in SCORE_ROWS:
        case = score_case(row, "cuda")
        tensors |= kept_inputs(case)
        for unit in units(row, architecture):
            found = scores(
                case.query, case.context_lens, case.paged(64), case.plan(unit), case.columns
            )
            padded = torch.nn.functional.pad(found, (0, -found.shape[1] % 4)).contiguous()
            tensors[f"{row}.{unit}.scores"] = found
            tensors[f"{row}.{unit}.picks"] = topk(padded, case.context_lens, K)
    return tensors


def modules(architecture: str) -> list[str]:
    """Return the kernel modules that :func:`run` runs."""
    return [f"scores_{unit}_{row}" for row in SCORE_ROWS for unit in units(row, architecture)]


def score_case(row: str, device: str) -> ScoreCase:
    """Return the batch that is recorded of a row format."""
    seed = 20 + SCORE_ROWS.index(row)
    return make_case(
        row, HEADS, COUNTS, ENTRIES, seed=seed, context_lens=CONTEXT_LENS, device=device
    )


def kept_inputs(case: ScoreCase) -> dict[str, Tensor]:
    """Return what a recording keeps of a batch, on the CPU."""
    out = {
        "codes": case.query.codes,
        "weights": case.query.weights,
        "values": case.stored.values,
        "limits": case.context_lens,
    }
    if case.query.scales is not None:
        out["query_scales"] = case.query.scales
    if case.stored.scales is not None:
        out["key_scales"] = case.stored.scales
    return {f"{case.row}.{name}": tensor.cpu() for name, tensor in out.items()}


def faults(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return what a recording has that the emulation does not admit; empty if all is well.

    Scores may differ by the bounds of both sides, picks must be those of the recorded scores.
    """
    names = [name for name in tensors if name.endswith(".scores")]
    if not names:
        return ["no scores in the recording: expected entries FORMAT.UNIT.scores"]
    wrong = []
    for name in names:
        row, unit, _ = name.split(".")
        actual, context_lens = tensors[name], tensors[f"{row}.limits"].long()
        expected, size = _emulated(row, tensors)
        seen = torch.arange(actual.shape[1]) < context_lens[:, None]
        constants = [ACCUMULATORS[a].value for a in (_accumulator(unit, row), Accumulator.FP32)]
        error = (actual.double() - expected).abs()
        if not torch.equal(actual == -torch.inf, ~seen):
            wrong.append(f"{row}.{unit}: another set of columns is -inf")
        elif not bool((error[seen] <= sum(constants) * size[seen]).all()):
            wrong.append(f"{row}.{unit}: scores outside the bound")
        if not torch.equal(tensors[f"{row}.{unit}.picks"], select_topk(actual, context_lens, K)):
            wrong.append(f"{row}.{unit}: other picks than those of its own scores")
    return wrong


def _accumulator(unit: str, row: str) -> Accumulator:
    return Accumulator(accumulator(unit, row))


def _emulated(row: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the emulation's scores, unmasked, and what their bounds are multiples of."""
    scales = tensors.get(f"{row}.query_scales")
    weights = tensors[f"{row}.weights"]
    query = QueryRows(row, tensors[f"{row}.codes"], scales, weights, row == "fp8")
    queries = read_queries(query, slice(None))
    values = tensors[f"{row}.values"].view(torch.uint8)
    key_scales = tensors.get(f"{row}.key_scales", values[:, :0]).reshape(len(values), -1)
    paged = allocate(f"index-{row}", 64, ENTRIES, seed=0)
    found = torch.zeros(len(weights), max(ENTRIES), dtype=torch.float64)
    size = torch.zeros_like(found)
    rows = torch.tensor((0, *COUNTS)).cumsum(0).tolist()
    keys = torch.tensor((0, *ENTRIES)).cumsum(0).tolist()
    for request, entries in enumerate(ENTRIES):
        own = slice(keys[request], keys[request + 1])
        stored = StoredRows(values[own].numpy(), key_scales[own].view(torch.uint8).numpy())
        write_rows(paged, request, 0, stored)
        read = read_index_keys(paged, request)
        part = slice(rows[request], rows[request + 1])
        out = torch.empty(COUNTS[request], entries)
        fused_scores(queries[part], weights[part], read.values, out)
        magnitude = (queries[part].abs() * weights[part].abs().unsqueeze(-1)).sum(1)
        scale = torch.ones(entries) if read.scale is None else read.scale
        found[part, :entries] = (out * scale).double()
        size[part, :entries] = ((magnitude @ read.values.abs().T) * scale).double()
    return found, size
