"""How large the HTML report of 43 layers is, and how long it takes to write and to open.

Layer 0 of the shipped recording is judged once and shown 43 times, with random row errors of 8,192
tokens. Chromium opens the page headless; the time runs from navigation to the end of a layout after
the load event, without the start of the browser. Medians count: browsers are noisy.

    python -m needlepoint.benchmarks.html_report --candidates 4 --times 7
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.inputs.load import load_inputs
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.report.html import html_report
from needlepoint.verify.run.pipeline import verify
from needlepoint.verify.schema.result import CandidateResult, Result

LAYERS: Final = 43
TOKENS: Final = 8192
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Reading a height makes the browser finish its layout first.
TOLD: Final = """<script>addEventListener("load", function () {
document.body.dataset.height = document.body.offsetHeight;
document.body.dataset.told = performance.now(); });</script>"""


def deep_result(candidates: int) -> tuple[Result, dict[str, Tensor]]:
    """Return a result of 43 layers and its row errors."""
    judged = verify(
        load_inputs("mini", tokens=600, layers=(0,)),
        [create("emulated:fused-fp8")],
        contract=BF16_CONTRACT,
        limits=Limits.default(),
        stages=None,
        progress=NoProgress(),
    ).result
    rows: dict[str, Tensor] = {}
    made = tuple(_deepened(judged.candidates[0], index, rows) for index in range(candidates))
    source = judged.input.model_copy(update={"tokens": TOKENS, "lengths": (TOKENS,)})
    return judged.model_copy(update={"candidates": made, "input": source}), rows


def _deepened(one: CandidateResult, index: int, rows: dict[str, Tensor]) -> CandidateResult:
    """Return a candidate with its first layer 43 times; add its row errors."""
    name, first = f"{one.name}-{index}", one.layers[0]
    generator = torch.Generator().manual_seed(index)
    for layer in range(LAYERS):
        for stage in (stage for stage in first.stages if stage.local is not None):
            for kind in ("local", "accumulated"):
                errors = torch.rand(TOKENS, generator=generator) ** 3 * 0.4
                rows[f"{name}/layer{layer}/{stage.path}/{stage.stage}/{kind}"] = errors
    layers = tuple(first.model_copy(update={"layer": layer}) for layer in range(LAYERS))
    return one.model_copy(update={"name": name, "layers": layers})


def opened_ms(browser: str, page: Path) -> float:
    """Return the milliseconds that a page takes to open."""
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                browser,
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                f"--user-data-dir={profile}",
                "--dump-dom",
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    (told,) = re.findall(r'data-told="([0-9.]+)"', done.stdout)
    return float(told)


def main() -> None:
    """Print size, writing time and opening time of one report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, default=4)
    parser.add_argument("--times", type=int, default=7)
    options = parser.parse_args()
    browser = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if browser is None:
        raise SystemExit(f"no browser: expected one of {', '.join(BROWSERS)} on PATH")
    result, rows = deep_result(options.candidates)
    start = time.process_time()
    page = html_report(result, rows)
    print(f"written: {len(page) / 1e6:.2f} MB in {time.process_time() - start:.2f} s of CPU")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_bytes(page.replace(b"</body>", TOLD.encode() + b"</body>"))
        took = [opened_ms(browser, path) / 1000 for _ in range(options.times)]
    print(
        f"opened: {statistics.median(took):.2f} s, median of {len(took)} "
        f"({min(took):.2f} to {max(took):.2f})"
    )


if __name__ == "__main__":
    main()
