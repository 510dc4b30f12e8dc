"""Progress of long work on standard error; nothing is printed where that is no terminal."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichBars

DELAY_S = 2.0
"""Work shorter than this never shows a bar."""


class Progress(Protocol):
    """What long work reports to."""

    def start(self, description: str, total: int) -> None:
        """Begin a phase of ``total`` steps; ends the phase before it."""
        ...

    def advance(self, steps: int = 1) -> None:
        """Report ``steps`` more steps of the current phase."""
        ...


class NoProgress:
    """Progress that nobody watches."""

    def start(self, description: str, total: int) -> None:
        """Do nothing."""

    def advance(self, steps: int = 1) -> None:
        """Do nothing."""


class TerminalProgress:
    """One bar on a terminal, shown once the work has lasted :data:`DELAY_S`.

    Use it as a context manager, so that the terminal is restored after an error or Ctrl-C. On
    anything but a terminal it prints nothing.

    Parameters
    ----------
    console
        Where the bar is drawn: standard error, because results own standard output.
    delay_s
        Seconds before the bar appears.
    """

    def __init__(self, console: Console, delay_s: float = DELAY_S) -> None:
        self._bars = RichBars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._watched = console.is_terminal
        self._task = self._bars.add_task("", total=None)
        # A timer, not a check at each step: a single long step deserves a bar too.
        self._timer = threading.Timer(delay_s, self._bars.start)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if self._watched:
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._watched:
            return
        self._timer.cancel()
        self._timer.join()
        self._bars.stop()

    def start(self, description: str, total: int) -> None:
        """Begin a phase of ``total`` steps."""
        self._bars.reset(self._task, total=total, description=description)

    def advance(self, steps: int = 1) -> None:
        """Report ``steps`` more steps."""
        self._bars.advance(self._task, steps)
