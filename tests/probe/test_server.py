"""Live endpoints, played by a local server: what counts as an answer, and what never does."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.probe.client import Arm, Manners
from needlepoint.verify.probe.journal import Pass
from needlepoint.verify.probe.questions import KINDS
from needlepoint.verify.probe.server import ProbeRequest, probe_lines, run_probe
from needlepoint.verify.recall.grid import Length
from needlepoint.verify.schema.probe import ProbeResult

SECRET = "sk-do-not-write-me-anywhere"
QUICK = Manners(timeout_s=5, retries=1, pause_s=0)
Answer = Callable[[str, int], tuple[int, Any]]


def number(text: str) -> str:
    found = re.search(r"\d{5}", text)
    assert found is not None, text
    return found[0]


def solve(prompt: str) -> str:
    """Return the right number of a prompt, as a model that reads all of it would."""
    body, question = prompt.rsplit("\n\n", 1)
    records = dict(re.findall(r"^Record (\d+): (.*)$", body, re.MULTILINE))
    asked = re.search(r"does record (\d+) name", question)
    if asked:
        return number(records[asked[1]])
    quoted = re.search(r'completes "(.*) \.\.\."', question)
    if quoted:
        text = next(r for r in records.values() if r.startswith(quoted[1]))
        return number(text)
    words = set(re.findall(r"[\w-]+", question)) - {"the", "The"}
    best = max(records.values(), key=lambda r: len(words & set(re.findall(r"[\w-]+", r))))
    return number(best)


def completion(text: str | None, prompt: str = "", **extra: object) -> dict[str, Any]:
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "toy",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
                **extra,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt) // 4,
            "completion_tokens": 1,
            "total_tokens": len(prompt) // 4 + 1,
            "prompt_tokens_details": {"cached_tokens": 7},
        },
    }


def perfect(prompt: str, count: int) -> tuple[int, Any]:
    return 200, completion(f"The number is {solve(prompt)}.", prompt)


class Toy:
    """A local server; ``answer`` gives status and body of each request."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[dict[str, Any]] = []
        self.most_at_once = 0
        toy, lock, now = self, threading.Lock(), [0]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"object": "list", "data": [{"id": "toy", "object": "model"}]})

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                sent = json.loads(self.rfile.read(size))
                with lock:
                    number = len(toy.requests)
                    toy.requests.append(sent)
                    now[0] += 1
                    toy.most_at_once = max(toy.most_at_once, now[0])
                try:
                    status, body = answer(sent["messages"][0]["content"], number)
                    if body == "echo":
                        body = f"bad key {self.headers['Authorization']}"
                    self._send(status, body)
                finally:
                    with lock:
                        now[0] -= 1

            def _send(self, status: int, body: object) -> None:
                raw = body if isinstance(body, str) else json.dumps(body)
                kind = "text/html" if isinstance(body, str) else "application/json"
                data = raw.encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Toy]]:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    opened: list[Toy] = []

    def start(answer: Answer) -> Toy:
        opened.append(Toy(answer))
        return opened[-1]

    yield start
    for toy in opened:
        toy.close()


def ask(
    *arms: Arm,
    depths: tuple[float, ...] = (0.0, 0.5, 1.0),
    haystacks: int = 2,
    passes: tuple[Pass, ...] = (Pass(0, "cold", 1),),
    manners: Manners = QUICK,
    budget: int = 10**9,
    journal: Path | None = None,
    restart: str | None = None,
) -> ProbeResult:
    request = ProbeRequest(
        arms=arms,
        lengths=(Length(1200),),
        depths=depths,
        kinds=KINDS,
        haystacks=haystacks,
        distractors=8,
        passes=passes,
        manners=manners,
        budget_tokens=budget,
        journal=journal,
        restart=restart,
        passages=None,
        seed=0,
    )
    return run_probe(request, NoProgress())


