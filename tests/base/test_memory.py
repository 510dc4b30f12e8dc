from __future__ import annotations

import ctypes

import pytest

from needlepoint.verify.base import memory as heap


def test_freed_memory_goes_back() -> None:
    if heap._TRIM is None:
        pytest.skip("the C library has no malloc_trim")
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    # Small pieces stay in the heap; one that is kept above them holds the heap's end.
    pieces = [libc.malloc(64 << 10) for _ in range(1024)]
    for piece in pieces:
        ctypes.memset(piece, 1, 64 << 10)
    last = libc.malloc(64 << 10)
    for piece in pieces:
        libc.free(piece)
    before = _resident()
    heap.trim_malloc()
    assert before - _resident() > 32 << 20
    libc.free(last)


def test_other_c_libraries_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_TRIM", None)
    heap.trim_malloc()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
