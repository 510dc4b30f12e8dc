"""Prompts with needles: where they stand, and that nothing stands twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from needlepoint.verify.inputs.recall_needles import WINDOW
from needlepoint.verify.probe.questions import KINDS, make_question
from needlepoint.verify.recall.pool import FactRecord, Pool, PoolFact, shipped_folder
from needlepoint.verify.recall.prompts import Haystack, Spot, compose

FACTS, FACT, QUESTION = 48, 10, 5


@pytest.fixture(scope="module")
def pool() -> Pool:
    passages = 40
    rows = passages * 50
    facts = []
    for i in range(FACTS):
        start = rows + i * FACT
        record = FactRecord(
            text=f"Thing {i} has the number {10_000 + i}.",
            question=f"What is the number of thing {i}?",
            answer=str(10_000 + i),
            group=i // 8,
            tokens=FACT,
            question_tokens=QUESTION,
            answer_span=(7, 9),
        )
        asked = rows + FACTS * FACT + i * QUESTION
        facts.append(PoolFact(record, range(start, start + FACT), range(asked, asked + QUESTION)))
    total = rows + FACTS * (FACT + QUESTION)
    return Pool(
        "test",
        torch.arange(total).unsqueeze(1).to(torch.bfloat16),
        tuple(range(i * 50, (i + 1) * 50) for i in range(passages)),
        tuple(f"This is passage {i}. " * 12 for i in range(passages)),
        tuple(facts),
        "0" * 64,
    )


def check(pool: Pool, haystack: Haystack, length: int, spots: list[Spot]) -> None:
    rows = haystack.rows.tolist()
    assert len(rows) == haystack.length == length
    assert len(set(rows)) == length
    assert len(haystack.needles) == len(spots)
    by_answer = {fact.rows.start + 7: fact for fact in pool.facts}
    for needle in haystack.needles:
        fact = by_answer[rows[needle.start]]
        assert rows[needle.start : needle.stop] == list(fact.rows[7:9])
        assert rows[needle.query] == fact.question[-1]
        assert needle.stop <= needle.query


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(700, 2000),
    depths=st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), min_size=1, max_size=8),
    distractors=st.integers(0, 16),
    number=st.integers(0, 30),
    inside=st.booleans(),
)
def test_every_needle_is_asked_for_and_nothing_repeats(
    pool: Pool, length: int, depths: list[float], distractors: int, number: int, inside: bool
) -> None:
    spots = [Spot(d) for d in depths] + [Spot(None)] * inside
    haystack = compose(pool, number, length, spots, distractors, 0)
    check(pool, haystack, length, spots)
    windowed = [n for n in haystack.needles if n.windowed]
    assert len(windowed) == inside
    assert all(n.query - n.start >= WINDOW for n in haystack.needles if not n.windowed)


def test_depth_is_where_the_needle_stands(pool: Pool) -> None:
    spots = [Spot(d) for d in (0.0, 0.5, 1.0)]
    haystack = compose(pool, 0, 1500, spots, 8, 0)
    reach = 1500 - 3 * QUESTION - WINDOW - FACT
    for needle in haystack.needles:
        assert needle.start - 7 == pytest.approx(needle.depth * reach, abs=1)


def test_a_fixed_position_is_exact(pool: Pool) -> None:
    haystack = compose(pool, 3, 1200, [Spot(None, 5)], 16, 0)
    assert haystack.needles[0].start == 5 + 7
    assert haystack.needles[0].depth == pytest.approx(5 / 1200)


def test_haystacks_differ_and_are_the_same_each_time(pool: Pool) -> None:
    spots = [Spot(0.0), Spot(0.5)]
    first, again = (compose(pool, 1, 900, spots, 4, 0) for _ in range(2))
    other = compose(pool, 2, 900, spots, 4, 0)
    assert torch.equal(first.rows, again.rows)
    assert not torch.equal(first.rows, other.rows)
    asked = [{int(h.rows[n.start]) for n in h.needles} for h in (first, other)]
    assert not asked[0] & asked[1]


@pytest.mark.parametrize(
    ("length", "spots", "distractors", "message"),
    [
        (6000, [Spot(0.5)], 4, "distinct passages"),
        (300, [Spot(0.5)], 40, "do not fit"),
        (140, [Spot(0.5), Spot(0.6)], 0, "do not fit"),
        (900, [Spot(0.5)], FACTS, "the pool has 48 facts"),
    ],
)
def test_what_does_not_fit_is_refused(
    pool: Pool, length: int, spots: list[Spot], distractors: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compose(pool, 0, length, spots, distractors, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_questions_hold_their_answer_at_their_place(pool: Pool, kind: str, depth: float) -> None:
    question = make_question(pool, 1200, depth, kind, 0, 8, 0)  # type: ignore[arg-type]
    assert question.text.count(question.answer) == 1
    at = question.text.index(question.answer) / len(question.text)
    assert question.place[0] <= at <= question.place[1]
    assert at == pytest.approx(depth, abs=0.1)
    assert not question.text.rsplit("\n\n", 1)[1].count(question.answer)


def test_questions_refuse_lengths_without_text(pool: Pool) -> None:
    with pytest.raises(ValueError, match="distinct passages run out"):
        make_question(pool, 9000, 0.5, "content", 0, 8, 0)
    with pytest.raises(ValueError, match="the pool has 48 facts"):
        make_question(pool, 900, 0.5, "content", 0, 64, 0)


def test_what_ships_is_small() -> None:
    sizes = [path.stat().st_size for path in shipped_folder().iterdir()]

    assert max(sizes) <= 8 << 20
    assert sum(sizes) <= 24 << 20
