"""Prompts with needles: passages in a drawn order, facts at stated depths, questions at the end.

A prompt is a haystack. Its facts are needles, or near-duplicates that are never asked for
(*distractors*). The questions stand one after the other at the end of the prompt and the query of a
needle is the last token of its question, so all needles of a haystack share one key side. No
passage and no fact stands in a prompt twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.verify.inputs.recall_needles import WINDOW, Needle
from needlepoint.verify.recall.pool import Pool, PoolFact


@dataclass(frozen=True)
class Spot:
    """Where a needle is wanted: at a depth, or with its first token at a position.

    The depth is 0 to 1 of the part of the prompt that no question reaches through its window; None
    without a position asks for a needle inside the window.
    """

    depth: float | None
    position: int | None = None


@dataclass(frozen=True)
class Haystack:
    """One prompt: rows of the pool's states, int64 ``[length]``, and its needles.

    ``number`` is the cluster of its needles, which stand in the order of their questions.
    """

    number: int
    distractors: int
    rows: Tensor
    needles: tuple[Needle, ...]

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.rows)


def compose(
    pool: Pool, number: int, length: int, spots: Sequence[Spot], distractors: int, seed: int
) -> Haystack:
    """Compose one prompt of ``length`` tokens, questions included, with a needle for each spot.

    ``number`` (which haystack), ``length`` and ``seed`` decide every draw; ``distractors`` are
    near-duplicates beside the needles.

    Raises
    ------
    ValueError
        If the pool has too few facts, distinct text runs out, or the facts do not fit.
    """
    draw = random.Random(f"{seed}/{length}/{distractors}/{number}")
    needles, others = _choose(pool, number, length, len(spots), distractors, seed, draw)
    order = sorted(range(len(spots)), key=lambda i: (spots[i].depth is not None, draw.random()))
    tail = [needles[i].question for i in order]
    body = length - sum(map(len, tail))
    starts = _place(pool, needles, spots, body, length)
    facts = sorted(zip(starts, needles, strict=True), key=lambda pair: pair[0])
    gaps = _gaps([(start, len(fact.rows)) for start, fact in facts], body)
    room = sum(gaps) - sum(len(fact.rows) for fact in others)
    if room < 0:
        raise ValueError(
            f"length {length}: {len(spots)} needles and {distractors} distractors do not fit; "
            "choose fewer distractors or a longer prompt"
        )
    rows = _fill(pool, facts, gaps, others, room, length, draw)
    rows += [row for question in tail for row in question]
    found, at = [], body
    for i, question in zip(order, tail, strict=True):
        at += len(question)
        first, stop = needles[i].record.answer_span
        start, depth = starts[i], spots[i].depth
        if depth is None:
            depth = 1.0 if _inside(spots[i]) else start / length
        found.append(Needle(start + first, start + stop, at - 1, depth))
    return Haystack(number, distractors, torch.tensor(rows), tuple(found))


def _choose(
    pool: Pool,
    number: int,
    length: int,
    count: int,
    distractors: int,
    seed: int,
    draw: random.Random,
) -> tuple[list[PoolFact], list[PoolFact]]:
    """Return needles and distractors; needles of successive haystacks differ while facts last."""
    if count + distractors > len(pool.facts):
        raise ValueError(
            f"{count} needles and {distractors} distractors: the pool has {len(pool.facts)} facts; "
            "choose fewer distractors"
        )
    # Neighbours in the order share a group, so needles of a haystack are near-duplicates too.
    order = list(range(len(pool.facts)))
    random.Random(f"{seed}/{length}").shuffle(order)
    places: dict[int, int] = {}
    for i in order:
        places.setdefault(pool.facts[i].record.group, len(places))
    order.sort(key=lambda i: places[pool.facts[i].record.group])
    first = number * count % len(order)
    chosen = [(order * 2)[first + i] for i in range(count)]
    groups = {pool.facts[i].record.group for i in chosen}
    rest = [i for i in order if i not in chosen]
    draw.shuffle(rest)
    # The nearest duplicates first: those that share words with a needle.
    rest.sort(key=lambda i: pool.facts[i].record.group not in groups)
    return [pool.facts[i] for i in chosen], [pool.facts[i] for i in rest[:distractors]]


def _place(
    pool: Pool, needles: Sequence[PoolFact], spots: Sequence[Spot], body: int, length: int
) -> list[int]:
    """Return the first token of every fact: as wanted, moved as little as overlaps ask for."""
    near = sum(len(n.rows) for n, s in zip(needles, spots, strict=True) if _inside(s))
    reach = body - max(WINDOW, near)
    wanted = []
    for fact, spot in zip(needles, spots, strict=True):
        size = len(fact.rows)
        if spot.position is not None:
            wanted.append(spot.position)
        elif spot.depth is None:
            wanted.append(body - size)
        else:
            wanted.append(round(spot.depth * (reach - size)))
    order = sorted(range(len(spots)), key=lambda i: wanted[i])
    starts, free = list(wanted), 0
    for i in order:
        starts[i] = max(starts[i], free)
        free = starts[i] + len(needles[i].rows)
    limit = body
    for i in reversed(order):
        if not _inside(spots[i]) and spots[i].position is None:
            limit = min(limit, reach)
        starts[i] = min(starts[i], limit - len(needles[i].rows))
        limit = starts[i]
    if limit < 0 or any(
        s.position is not None and s.position != at for s, at in zip(spots, starts, strict=True)
    ):
        raise ValueError(
            f"length {length}: {len(spots)} needles do not fit at the wanted places beside their "
            "questions and the window; choose fewer needles or a longer prompt"
        )
    return starts


def _inside(spot: Spot) -> bool:
    return spot.depth is None and spot.position is None


def _gaps(placed: Sequence[tuple[int, int]], body: int) -> list[int]:
    """Return the free tokens before each placed fact and behind the last."""
    gaps, at = [], 0
    for start, size in placed:
        gaps.append(start - at)
        at = start + size
    return [*gaps, body - at]


def _fill(
    pool: Pool,
    facts: Sequence[tuple[int, PoolFact]],
    gaps: Sequence[int],
    others: Sequence[PoolFact],
    room: int,
    length: int,
    draw: random.Random,
) -> list[int]:
    """Return the rows of the body: distractors and passages in the gaps between needles."""
    if room > pool.passage_tokens:
        raise ValueError(
            f"length {length}: needs {room} tokens of distinct passages, the pool {pool.name} has "
            f"{pool.passage_tokens}; give a longer pool with --passages (`pip install "
            f"'needlepoint[encoder]'`, then `python -m needlepoint.fixtures.make_recall --passages "
            f"{room} --out DIR`)"
        )
    order = list(range(len(pool.passages)))
    draw.shuffle(order)
    text = iter([row for i in order for row in pool.passages[i]])
    left = list(gaps)
    inside: list[list[PoolFact]] = [[] for _ in gaps]
    for fact in sorted(others, key=lambda f: -len(f.rows)):
        fitting = [i for i, free in enumerate(left) if free >= len(fact.rows)]
        if not fitting:
            raise ValueError(f"length {length}: distractors do not fit between the needles")
        gap = draw.choices(fitting, weights=[left[i] for i in fitting])[0]
        inside[gap].append(fact)
        left[gap] -= len(fact.rows)
    rows: list[int] = []
    for i, between in enumerate(inside):
        draw.shuffle(between)
        cuts = sorted(draw.randint(0, left[i]) for _ in between)
        for fact, before in zip(
            between, [b - a for a, b in zip([0, *cuts], cuts, strict=False)], strict=True
        ):
            rows += [next(text) for _ in range(before)]
            rows += fact.rows
        rows += [next(text) for _ in range(left[i] - (cuts[-1] if cuts else 0))]
        if i < len(facts):
            rows += facts[i][1].rows
    return rows
