"""Questions for a live endpoint: the same passages and facts as text.

A prompt is passages with numbered records among them; one record is the needle. It is asked for by
content, by its number, or by its own words. Lengths are counted in the pool's tokens, so the
server's own count differs by its tokenizer; results hold that count.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final, Literal

from needlepoint.verify.recall.pool import Pool

Kind = Literal["content", "position", "quote"]
KINDS: Final[tuple[Kind, ...]] = ("content", "position", "quote")
_HEAD = "Below are passages of a novel with numbered records among them."
_ASK = "Answer with the number alone."


@dataclass(frozen=True)
class Question:
    """One prompt and what it must be answered with.

    Attributes
    ----------
    name
        The same for every server: length, depth, kind, haystack.
    length
        Tokens, counted by the pool.
    depth
        0 to 1.
    kind
        What it asks by.
    haystack
        Cluster: haystacks share passages and records, not the order.
    text
        The prompt.
    answer
        The number.
    place
        Part of the prompt's characters before the needle, and up to its end.
    """

    name: str
    length: int
    depth: float
    kind: Kind
    haystack: int
    text: str
    answer: str
    place: tuple[float, float]


def make_question(
    pool: Pool, length: int, depth: float, kind: Kind, haystack: int, distractors: int, seed: int
) -> Question:
    """Compose one question.

    Raises
    ------
    ValueError
        If the pool has too few facts, or distinct passages run out.
    """
    draw = random.Random(f"{seed}/{length}/{haystack}")
    facts = [fact.record for fact in pool.facts]
    draw.shuffle(facts)
    if distractors + 1 > len(facts):
        raise ValueError(
            f"{distractors} distractors: the pool has {len(facts)} facts; choose fewer"
        )
    # The same haystack for every depth and kind: only the needle's place moves.
    near = [f for f in facts[1:] if f.group == facts[0].group]
    chosen = [facts[0], *(near + [f for f in facts[1:] if f.group != facts[0].group])[:distractors]]
    room = length - sum(record.tokens + 6 for record in chosen) - 40
    order = list(range(len(pool.passages)))
    draw.shuffle(order)
    parts: list[str] = []
    for i in order:
        if room <= 0:
            break
        sentences = re.split(r"(?<=[.!?]) +", " ".join(pool.texts[i].split()))
        share = min(1.0, room / len(pool.passages[i]))
        parts += sentences[: max(1, round(share * len(sentences)))]
        room -= len(pool.passages[i])
    if room > 0:
        raise ValueError(
            f"length {length}: distinct passages run out {room} tokens before; give a longer pool "
            "with --passages"
        )
    others = [(draw.random(), record) for record in chosen[1:]]
    placed = sorted([(depth, chosen[0]), *others], key=lambda pair: pair[0])
    needle = next(i for i, (_, record) in enumerate(placed) if record is chosen[0])
    lines: list[str] = []
    at = 0
    before = 0
    for number, (where, record) in enumerate(placed, 1):
        upto = min(len(parts), round(where * len(parts)))
        lines += [" ".join(parts[at:upto])] if upto > at else []
        at = max(at, upto)
        if number - 1 == needle:
            before = len("\n\n".join([_HEAD, *lines]))
        lines.append(f"Record {number}: {record.text}")
    lines += [" ".join(parts[at:])] if at < len(parts) else []
    record = chosen[0]
    asked = {
        "content": record.question,
        "position": f"Which number does record {needle + 1} name?",
        "quote": f'Which number completes "{record.text.split(record.answer)[0].strip()} ..."?',
    }[kind]
    text = "\n\n".join([_HEAD, *lines, f"{asked} {_ASK}"])
    return Question(
        f"{length}/{depth:g}/{kind}/{haystack}",
        length,
        depth,
        kind,
        haystack,
        text,
        record.answer,
        (before / len(text), (before + len(record.text) + 20) / len(text)),
    )
