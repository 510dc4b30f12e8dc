"""``needlepoint diff A B``: recording B judged against recording A.

Two recordings of one exact arithmetic (the specification in one format, or the reference under one
contract) must agree to the bit up to the stored rows and queries; their scores within the bounds of
both. Any other B is judged by its own profile, replayed from what both sides were given, and A
shows what that costs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from needlepoint.optimized.protocol.interface import CandidateInfo, StageKey
from needlepoint.reference.profile import CONTRACTS, Arithmetic
from needlepoint.verify.base.memory import trim_malloc
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.base.stages import ATTENTION, require_declared
from needlepoint.verify.diff.dump import Dump, is_dump
from needlepoint.verify.diff.layer import diff_layer
from needlepoint.verify.diff.pair import LayerPair
from needlepoint.verify.inputs.checks import tensor_digest
from needlepoint.verify.inputs.load import SYNTHETIC
from needlepoint.verify.inputs.synthetic import declares_constant
from needlepoint.verify.judge.degenerate import require_moving
from needlepoint.verify.judge.profiles import NEEDLEPOINT, profile_of
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recording.manifest import LayerRecord
from needlepoint.verify.recording.recording import Recording, RecordingError, open_recording
from needlepoint.verify.run.candidates import CandidateOutcome
from needlepoint.verify.run.pipeline import pipeline_output
from needlepoint.verify.schema.environment import collect_environment
from needlepoint.verify.schema.result import InputInfo


def diff(
    a: Path,
    b: Path,
    *,
    contract: Arithmetic,
    layers: tuple[int, ...] | None,
    limits: Limits,
    stages: frozenset[StageKey] | None,
    progress: Progress,
) -> PipelineOutput:
    """Judge recording ``b`` against recording ``a``, layer by layer.

    Parameters
    ----------
    a, b
        Recording directories; ``b`` may also be a dump (a mapping file, or a folder with one).
    contract
        Recorded in the result; costs are against ``a``.
    layers
        Layers to compare; None for all.
    limits
        Limits.
    stages
        Stages to compare; None for all.
    progress
        Told of long work.

    Raises
    ------
    ValueError
        If a recording is not usable, or the two do not belong together: other requests, layers,
        stages or model, always with what is missing on which side.
    """
    if is_dump(a):
        raise RecordingError(
            f"{a}: is a dump; give it as B, and as A a recording of the same prompts, which holds "
            "what the stages are judged from (`needlepoint record`)"
        )
    left = open_recording(a)
    if is_dump(b):
        return _diff_dump(left, Dump(b), contract.name, layers, limits, stages, progress)
    right = open_recording(b)
    chosen = _matching_layers(left, right, layers)
    if stages is not None:
        held = frozenset().union(*(right.record(layer).stages for layer in chosen))
        require_declared(stages, held, "both recordings hold")
    exact = same_arithmetic(left, right)
    info = _identity(right)
    if not exact and right.manifest.kind == "reference":
        raise RecordingError(
            f"recording {b} is the reference under {info.profile}; it is what others are judged "
            "against: give it as A"
        )
    outcome = CandidateOutcome(info)
    against = left.manifest.profile.name if left.manifest.profile else contract.name
    upstream = False
    progress.start("comparing layers", len(chosen))
    for layer in chosen:
        given, meant = left.read_layer(layer)
        own_given = partial(right.read_given, layer)
        pair = LayerPair(given, meant, own_given, right.read_layer(layer)[1])
        try:
            part, entry, moved = diff_layer(pair, profile_of(info), limits, exact, against, stages)
            if not exact and not _declares_constant(left):
                require_moving(given, part.errors, stages)
        except ValueError as error:
            raise RecordingError(f"{a} and {b}, layer {layer}: {error}") from error
        outcome.add(part, entry)
        upstream |= moved
        progress.advance()
        trim_malloc()
    manifest = right.manifest
    hidden = dict.fromkeys(right.input_name(layer) for layer in chosen)
    source = InputInfo(
        name=manifest.input_name or "recording",
        # Of what was compared: the recording may have been edited since it was made.
        sha256=tensor_digest(right.tensor(name) for name in hidden),
        tokens=sum(manifest.requests),
        requests=len(manifest.requests),
        model=manifest.model if isinstance(manifest.model, str) else "recorded",
        seed=manifest.seed,
    )
    output = pipeline_output([outcome], contract.name, collect_environment("cpu"), source)
    return _named_upstream(output) if upstream else output


def _diff_dump(
    left: Recording,
    dump: Dump,
    contract: str,
    layers: tuple[int, ...] | None,
    limits: Limits,
    stages: frozenset[StageKey] | None,
    progress: Progress,
) -> PipelineOutput:
    """Judge an engine's dump by its profile, from what the recording was given."""
    _identity(left)
    chosen = sorted(dump.mapping.layers if layers is None else set(layers))
    lacking = [layer for layer in chosen if layer not in dump.mapping.layers]
    if lacking:
        raise RecordingError(
            f"layer {lacking[0]} is not in dump {dump.path}, which has {list(dump.mapping.layers)}"
        )
    outcome = CandidateOutcome(dump.info)
    profile = left.manifest.profile
    against = profile.name if profile else contract
    upstream = False
    held: set[StageKey] = set()
    progress.start("comparing layers", len(chosen))
    for layer in chosen:
        given, meant = left.read_layer(layer)
        found = dump.read_layer(given)
        own_given = partial(getattr, found, "given")
        pair = LayerPair(given, meant, own_given, found.observed, found.brought)
        try:
            part, entry, moved = diff_layer(
                pair, profile_of(dump.info), limits, False, against, stages
            )
            if not _declares_constant(left):
                require_moving(found.given, part.errors, stages)
        except ValueError as error:
            raise RecordingError(f"{dump.path}, layer {layer}: {error}") from error
        outcome.add(part, entry)
        held |= found.brought
        upstream |= moved
        progress.advance()
        trim_malloc()
    if stages is not None:
        require_declared(stages, held, f"dump {dump.path} brings")
    hidden = dict.fromkeys(left.input_name(layer) for layer in chosen)
    source = InputInfo(
        name=left.manifest.input_name or "recording",
        sha256=tensor_digest(left.tensor(name) for name in hidden),
        tokens=sum(left.manifest.requests),
        requests=len(left.manifest.requests),
        model=left.manifest.model if isinstance(left.manifest.model, str) else "recorded",
        seed=left.manifest.seed,
    )
    output = pipeline_output([outcome], contract, collect_environment("cpu"), source)
    return _named_upstream(output) if upstream else output