def test_a_server_that_reads_everything_hits_everything(toys: Callable[[Answer], Toy]) -> None:
    toy = toys(perfect)
    found = ask(Arm("a", toy.url)).arms[0]
    assert (found.hits, found.rows) == (18, 18)
    assert {(c.kind, c.hits, c.rows) for c in found.cells} == {(kind, 2, 2) for kind in KINDS}
    assert found.unanswered == {}
    assert found.cached_tokens == 18 * 7
    assert all(r["temperature"] == 0 and r["max_tokens"] == 16 for r in toy.requests)
    assert all(r["model"] == "toy" for r in toy.requests)
    assert toy.most_at_once == 1


def test_two_servers_are_paired_question_by_question(toys: Callable[[Answer], Toy]) -> None:
    def forgetful(prompt: str, number: int) -> tuple[int, Any]:
        right = solve(prompt)
        late = prompt.index(right) > len(prompt) // 3
        return 200, completion("10000" if late else right, prompt)

    first, second = toys(perfect), toys(forgetful)
    found = ask(Arm("a", first.url), Arm("b", second.url), haystacks=6)
    pair = found.pairs[0]
    assert (pair.first, pair.second, pair.rows, pair.gained) == ("a", "b", 54, 0)
    assert pair.lost == 36
    assert pair.conclusion == "lower"
    assert pair.mcnemar_p is not None
    assert pair.mcnemar_p < 1e-9
    assert [r["messages"] for r in first.requests[:1]] != [r["messages"] for r in second.requests]
    assert "b against a: lower" in probe_lines(found)[0]


def test_two_settings_of_one_server(toys: Callable[[Answer], Toy]) -> None:
    toy = toys(perfect)
    found = ask(
        Arm("on", toy.url, "toy", {"flag": True}),
        Arm("off", toy.url, "toy", {"flag": False}),
        depths=(0.5,),
        haystacks=1,
    )
    assert [r["flag"] for r in toy.requests] == [True] * 3 + [False] * 3
    assert found.pairs[0].conclusion == "not shown"


@pytest.mark.parametrize(
    ("status", "body", "state"),
    [
        (200, "<html>gateway</html>", "junk"),
        (200, completion(None), "junk"),
        (200, completion("  "), "junk"),
        (200, {"choices": []}, "junk"),
        (200, {"unrelated": 1}, "junk"),
        (200, "[1, 2]", "junk"),
        (429, {"error": {"message": "slow down"}}, "busy"),
        (503, {"error": {"message": "starting"}}, "busy"),
        (500, {"error": {"message": "crash"}}, "refused"),
        (401, "echo", "refused"),
    ],
)
def test_what_is_no_answer_is_no_miss(
    toys: Callable[[Answer], Toy], status: int, body: object, state: str, tmp_path: Path
) -> None:
    toy = toys(lambda prompt, number: (status, body))
    found = ask(Arm("a", toy.url, "toy"), depths=(0.5,), haystacks=1, journal=tmp_path / "journal")
    assert found.verdict == "cannot-judge"
    assert (found.arms[0].rows, found.arms[0].hits) == (0, 0)
    assert found.arms[0].unanswered == {state: 3}
    assert (found.arms[0].rate, found.arms[0].ci95) == (None, None)
    assert SECRET not in found.model_dump_json() + (tmp_path / "journal").read_text()


def test_a_dead_and_a_slow_server_are_no_verdict(toys: Callable[[Answer], Toy]) -> None:
    def slow(prompt: str, number: int) -> tuple[int, Any]:
        time.sleep(0.6)
        return perfect(prompt, number)

    gone = toys(perfect)
    gone.close()
    gone.close = lambda: None  # type: ignore[method-assign]
    lazy = toys(slow)
    manners = Manners(timeout_s=0.2, retries=0, pause_s=0)
    found = ask(
        Arm("dead", gone.url, "toy"),
        Arm("slow", lazy.url, "toy"),
        depths=(0.5,),
        haystacks=1,
        manners=manners,
    )
    assert [arm.unanswered for arm in found.arms] == [{"dead": 3}, {"slow": 3}]
    assert found.verdict == "cannot-judge"
    assert found.pairs[0].rows == 0
    assert found.pairs[0].conclusion == "not shown"


