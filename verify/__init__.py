"""The verifier: runs reference and candidates over one input and judges every stage.

``needlepoint.verify`` is this package and a function at once: called, it is
:func:`needlepoint.verify.cli.python.verify`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Verify(ModuleType):
    """A package that can be called; what it runs is loaded by the call."""

    def __call__(self, candidates: Any = None, **options: Any) -> object:  # noqa: ANN401
        """Judge candidates: see :func:`needlepoint.verify.cli.python.verify`."""
        from needlepoint.verify.cli.python import verify

        return verify(candidates, **options)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return import_module, (self.__name__,)  # a function pickles by name; so does this


sys.modules[__name__].__class__ = _Verify