def _named_upstream(output: PipelineOutput) -> PipelineOutput:
    named = output.result.model_copy(update={"detail": "upstream"})
    return PipelineOutput(named, output.rows)


def _declares_constant(recording: Recording) -> bool:
    name = recording.manifest.input_name or ""
    return declares_constant(name.removeprefix(f"{SYNTHETIC}:"))


def same_arithmetic(left: Recording, right: Recording) -> bool:
    """Return whether both recordings are of one exact arithmetic, and so equal to the bit.

    That is the reference under one contract, or two candidates of the specification in one format.
    """
    one, other = left.manifest, right.manifest
    if one.kind != other.kind or one.profile != other.profile:
        return False
    if one.kind == "reference":
        return True
    if one.candidate is None or other.candidate is None:
        return False
    specified = one.candidate.profile == other.candidate.profile == NEEDLEPOINT
    return specified and one.candidate.format == other.candidate.format


def _identity(recording: Recording) -> CandidateInfo:
    manifest = recording.manifest
    if manifest.kind == "input":
        raise RecordingError(
            f"recording {recording.directory} holds input only; record the stages of the reference "
            "or of a candidate with `needlepoint record`"
        )
    if manifest.candidate is not None:
        info = CandidateInfo(**manifest.candidate.model_dump())
        meant = profile_of(info)
        stated = manifest.profile
        if stated is None or (stated.name, stated.switches) != (meant.name, meant.switches()):
            raise RecordingError(
                f"recording {recording.directory}: its profile block is not that of {info.name}, "
                f"{meant.name} in {info.format}; record it again"
            )
        return info
    if manifest.profile is None or manifest.profile.name not in CONTRACTS:
        raise RecordingError(
            f"recording {recording.directory}: profile {manifest.profile!r}, expected one of the "
            f"contracts {', '.join(CONTRACTS)}"
        )
    name = manifest.profile.name
    return CandidateInfo(
        name="reference",
        format="bf16",
        device="cpu",
        profile=name,
        variant=f"contract {name}",
        source_sha256="0" * 64,
    )


def _matching_layers(
    left: Recording, right: Recording, wanted: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the layers to compare; refuse recordings that do not belong together."""
    for recording in (left, right):
        _identity(recording)
    for what in ("model", "requests"):
        one, other = getattr(left.manifest, what), getattr(right.manifest, what)
        if one != other:
            one, other = _parting(one, other)
            raise RecordingError(
                f"{what} {one!r} in {left.directory}, {other!r} in {right.directory}; expected two "
                "recordings of one run"
            )
    layers = sorted({*left.layers, *right.layers} if wanted is None else set(wanted))
    for recording in (left, right):
        for layer in layers:
            if layer not in recording.layers:
                raise RecordingError(
                    f"layer {layer} is not in {recording.directory}: {left.directory} has "
                    f"{list(left.layers)}, {right.directory} {list(right.layers)}; name layers "
                    "that both have"
                )
    for layer in layers:
        one, other = _judged(left.record(layer)), _judged(right.record(layer))
        for recording, missing in ((left, other - one), (right, one - other)):
            if missing:
                stages = ", ".join(".".join(key) for key in sorted(missing))
                raise RecordingError(
                    f"layer {layer}: stage {stages} is missing in {recording.directory}; expected "
                    "the same stages on both sides"
                )
    if not layers:
        raise RecordingError(f"recording {left.directory} has no layers; nothing to compare")
    return tuple(layers)


def _judged(record: LayerRecord) -> set[StageKey]:
    """Return the stages of a layer that are judged: all but the consequence."""
    return {key for key in record.stages if key[1] != ATTENTION}


def _parting(one: object, other: object) -> tuple[object, object]:
    """Return what of two values differs: of two models, the fields that do."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one, other
    keys = [key for key in one if one[key] != other.get(key)]
    return {key: one[key] for key in keys}, {key: other.get(key) for key in keys}
