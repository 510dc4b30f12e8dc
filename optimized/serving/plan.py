"""Which windows a call completes, where their slots are, and which tokens to keep for later calls.

The compressor state of a request is a ring used as a queue: a call appends the tokens that a later
window will still need. The ring has twice the slots of a window, and the windows of a call reach
back at most ``slots - 1`` tokens, so the rows that a launch reads and the rows that it writes never
meet, whatever the length of the chunk. Where the queue ends is the *head*, kept by the caller on
the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

I64 = npt.NDArray[np.int64]


def window_slots(ratio: int) -> int:
    """Return the slots of a window: 8 at ratio 4 (windows overlap), 128 at ratio 128."""
    if ratio not in (4, 128):
        raise ValueError(f"ratio {ratio}: expected 4 or 128")
    return 8 if ratio == 4 else 128


def ring_rows(ratio: int) -> int:
    """Return the rows of a request's state ring."""
    return 2 * window_slots(ratio)


@dataclass(frozen=True)
class Chunks:
    """Consecutive tokens of one or more requests, as one call receives them.

    Attributes
    ----------
    request
        int64 ``[n]``: row of each chunk's request in the state and in the page table.
    start
        int64 ``[n]``: position of the chunk's first token.
    length
        int64 ``[n]``: tokens of the chunk; their rows follow one another in order of the chunks.
    head
        int64 ``[n]``: where the request's queue ends in its ring before the call.
    """

    request: I64
    start: I64
    length: I64
    head: I64

    @classmethod
    def whole(cls, lengths: Sequence[int]) -> Chunks:
        """Return the chunks of requests that are computed in one call from position 0."""
        count = np.asarray(lengths, np.int64)
        zeros = np.zeros_like(count)
        return cls(np.arange(len(count), dtype=np.int64), zeros, count, zeros)


@dataclass(frozen=True)
class Windows:
    """The windows of a plan, on the host, for checks and for the separate steps.

    Attributes
    ----------
    entry
        int64 ``[windows]``: number of the entry within its request.
    token
        int64 ``[windows]``: row of the token that completes it.
    from_state
        int64 ``[windows]``: leading slots that lie in the state.
    """

    entry: I64
    token: I64
    from_state: I64


@dataclass(frozen=True)
class StorePlan:
    """What one launch does; tensors on the CPU until :meth:`to`.

    Attributes
    ----------
    ratio
        Tokens an entry.
    decode
        Whether the plan is for the decode kernels: at most one token, so at most one window, a
        chunk.
    tokens
        Rows of ``kv`` and ``score`` that the plan refers to.
    segments
        int32 ``[chunks, 8]``: windows of the chunks before it, windows of it, row of the token that
        completes its first window, entry of that window, slots of that window in the state, first
        state row of the request, ring position of that window's slot 0, 0.
    slots
        int64: page times page size plus row; negative ones are not stored. One a window, or in
        decode one a chunk.
    writes
        int32 ``[kept, 2]``: row of the token, state row; negative rows are skipped.
    windows
        The windows, on the host.
    head
        int64 ``[chunks]`` on the host: heads after the call.
    state_requests
        Requests that the state must hold; 0 if no window reads it and no token is kept.
    positions
        Rows that the RoPE table must have.
    pages
        Pages that the pool must have.
    page_size
        Rows a page that ``slots`` were made for.
    workspace
        int32: what the blocks of a window pass to one another at ratio 128, 512 words a window;
        empty on the CPU and at ratio 4. A word of -1 says that nothing is there yet, which is also
        how a launch leaves it; two at the same time must not share it.
    """

    ratio: int
    decode: bool
    tokens: int
    segments: Tensor
    slots: Tensor
    writes: Tensor
    windows: Windows
    head: I64
    state_requests: int
    positions: int
    pages: int
    page_size: int
    workspace: Tensor

    def to(self, device: torch.device | str) -> StorePlan:
        """Return the plan with its tensors on a device."""
        words = self.workspace_words
        return replace(
            self,
            segments=self.segments.to(device),
            slots=self.slots.to(device),
            writes=self.writes.to(device),
            workspace=torch.full((words,), -1, dtype=torch.int32, device=device),
        )

    @property
    def workspace_words(self) -> int:
        """Words that ``workspace`` must have for a launch."""
        return 512 * self.slots.shape[0] if self.ratio == 128 else 0


