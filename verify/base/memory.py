"""Freed memory goes back to the system.

A long run frees and allocates blocks of tensors beside small ones that it keeps. The C library
keeps the holes between them: over a layer of the default run they grew to a gigabyte that nothing
used.
"""

from __future__ import annotations

import ctypes


def trim_malloc() -> None:
    """Return freed pages of the heap to the system, where the C library can (glibc)."""
    if _TRIM is not None:
        _TRIM(0)


def _find_trim() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


_TRIM = _find_trim()
