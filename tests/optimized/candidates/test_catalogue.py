"""The registry: our names, entry points, module paths, and what is refused."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from needlepoint.optimized.candidates import catalogue as candidates
from needlepoint.optimized.candidates.catalogue import FACTORIES, create, names
from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order

EMULATED = (
    "emulated:fused-bf16",
    "emulated:fused-fp8",
    "emulated:fused-fp4",
    "emulated:unfused-bf16",
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("house_of_candidates")
    made.good = lambda: EmulatedCandidate("fp8", Order.FUSED)  # type: ignore[attr-defined]
    made.bad = lambda: 3  # type: ignore[attr-defined]
    made.number = 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "house_of_candidates", made)
    return made


@pytest.mark.parametrize("name", EMULATED)
def test_the_four_emulated_candidates(name: str) -> None:
    info = create(name).info
    assert info.name == name
    assert (info.device, info.profile) == ("cpu", "needlepoint")
    assert name.endswith(info.format)


def test_names_start_with_our_table() -> None:
    assert names()[: len(FACTORIES)] == tuple(FACTORIES)
    assert set(EMULATED) <= set(names())


@pytest.mark.parametrize(
    "name", ["emulated:fused-fp9", "fused-fp8", "no.such.module:factory", ":", "a:", ":b", ""]
)
def test_an_unknown_name_lists_what_exists(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of emulated:fused-bf16, .*module:factory"):
        create(name)


@pytest.mark.usefixtures("module")
def test_module_path() -> None:
    assert create("house_of_candidates:good").info.format == "fp8"


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("attribute", "message"),
    [("bad", "lacks info, stages, run"), ("number", "not callable"), ("none", "expected one of")],
)
def test_what_is_no_candidate_is_refused(attribute: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(f"house_of_candidates:{attribute}")


@pytest.mark.usefixtures("module")
def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("house", "house_of_candidates:good", candidates.ENTRY_POINT_GROUP)
    groups = {candidates.ENTRY_POINT_GROUP: [point]}
    monkeypatch.setattr(candidates, "entry_points", lambda group: groups[group])
    assert names()[-1] == "house"
    assert create("house").info.format == "fp8"


@pytest.mark.usefixtures("module")
def test_our_names_win_over_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(EMULATED[0], "house_of_candidates:good", candidates.ENTRY_POINT_GROUP)
    monkeypatch.setattr(candidates, "entry_points", lambda group: [point] if group else [])
    assert create(EMULATED[0]).info.format == "bf16"
    assert names().count(EMULATED[0]) == 1