def test_a_busy_server_is_asked_again(toys: Callable[[Answer], Toy]) -> None:
    def busy(prompt: str, number: int) -> tuple[int, Any]:
        return (429, {"error": {}}) if number % 2 == 0 else perfect(prompt, number)

    toy = toys(busy)
    found = ask(Arm("a", toy.url, "toy"), depths=(0.5,), haystacks=1)
    assert found.arms[0].hits == found.arms[0].rows == 3
    assert len(toy.requests) == 6


def test_a_budget_is_shared_so_that_answers_pair(toys: Callable[[Answer], Toy]) -> None:
    arms = [Arm(name, toys(perfect).url, "toy") for name in "ab"]
    found = ask(*arms, budget=8000)
    assert not found.complete
    first, second = (arm.rows for arm in found.arms)
    assert 0 < first == second < 18
    assert [pair.rows for pair in found.pairs] == [first]


def test_the_report_writes_short_numbers(toys: Callable[[Answer], Toy]) -> None:
    def blind(prompt: str, number: int) -> tuple[int, Any]:
        return 200, completion("00000", prompt)

    good, bad = Arm("a", toys(perfect).url, "toy"), Arm("b", toys(blind).url, "toy")
    *_, last = probe_lines(ask(good, bad))
    assert last == "b against a: 18 pairs, lost 18, gained 0, p 7.6e-06, over haystacks 0.500"
    *_, last = probe_lines(ask(good, bad, budget=10))
    assert last == "b against a: 0 pairs, lost 0, gained 0, p -, over haystacks -"


