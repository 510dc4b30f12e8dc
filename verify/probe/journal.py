"""What a probe was answered: every reply is appended at once, so that a run can be resumed.

Replies that are no answers are asked again then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from needlepoint.verify.probe.client import ANSWERED, Arm, Reply
from needlepoint.verify.probe.questions import Question
from needlepoint.verify.recording.manifest import parse_json

JOURNAL: Final = "needlepoint.probe-journal/1"
MAX_JOURNAL_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class Pass:
    """One way to ask all questions.

    Attributes
    ----------
    start
        Which start of the server, 0 the first.
    cache
        ``cold``: each prompt begins with words of its own, so no prefix of it is cached. ``warm``:
        the prompt of the cold pass a second time.
    concurrency
        Questions under way at a time.
    """

    start: int
    cache: str
    concurrency: int

    @property
    def name(self) -> str:
        """As it stands in the journal."""
        return f"start {self.start}, {self.cache}, {self.concurrency} at a time"

    def prefix(self, arm: str, question: str) -> str:
        """Return the words that a prompt begins with, the same for a cold and its warm pass."""
        return f"[{arm}; start {self.start}; {self.concurrency} at a time; {question}]\n"


@dataclass(frozen=True)
class Record:
    """One reply."""

    arm: str
    passed: str
    question: str
    reply: Reply


class Journal:
    """Replies on disk, one JSON object a line.

    Parameters
    ----------
    path
        File; None keeps replies in memory alone.
    digest
        Of the questions and arms; a journal of others is refused.

    Raises
    ------
    ValueError
        If the file is of another run or no journal.
    """

    def __init__(self, path: Path | None, digest: str) -> None:
        self._path, self._lock = path, Lock()
        self.records: dict[tuple[str, str, str], Reply] = {}
        if path is None:
            return
        if path.exists():
            self._load(path, digest)
        else:
            self._write({"schema": JOURNAL, "digest": digest})

    def answered(self, arm: str, passed: str, question: str) -> bool:
        """Return whether this question has an answer already."""
        reply = self.records.get((arm, passed, question))
        return reply is not None and reply.state in ANSWERED

    def add(self, record: Record) -> None:
        """Keep one reply."""
        with self._lock:
            self.records[record.arm, record.passed, record.question] = record.reply
            self._write(asdict(record))

    def _write(self, value: dict[str, object]) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")

    def _load(self, path: Path, digest: str) -> None:
        if path.stat().st_size > MAX_JOURNAL_BYTES:
            raise ValueError(f"journal {path}: larger than {MAX_JOURNAL_BYTES} bytes")
        lines = path.read_bytes().split(b"\n")
        head = parse_json(lines[0] or b"null", f"{path}, line 1")
        if not isinstance(head, dict) or head.get("schema") != JOURNAL:
            raise ValueError(f"journal {path}: is not a journal of recall --server; name another")
        if head.get("digest") != digest:
            raise ValueError(
                f"journal {path}: holds replies to other questions or of other servers; name "
                "another file, or ask the same again"
            )
        for number, line in enumerate(lines[1:], 2):
            if not line:
                continue
            try:
                value = json.loads(line)
                reply = Reply(**value["reply"])
                self.records[value["arm"], value["passed"], value["question"]] = reply
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):
                    break  # a run that was killed while it wrote: ask that question again
                raise ValueError(f"journal {path}, line {number}: {error}") from error


def probe_digest(arms: Sequence[Arm], questions: Sequence[Question]) -> str:
    """Return the digest that ties a journal to its run."""
    text = json.dumps(
        [
            [[a.label, a.model, dict(a.body)] for a in arms],
            [[q.name, q.text, q.answer] for q in questions],
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()
