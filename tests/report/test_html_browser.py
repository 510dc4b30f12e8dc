"""The report in headless Chromium: its script runs, and a keyboard is enough.

Without Chromium these are skipped; where NEEDLEPOINT_REQUIRE_CHROMIUM is set they fail.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from needlepoint.verify.report.html import html_report
from needlepoint.verify.schema.result import Result

Deep = tuple[Result, dict[str, Tensor]]

ACT = """
<script>
addEventListener("load", function () {
  const out = [], said = document.getElementById("said");
  const svg = document.querySelector("details[open] .strip svg");
  svg.focus();
  const key = function (name) { svg.dispatchEvent(new KeyboardEvent("keydown", { key: name })); };
  key("Home");
  out.push(said.textContent);
  key("ArrowRight");
  out.push(said.textContent);
  svg.blur();
  out.push(said.textContent);
  document.getElementById("only").click();
  out.push(String(getComputedStyle(document.querySelector(".matrix .fine")).display));
  const before = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  out.push(String(before !== getComputedStyle(document.body).backgroundColor));
  document.getElementById("all").click();
  out.push(String(document.querySelectorAll("details[open]").length));
  document.body.dataset.told = out.join("|");
});
</script>
"""


def opened(chromium: str, page: Path, fragment: str = "") -> tuple[str, str]:
    """Return the page's elements after its scripts have run, and what it logged."""
    done = subprocess.run(
        [
            chromium,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={page.parent / 'profile'}",
            "--enable-logging=stderr",
            "--dump-dom",
            f"{page.as_uri()}{fragment}",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_the_script_runs_and_links_open_layers(
    chromium: str, deep: Callable[[int, int], Deep], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(html_report(*deep(20, 1)))
    dom, log = opened(chromium, page, "#c0-l3-index-stored")
    assert log == ""
    assert re.search(r'<body[^>]* class="ready"', dom)
    states = dict(re.findall(r'<details id="c0-l(\d+)" class="\w+"( open="")?', dom))
    assert [layer for layer, is_open in states.items() if is_open] == ["3", "17"]


def test_a_keyboard_is_enough(
    chromium: str, deep: Callable[[int, int], Deep], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    text = html_report(*deep(20, 1)).decode().replace("</body>", f"{ACT}</body>")
    page.write_text(text)
    dom, log = opened(chromium, page)
    assert log == ""
    (told,) = re.findall(r'data-told="([^"]*)"', dom)
    home, right, left, hidden, changed, opened_layers = told.split("|")
    span = r"request 0 position (\d+) to request 0 position (\d+): at most 0\.\d+ x limit"
    first, second = re.fullmatch(span, home), re.fullmatch(span, right)
    assert first is not None
    assert second is not None
    assert first[1] == "3"
    assert int(second[1]) == int(first[2]) + 4
    assert left == ""
    assert (hidden, changed, opened_layers) == ("none", "true", "20")


def test_a_pointer_is_told_what_is_under_it(
    tab: Any,  # noqa: ANN401
    deep: Callable[[int, int], Deep],
    tmp_path: Path,
) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(html_report(*deep(2, 1)))
    tab.open(page)
    tab.value("document.querySelector('.strip').scrollIntoView({block: 'center'})")
    where = "JSON.stringify(document.querySelector('.strip svg').getBoundingClientRect())"
    box = json.loads(tab.value(where))
    middle = box["y"] + box["height"] / 2
    said = []
    for x in (box["x"] + 2, box["x"] + box["width"] - 2, box["x"] - 10):
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=middle)
        said.append(tab.value("document.getElementById('said').textContent"))
    assert said[0].startswith("request 0 position 3 to ")
    assert " to request 0 position 8191: " in said[1]
    assert said[2] == ""
    assert tab.value("document.querySelectorAll('.strip rect').length") == 0


def test_a_broken_script_would_be_seen(
    chromium: str, deep: Callable[[int, int], Deep], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    text = html_report(*deep(2, 1)).decode()
    page.write_text(text.replace('getElementById("only")', 'getElementById("gone")'))
    dom, log = opened(chromium, page)
    assert "TypeError" in log
    assert not re.search(r'<body[^>]* class="ready"', dom)
