"""Compute what a golden holds: stages of the reference, or of the emulation, as named tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import needlepoint.reference as reference_package
from needlepoint.optimized.candidates.catalogue import create
from needlepoint.reference.profile import CONTRACTS
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.goldens.manifest import (
    Definition,
    GoldenError,
    LayerForm,
    sources_digest,
)
from needlepoint.verify.inputs.load import Inputs, load_inputs
from needlepoint.verify.judge.record import record
from needlepoint.verify.recording.recording import Recording, open_recording

_INPUTS = (
    "reference/**/*.py",
    "verify/inputs/*.py",
    "verify/judge/record.py",
    "verify/recording/*.py",
)
_EMULATION = "optimized/emulation/*.py"
_DRAWN = (
    "reference/**/*.py",
    _EMULATION,
    "verify/workloads/*.py",
    "verify/inputs/draw.py",
)
_SOURCES: Mapping[str, tuple[str, ...]] = {
    "reference": _INPUTS,
    "recorded": (*_INPUTS, _EMULATION),
    "stores": (*_DRAWN, "optimized/build/variants.py", "verify/goldens/stores.py"),
    "scores": (
        *_DRAWN,
        "optimized/build/score_variants.py",
        "verify/goldens/scores.py",
        "verify/numerics/error_model.py",
    ),
}
"""By what a golden is made by; input data is made by a script of its own."""


@dataclass(frozen=True)
class Computed:
    """Kept tensors by name, as recordings name them, and how each layer is laid out."""

    tensors: Mapping[str, Tensor]
    layers: Mapping[str, LayerForm]


def golden_sources(root: Path, made_by: str) -> str:
    """Return the digest of every source that a golden comes from; see ``Golden.made_by``."""
    return sources_digest(root, _SOURCES.get(made_by, (made_by,)))


def runs_here(root: Path) -> bool:
    """Return whether the code that runs is the code of this checkout."""
    running = Path(str(reference_package.__file__)).resolve().parent
    return running == (root / "reference").resolve()


def require_own_sources(root: Path) -> None:
    """Raise ``GoldenError`` unless the code that runs is the code of this checkout."""
    if not runs_here(root):
        running = Path(str(reference_package.__file__)).resolve().parents[1]
        raise GoldenError(
            f"needlepoint runs from {running}, the fixtures are those of {root}; install "
            "that checkout (pip install -e) or name the one that runs with --root"
        )


def compute(definition: Definition) -> Computed:
    """Compute a golden's tensors: by the reference, or by the emulation of a recorded one.

    Raises
    ------
    GoldenError
        If the input is not the one that the definition pins.
    ValueError
        If the input or the candidate cannot be used.
    """
    inputs = golden_inputs(definition)
    candidate = None if definition.emulation is None else create(definition.emulation)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "recording"
        contract = CONTRACTS[definition.contract or "bf16"]
        record(inputs, candidate, out, contract=contract, force=False, progress=NoProgress())
        return keep(open_recording(out), definition.keep)


def golden_inputs(definition: Definition) -> Inputs:
    """Return the input of a golden, checked against its digest."""
    inputs = load_inputs(
        definition.input,
        model=definition.model,
        layers=definition.layers,
        tokens=sum(definition.requests),
        seed=definition.seed,
    )
    if (inputs.sha256, inputs.requests) != (definition.input_sha256, definition.requests):
        raise GoldenError(
            f"input {definition.input}: requests {inputs.requests}, sha256 {inputs.sha256}; the "
            f"golden was computed from {definition.requests}, {definition.input_sha256}"
        )
    return inputs


def keep(recording: Recording, stages: tuple[str, ...]) -> Computed:
    """Return the tensors of some stages of a recording, copied out of its files.

    Raises
    ------
    GoldenError
        If the recording has none of a stage.
    """
    tensors: dict[str, Tensor] = {}
    for stage in stages:
        found = [
            name
            for name in recording.manifest.tensors
            for layer in recording.layers
            if f"{name}.".startswith(f"layer{layer}.{stage}.")
        ]
        if not found:
            raise GoldenError(
                f"recording {recording.directory}: has no tensor of stage {stage}; keep stages "
                "that were recorded"
            )
        tensors |= {name: recording.tensor(name).clone() for name in found}
    layers = {
        str(layer): LayerForm(
            pools={str(path): pool for path, pool in recording.record(layer).layouts.items()},
            query=recording.record(layer).query,
        )
        for layer in recording.layers
    }
    return Computed(tensors, layers)


def differing(stored: Mapping[str, Tensor], computed: Computed) -> list[str]:
    """Return the tensors whose bytes, dtype or shape are not the same on both sides."""
    names = sorted({*stored, *computed.tensors})
    return [name for name in names if not _same(stored.get(name), computed.tensors.get(name))]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))
