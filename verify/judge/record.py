"""``needlepoint record``: the stages of one candidate, or of the reference, as a recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    Candidate,
    LayerInputs,
    Observed,
    PagedRows,
    QueryRows,
)
from needlepoint.optimized.protocol.stages import stage_named
from needlepoint.reference.formats import to_bf16
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT, Arithmetic, Precision
from needlepoint.reference.stages import ChunkStages
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.base.stages import POOLED
from needlepoint.verify.inputs.layer_inputs import given_layer
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.inputs.recall_needles import needle_records
from needlepoint.verify.judge.candidate_run import CandidateFailed, missing_stages, observe
from needlepoint.verify.judge.contracts import compute_type
from needlepoint.verify.judge.profiles import profile_of
from needlepoint.verify.recording.model import config_record
from needlepoint.verify.recording.recording import (
    CandidateRecord,
    Manifest,
    ProfileRecord,
    RecordingWriter,
)

_PAGE_SIZE = 64


def record(
    inputs: Inputs,
    candidate: Candidate | None,
    out: Path,
    *,
    contract: Arithmetic,
    force: bool,
    progress: Progress,
) -> None:
    """Write every stage of every layer to a directory, whole or not at all.

    Parameters
    ----------
    inputs
        The run's input.
    candidate
        What to record; None for the reference under ``contract``.
    out
        Directory to appear.
    contract
        Arithmetic of the reference; a candidate has its own.
    force
        Whether an existing recording may be replaced.
    progress
        Told of long work.

    Raises
    ------
    ValueError
        If no layer has a compressor, the candidate fails, or the directory cannot be written.
    """
    layers = [layer for layer in inputs.layers if inputs.config.ratio(layer)]
    if not layers:
        raise ValueError(
            f"layers {list(inputs.layers)} have ratio 0: there is nothing to record; choose layers "
            "with a compressor"
        )
    states = [inputs.hidden(layer) for layer in layers]
    shared = states[0] if all(state is states[0] for state in states) else None
    head = recording_head(inputs, candidate, contract)
    with RecordingWriter(out, head, shared, force=force) as writer:
        progress.start("recording layers", len(layers))
        for layer in layers:
            given, observed = _layer(inputs, layer, candidate, contract)
            writer.write_layer(replace(given, layer_weights={}), observed)
            progress.advance()


def recording_head(inputs: Inputs, candidate: Candidate | None, contract: Arithmetic) -> Manifest:
    """Return the manifest of a recording without its tensors and layers.

    Parameters
    ----------
    inputs, candidate, contract
        As of :func:`record`.
    """
    arithmetic = contract if candidate is None else profile_of(candidate.info)
    return Manifest.model_validate(
        {
            "schema": "needlepoint.recording/1",
            "kind": "reference" if candidate is None else "candidate",
            "model": config_record(inputs.config),
            "requests": inputs.requests,
            "tensors": {},
            "candidate": None if candidate is None else CandidateRecord(**asdict(candidate.info)),
            "profile": ProfileRecord(name=arithmetic.name, switches=arithmetic.switches()),
            "seed": inputs.seed,
            "input_name": inputs.name,
            "input_sha256": inputs.sha256,
            "needles": needle_records(inputs.needles),
        }
    )


def _layer(
    inputs: Inputs, layer: int, candidate: Candidate | None, contract: Arithmetic
) -> tuple[LayerInputs, Observed]:
    weights = inputs.weights(layer)
    common = ReferenceLayer(inputs.config, layer, weights, BF16_CONTRACT)
    given = given_layer(inputs, layer, common)
    if candidate is not None:
        observed = observe(candidate, given.inputs)
        missing = missing_stages(candidate, given.inputs, observed)
        if missing:
            raise CandidateFailed(
                f"candidate {candidate.info.name}, layer {layer}: declares "
                f"{', '.join('.'.join(key) for key in missing)} and did not return it; a recording "
                "of part of a run would pass for the whole"
            )
        return given.inputs, observed
    reference = ReferenceLayer(
        inputs.config, layer, weights, contract, compute=compute_type(contract)
    )
    stages = []
    for request, part in enumerate(torch.split(inputs.hidden(layer), list(inputs.requests))):
        state = reference.new_request()
        if contract.projected is Precision.FP32:
            projected = given.projected(request, 0, len(part))
            found = reference.forward_projected(projected, state, keep_scores=True)
        else:
            found = reference.forward(part, state, keep_scores=True)
        stages.append(found)
    return given.inputs, reference_observed(stages, contract)


def reference_observed(stages: Sequence[ChunkStages], contract: Arithmetic) -> Observed:
    """Return the reference's stages as what a candidate would hand back.

    Parameters
    ----------
    stages
        Whole requests in order, each run in one piece and with its scores kept.
    contract
        Arithmetic that they were run under.
    """
    exact = contract.index_key.element == "float64"
    stored: dict[str, PagedRows] = {}
    for path in (INDEX, MAIN):
        rows = [part.index if path == INDEX else part.main for part in stages]
        present = [row for row in rows if row is not None]
        if not present:
            continue
        stored[path] = _pages([row.stored.values for row in present], path, exact)
    by_stage = [part.tensors() for part in stages]
    dense = {
        key: _narrow(torch.cat([tensors[key] for tensors in by_stage]), exact)
        for key in by_stage[0]
        # Without a main path the layer is one of a key a token, where nothing is pooled.
        if stage_named(key[1]).dense and (stages[0].main or key[1] != POOLED)
    }
    queries = [part.query for part in stages if part.query is not None]
    query = None
    if queries:
        codes = torch.cat([part.stored.values for part in queries])
        query = QueryRows(
            format="float64" if exact else "bf16",
            codes=codes if exact else to_bf16(codes),
            scales=None,
            weights=_narrow(torch.cat([part.weights for part in queries]), exact),
            scale_folded=False,
        )
    picks = [part.topk for part in stages if part.topk is not None]
    attention = [part.attention for part in stages if part.attention is not None]

    def scores(request: int, start: int, stop: int) -> Tensor:
        found = stages[request].scores
        if found is None:
            raise ValueError(f"request {request} has no scores")
        return found[start:stop]

    return Observed(
        dense=dense,
        stored=stored,
        query=query,
        scores=scores if picks else None,
        topk=torch.cat(picks) if picks else None,
        attention=torch.cat(attention) if attention else None,
        path_taken=f"reference, contract {contract.name}",
    )


def _narrow(rows: Tensor, exact: bool) -> Tensor:
    """Return rows in the dtype that holds them: float64 of ``exact``, fp32 of rounded contracts."""
    return rows if exact else rows.to(torch.float32)


def _pages(rows: Sequence[Tensor], path: str, exact: bool) -> PagedRows:
    """Lay decoded rows out in pages, one request after another.

    FP4- and FP8-simulated rows are held in bf16, as the published code holds them.
    """
    layout = "rows-f64" if exact else f"{path}-bf16"
    tables: list[Tensor] = []
    pages: list[Tensor] = []
    first = 0
    for part in rows:
        count = -(-len(part) // _PAGE_SIZE)
        held = part if exact else to_bf16(part)
        width = held.shape[1] * held.element_size()
        block = torch.full((count * _PAGE_SIZE, width), 0xFF, dtype=torch.uint8)
        block[: len(part)] = held.contiguous().view(torch.uint8).view(len(part), width)
        pages.append(block.view(count, _PAGE_SIZE * width))
        tables.append(torch.arange(first, first + count, dtype=torch.int32))
        first += count
    return PagedRows(
        layout, torch.cat(pages), _PAGE_SIZE, tuple(tables), tuple(len(part) for part in rows)
    )
