"""``needlepoint recall --server``: the same questions to every arm, pass by pass.

From options to questions, arms and a result; an interrupted run goes on from its journal.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Final

from needlepoint.verify.base.numbers import number
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.probe.client import Arm, Endpoint, Manners, shown_url
from needlepoint.verify.probe.journal import Journal, Pass, Record, probe_digest
from needlepoint.verify.probe.questions import KINDS, Kind, Question, make_question
from needlepoint.verify.probe.tally import probe_result
from needlepoint.verify.recall.grid import Length
from needlepoint.verify.recall.pool import load_pool
from needlepoint.verify.recording.manifest import parse_json
from needlepoint.verify.schema.probe import ProbeResult

HAYSTACKS: Final = 3
CACHES: Final = ("cold", "warm")
_CHARACTERS_A_TOKEN: Final = 4


@dataclass(frozen=True)
class ProbeRequest:
    """Options of ``recall --server``.

    Attributes
    ----------
    arms
        Servers or settings, the first is what the others are compared with.
    lengths, depths, kinds, haystacks, distractors
        The grid of questions.
    passes
        In order.
    manners, budget_tokens
        How the servers are treated.
    journal
        File to go on from; None to keep nothing but the result.
    restart
        Command between starts.
    passages, seed
        Pool and draw.
    """

    arms: tuple[Arm, ...]
    lengths: tuple[Length, ...]
    depths: tuple[float, ...]
    kinds: tuple[Kind, ...]
    haystacks: int
    distractors: int
    passes: tuple[Pass, ...]
    manners: Manners
    budget_tokens: int
    journal: Path | None
    restart: str | None
    passages: Path | None
    seed: int


def run_probe(request: ProbeRequest, progress: Progress) -> ProbeResult:
    """Ask all questions and return what was answered.

    Raises
    ------
    ValueError
        If a length has no distinct text, the journal is of another run, or the client library is
        missing.
    """
    pool = load_pool(request.passages)
    questions: list[Question] = []
    for length, depth, kind, haystack in product(
        request.lengths, request.depths, request.kinds, range(request.haystacks)
    ):
        where = depth if length.position is None else length.position / length.tokens
        questions.append(
            make_question(
                pool, length.tokens, where, kind, haystack, request.distractors, request.seed
            )
        )
    questions = list({q.name: q for q in questions}.values())
    journal = Journal(request.journal, probe_digest(request.arms, questions))
    complete = _ask_all(request, questions, journal, progress)
    return probe_result(request.arms, questions, request.passes, journal, complete=complete)


def _ask_all(
    request: ProbeRequest, questions: Sequence[Question], journal: Journal, progress: Progress
) -> bool:
    """Ask every question of every arm in every pass; return whether all were asked.

    Every arm has an equal share of the token budget, so that what was asked of one was asked of
    all. What the journal holds an answer to is not asked again.
    """
    arms, passes = request.arms, request.passes
    progress.start("recall: questions", len(arms) * len(questions) * len(passes))
    spent, whole, lock = dict.fromkeys((arm.label for arm in arms), 0), True, Lock()
    share = request.budget_tokens // len(arms)
    started = 0
    for one in passes:
        if one.start != started and request.restart is not None:
            _restart(request.restart)
        started = one.start
        for arm in arms:
            endpoint = Endpoint(arm, request.manners)

            def ask(
                question: Question, one: Pass = one, arm: Arm = arm, endpoint: Endpoint = endpoint
            ) -> None:
                nonlocal whole
                if not journal.answered(arm.label, one.name, question.name):
                    with lock:
                        spent[arm.label] += len(question.text) // _CHARACTERS_A_TOKEN
                        if spent[arm.label] > share:
                            whole = False
                            return
                    reply = endpoint.ask(question, one.prefix(arm.label, question.name))
                    journal.add(Record(arm.label, one.name, question.name, reply))
                progress.advance()

            try:
                with ThreadPoolExecutor(one.concurrency) as pool:
                    for _ in pool.map(ask, questions):
                        pass
            finally:
                endpoint.close()
    return whole


def _restart(command: str) -> None:
    done = subprocess.run(shlex.split(command), check=False)
    if done.returncode:
        raise ValueError(f"--restart {command!r}: exit code {done.returncode}, expected 0")
    time.sleep(1.0)


def parse_arms(
    servers: Sequence[str], models: Sequence[str], bodies: Sequence[str]
) -> tuple[Arm, ...]:
    """Return one arm a server, or one a body where a single server has several.

    Raises
    ------
    ValueError
        Where a URL or a JSON object is wrong, or the numbers do not fit.
    """
    fields = [_body(text) for text in bodies]
    count = max(len(servers), len(fields), len(models))
    for name, values in (("--server", servers), ("--body", fields), ("--api-model", models)):
        if len(values) not in (0, 1, count):
            raise ValueError(
                f"{name}: given {len(values)} times for {count} arms; give it once or {count} times"
            )
    arms = []
    for i in range(count):
        url = servers[i % len(servers)]
        label = shown_url(url) + (f" #{i + 1}" if count > 1 else "")
        model = models[i % len(models)] if models else None
        arms.append(Arm(label, url, model, fields[i % len(fields)] if fields else {}))
    return tuple(arms)


def parse_passes(caches: str, concurrency: str, starts: int) -> tuple[Pass, ...]:
    """Return the passes of ``cold,warm``, ``1,8`` and a number of server starts.

    Raises
    ------
    ValueError
        Where a word or number is not one of these.
    """
    words = caches.replace(" ", "").split(",")
    if not set(words) <= set(CACHES) or "cold" not in words:
        raise ValueError(f"--cache {caches!r}: expected cold, or cold,warm")
    numbers = concurrency.replace(" ", "").split(",")
    if any(re.fullmatch(r"[1-9][0-9]?", n) is None for n in numbers):
        raise ValueError(f"--concurrency {concurrency!r}: expected numbers from 1 to 99")
    return tuple(
        Pass(start, cache, int(n))
        for start in range(starts)
        for n in dict.fromkeys(numbers)
        for cache in CACHES
        if cache in words
    )


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """Return the kinds of questions of ``content,position,quote``.

    Raises
    ------
    ValueError
        Where a word is not one of these.
    """
    words = text.replace(" ", "").split(",")
    if not words or not set(words) <= set(KINDS):
        raise ValueError(f"--questions {text!r}: expected some of {','.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in words)


def parse_picks(text: str | None) -> tuple[int, int] | None:
    """Return (layers, k) of ``21x512``.

    Raises
    ------
    ValueError
        Where the text has another form.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,2})x([1-9][0-9]{0,3})", text)
    if match is None:
        raise ValueError(f"--picks {text!r}: expected LAYERSxK, for example 21x512")
    return int(match[1]), int(match[2])


