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
    from needlepoint.verify.cli.python import Result as Result
    from needlepoint.verify.cli.python import check as check
    from needlepoint.verify.cli.python import diff as diff
    from needlepoint.verify.cli.python import load_result as load_result
    from needlepoint.verify.cli.python import verify as verify

    __version__: str

_PROTOCOL = "needlepoint.optimized.protocol.interface"
_COMMANDS = "needlepoint.verify.cli.python"
_PLACES = {
    "Candidate": _PROTOCOL,
    "CandidateInfo": _PROTOCOL,
    "CompressorInputs": _PROTOCOL,
    "INDEX": _PROTOCOL,
    "LayerInputs": _PROTOCOL,
    "MAIN": _PROTOCOL,
    "Observed": _PROTOCOL,
    "PagedRows": _PROTOCOL,
    "QUERY": _PROTOCOL,
    "QueryInputs": _PROTOCOL,
    "QueryRows": _PROTOCOL,
    "Result": _COMMANDS,
    "ScoreReader": _PROTOCOL,
    "StageKey": _PROTOCOL,
    "check": _COMMANDS,
    "diff": _COMMANDS,
    "load_result": _COMMANDS,
    "verify": "needlepoint",
}
"""Where each name comes from. ``verify`` is the package of the verifier, which can be called."""
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
