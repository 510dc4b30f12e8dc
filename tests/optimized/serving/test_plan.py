"""Plans of stores against a queue that is simulated token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.graphed_decode import padded_plan

from needlepoint.optimized.serving.plan import (
    Chunks,
    StorePlan,
    plan_store,
    ring_rows,
    window_slots,
)

PAGE = 4


@dataclass
class Requests:
    """Requests that arrive in chunks, and a state in which every row holds a token's name."""

    ratio: int
    lengths: list[int]
    head: np.ndarray
    done: np.ndarray
    ring: np.ndarray  # [requests, ring rows]
    seen: list[list[int]]

    @classmethod
    def new(cls, ratio: int, lengths: list[int], head: int) -> Requests:
        count, rows = len(lengths), ring_rows(ratio)
        return cls(
            ratio,
            lengths,
            np.full(count, head % rows, np.int64),
            np.zeros(count, np.int64),
            np.full((count, rows), -1, np.int64),
            [[] for _ in lengths],
        )

    def table(self) -> torch.Tensor:
        columns = max(self.lengths) // self.ratio // PAGE + 1
        return torch.arange(len(self.lengths) * columns, dtype=torch.int32).view(-1, columns)

    def feed(self, size: int, *, decode: bool) -> StorePlan:
        """Take the next ``size`` tokens of every unfinished request."""
        who = np.flatnonzero(self.done < np.asarray(self.lengths))
        count = np.minimum(size, np.asarray(self.lengths)[who] - self.done[who])
        chunks = Chunks(who, self.done[who], count, self.head[who])
        plan = plan_store(self.ratio, chunks, self.table(), PAGE, decode=decode)
        names = [
            name(request, int(self.done[request]) + i)
            for request, n in zip(who.tolist(), count.tolist(), strict=True)
            for i in range(n)
        ]
        read = self.check_windows(plan, names)
        rows = self.ring.shape[1]
        for _, row in plan.writes.tolist():
            assert divmod(row, rows) not in read, "a launch must not write a row that it reads"
        for token, row in plan.writes.tolist():
            self.ring[divmod(row, rows)] = names[token]
        self.head[who] = plan.head
        self.done[who] += count
        return plan

    def check_windows(self, plan: StorePlan, names: list[int]) -> set[tuple[int, int]]:
        """Check each window's tokens; return the state rows that the launch reads."""
        slots, rows = window_slots(self.ratio), self.ring.shape[1]
        read: set[tuple[int, int]] = set()
        for _, count, first_token, entry, behind, base, place, _ in plan.segments.tolist():
            request = base // rows
            for step in range(count):
                last, kept = first_token + step * self.ratio, max(behind - step * self.ratio, 0)
                window = entry + step
                oldest = (window + 1) * self.ratio - slots
                for slot in range(slots):
                    if oldest + slot < 0:
                        continue  # masked
                    if slot < kept:
                        row = (place + step * self.ratio + slot) % rows
                        read.add((request, row))
                        found = self.ring[request, row]
                    else:
                        found = names[last - (slots - 1 - slot)]
                    assert found == name(request, oldest + slot)
                self.seen[request].append(window)
        return read


def name(request: int, position: int) -> int:
    return request * 10**6 + position


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.sampled_from([4, 128]),
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    head=st.integers(0, 255),
)
def test_every_window_finds_its_tokens(
    ratio: int, lengths: list[int], sizes: list[int], head: int
) -> None:
    requests = Requests.new(ratio, lengths, head)
    turn = 0
    while (requests.done < np.asarray(lengths)).any():
        size = sizes[turn % len(sizes)]
        requests.feed(size, decode=size == 1)
        turn += 1

    assert requests.seen == [list(range(n // ratio)) for n in lengths]


def test_slots_follow_the_page_table_and_skip_missing_pages() -> None:
    table = torch.tensor([[7, -1, 2]], dtype=torch.int32)
    plan = plan_store(4, Chunks.whole((40,)), table, PAGE, keep_state=False)

    assert plan.slots.tolist() == [28, 29, 30, 31, -1, -1, -1, -1, 8, 9]
    assert (plan.pages, plan.positions, plan.tokens, plan.state_requests) == (8, 37, 40, 0)
    assert plan.writes.shape == (0, 2)


def test_decode_has_one_slot_a_chunk() -> None:
    start = np.array([3, 4])
    chunks = Chunks(np.arange(2), start, np.ones(2, np.int64), np.zeros(2, np.int64))
    table = torch.zeros(2, 1, dtype=torch.int32)
    plan = plan_store(4, chunks, table, PAGE, decode=True)

    assert plan.slots.tolist() == [0, -1]
    assert padded_plan(plan, 3, 5).slots.tolist() == [0, -1, -1]
    assert padded_plan(plan, 3, 5).segments[2].tolist() == [0] * 8
    assert padded_plan(plan, 3, 5).writes[2:].tolist() == [[-1, -1]] * 3
    with pytest.raises(ValueError, match="cannot be padded to 1"):
        padded_plan(plan, 1, 5)


def chunk(**changes: int) -> Chunks:
    fields = {"request": 0, "start": 0, "length": 8, "head": 0} | changes
    return Chunks(**{key: np.array([value]) for key, value in fields.items()})


@pytest.mark.parametrize(
    ("chunks", "page_size", "decode", "message"),
    [
        (chunk(), 3, False, "page_size 3: expected a power of two"),
        (chunk(request=1), 4, False, "request 1, expected 0 <= request < 1"),
        (chunk(start=-1), 4, False, "start -1"),
        (chunk(head=16), 4, False, "head 16, expected 0 <= head < 16"),
        (chunk(length=40), 4, False, "entry 9 needs page 2"),
        (chunk(length=2**31 - 1), 4, False, "entry 536870910 needs page 134217727"),
        (chunk(start=2**31 - 4), 4, False, "end 2147483652, expected 0 <= end < 2147483648"),
        (chunk(), 4, True, "chunk of 8 tokens: a decode plan takes at most one"),
        (Chunks.whole(()), 4, False, "four arrays of one length >= 1"),
        (
            Chunks(np.zeros(2, np.int64), *(np.ones(2, np.int64) for _ in range(3))),
            4,
            False,
            "two of one request",
        ),
    ],
)
def test_bad_plans_are_refused(chunks: Chunks, page_size: int, decode: bool, message: str) -> None:
    table = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        plan_store(4, chunks, table, page_size, decode=decode)


def test_bad_tables_and_ratios_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected int32 \[requests, pages\] on the CPU"):
        plan_store(4, chunk(), torch.zeros(1, 2), PAGE)
    with pytest.raises(ValueError, match="ratio 8: expected 4 or 128"):
        plan_store(8, chunk(), torch.zeros(1, 2, dtype=torch.int32), PAGE)
