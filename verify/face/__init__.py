"""Judge DeepSeek-V4 compressor and indexer kernels against a reference, in three lines.

    import needlepoint
    result = needlepoint.check(MyKernel(), tokens=600)
    assert result.verdict == "match", result.summary()

Names are loaded when they are first used: importing this package, or ``needlepoint.reference``,
loads nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from needlepoint.optimized.protocol.interface import INDEX as INDEX
    from needlepoint.optimized.protocol.interface import MAIN as MAIN
    from needlepoint.optimized.protocol.interface import QUERY as QUERY
    from needlepoint.optimized.protocol.interface import Candidate as Candidate
    from needlepoint.optimized.protocol.interface import CandidateInfo as CandidateInfo
    from needlepoint.optimized.protocol.interface import CompressorInputs as CompressorInputs
    from needlepoint.optimized.protocol.interface import LayerInputs as LayerInputs
    from needlepoint.optimized.protocol.interface import Observed as Observed
    from needlepoint.optimized.protocol.interface import PagedRows as PagedRows
    from needlepoint.optimized.protocol.interface import QueryInputs as QueryInputs
    from needlepoint.optimized.protocol.interface import QueryRows as QueryRows
    from needlepoint.optimized.protocol.interface import ScoreReader as ScoreReader
    from needlepoint.optimized.protocol.interface import StageKey as StageKey
    from needlepoint.optimized.protocol.optional import ComputesRows as ComputesRows
    from needlepoint.optimized.protocol.optional import MeasuresPrompts as MeasuresPrompts
    from needlepoint.optimized.protocol.optional import MeasuresTransients as MeasuresTransients
    from needlepoint.optimized.protocol.optional import SelectsEntries as SelectsEntries
    from needlepoint.optimized.protocol.optional import SpreadsLayers as SpreadsLayers
    from needlepoint.optimized.protocol.optional import TransientLaw as TransientLaw
    from needlepoint.optimized.protocol.optional import TransientSample as TransientSample
    from needlepoint.optimized.protocol.serving import Cache as Cache
    from needlepoint.optimized.protocol.serving import CacheSpec as CacheSpec
    from needlepoint.optimized.protocol.serving import CannotServe as CannotServe
    from needlepoint.optimized.protocol.serving import CompressorParameters as CompressorParameters
    from needlepoint.optimized.protocol.serving import LayerParameters as LayerParameters
    from needlepoint.optimized.protocol.serving import Part as Part
    from needlepoint.optimized.protocol.serving import Place as Place
    from needlepoint.optimized.protocol.serving import Server as Server
    from needlepoint.optimized.protocol.serving import StatefulCandidate as StatefulCandidate
    from needlepoint.optimized.protocol.serving import StepBatch as StepBatch
    from needlepoint.optimized.protocol.serving import StepOutput as StepOutput
    from needlepoint.optimized.protocol.serving import TokenRows as TokenRows
    from needlepoint.verify.cli.python import Result as Result
    from needlepoint.verify.cli.python import check as check
    from needlepoint.verify.cli.python import diff as diff
    from needlepoint.verify.cli.python import load_result as load_result
    from needlepoint.verify.cli.python import verify as verify
    from needlepoint.verify.diff.capture import Capture as Capture
    from needlepoint.verify.diff.capture import Tap as Tap
    from needlepoint.verify.diff.capture import first_input as first_input
    from needlepoint.verify.recording.manifest import Manifest as Manifest
    from needlepoint.verify.recording.recording import RecordingWriter as RecordingWriter

    __version__: str

_NAMES = {
    "needlepoint.optimized.protocol.interface": (
        "Candidate",
        "CandidateInfo",
        "CompressorInputs",
        "INDEX",
        "LayerInputs",
        "MAIN",
        "Observed",
        "PagedRows",
        "QUERY",
        "QueryInputs",
        "QueryRows",
        "ScoreReader",
        "StageKey",
    ),
    "needlepoint.optimized.protocol.optional": (
        "ComputesRows",
        "MeasuresPrompts",
        "MeasuresTransients",
        "SelectsEntries",
        "SpreadsLayers",
        "TransientLaw",
        "TransientSample",
    ),
    "needlepoint.optimized.protocol.serving": (
        "Cache",
        "CacheSpec",
        "CannotServe",
        "CompressorParameters",
        "LayerParameters",
        "Part",
        "Place",
        "Server",
        "StatefulCandidate",
        "StepBatch",
        "StepOutput",
        "TokenRows",
    ),
    "needlepoint.verify.cli.python": (
        "Result",
        "check",
        "diff",
        "load_result",
    ),
    "needlepoint.verify.diff.capture": (
        "Capture",
        "Tap",
        "first_input",
    ),
    "needlepoint.verify.recording.manifest": ("Manifest",),
    "needlepoint.verify.recording.recording": ("RecordingWriter",),
    "needlepoint": ("verify",),  # the package of the verifier, which can be called
}
"""Names by where they are, as they stand for type checkers above."""
_PLACES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("needlepoint.verify.schema.version").own_version()
    if name == "verify":
        return import_module("needlepoint.verify")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES, "__version__"})
