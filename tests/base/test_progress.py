from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from needlepoint.verify.base.progress import NoProgress, Progress, TerminalProgress


class _Screen(io.StringIO):
    """A terminal that says when something was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = threading.Event()

    def write(self, text: str) -> int:
        if "scoring" in text:
            self.drawn.set()
        return super().write(text)


def _console(file: io.StringIO, *, terminal: bool) -> Console:
    return Console(file=file, force_terminal=terminal, width=80)


def test_long_work_shows_a_bar_even_during_its_first_step() -> None:
    screen = _Screen()
    with TerminalProgress(_console(screen, terminal=True), delay_s=0.0) as progress:
        progress.start("scoring", 3)
        assert screen.drawn.wait(timeout=60)
        progress.advance()

    assert "scoring" in screen.getvalue()


def test_short_work_shows_nothing() -> None:
    screen = _Screen()
    with TerminalProgress(_console(screen, terminal=True), delay_s=3600.0) as progress:
        progress.start("scoring", 1)
        progress.advance()

    assert "scoring" not in screen.getvalue()


def test_nothing_is_drawn_away_from_a_terminal() -> None:
    screen = _Screen()
    with TerminalProgress(_console(screen, terminal=False), delay_s=0.0) as progress:
        progress.start("scoring", 1)
        progress.advance()

    assert screen.getvalue() == ""


def _interrupted(progress: TerminalProgress) -> None:
    with progress:
        progress.start("scoring", 1)
        raise KeyboardInterrupt


def test_an_error_passes_through_and_ends_the_bar() -> None:
    before = set(threading.enumerate())

    with pytest.raises(KeyboardInterrupt):
        _interrupted(TerminalProgress(_console(_Screen(), terminal=True), delay_s=0.0))

    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_unwatched_progress_is_a_progress() -> None:
    progress: Progress = NoProgress()
    progress.start("scoring", 1)
    progress.advance()
