"""Recorded goldens: what may vouch for bytes from a card, and what may not.

A recording and a result of the emulation stand in for those of a card: only their names differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.goldens.accept import accept
from needlepoint.verify.goldens.check import check
from needlepoint.verify.goldens.manifest import Definition, GoldenError, load_golden, load_manifest
from needlepoint.verify.goldens.recorded import propose_recorded
from needlepoint.verify.inputs.load import load_inputs
from needlepoint.verify.judge.record import record
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recording.results import result_json
from needlepoint.verify.run.pipeline import verify
from needlepoint.verify.schema.result import Result

EMULATED, CARD = "emulated:fused-fp8", "cuda:fused-fp8"
KEPT = ("index.stored", "query.query")


@dataclass(frozen=True)
class FromCard:
    """A recording and its result, as a card would have left them."""

    recording: Path
    result: Result

    def file(self, result: Result) -> Path:
        path = self.recording.with_name("result.json")
        path.write_text(result_json(result))
        return path


@pytest.fixture
def card(tmp_path: Path) -> FromCard:
    """Return what a card left for 24 tokens of one layer."""
    inputs = load_inputs("synthetic:small", layers=(0,), tokens=24)
    candidate = create(EMULATED)
    folder = tmp_path / "recording"
    record(inputs, candidate, folder, contract=BF16_CONTRACT, force=False, progress=NoProgress())
    edit(folder, lambda value: value["candidate"].update(name=CARD, device="cuda"))
    stages = frozenset({("index", "stored"), ("query", "query")})
    result = verify(
        inputs,
        [candidate],
        contract=BF16_CONTRACT,
        limits=Limits.default(),
        stages=stages,
        progress=NoProgress(),
    ).result
    judged = result.candidates[0].model_copy(update={"name": CARD, "device": "cuda"})
    where = result.environment.model_copy(update={"device": "NVIDIA H200"})
    return FromCard(
        folder, result.model_copy(update={"candidates": (judged,), "environment": where})
    )


def edit(folder: Path, change: Callable[[dict[str, dict[str, str]]], None]) -> None:
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_match_from_a_card_is_kept_with_its_environment(
    card: FromCard, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fixtures", "propose", "card", "--from", str(card.recording), "--root", str(checkout)]
    words += ["--result", str(card.file(card.result)), "--keep", ",".join(KEPT)]
    assert run_app(app, words) == 0
    assert capsys.readouterr().out.startswith("new: 4 tensors")
    accept(checkout, ["card"], "stores of the first card that ran")
    golden = load_golden("card", checkout / "fixtures").golden
    assert (golden.kind, golden.device) == ("recorded", "NVIDIA H200")
    assert isinstance(golden.definition, Definition)
    assert (golden.definition.candidate, golden.definition.emulation) == (CARD, EMULATED)
    assert golden.environment is not None
    assert golden.kernel == card.result.candidates[0].kernel.model_dump(mode="json")
    assert check(checkout).faults == ()
    assert load_manifest(checkout / "fixtures").history[-1].name == "card"


def not_a_match(result: Result) -> Result:
    return result.model_copy(update={"verdict": "differ"})


def from_a_cpu(result: Result) -> Result:
    where = result.environment.model_copy(update={"device": "cpu"})
    return result.model_copy(update={"environment": where})


def other_candidate(result: Result) -> Result:
    judged = result.candidates[0].model_copy(update={"name": "cuda:fused-fp4"})
    return result.model_copy(update={"candidates": (judged,)})


def other_kernel(result: Result) -> Result:
    kernel = result.candidates[0].kernel.model_copy(update={"source_sha256": "0" * 64})
    judged = result.candidates[0].model_copy(update={"kernel": kernel})
    return result.model_copy(update={"candidates": (judged,)})


def other_input(result: Result) -> Result:
    return result.model_copy(update={"input": result.input.model_copy(update={"seed": 5})})


def stage_not_judged(result: Result) -> Result:
    layer = result.candidates[0].layers[0]
    stages = tuple(stage for stage in layer.stages if stage.stage != "stored")
    judged = result.candidates[0].model_copy(
        update={"layers": (layer.model_copy(update={"stages": stages}),)}
    )
    return result.model_copy(update={"candidates": (judged,)})


REFUSED: dict[Callable[[Result], Result], str] = {
    not_a_match: "verdict differ; only a match can vouch",
    from_a_cpu: "a recorded golden comes from a card",
    other_candidate: "does not judge cuda:fused-fp8",
    other_kernel: "kernel source 0{64}, the recording has",
    other_input: "seed 5, the recording has 0",
    stage_not_judged: "layer 0 index.stored was not judged a match",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_result_that_cannot_vouch_is_refused(
    change: Callable[[Result], Result], card: FromCard, checkout: Path
) -> None:
    file = card.file(change(card.result))
    with pytest.raises(GoldenError, match=REFUSED[change]):
        propose_recorded(checkout, "card", card.recording, file, KEPT, None)
    assert not (checkout / "fixtures/card.proposed").exists()


def test_bytes_that_the_emulation_does_not_give_are_refused(card: FromCard, checkout: Path) -> None:
    path = card.recording / "layer0.safetensors"
    raw = bytearray(path.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    begin = json.loads(raw[8 : 8 + size])["layer0.index.stored.pages"]["data_offsets"][0]
    raw[8 + size + begin] ^= 1
    path.write_bytes(raw)
    with pytest.raises(GoldenError, match=r"gives other bytes of layer0\.index\.stored\.pages"):
        propose_recorded(checkout, "card", card.recording, card.file(card.result), KEPT, None)


def test_an_input_that_no_checkout_has_is_refused(card: FromCard, checkout: Path) -> None:
    edit(card.recording, lambda value: value.update(input_name="elsewhere"))  # type: ignore[call-overload]
    with pytest.raises(GoldenError, match="recorded over 'elsewhere'"):
        propose_recorded(checkout, "card", card.recording, card.file(card.result), KEPT, None)


def test_a_candidate_without_an_emulation_is_refused(card: FromCard, checkout: Path) -> None:
    with pytest.raises(GoldenError, match="no emulation 'emulated:other'; name one"):
        propose_recorded(
            checkout, "card", card.recording, card.file(card.result), KEPT, "emulated:other"
        )
