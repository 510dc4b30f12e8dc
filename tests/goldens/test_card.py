"""What a card recorded, replayed against the emulation, which runs anywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from needlepoint.optimized.build.variants import VARIANTS
from needlepoint.optimized.emulation.select import select_topk
from needlepoint.optimized.emulation.specification import SPEC_VERSION
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.goldens import check as goldens_check
from needlepoint.verify.goldens import recorded
from needlepoint.verify.goldens.accept import accept
from needlepoint.verify.goldens.card import CASES, CardRecording, read_card, record_card
from needlepoint.verify.goldens.check import check, replay
from needlepoint.verify.goldens.manifest import CardDefinition, Cases, GoldenError, load_golden
from needlepoint.verify.goldens.recorded import propose_card
from needlepoint.verify.goldens.review import load_side, review
from needlepoint.verify.goldens.scores import K, faults, kept_inputs, score_case
from needlepoint.verify.goldens.stores import SEED, store_inputs

ROOT = Path(__file__).parents[2]
FORMATS = ("bf16", "fp8", "fp4")
SHIPPED: Mapping[str, Cases] = {"h200-stores": "stores", "h200-scores": "scores"}
no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_emulation_admits_what_the_card_gave(name: str) -> None:
    assert replay(load_golden(name)) == []


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recording_says_where_it_comes_from(name: str) -> None:
    golden = load_golden(name).golden
    assert golden.environment is not None
    assert golden.kernel is not None
    assert (golden.kind, golden.device) == ("recorded", "NVIDIA H200")
    assert golden.definition == CardDefinition(cases=SHIPPED[name])
    assert set(golden.environment) >= {"card", "architecture", "date"}
    assert "torch" in golden.versions
    sources = golden.kernel["sources_sha256"]
    assert isinstance(sources, dict)
    assert all(re.fullmatch("[0-9a-f]{64}", str(digest)) for digest in sources.values())
    assert (ROOT / "fixtures" / name / "golden.safetensors").stat().st_size < 400 * 1024


def test_every_one_launch_variant_is_recorded() -> None:
    loaded = load_golden("h200-stores")
    variants = {v.name for v in VARIANTS if re.match(r"store_(prefill|decode)|query_", v.name)}
    environment, kernel = loaded.golden.environment, loaded.golden.kernel
    assert environment is not None
    assert kernel is not None

    assert {name.split(".")[0] for name in loaded.tensors} == variants
    assert (environment["specification"], environment["seed"]) == (str(SPEC_VERSION), str(SEED))
    assert environment["driver"]
    assert set(kernel["sources_sha256"]) == {  # type: ignore[arg-type]
        v.module for v in VARIANTS if v.name in variants
    }


def test_every_unit_of_the_card_is_recorded() -> None:
    names = load_golden("h200-scores").tensors
    assert {name.removesuffix(".scores") for name in names if name.endswith(".scores")} == {
        "bf16.mma",
        "bf16.wgmma",
        "fp8.mma",
        "fp8.wgmma",
        "fp4.mma",
    }


def test_store_inputs_reach_what_they_are_for() -> None:
    inputs = store_inputs(4, 128, "fp32")
    kv, table = inputs.main.kv, inputs.rope_table

    assert kv.abs().max() > 50  # outlier channels
    assert torch.equal(kv, store_inputs(4, 128, "fp32").main.kv)
    assert not torch.equal(kv, store_inputs(4, 128, "bf16").main.kv.float())
    assert (table[..., 0] ** 2 + table[..., 1] ** 2 - 1).abs().max() < 1e-6


def scored() -> dict[str, Tensor]:
    """Return scores as a card would give them: float64 scores of the same bytes, rounded."""
    tensors: dict[str, Tensor] = {}
    for row in FORMATS:
        case = score_case(row, "cpu")
        found = torch.cat([scores for _, scores, _ in case.true_rows()]).float()
        tensors |= kept_inputs(case)
        tensors[f"{row}.mma.scores"] = found
        tensors[f"{row}.mma.picks"] = select_topk(found, case.context_lens, K)
    return tensors


def test_scores_of_the_same_bytes_are_admitted() -> None:
    assert faults(scored()) == []


@pytest.mark.parametrize("row", FORMATS)
def test_every_planted_fault_of_scores_is_named(row: str) -> None:
    tensors = scored()
    scores, picks = tensors[f"{row}.mma.scores"], tensors[f"{row}.mma.picks"]

    def found(name: str, changed: Tensor) -> list[str]:
        return faults(tensors | {f"{row}.mma.{name}": changed})

    gain = scores * 1.001
    assert f"{row}.mma: scores outside the bound" in found("scores", gain)
    seen = scores.clone()
    seen[2, 3] = 0.0  # this row sees three columns
    assert f"{row}.mma: another set of columns is -inf" in found("scores", seen)
    swapped = picks.clone()
    swapped[0, 0], swapped[0, 1] = picks[0, 1], picks[0, 0]
    assert found("picks", swapped) == [f"{row}.mma: other picks than those of its own scores"]
    lost = scores.clone()
    lost[7, 5] = torch.nan
    assert f"{row}.mma: scores outside the bound" in found("scores", lost)


def test_a_recording_without_scores_is_a_fault() -> None:
    (fault,) = faults({"bf16.codes": torch.zeros(1)})
    assert fault.startswith("no scores in the recording")


def elsewhere(name: str, checkout: Path) -> Path:
    """Return a folder with the file that a card left."""
    folder = checkout.parent / name
    shutil.copytree(ROOT / "fixtures" / name, folder)
    return folder


@pytest.fixture
def with_stores(checkout: Path) -> Path:
    """Return a checkout whose fixture ``card`` is a recording of stores."""
    propose_card(checkout, "card", "stores", elsewhere("h200-stores", checkout))
    accept(checkout, ["card"], "what the first card stored")
    commit = ["-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-qm", "card"]
    for words in (["add", "."], commit):
        subprocess.run(["git", "-C", str(checkout), *words], check=True)
    return checkout


def test_a_recording_of_another_day_is_proposed_with_its_bytes(
    with_stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = with_stores / "fixtures/card/golden.safetensors"
    assert file.read_bytes() == (ROOT / "fixtures/h200-stores/golden.safetensors").read_bytes()
    assert check(with_stores).faults == ()
    assert run_app(app, ["fixtures", "list", "--root", str(with_stores)]) == 0
    assert "card: recorded, 44 tensors, kernel cases stores on NVIDIA H200" in (
        capsys.readouterr().out
    )


def test_the_check_replays_a_recording_though_nothing_changed(
    with_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = CASES["stores"]
    name = "store_decode_r4_d512_fp32_584"

    def flipped(tensors: Mapping[str, Tensor]) -> list[str]:
        return stores.faults({**tensors, name: tensors[name] ^ 1})

    changed = {**CASES, "stores": replace(stores, faults=flipped)}
    monkeypatch.setattr(goldens_check, "CASES", changed)
    assert check(with_stores).faults == (
        f"card: stale: today's sources give other bytes of {name}",
    )


def test_a_card_whose_bytes_the_emulation_does_not_give_is_refused(checkout: Path) -> None:
    folder = elsewhere("h200-stores", checkout)
    (path,) = folder.iterdir()
    facts = dict(read_card(path).facts)
    tensors = load_file(path)
    tensors["query_fp32_fp4.codes"][0, 0, 0] ^= 1
    save_file(tensors, path, facts)
    with pytest.raises(GoldenError, match=r"NVIDIA H200 gave .* query_fp32_fp4\.codes$"):
        propose_card(checkout, "card", "stores", folder)
    save_file(tensors, path)
    with pytest.raises(GoldenError, match="expected card and sources_sha256"):
        propose_card(checkout, "card", "stores", folder)
    path.unlink()
    with pytest.raises(GoldenError, match="0 safetensors files, expected the one of a card"):
        propose_card(checkout, "card", "stores", folder)
    assert not (checkout / "fixtures/card.proposed").exists()


def test_cases_do_not_change_by_the_way(
    with_stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fixtures", "propose", "card", "--root", str(with_stores)]
    assert run_app(app, [*words, "--cases", "scores"]) == 2
    assert "golden card: is recorded of stores, not of scores" in capsys.readouterr().err
    assert run_app(app, [*words, "--cases", "all"]) == 2
    assert "--cases 'all': expected stores or scores" in capsys.readouterr().err
    assert run_app(app, [*words, "--input", "mini"]) == 2
    assert "are not for kernel cases" in capsys.readouterr().err


@no_card
def test_recording_needs_a_card(with_stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["card"], ["other", "--cases", "scores"]):
        assert run_app(app, ["fixtures", "propose", *words, "--root", str(with_stores)]) == 2
        assert "no CUDA device" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no CUDA device"):
        record_card("scores")
    assert not list((with_stores / "fixtures").glob("*.proposed"))


def test_a_card_records_again_in_place(
    with_stores: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(cases: str) -> CardRecording:
        assert cases == "stores"
        before = read_card(ROOT / "fixtures/h200-stores/golden.safetensors")
        return CardRecording(before.tensors, {**before.facts, "card": "another card"})

    monkeypatch.setattr(recorded, "record_card", record)
    assert run_app(app, ["fixtures", "propose", "card", "--root", str(with_stores)]) == 0
    assert capsys.readouterr().out.startswith("44 of 44 tensors unchanged")
    (entry,) = accept(with_stores, ["card"], "recorded again on another card")
    assert entry.review == "44 of 44 tensors unchanged"
    assert load_golden("card", with_stores / "fixtures").golden.device == "another card"


@pytest.mark.parametrize(
    ("name", "byte", "said"),
    [
        ("store_prefill_r4_d128_bf16_fp8", 3, "1 of 1,792 codes moved, by at most 1 codes"),
        ("store_decode_r128_d512_fp32_584", 583, "bytes that no row owns, or signs of zero"),
        ("query_fp32_fp4.codes", 0, "1 of 23,808 codes moved, by at most 1 codes"),
        ("query_bf16_bf16.codes", 0, "1 of 23,808 values moved, by at most 1 ulp"),
    ],
)
def test_the_review_counts_codes_of_rows(name: str, byte: int, said: str) -> None:
    stores = load_side(ROOT / "fixtures/h200-stores", load_golden("h200-stores").golden)
    changed = stores.tensors[name].clone()
    changed.view(-1, changed.shape[-1])[0, byte] ^= 1
    lines = review(stores, replace(stores, tensors={**stores.tensors, name: changed}))
    assert lines[0].startswith(f"{name}: {said}")
    assert lines[1] == "43 of 44 tensors unchanged"


def test_the_review_names_the_queries_whose_picks_change() -> None:
    scores = load_side(ROOT / "fixtures/h200-scores", load_golden("h200-scores").golden)
    name = "fp8.wgmma.picks"
    changed = scores.tensors[name].clone()
    gone = int(changed[6, 0])
    changed[6, 0] = 149
    lines = review(scores, replace(scores, tensors={**scores.tensors, name: changed}))
    assert lines[:2] == [
        f"{name}: picks of 1 of 15 queries changed",
        f"  request 2 position 0: loses {gone}, gains 149",
    ]