def probe_lines(result: ProbeResult) -> list[str]:
    """Return the terminal report, the first line alone says what came out."""
    head = "; ".join(f"{a.label} {a.hits} of {a.rows}" for a in result.arms)
    for pair in result.pairs:
        drop = "-" if pair.detectable_drop is None else f"{pair.detectable_drop:.3f}"
        head += f"; {pair.second} against {pair.first}: {pair.conclusion} (detectable drop {drop})"
    lines = [f"{result.verdict}: {result.detail}: {head}", f"  {result.label}"]
    for arm in result.arms:
        lines.append(f"{arm.label}, model {arm.model or 'the first listed'}")
        if arm.unanswered:
            reasons = ", ".join(f"{n} {state}" for state, n in arm.unanswered.items())
            lines.append(f"  not answered and not counted: {reasons}")
        if arm.unstable:
            lines.append(f"  {arm.unstable} questions right in one pass and wrong in another")
        for cell in arm.cells:
            shown = "" if cell.ci95 is None else f" [{cell.ci95[0]:.3f}, {cell.ci95[1]:.3f}]"
            lines.append(
                f"  {cell.length} tokens, {100 * cell.depth:.3g} %, by {cell.kind}: "
                f"{cell.hits} of {cell.rows}{shown}"
            )
        for one in arm.passes if len(arm.passes) > 1 else ():
            lines.append(
                f"  start {one.start}, {one.cache}, {one.concurrency} at a time: "
                f"{one.hits} of {one.rows}"
            )
        for name, count in arm.picks.items():
            lines.append(f"  picks, place estimated: {name}: {count}")
    for pair in result.pairs:
        lines.append(
            f"{pair.second} against {pair.first}: {pair.rows} pairs, lost {pair.lost}, gained "
            f"{pair.gained}, p {number(pair.mcnemar_p)}, over haystacks {number(pair.cluster_p)}"
        )
    return lines


def _body(text: str) -> dict[str, object]:
    value = parse_json(text.encode(), "--body")
    if not isinstance(value, dict):
        raise ValueError(f"--body {text[:80]!r}: expected a JSON object of request fields")
    return dict(json.loads(text))
