"""A scenario: requests and what happens to them, as data.

A scenario says what a server is asked to do, never how: a list of events over named requests. What
a request says is a *text*, a fixed line of tokens; a fork goes on with another text. Which event is
possible when is in :mod:`~needlepoint.verify.scenario.rules`, files in
:mod:`~needlepoint.verify.scenario.file`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

MAX_TOKENS: Final = 320
"""Longest request: two windows of 128 and half of one."""
TEXTS: Final = 5
"""Texts to choose from, 0 to 4."""


@dataclass(frozen=True)
class Event:
    """Something that happens; subclasses are the kinds."""

    def describe(self) -> str:
        """Return the event as words: ``prefill a 21, b 5``."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        requests = named.pop("requests", ())
        numbers = [named.pop(name) for name in ("tokens", "keep") if name in named]
        words = [
            " ".join([_shown(request), *(str(own[i]) for own in numbers if i < len(own))])
            for i, request in enumerate(requests)
        ]
        for name, value in named.items():
            words.append(_shown(value) if name == "request" else f"{name} {_shown(value)}")
        return f"{kind_of(self)} {', '.join(words)}"


@dataclass(frozen=True)
class Prefill(Event):
    """One call: the next ``tokens[i]`` tokens of each request. The first one takes a slot."""

    requests: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Decode(Event):
    """One call: the next token of each request."""

    requests: tuple[str, ...]


@dataclass(frozen=True)
class Draft(Event):
    """One call: ``tokens[i]`` drafted tokens of each request; an accept says how many hold."""

    requests: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Accept(Event):
    """The first ``keep[i]`` drafted tokens of each request stay, the others never were."""

    requests: tuple[str, ...]
    keep: tuple[int, ...]


@dataclass(frozen=True)
class Fork(Event):
    """A new request starts with the first ``prefix`` tokens of another."""

    request: str
    source: str
    prefix: int


@dataclass(frozen=True)
class Evict(Event):
    """A request loses slot and pages; its tokens must be computed again."""

    request: str


@dataclass(frozen=True)
class Offload(Event):
    """State and pages of a request move out of the cache; slot and pages are given away."""

    request: str


@dataclass(frozen=True)
class Restore(Event):
    """An offloaded request comes back, to another slot and other pages."""

    request: str


@dataclass(frozen=True)
class Free(Event):
    """A request ends; its slot and pages are given away as they are."""

    request: str


@dataclass(frozen=True)
class Copy(Event):
    """The pages of a request are copied to another pool, where it goes on."""

    request: str
    pool: int


@dataclass(frozen=True)
class Pad(Event):
    """The next call has ``rows`` rows of padding, at the ``front`` or the ``back``."""

    rows: int
    side: str


@dataclass(frozen=True)
class Split(Event):
    """The next call is shared by the ranks of a context-parallel group."""

    ranks: int
    layout: str


KINDS: Final[Mapping[str, type[Event]]] = {
    kind.__name__.lower(): kind
    for kind in (
        Prefill,
        Decode,
        Draft,
        Accept,
        Fork,
        Evict,
        Offload,
        Restore,
        Free,
        Copy,
        Pad,
        Split,
    )
}


def _shown(value: object) -> str:
    """Return a value as a message may print it: a file can say anything, a terminal obeys some."""
    text = str(value)
    return text if text.isprintable() else repr(text)


CALLS: Final = (Prefill, Decode, Draft)
"""Events that are a call; padding and ranks are said of the next one."""


def kind_of(event: Event) -> str:
    """Return the kind of an event as it stands in files."""
    return type(event).__name__.lower()


@dataclass(frozen=True)
class Request:
    """A request: its name, and the text that it says where no fork gave it another."""

    name: str
    text: int


@dataclass(frozen=True)
class Scenario:
    """A history of requests."""

    name: str  # For reports.
    requests: tuple[Request, ...]  # Every request that events name.
    events: tuple[Event, ...]  # What happens, in order.
    state: str = "fp32"  # ``"fp32"`` or ``"bf16"``, what the state ring holds.
    slots: int = 4  # Requests that the server can hold at once.
    pages: int = 16  # Pages of each pool of each path.
    # Tokens a page covers: 256 gives pages of 64 rows at ratio 4 and 2 rows at ratio 128.
    page_tokens: int = 256
    pools: int = 2  # Pools of pages.
    seed: int = 0  # Of token values, weights and page numbers.

    @property
    def texts(self) -> Mapping[str, int]:
        """Text of each request."""
        return {request.name: request.text for request in self.requests}
