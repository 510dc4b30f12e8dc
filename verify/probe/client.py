"""Ask one OpenAI-compatible endpoint, with pauses, and return its answers.

Only an answer counts. A server that is dead, slow or busy, or sends something else, gives an
*outcome of the transport* and never a miss. Keys are read from the environment, sent, and kept
nowhere.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from needlepoint.verify.probe.questions import Question

if TYPE_CHECKING:
    from openai import OpenAI

State = Literal["hit", "miss", "junk", "dead", "slow", "busy", "refused"]
ANSWERED: Final = frozenset({"hit", "miss"})
KEY_VARIABLE: Final = "OPENAI_API_KEY"
_MAX_PICKS: Final = 256 << 20
_NEAR: Final = 2
"""Entries by which an estimated place may be off."""


@dataclass(frozen=True)
class Arm:
    """One server, or one setting of it.

    Attributes
    ----------
    label
        As it stands in results.
    url
        Base URL, for example ``http://localhost:30000/v1``.
    model
        Model name; None for the first that the server lists.
    body
        Fields added to every request, for servers' own flags.
    """

    label: str
    url: str
    model: str | None = None
    body: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Manners:
    """How a server is treated.

    Attributes
    ----------
    timeout_s
        Of one request.
    retries
        After a busy or broken answer, each after a longer pause.
    pause_s
        Least time between two requests of one worker.
    max_tokens
        Of a reply.
    picks
        (layers, k) of the picks to ask for; None to ask for none.
    """

    timeout_s: float = 120.0
    retries: int = 2
    pause_s: float = 0.2
    max_tokens: int = 16
    picks: tuple[int, int] | None = None


@dataclass(frozen=True)
class Reply:
    """What one request came to.

    Attributes
    ----------
    state
        ``hit`` and ``miss`` are answers; the others say why there is none.
    text
        Up to 200 characters of the reply, or of the error.
    prompt_tokens, cached_tokens
        As the server counts them; None where it does not.
    seconds
        Time of the request that counted.
    layers_reached
        Layers whose picks for the last prompt token hold the needle's place; None without picks.
        The place is estimated from the part of the text before it.
    """

    state: State
    text: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    seconds: float = 0.0
    layers_reached: int | None = None


class Endpoint:
    """One arm's client; may be used by several threads.

    Raises
    ------
    ValueError
        If the client library is missing or the URL is not one.
    """

    def __init__(self, arm: Arm, manners: Manners, key_variable: str = KEY_VARIABLE) -> None:
        try:
            import openai
        except ImportError as error:
            raise ValueError(
                "recall --server needs the OpenAI client: pip install 'needlepoint[server]'"
            ) from error
        shown_url(arm.url)
        self._errors = openai
        self._key = os.environ.get(key_variable, "")
        self._client: OpenAI = openai.OpenAI(
            base_url=arm.url, api_key=self._key or "none", timeout=manners.timeout_s, max_retries=0
        )
        self._arm, self._manners = arm, manners
        self._model = arm.model
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def model(self) -> str:
        """Return the model name, asking the server if none was given."""
        with self._lock:
            if self._model is None:
                listed = self._client.models.list()
                if not listed.data:
                    raise ValueError(f"server {self._arm.label}: lists no model; name one")
                self._model = str(listed.data[0].id)
            return self._model

    def ask(self, question: Question, prefix: str = "") -> Reply:
        """Ask one question; ``prefix`` stands before the prompt, to miss the prefix cache."""
        reply = self._once(question, prefix)
        for attempt in range(self._manners.retries):
            if reply.state not in ("busy", "dead"):
                break
            time.sleep(self._manners.pause_s * 4**attempt)
            reply = self._once(question, prefix)
        time.sleep(self._manners.pause_s)
        return reply

    def _once(self, question: Question, prefix: str) -> Reply:
        errors, manners = self._errors, self._manners
        body = dict(self._arm.body)
        if manners.picks is not None:
            body |= {"return_indexer_topk": True, "return_meta_info": True}
        start = time.monotonic()
        try:
            found = self._client.chat.completions.create(
                model=self.model(),
                messages=[{"role": "user", "content": prefix + question.text}],
                temperature=0,
                max_tokens=manners.max_tokens,
                extra_body=body,
            )
            seconds = time.monotonic() - start
            return self._read(question, prefix, found, seconds)
        except errors.APITimeoutError:
            return Reply("slow", f"no answer within {manners.timeout_s:g} s")
        except errors.APIConnectionError as error:
            return Reply("dead", self._clean(str(error.__cause__ or error)))
        except errors.RateLimitError as error:
            return Reply("busy", self._clean(str(error)))
        except errors.APIStatusError as error:
            busy = error.status_code in (429, 502, 503, 504)
            return Reply("busy" if busy else "refused", self._clean(str(error)))
        except (errors.OpenAIError, ValueError, AttributeError, TypeError, KeyError) as error:
            return Reply("junk", self._clean(f"{type(error).__name__}: {error}"))

    def _read(self, question: Question, prefix: str, found: object, seconds: float) -> Reply:
        choices = getattr(found, "choices", None)
        if not choices:
            return Reply("junk", self._clean(f"no choices: {found}"), seconds=seconds)
        text = getattr(getattr(choices[0], "message", None), "content", None)
        if not isinstance(text, str) or not text.strip():
            return Reply("junk", "an empty reply", seconds=seconds)
        usage = getattr(found, "usage", None)
        prompt = _count(getattr(usage, "prompt_tokens", None))
        cached = _count(
            getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", None)
        )
        named = re.findall(r"(?<![0-9])[0-9]{5}(?![0-9])", text.replace(",", ""))
        return Reply(
            "hit" if named and named[0] == question.answer else "miss",
            self._clean(text),
            prompt,
            cached,
            seconds,
            self._picks(question, prefix, choices[0], prompt),
        )

    def _picks(
        self, question: Question, prefix: str, choice: object, prompt: int | None
    ) -> int | None:
        """Return how many layers pick the needle's place for the last prompt token."""
        shape = self._manners.picks
        meta = getattr(choice, "meta_info", None)
        raw = meta.get("indexer_topk") if isinstance(meta, dict) else None
        if shape is None or prompt is None or not isinstance(raw, str) or len(raw) > _MAX_PICKS:
            return None
        try:
            flat = np.frombuffer(base64.b64decode(raw, validate=True), dtype="<i4")
        except (binascii.Error, ValueError):
            return None
        layers, k = shape
        if not flat.size or flat.size % (layers * k):
            return None
        rows = flat.reshape(-1, layers, k)
        if len(rows) < prompt - 1:
            return None
        row = rows[min(prompt, len(rows)) - 1]
        whole = len(prefix) + len(question.text)
        first, last = (
            int((len(prefix) + part * len(question.text)) / whole * prompt) // 4
            for part in question.place
        )
        near = (row >= first - _NEAR) & (row <= last + _NEAR) & (row >= 0)
        return int(near.any(axis=1).sum())

    def _clean(self, text: str) -> str:
        """Return a text short, on one line, and without the key."""
        if self._key:
            text = text.replace(self._key, "***")
        return " ".join(text.split())[:200]


def shown_url(url: str) -> str:
    """Return a URL without what may be secret: user, password, query and fragment.

    Raises
    ------
    ValueError
        If it is not an HTTP URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--server {url[:80]!r}: expected a URL such as http://localhost:30000/v1")
    host = parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
