"""A deep result whose one stage of one layer differs at one token, recall, and Chromium."""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from needlepoint.verify.schema.result import CandidateResult, RecallCell, RecallResult, Result

Deep = tuple[Result, dict[str, Tensor]]
BAD_LAYER, BAD_ROW = 17, 127
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_S = 120


@pytest.fixture
def deep(differing: Result) -> Callable[[int, int], Deep]:
    """Return a function that makes a result of so many layers and candidates."""

    def make(layers: int, candidates: int) -> Deep:
        rows: dict[str, Tensor] = {}
        made = [_candidate(differing.candidates[1], i, layers, rows) for i in range(candidates)]
        source = differing.input.model_copy(update={"lengths": (8192,)})
        return differing.model_copy(update={"candidates": tuple(made), "input": source}), rows

    return make


def _candidate(
    one: CandidateResult, index: int, layers: int, rows: dict[str, Tensor]
) -> CandidateResult:
    name, first = f"candidate-{index}", one.layers[0]
    pooled = next(stage for stage in first.stages if stage.stage == "pooled")
    extra = [pooled.model_copy(update={"stage": name}) for name in ("normed", "roped", "rotated")]
    generator = torch.Generator().manual_seed(index)
    made = []
    for number in range(layers):
        stages = []
        for stage in (*first.stages, *extra):
            bad = stage.verdict == "differ" and number == BAD_LAYER
            verdict = stage.verdict and ("differ" if bad else "match")
            stages.append(stage.model_copy(update={"verdict": verdict, "worst": stage.worst * 16}))
            for kind in ("local", "accumulated"):
                errors = torch.rand(stage.rows_compared, generator=generator) ** 3 * 0.4
                if bad:
                    errors[BAD_ROW] = math.inf
                if stage.local is not None:
                    rows[f"{name}/layer{number}/{stage.path}/{stage.stage}/{kind}"] = errors
        made.append(first.model_copy(update={"layer": number, "stages": tuple(stages)}))
    where = one.first_divergence
    divergence = where and where.model_copy(update={"layer": BAD_LAYER})
    return one.model_copy(
        update={"name": name, "layers": tuple(made), "first_divergence": divergence}
    )


def _cell(depth: float, length: int, hits: int, k: int = 128, exercised: bool = True) -> RecallCell:
    return RecallCell(
        length=length,
        depth=depth,
        k=k,
        distractors=0,
        rows=10,
        hits=hits,
        ci95=(0.1, 0.9),
        reference_hits=10,
        lost=10 - hits,
        gained=0,
        exercised=exercised,
    )


@pytest.fixture
def recalled(matching: Result) -> Result:
    """Return a result whose first candidate has a measured recall."""
    recall = RecallResult(
        rows=40,
        hits=25,
        rate=0.625,
        ci95=(0.47, 0.76),
        reference_rate=1.0,
        lost=15,
        gained=0,
        delta=-0.375,
        delta_ci95=(-0.5, -0.2),
        mcnemar_p=6.1e-5,
        detectable_drop=0.15,
        cells=(
            *(_cell(0.0, 1024, 10), _cell(0.5, 1024, 0), _cell(0.0, 8192, 5)),
            *(_cell(0.5, 512, 10, exercised=False), _cell(0.5, 8192, 9, k=64)),
        ),
        causes={"outranked": 15},
        k=128,
        distractors=0,
    )
    first = matching.candidates[0].model_copy(update={"recall": recall})
    return matching.model_copy(update={"candidates": (first, *matching.candidates[1:])})


@pytest.fixture(scope="session")
def chromium() -> str:
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None and os.environ.get("NEEDLEPOINT_REQUIRE_CHROMIUM"):
        pytest.fail("no Chromium, and NEEDLEPOINT_REQUIRE_CHROMIUM is set")
    if found is None:
        pytest.skip("no Chromium: the report was not opened in a browser")
    return found


class Tab:
    """A page in Chromium, driven over the pipes of its DevTools protocol."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies = commands, replies
        self._sent, self._rest, self._session = 0, b"", ""
        self._events: set[str] = set()
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and return its result."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (reply := self._read()).get("id") != self._sent:
            self._events.add(reply.get("method", ""))
        assert "result" in reply, reply
        result: dict[str, Any] = reply["result"]
        return result

    def open(self, page: Path) -> None:
        """Open a page and wait until it is loaded."""
        self.call("Page.enable")
        self.call("Page.navigate", url=page.as_uri())
        # The empty page before may still have an event of its own to come.
        while self.value("location.href") != page.as_uri():
            self._wait("Page.loadEventFired")
        while self.value("document.readyState") != "complete":
            self._wait("Page.loadEventFired")

    def value(self, expression: str) -> Any:  # noqa: ANN401
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, for example Tab."""
        code = {"Tab": 9, "ArrowRight": 39, "End": 35}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def _wait(self, event: str) -> None:
        while event not in self._events:
            self._events.add(self._read().get("method", ""))
        self._events.remove(event)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._replies], [], [], PATIENCE_S)
            assert ready, f"Chromium has said nothing for {PATIENCE_S} s"
            chunk = os.read(self._replies, 1 << 20)
            assert chunk, "Chromium has ended"
            self._rest += chunk
        reply, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(reply)
        return message


@pytest.fixture
def tab(chromium: str, tmp_path: Path) -> Iterator[Tab]:
    """Yield a tab as a screen reader's user has it: with the tree of accessible things."""
    ends = [*os.pipe(), *os.pipe()]
    # Chromium reads commands from 3 and replies on 4: its own ends must stand elsewhere before.
    theirs = [fcntl.fcntl(ends[i], fcntl.F_DUPFD, 10) for i in (0, 3)]
    options = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--force-renderer-accessibility", "--remote-debugging-pipe", "--window-size=1280,900"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"),
    ]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}', chromium, *options],
        stderr=subprocess.DEVNULL,
        pass_fds=theirs,
    )
    for end in (ends[0], ends[3], *theirs):
        os.close(end)
    try:
        opened = Tab(ends[1], ends[2])
        yield opened
        opened.call("Browser.close")
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        for end in ends[1:3]:
            os.close(end)