def test_a_run_goes_on_where_it_stopped(toys: Callable[[Answer], Toy], tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    toy = toys(perfect)
    arm = Arm("a", toy.url, "toy")
    first = ask(arm, budget=4000, journal=journal)
    assert not first.complete
    assert "resume" in first.detail
    sent = len(toy.requests)
    assert 0 < sent < 18
    with journal.open("a") as file:
        file.write('{"arm": "a", "passed"')  # a run that was killed while it wrote
    second = ask(arm, journal=journal)
    assert second.complete
    assert len(toy.requests) == 18
    assert second.arms[0].hits == 18
    with pytest.raises(ValueError, match="other questions"):
        ask(arm, haystacks=3, journal=journal)
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(ValueError, match="not JSON"):
        ask(arm, journal=tmp_path / "other")


def test_cold_and_warm_one_and_eight_at_a_time(toys: Callable[[Answer], Toy]) -> None:
    def unsteady(prompt: str, number: int) -> tuple[int, Any]:
        time.sleep(0.02)
        return 200, completion("10000" if "8 at a time" in prompt else solve(prompt), prompt)

    toy = toys(unsteady)
    passes = tuple(Pass(0, cache, n) for n in (1, 8) for cache in ("cold", "warm"))
    found = ask(Arm("a", toy.url, "toy"), passes=passes, haystacks=1).arms[0]
    assert [(p.cache, p.concurrency, p.hits, p.rows) for p in found.passes] == [
        ("cold", 1, 9, 9),
        ("warm", 1, 9, 9),
        ("cold", 8, 0, 9),
        ("warm", 8, 0, 9),
    ]
    assert found.unstable == 9
    assert 1 < toy.most_at_once <= 8
    prompts = [r["messages"][0]["content"] for r in toy.requests]
    assert sorted(prompts[:9]) == sorted(prompts[9:18])  # warm repeats cold
    assert len(set(prompts)) == 18


def test_servers_are_started_anew(toys: Callable[[Answer], Toy], tmp_path: Path) -> None:
    toy, mark = toys(perfect), tmp_path / "started"
    passes = (Pass(0, "cold", 1), Pass(1, "cold", 1))
    arm = Arm("a", toy.url, "toy")
    found = ask(arm, depths=(0.5,), haystacks=1, passes=passes, restart=f"touch {mark}").arms[0]
    assert mark.exists()
    assert [(p.start, p.hits) for p in found.passes] == [(0, 3), (1, 3)]
    with pytest.raises(ValueError, match="exit code 1"):
        ask(arm, depths=(0.5,), passes=passes, restart="false")


@pytest.mark.parametrize("kept", [True, False])
def test_returned_picks_are_read(toys: Callable[[Answer], Toy], kept: bool) -> None:
    layers, k = 3, 16

    def picking(prompt: str, number: int) -> tuple[int, Any]:
        tokens = len(prompt) // 4
        rows = np.full((tokens - 1, layers, k), -1, dtype="<i4")
        at = prompt.index(solve(prompt)) / len(prompt)
        rows[-1, 1, :] = int(at * tokens) // 4 if kept else 0
        meta = {"indexer_topk": base64.b64encode(rows.tobytes()).decode()}
        return 200, completion(solve(prompt), prompt, meta_info=meta)

    toy = toys(picking)
    manners = Manners(timeout_s=5, retries=0, pause_s=0, picks=(layers, k))
    found = ask(Arm("a", toy.url, "toy"), depths=(0.5,), haystacks=1, manners=manners).arms[0]
    assert found.picks == {f"hit: {int(kept)} layers": 3}
    assert all(r["return_indexer_topk"] and r["return_meta_info"] for r in toy.requests)


def test_picks_of_another_shape_are_left_out(toys: Callable[[Answer], Toy]) -> None:
    def odd(prompt: str, number: int) -> tuple[int, Any]:
        meta = {"indexer_topk": ["!!", "AAAA", base64.b64encode(b"x" * 64).decode()][number % 3]}
        return 200, completion(solve(prompt), prompt, meta_info=meta)

    toy = toys(odd)
    manners = Manners(timeout_s=5, retries=0, pause_s=0, picks=(3, 16))
    found = ask(Arm("a", toy.url, "toy"), depths=(0.5,), haystacks=1, manners=manners).arms[0]
    assert (found.hits, found.picks) == (3, {})


def test_the_command_writes_its_result_without_the_key(
    toys: Callable[[Answer], Toy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = toys(perfect)
    url = toy.url.replace("http://", "http://user:hunter2@") + "?token=hunter2"
    json_file = tmp_path / "probe.json"
    arguments = ["recall", "--server", url, "--lengths", "1200", "--depths", "50"]
    arguments += ["--haystacks", "1", "--distractors", "8", "--pause-ms", "0", "--json"]
    code = run_app(app, [*arguments, str(json_file), "--api-model", "toy"])
    printed = capsys.readouterr()
    written = json_file.read_text()
    assert code == 0
    assert ProbeResult.model_validate_json(written).arms[0].hits == 3
    for secret in (SECRET, "hunter2"):
        assert secret not in written + printed.out + printed.err
    assert run_app(app, [*arguments, str(json_file)]) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--server", "ftp://x/v1"], "expected a URL"),
        (["--server", "http://localhost:1/v1", "--cache", "hot"], "expected cold"),
        (["--server", "http://localhost:1/v1", "--concurrency", "0"], "--concurrency '0'"),
        (["--server", "http://localhost:1/v1", "--questions", "why"], "--questions 'why'"),
        (["--server", "http://localhost:1/v1", "--picks", "many"], "LAYERSxK"),
        (["--server", "http://localhost:1/v1", "--body", "[]"], "expected a JSON object"),
        (["--server", "http://localhost:1/v1", "--gate", "recall.lost<=0"], "does not go with"),
        (
            ["--server", "http://a/v1", "--server", "http://b/v1", *["--body", "{}"] * 3],
            "for 3 arms",
        ),
        (["--server", "http://localhost:1/v1", "--lengths", "99999"], "distinct passages"),
    ],
)
def test_wrong_options_are_one_message(
    extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["recall", *extra]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
