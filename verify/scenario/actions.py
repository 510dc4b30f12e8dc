"""What an event asks of a server: requests before and after, and the tokens of a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from needlepoint.optimized.protocol.serving import Place
from needlepoint.verify.scenario.events import TEXTS, Event

JUNK = TEXTS
"""The text of rejected drafts and of padding."""

Ints = NDArray[np.int64]


class ScenarioError(ValueError):
    """An event that cannot happen."""


@dataclass(frozen=True)
class View:
    """A request as it should be at one moment."""

    request: str  # Its name.
    place: Place  # Where it lives.
    texts: Ints  # int64 ``[length]``: text of each accepted token.
    # int64 ``[length]``: first position of the call that computed each token. Earlier tokens of a
    # window came from the state.
    calls: Ints


@dataclass(frozen=True)
class CallPart:
    """Tokens of one request in a call: the view before it, and what is fed."""

    before: View  # The request before the call.
    # int64 ``[count]``: text of each token; :data:`JUNK` for drafts that will be rejected.
    texts: Ints
    kept: int  # How many of them will stay; all of a prefill.
    draft: bool  # Whether they are drafts.

    @property
    def after(self) -> View:
        """The request when the tokens that stay are accepted."""
        old = self.before
        start = len(old.texts)
        return replace(
            old,
            place=replace(old.place, length=start + self.kept),
            texts=np.concatenate((old.texts, self.texts[: self.kept])),
            calls=np.concatenate((old.calls, np.full(self.kept, start))),
        )


@dataclass(frozen=True)
class Action:
    """What an event asks of a server."""

    # The event.
    index: int
    event: Event
    parts: tuple[CallPart, ...] = ()  # Of a call.
    # Of a call: padding rows and their side, ranks and which tokens each takes.
    pad: int = 0
    side: str = "back"
    ranks: int = 1
    layout: str = "contiguous"
    # Of anything else: the request it is about, before and after; ``before`` of a fork is the
    # source.
    before: View | None = None
    after: View | None = None
    drafted: int = 0  # Of an accept: tokens that were drafted.

    @cached_property
    def words(self) -> str:
        """The event as messages name it."""
        return f"event {self.index} ({self.event.describe()})"
