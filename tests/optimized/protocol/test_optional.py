"""What a candidate may offer is declared, documented, and asked for by its declaration."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import FACTORIES, create
from needlepoint.optimized.candidates.emulated import EmulatedCandidate
from needlepoint.optimized.candidates.heads import ParallelHeads
from needlepoint.optimized.cuda.candidates import CudaCandidate
from needlepoint.optimized.engines.transformers import TransformersCandidate
from needlepoint.optimized.protocol import optional
from needlepoint.optimized.protocol.interface import Candidate, LayerInputs
from needlepoint.optimized.protocol.optional import SelectsEntries
from needlepoint.optimized.protocol.serving import Server, StatefulCandidate

ROOT = Path(__file__).parents[3]
REQUIRED = {"info", "stages", "run"}
PARTS = {
    "serve": StatefulCandidate,
    "run_rows": optional.ComputesRows,
    "select": optional.SelectsEntries,
    "spreads_layers": optional.SpreadsLayers,
    "transient_law": optional.MeasuresTransients,
    "prompt_transients": optional.MeasuresPrompts,
}
OFFERED = {
    EmulatedCandidate: {"serve", "run_rows", "select", "transient_law", "prompt_transients"},
    ParallelHeads: {"select", "spreads_layers"},
    CudaCandidate: {"serve", "select"},
    TransformersCandidate: set(),
}
CPU = [name for name in FACTORIES if name.startswith(("emulated:", "heads:"))]
CARD = [name for name in FACTORIES if name.startswith("cuda:")]


def members(protocol: type) -> dict[str, object]:
    return {name: value for name, value in vars(protocol).items() if not name.startswith("_")}


def test_every_part_is_listed_here() -> None:
    declared = {
        value
        for value in vars(optional).values()
        if inspect.isclass(value)
        and value.__module__ == optional.__name__
        and "Protocol" in {base.__name__ for base in value.__mro__}
    }
    assert declared | {StatefulCandidate} == set(PARTS.values())
    assert set(members(Candidate)) == REQUIRED


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_one_documented_member_that_a_candidate_has_or_not(name: str) -> None:
    protocol = PARTS[name]
    own = {key: value for key, value in members(protocol).items() if key not in REQUIRED}
    assert list(own) == [name]
    assert protocol.__doc__
    assert own[name].__doc__
    needed = dict.fromkeys(REQUIRED, print)
    assert not isinstance(type("Bare", (), needed)(), protocol)
    assert isinstance(type("Full", (), needed | {name: print})(), protocol)


def test_the_page_names_every_part() -> None:
    page = (ROOT / "docs/judge-my-kernel.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1].split("(")[0] for line in page.splitlines() if line[:3] == "| `"}
    assert rows >= REQUIRED | set(PARTS)


@pytest.mark.parametrize("kind", OFFERED, ids=lambda kind: kind.__name__)
def test_candidates_of_ours_offer_what_they_are_meant_to(kind: type) -> None:
    assert {name for name in PARTS if name in vars(kind)} == OFFERED[kind]


def asked_by_name() -> Iterator[tuple[str, str, str]]:
    """Return place, object and name of every ``getattr`` and ``hasattr`` of a fixed name."""
    for room in ("verify", "optimized", "benchmarks"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                if node.func.id in ("getattr", "hasattr") and isinstance(
                    node.args[1], ast.Constant
                ):
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield place, ast.unparse(node.args[0]), str(node.args[1].value)


def test_no_part_of_a_candidate_is_found_by_its_name() -> None:
    """Optional parts by their protocols alone; needed ones may be looked for in what is no one."""
    asked = list(asked_by_name())
    assert len(asked) > 5
    serving = set(members(Server))
    for place, thing, name in asked:
        assert name not in PARTS.keys() | serving, place
        of_candidate = any(word in thing for word in ("candidate", "server", "made"))
        assert not of_candidate or name in REQUIRED or name.startswith("__"), place


def own_picks(candidate: Candidate, inputs: LayerInputs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Return scores, visible entries and picks of every request of a run."""
    observed = candidate.run(inputs)
    assert observed.scores is not None
    assert observed.topk is not None
    for request, picks in enumerate(torch.split(observed.topk, list(inputs.lengths))):
        seen = torch.arange(1, len(picks) + 1, dtype=torch.int32) // inputs.ratio
        yield observed.scores(request, 0, len(picks)), seen, picks


def check_selection(judged: Candidate, candidate: object, inputs: LayerInputs) -> None:
    assert isinstance(candidate, SelectsEntries)
    discarding = 0
    for scores, seen, picks in own_picks(judged, inputs):
        kept = scores.clone()
        assert torch.equal(candidate.select(scores, seen, inputs.topk), picks)
        assert torch.equal(scores, kept)
        discarding += int((seen > inputs.topk).sum())
        if len(picks) > 30:  # selection follows the scores it is given
            assert not torch.equal(candidate.select(-scores, seen, inputs.topk), picks)
    assert discarding > 100


@pytest.mark.parametrize("name", CPU)
def test_a_selection_alone_is_that_of_the_run(
    make_inputs: Callable[..., LayerInputs], name: str
) -> None:
    candidate = create(name)
    # Ranks that spread heads are not needed to select.
    judged = create(name.replace("heads:", "emulated:"))
    check_selection(judged, candidate, make_inputs(4, (130, 3, 18)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CARD)
def test_a_selection_alone_is_that_of_the_run_on_a_card(
    make_inputs: Callable[..., LayerInputs], name: str
) -> None:
    candidate = create(name)
    check_selection(candidate, candidate, make_inputs(4, (130, 3, 18), heads=8))