def plan_store(
    ratio: int,
    chunks: Chunks,
    page_table: Tensor,
    page_size: int,
    *,
    keep_state: bool = True,
    decode: bool = False,
) -> StorePlan:
    """Plan one launch.

    Parameters
    ----------
    ratio
        4 or 128.
    chunks
        The tokens of the call.
    page_table
        int32 ``[requests, pages]`` on the CPU: page of entries ``page_size * i ..``; a negative
        page marks entries that are not to be stored.
    page_size
        Rows a page, a power of two.
    keep_state
        Whether later calls continue these requests.
    decode
        Plan for the decode kernels.

    Raises
    ------
    ValueError
        If a chunk, a head, the page table or the page size is out of range.
    """
    slots, ring = window_slots(ratio), ring_rows(ratio)
    _require_chunks(chunks, page_table, page_size, ring, decode=decode)
    end = chunks.start + chunks.length
    first = chunks.start // ratio
    count = end // ratio - first
    _require_pages(int((end // ratio)[count > 0].max(initial=0)), page_table, page_size)
    owner, step = _ragged(count)
    entry = first[owner] + step
    row0 = np.cumsum(chunks.length) - chunks.length
    token = row0 + (first + 1) * ratio - 1 - chunks.start  # completes the chunk's first window
    behind = chunks.start - ((first + 1) * ratio - slots)  # its slots before the chunk
    in_state = np.where(chunks.start > 0, np.minimum(behind, slots - 1), 0)
    base = chunks.request * ring
    state_slot = (chunks.head - behind) % ring
    before = np.cumsum(count) - count
    columns = (before, count, token, first, in_state, base, state_slot, np.zeros_like(base))
    windows = Windows(
        entry, token[owner] + step * ratio, np.maximum(in_state[owner] - step * ratio, 0)
    )

    slot = _slots(chunks.request[owner], entry, page_table.numpy(), page_size)
    placed = slot
    if decode:
        placed = np.full(count.size, -1, np.int64)
        placed[owner] = slot
    need = end - np.maximum((end // ratio + 1) * ratio - slots, 0)
    kept = np.minimum(chunks.length, need) if keep_state else np.zeros_like(need)
    kept_owner, kept_step = _ragged(kept)
    kept_token = (row0 + chunks.length - kept)[kept_owner] + kept_step
    kept_row = base[kept_owner] + (chunks.head[kept_owner] + kept_step) % ring
    touches_state = bool(kept.sum()) or bool((windows.from_state > 0).any())
    return StorePlan(
        ratio=ratio,
        decode=decode,
        tokens=int(chunks.length.sum()),
        segments=_int32(np.stack(columns, axis=1)),
        slots=torch.from_numpy(placed),
        writes=_int32(np.stack((kept_token, kept_row), axis=1)),
        windows=windows,
        head=(chunks.head + kept) % ring,
        state_requests=int(chunks.request.max()) + 1 if touches_state else 0,
        positions=int(entry.max()) * ratio + 1 if entry.size else 0,
        pages=int(slot.max()) // page_size + 1 if slot.size else 0,
        page_size=page_size,
        workspace=torch.zeros(0, dtype=torch.int32),
    )


def _require_chunks(
    chunks: Chunks, page_table: Tensor, page_size: int, ring: int, *, decode: bool
) -> None:
    arrays = (chunks.request, chunks.start, chunks.length, chunks.head)
    if len({a.shape for a in arrays}) != 1 or chunks.request.ndim != 1 or not chunks.request.size:
        raise ValueError(
            f"chunks of shapes {[a.shape for a in arrays]}: expected four arrays of one length >= 1"
        )
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size {page_size}: expected a power of two")
    if page_table.dtype != torch.int32 or page_table.ndim != 2 or page_table.device.type != "cpu":
        raise ValueError(
            f"page_table: {page_table.dtype} {tuple(page_table.shape)} on {page_table.device}, "
            "expected int32 [requests, pages] on the CPU"
        )
    for name, array, limit in (
        ("request", chunks.request, page_table.shape[0]),
        ("head", chunks.head, ring),
        ("start", chunks.start, 2**31),
        ("length", chunks.length, 2**31),
        ("end", chunks.start + chunks.length, 2**31),
    ):
        bad = np.flatnonzero((array < 0) | (array >= limit))
        if bad.size:
            raise ValueError(
                f"chunk {bad[0]}: {name} {array[bad[0]]}, expected 0 <= {name} < {limit}"
            )
    if decode and int(chunks.length.max()) > 1:
        raise ValueError(
            f"chunk of {int(chunks.length.max())} tokens: a decode plan takes at most one token a "
            "chunk; plan it with decode=False"
        )
    if np.unique(chunks.request).size != chunks.request.size:
        raise ValueError("chunks: two of one request; expected one chunk a request in each call")
    largest = int(chunks.request.max() + 1) * ring
    if int(chunks.length.sum()) >= 2**31 or largest >= 2**31:
        raise ValueError(
            f"plan of {int(chunks.length.sum())} tokens and {largest} state rows: expected fewer "
            "than 2**31 of each"
        )


def _require_pages(entries: int, page_table: Tensor, page_size: int) -> None:
    """Check that a request of so many entries fits, before anything is made for each of them."""
    last = (entries - 1) // page_size
    if last >= page_table.shape[1]:
        raise ValueError(
            f"page_table of {page_table.shape[1]} pages a request: entry {entries - 1} needs page "
            f"{last}"
        )


def _slots(request: I64, entry: I64, table: npt.NDArray[np.int32], page_size: int) -> I64:
    page = table[request, entry // page_size].astype(np.int64)
    return np.where(page < 0, np.int64(-1), page * page_size + entry % page_size)


def _ragged(count: I64) -> tuple[I64, I64]:
    """Return, for each of ``count.sum()`` items, its owner and its place within the owner."""
    owner = np.repeat(np.arange(count.size), count)
    return owner, np.arange(owner.size) - np.repeat(np.cumsum(count) - count, count)


def _int32(array: I64) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.int32)))
