"""Bytes that cards wrote, replayed against the emulation, which runs anywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.build.variants import VARIANTS
from needlepoint.optimized.emulation.specification import SPEC_VERSION
from needlepoint.verify.goldens.card_stores import SEED, expected_bytes, golden_inputs, main, read

FILES = sorted((Path(__file__).parent / "data" / "stores").glob("*.safetensors"))


@pytest.fixture(scope="module")
def emulated() -> dict[str, Tensor]:
    return expected_bytes()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_emulation_writes_what_the_card_wrote(path: Path, emulated: dict[str, Tensor]) -> None:
    recorded, _ = read(path)

    assert set(recorded) == set(emulated)
    for name, tensor in recorded.items():
        assert tensor.dtype == emulated[name].dtype
        assert torch.equal(tensor, emulated[name]), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_one_launch_variant_is_recorded_with_its_provenance(path: Path) -> None:
    recorded, facts = read(path)
    variants = {v.name for v in VARIANTS if re.match(r"store_(prefill|decode)|query_", v.name)}

    assert {name.split(".")[0] for name in recorded} == variants
    assert int(facts["specification"]) == SPEC_VERSION
    assert int(facts["seed"]) == SEED
    assert set(facts) >= {"card", "architecture", "driver", "torch", "date"}
    modules = {v.module for v in VARIANTS if v.name in variants}
    sources = json.loads(facts["sources_sha256"])
    assert set(sources) == modules
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in sources.values())
    assert path.stat().st_size < 400 * 1024


def test_there_is_a_golden() -> None:
    assert [path.stem for path in FILES] == ["h200"]


def test_golden_inputs_reach_what_they_are_for() -> None:
    inputs = golden_inputs(4, 128, "fp32")
    kv, table = inputs.main.kv, inputs.rope_table

    assert kv.abs().max() > 50  # outlier channels
    assert torch.equal(kv, golden_inputs(4, 128, "fp32").main.kv)
    assert not torch.equal(kv, golden_inputs(4, 128, "bf16").main.kv.float())
    assert (table[..., 0] ** 2 + table[..., 1] ** 2 - 1).abs().max() < 1e-6


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_recording_needs_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "x.safetensors")]) == 2
    assert "gpu-goldens: no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
