"""``recall --input --checkpoint``: a checkpoint's indexer over recorded states with needles."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.reference.weights import random_layer_weights
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.inputs.checkpoint import dequantised
from needlepoint.verify.inputs.recall_needles import Needle
from needlepoint.verify.recall.model import NeedlePrompt, Setting
from needlepoint.verify.recall.queries import LayerReference, project_request

Published: TypeAlias = Any
Write = Callable[..., Path]
LENGTH = 400
QUERY = LENGTH - 1
BEFORE_WINDOW = (QUERY - 128) // 4


@pytest.fixture(scope="module")
def states() -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(LENGTH, 192, generator=draw).to(torch.bfloat16)


@pytest.fixture
def record(tmp_path: Path, states: Tensor) -> Callable[[list[int]], Path]:
    """Return a writer of a recording whose needles are single entries, asked for at the end."""

    def make(entries: list[int]) -> Path:
        folder = tmp_path / "recording"
        folder.mkdir()
        save_file({"input": states}, folder / "input.safetensors")
        tensor = {"file": "input.safetensors", "dtype": "BF16", "shape": list(states.shape)}
        manifest = {
            "schema": "needlepoint.recording/1",
            "kind": "input",
            "model": "mini",
            "requests": [LENGTH],
            "tensors": {"input": tensor},
            "needles": [
                {"request": 0, "start": 4 * e, "stop": 4 * e + 4, "query": QUERY} for e in entries
            ],
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return make


def ranked(published: Published, states: Tensor) -> list[int]:
    """Return entries before the window, best first, by the weights that were written."""
    weights = random_layer_weights(published.config, 0, 5)
    plain: dict[str, Any] = {
        part: dequantised(*published.drawn_fp8(0, part)) for part in published.fp8
    }
    weights = replace(weights, **plain)
    reference = LayerReference(published.config, 0, weights, BF16_CONTRACT)
    prompt = NeedlePrompt(Setting(LENGTH, 0, 0), (Needle(0, 1, QUERY, 0.0),), lambda layer: states)
    queries = project_request(prompt, reference, 0, whole=False)
    order = queries.scores[0].argsort(descending=True).tolist()
    return [entry for entry in order if entry < BEFORE_WINDOW]


def found(command: str, folder: Path, out: Path, *options: str) -> dict[str, Any]:
    arguments = [command, "--input", str(folder), "--layers", "0", "--quiet", "--force", *options]
    arguments += ["--candidate", "emulated:fused-bf16", "--json", str(out)]
    assert run_app(app, arguments) == 0
    recall: dict[str, Any] = json.loads(out.read_text())["candidates"][0]["recall"]
    return recall


@pytest.mark.parametrize("command", ["recall", "verify"])
def test_needles_are_ranked_by_the_weights_of_the_checkpoint(
    published: Published,
    write: Write,
    record: Callable[[list[int]], Path],
    states: Tensor,
    tmp_path: Path,
    command: str,
) -> None:
    order = ranked(published, states)
    best, worst = order[:1], order[-3:]
    checkpoint = write()
    recall = found(
        command, record(best + worst), tmp_path / "r.json", "--checkpoint", str(checkpoint)
    )
    assert (recall["k"], recall["rows"], recall["hits"]) == (8, 4, 1)
    assert recall["causes"]["upstream"] == 3
    assert {miss["start"] // 4 for miss in recall["misses"]} == set(worst)
    assert recall["label"].endswith(f"the indexer's weights are those of checkpoint {checkpoint}")
    assert "random" not in recall["label"]


def test_another_checkpoint_ranks_them_differently(
    published: Published,
    write: Write,
    record: Callable[[list[int]], Path],
    states: Tensor,
    tmp_path: Path,
) -> None:
    order = ranked(published, states)

    def negate(tensors: dict[str, Tensor]) -> None:
        name = "layers.0.attn.indexer.weights_proj.weight"
        tensors[name] = -tensors[name]

    folder, checkpoint = record(order[:1]), write(change=negate)
    recall = found("recall", folder, tmp_path / "r.json", "--checkpoint", str(checkpoint))
    assert (recall["rows"], recall["hits"]) == (1, 0)


def test_without_a_checkpoint_the_label_says_random(
    record: Callable[[list[int]], Path], write: Write, tmp_path: Path
) -> None:
    shapes, folder = write() / "config.json", record([2])
    for command in ("recall", "verify"):
        recall = found(command, folder, tmp_path / "r.json", "--model", str(shapes))
        assert "weights are random" in recall["label"]
        assert "checkpoint" not in recall["label"]


def test_a_checkpoint_without_the_indexer_is_refused(
    write: Write, record: Callable[[list[int]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write(change=lambda tensors: tensors.pop("layers.0.attn.indexer.wq_b.weight"))
    code = run_app(
        app,
        ["recall", "--input", str(record([2])), "--layers", "0", "--checkpoint", str(checkpoint)],
    )
    message = capsys.readouterr().err
    assert code == 2
    assert message.startswith("needlepoint: error: ")
    assert "indexer.wq_b" in message
