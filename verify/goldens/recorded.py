"""Recorded goldens: what a card gave, held to the emulation before it is proposed.

Stages of a candidate are vouched for by a result: a match, of the same kernel over the same input,
made on a card. Kernel cases are run on the card by :func:`propose_card` itself.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from needlepoint.optimized.candidates.catalogue import names
from needlepoint.verify.goldens.card import CASES, read_card, record_card
from needlepoint.verify.goldens.compute import (
    compute,
    differing,
    golden_sources,
    keep,
    require_own_sources,
)
from needlepoint.verify.goldens.manifest import (
    FIXTURES,
    TENSORS_FILE,
    CardDefinition,
    Cases,
    Definition,
    Golden,
    GoldenError,
    load_manifest,
)
from needlepoint.verify.goldens.propose import (
    DEFAULT_KEEP,
    PROPOSE,
    RECORD,
    Proposal,
    accepted_golden,
    finish,
    fresh,
    tool_versions,
    write_proposal,
)
from needlepoint.verify.inputs.load import MINI, SYNTHETIC
from needlepoint.verify.recording.recording import Recording, open_recording
from needlepoint.verify.recording.results import load_result
from needlepoint.verify.schema.result import MATCH, CandidateResult, Result


def propose_recorded(
    root: Path,
    name: str,
    source: Path,
    result_file: Path,
    stages: tuple[str, ...] | None,
    emulation: str | None,
) -> Proposal:
    """Propose bytes that a candidate left on a card, in a run that was a match.

    Parameters
    ----------
    root, name
        Checkout and fixture.
    source
        Recording of the candidate, made on the card.
    result_file
        Result of the same candidate over the same input, made on the card.
    stages
        Stages to keep.
    emulation
        What it is compared with; by default ``emulated:X`` for ``cuda:X``.

    Raises
    ------
    ValueError
        If the result is not a match from a card, is of another run, or the emulation gives other
        bytes.
    """
    require_own_sources(root)
    old = accepted_golden(root, name, "recorded")
    recording, result = open_recording(source), load_result(result_file)
    before = None if old is None else old.definition
    kept = stages or (before.keep if isinstance(before, Definition) else DEFAULT_KEEP)
    vouching = _vouched(recording, result, result_file, kept)
    definition = _recorded_definition(recording, kept, vouching.name, emulation)
    found = keep(recording, kept)
    wrong = differing(found.tensors, compute(definition))
    if wrong:
        raise GoldenError(
            f"golden {name}: {definition.emulation} gives other bytes of {', '.join(wrong)}; a "
            "recorded golden is compared with the emulation alone, so keep stages that are equal "
            "by specification, or find the fault"
        )
    golden = Golden(
        kind="recorded",
        generator=RECORD,
        sources_sha256=golden_sources(root, "recorded"),
        versions=tool_versions(),
        device=result.environment.device,
        files={},
        definition=definition,
        environment=result.environment.model_dump(mode="json"),
        kernel=vouching.kernel.model_dump(mode="json"),
    )
    return write_proposal(root, name, golden, found)


def is_drawn(root: Path, name: str) -> bool:
    """Return whether a fixture is a recording of kernel cases."""
    golden = load_manifest(root / FIXTURES).goldens.get(name)
    return golden is not None and isinstance(golden.definition, CardDefinition)


def propose_card(root: Path, name: str, cases: Cases | None, source: Path | None) -> Proposal:
    """Run kernel cases on this machine's card, or read what one recorded, and propose it.

    Parameters
    ----------
    root, name
        Checkout and fixture.
    cases
        Which; None for those it has.
    source
        Folder with the safetensors file of an earlier recording; None to record now.

    Raises
    ------
    ValueError
        If there is no card and no earlier recording, the fixture is of other cases, or the
        emulation does not admit what the card gave.
    """
    require_own_sources(root)
    old = accepted_golden(root, name, "recorded")
    before = None if old is None else old.definition
    own = before.cases if isinstance(before, CardDefinition) else None
    if old is not None and (own is None or cases not in (None, own)):
        raise GoldenError(f"golden {name}: is recorded of {own or 'stages'}, not of {cases}")
    cases = cases or own
    if cases is None:
        raise GoldenError(f"golden {name}: is new; say with --cases what a card is to record")
    if source is None:
        recording = record_card(cases)
        raw = save(dict(recording.tensors), dict(recording.facts))
    else:
        file = _only_file(source)
        recording, raw = read_card(file), file.read_bytes()
    wrong = CASES[cases].faults(recording.tensors)
    if wrong:
        raise GoldenError(
            f"golden {name}: {recording.card} gave what the emulation does not: {'; '.join(wrong)}"
        )
    golden = Golden(
        kind="recorded",
        generator=PROPOSE,
        sources_sha256=golden_sources(root, cases),
        versions=recording.versions,
        device=recording.card,
        files={},
        definition=CardDefinition(cases=cases),
        environment=recording.environment,
        kernel=recording.kernel,
    )
    target = fresh(root, name)
    (target / TENSORS_FILE).write_bytes(raw)
    return finish(root, name, target, golden)


def _only_file(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise GoldenError(
            f"--from {folder}: {len(found)} safetensors files, expected the one of a card"
        )
    return found[0]


def _vouched(
    recording: Recording, result: Result, path: Path, stages: tuple[str, ...]
) -> CandidateResult:
    """Return the candidate of the result that vouches for every kept stage of the recording."""
    manifest = recording.manifest
    made = manifest.candidate
    if made is None:
        raise GoldenError(f"{recording.directory}: no candidate in it; expected one on a card")
    if "cpu" in (made.device, result.environment.device):
        raise GoldenError(
            f"result {path}: from {result.environment.device}, candidate on {made.device}; a "
            "recorded golden comes from a card. What a CPU gives is a reference golden"
        )
    if result.verdict != MATCH:
        raise GoldenError(f"result {path}: verdict {result.verdict}; only a match can vouch")
    for candidate in result.candidates:
        if candidate.name == made.name:
            break
    else:
        raise GoldenError(f"result {path}: does not judge {made.name}, which was recorded")
    same = {
        "kernel source": (candidate.kernel.source_sha256, made.source_sha256),
        "kernel variant": (candidate.kernel.variant, made.variant),
        "input": (result.input.sha256, manifest.input_sha256),
        "seed": (result.input.seed, manifest.seed),
        "tokens": (result.input.tokens, sum(manifest.requests)),
    }
    for what, (judged, recorded) in same.items():
        if judged != recorded:
            raise GoldenError(f"result {path}: {what} {judged}, the recording has {recorded}")
    matched = {
        (layer.layer, f"{stage.path}.{stage.stage}")
        for layer in candidate.layers
        for stage in layer.stages
        if stage.kind == "compared" and stage.verdict == MATCH
    }
    for record in manifest.layers:
        recorded_stages = {".".join(key) for key in record.stages}
        for stage_name in stages:
            if stage_name in recorded_stages and (record.layer, stage_name) not in matched:
                raise GoldenError(
                    f"result {path}: layer {record.layer} {stage_name} was not judged a match"
                )
    return candidate


def _recorded_definition(
    recording: Recording, stages: tuple[str, ...], candidate: str, emulation: str | None
) -> Definition:
    manifest = recording.manifest
    source = manifest.input_name or ""
    if source != MINI and source.partition(":")[0] != SYNTHETIC:
        raise GoldenError(
            f"{recording.directory}: recorded over {source!r}; a golden's input must be one that "
            f"every checkout has, {MINI} or {SYNTHETIC}:KIND"
        )
    own = emulation or candidate.replace("cuda:", "emulated:", 1)
    if own not in names() or not own.startswith("emulated:"):
        raise GoldenError(f"golden of {candidate}: no emulation {own!r}; name one with --emulation")
    if not isinstance(manifest.model, str):
        raise GoldenError(f"{recording.directory}: of a model of its own; expected a preset")
    return Definition(
        input=source,
        model=manifest.model,
        requests=manifest.requests,
        layers=recording.layers,
        seed=manifest.seed or 0,
        input_sha256=manifest.input_sha256 or "",
        keep=stages,
        candidate=candidate,
        emulation=own,
    )
