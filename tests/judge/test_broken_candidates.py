"""Third-party candidates that break the protocol: no verdict, and a message."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    Candidate,
    LayerInputs,
    Observed,
    PagedRows,
    QueryRows,
    StageKey,
)
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput

Cli = Callable[..., CompletedProcess[str]]
Change = Callable[[LayerInputs, Observed], Any]
Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]
Named = Callable[[str, Candidate], str]
Rows = TypeVar("Rows", PagedRows, QueryRows)
Wrapped = Callable[..., Candidate]
Options = tuple[object, ...]


def untouched(inputs: LayerInputs, observed: Observed) -> Observed:
    return observed


def late_writer(inputs: LayerInputs, observed: Observed) -> Observed:
    """Write to a given tensor after the run, as a background thread would."""

    def scores(request: int, start: int, stop: int) -> Tensor:
        inputs.main.kv[0, 0] += 1
        assert observed.scores is not None
        return observed.scores(request, start, stop)

    return replace(observed, scores=scores)


def raise_error(error: BaseException) -> Change:
    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        raise error

    return change


def spoil_given(pick: Callable[[LayerInputs], Tensor]) -> Change:
    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        pick(inputs)[-1] *= 2
        return observed

    return change


def forget_parameter(inputs: LayerInputs, observed: Observed) -> Observed:
    cast(dict[str, Tensor], inputs.layer_weights).pop("wkv")
    return observed


def with_dense(key: StageKey, by: Callable[[Tensor], Tensor]) -> Change:
    return lambda _, seen: replace(seen, dense={**seen.dense, key: by(seen.dense[key])})


def changed(rows: Rows, changes: Mapping[str, object]) -> Rows:
    """Return rows with other fields; a callable is given the field."""
    new = {k: v(getattr(rows, k)) if callable(v) else v for k, v in changes.items()}
    return replace(rows, **new)  # type: ignore[arg-type]


def with_pool(path: str, **changes: object) -> Change:
    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        if path not in observed.stored:
            return observed
        rows = observed.stored[path]
        return replace(observed, stored={**observed.stored, path: changed(rows, changes)})

    return change


def with_query(**changes: object) -> Change:
    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        if observed.query is None:
            return observed
        return replace(observed, query=changed(observed.query, changes))

    return change


def with_topk(by: Callable[[Tensor], Tensor]) -> Change:
    return lambda _, seen: seen if seen.topk is None else replace(seen, topk=by(seen.topk))


def with_scores(by: Callable[[Tensor], Any]) -> Change:
    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        reader = observed.scores
        if reader is None:
            return observed
        return replace(observed, scores=lambda r, a, b: by(reader(r, a, b)))

    return change


def late_failure(inputs: LayerInputs, observed: Observed) -> Observed:
    reader = observed.scores

    def read(request: int, start: int, stop: int) -> Tensor:
        if reader is None or stop > 1:
            raise RuntimeError("device lost")
        return reader(request, start, stop)

    return observed if reader is None else replace(observed, scores=read)


def table(*pages: int) -> Callable[[object], tuple[Tensor, ...]]:
    return lambda _: (torch.tensor(pages, dtype=torch.int32),)


BROKEN: dict[str, tuple[Change, str]] = {
    "raises": (raise_error(RuntimeError("boom")), "layer 0 failed: RuntimeError: boom"),
    "raises a message": (raise_error(ValueError("k too small")), "layer 0: k too small"),
    "returns nothing": (lambda _, seen: None, "run returned NoneType, expected Observed"),
    "changes kv": (spoil_given(lambda i: i.main.kv), "layer 0: changed its inputs main.kv"),
    "changes hidden": (spoil_given(lambda i: i.hidden), "changed its inputs hidden;"),
    "changes the table": (spoil_given(lambda i: i.rope_table), "changed its inputs rope_table;"),
    "changes a weight": (
        spoil_given(lambda i: i.layer_weights["index_wq_b"]),
        "changed its inputs index_wq_b;",
    ),
    "removes a weight": (forget_parameter, "changed its inputs wkv;"),
    "short rows": (
        with_dense((MAIN, "pooled"), lambda x: x[:-1]),
        "layer0.main.pooled: shape [49, 512], expected [50, 512]",
    ),
    "narrow rows": (
        with_dense((MAIN, "normed"), lambda x: x[:, :128]),
        "layer0.main.normed: shape [50, 128], expected [50, 512]",
    ),
    "integer rows": (
        with_dense((MAIN, "roped"), lambda x: x.to(torch.int32)),
        "layer0.main.roped: dtype I32, expected BF16 or F16 or F32 or F64",
    ),
    "complex rows": (
        with_dense((MAIN, "roped"), lambda x: x.to(torch.complex64)),
        "torch.complex64",
    ),
    "a stage beside its field": (
        lambda inputs, seen: replace(
            seen, dense={**seen.dense, (QUERY, "weights"): torch.zeros(200, 4)}
        ),
        "stage query.weights stands in dense",
    ),
    "dense of another key": (
        lambda _, seen: replace(seen, dense=cast(Any, {"pooled": torch.zeros(50, 512)})),
        "dense has the key 'pooled', expected (path, stage)",
    ),
    "a list of dense": (
        lambda _, seen: replace(seen, dense=cast(Any, [])),
        "dense is [], expected a dict",
    ),
    "entries of a tensor": (
        with_pool(INDEX, entries=(torch.tensor(50),)),
        "index.stored has entries (tensor(50),), expected whole numbers",
    ),
    "no entries": (with_pool(INDEX, entries=None), "entries of type NoneType, expected tuple"),
    "a layout of no text": (
        with_pool(INDEX, layout=["index-fp8"]),
        "layout ['index-fp8'], expected str",
    ),
    "a long layout": (with_pool(INDEX, layout="x" * 10_000), "no layout"),
    "folded or not": (with_query(scale_folded="no"), "scale_folded is 'no', expected True"),
    "a stage that no layer has": (
        lambda _, seen: replace(
            seen, dense={**seen.dense, (MAIN, "rotated"): torch.zeros(50, 512)}
        ),
        "no stage main.rotated",
    ),
    "negative page": (with_pool(INDEX, page_table=table(-1)), "page id -1 at position 0"),
    "page past the pool": (with_pool(MAIN, page_table=table(7)), "page id 7 at position 0"),
    "no page": (with_pool(MAIN, page_table=table()), "0 pages for 50 entries"),
    "no table": (with_pool(MAIN, page_table=()), "main.stored.page_table.0 is missing"),
    "wide table": (
        with_pool(MAIN, page_table=lambda t: (t[0].to(torch.int64),)),
        "main.stored.page_table.0: dtype I64, expected I32",
    ),
    "entries": (with_pool(MAIN, entries=(49,)), "main.stored has entries [49], expected [50]"),
    "float pool": (
        with_pool(MAIN, pool=lambda p: p.to(torch.float32)),
        "main.stored.pages: dtype F32, expected U8",
    ),
    "page size 32 for 64": (
        with_pool(MAIN, page_size=32),
        "pages of 37440 bytes (page size 64), expected 19008 bytes for page size 32",
    ),
    "stride": (with_pool(MAIN, pool=lambda p: p[:, :-1]), "pages of 37439 bytes"),
    "layout": (with_pool(MAIN, layout="main-fp6"), "'main-fp6'"),
    "layout of another profile": (
        untouched,
        "layout index-fp8 stores e4m3, the profile stores bf16",
    ),
    "query format": (with_query(format="int8"), "'int8'"),
    "query of another profile": (
        with_query(format="bf16", codes=lambda c: c.to(torch.bfloat16), scales=None),
        "query format 'bf16', the profile stores e4m3",
    ),
    "query shape": (
        with_query(codes=lambda c: c[:, :3]),
        "query.query.codes: shape [200, 3, 128], expected [200, 4, 128]",
    ),
    "query without scales": (with_query(scales=None), "query.query.scales is missing"),
    "float picks": (with_topk(lambda t: t.to(torch.float32)), "index.topk: dtype F32"),
    "picks of some": (with_topk(lambda t: t[:100]), "index.topk: shape [100, 8], expected [200"),
    "scores of another shape": (with_scores(lambda s: s[:, :-1]), "scores of request 0"),
    "scores of no tensor": (with_scores(lambda s: s.tolist()), "AttributeError"),
    "fails while scores are read": (late_failure, "layer 0 failed: RuntimeError: device lost"),
    "undeclared stage": (
        untouched,
        "returned stage index.scores, which is not declared",
    ),
    "attention of another shape": (
        lambda _, seen: replace(seen, attention=torch.zeros(200, 2, 512)),
        "attention: shape (200, 2, 512), expected (200, 1, 512)",
    ),
    "unknown profile": (
        untouched,
        "profile 'vllm-next', expected one of needlepoint",
    ),
    "unknown format": (
        untouched,
        "key format 'int8', expected one of bf16, fp8, fp4",
    ),
    "a declared stage that no layer has": (
        untouched,
        "stages() names index.foo",
    ),
    "attention declared and not returned": (
        untouched,
        "stages() names main.attention and run did not return it",
    ),
    "a cancelled run": (raise_error(CancelledError()), "failed: CancelledError"),
    "a skipped run": (raise_error(pytest.skip.Exception("later")), "failed: Skipped"),
    "inputs changed by the score reader": (
        late_writer,
        "main.kv changed while they were judged",
    ),
}

CLAIMED: dict[str, dict[str, Any]] = {
    "layout of another profile": {"claims": {"format": "bf16"}},
    "undeclared stage": {"without": frozenset({(INDEX, "scores")})},
    "attention of another shape": {"adds": frozenset({(MAIN, "attention")})},
    "unknown profile": {"claims": {"profile": "vllm-next"}},
    "unknown format": {"claims": {"format": "int8"}},
    "a declared stage that no layer has": {"adds": frozenset({(INDEX, "foo")})},
    "attention declared and not returned": {"adds": frozenset({(MAIN, "attention")})},
}
"""What candidates of some cases claim besides."""


@pytest.mark.parametrize("case", BROKEN)
def test_a_candidate_that_breaks_the_protocol_is_no_verdict(
    case: str, cli: Cli, candidate_named: Named, run_options: Options, wrapped: Wrapped
) -> None:
    change, message = BROKEN[case]
    name = candidate_named("test:wrapped", wrapped(change, **CLAIMED.get(case, {})))

    done = cli(
        "verify",
        *run_options,
        "--candidate",
        name,
        *("--layers", "0", "--json", "r.json", "--junitxml", "r.xml"),
    )

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "candidate test:wrapped" in done.stderr
    assert message in done.stderr
    assert [path.name for path in Path().iterdir()] == ["pyproject.toml"]


def test_a_candidate_that_ends_the_process_is_no_verdict(
    cli: Cli, candidate_named: Named, run_options: Options, wrapped: Wrapped
) -> None:
    name = candidate_named("test:wrapped", wrapped(raise_error(SystemExit(0))))

    done = cli("verify", *run_options, "--candidate", name, "--json", "r.json")

    assert done.returncode == 2
    assert "candidate test:wrapped, layer 0 failed: SystemExit: 0" in done.stderr
    assert not Path("r.json").exists()


def test_an_interrupted_recording_leaves_nothing(
    cli: Cli, candidate_named: Named, run_options: Options, wrapped: Wrapped
) -> None:
    def in_second_layer(inputs: LayerInputs, observed: Observed) -> Observed:
        if inputs.layer == 1:
            raise KeyboardInterrupt
        return observed

    name = candidate_named("test:wrapped", wrapped(in_second_layer))

    done = cli("record", *run_options, "--candidate", name, "--out", "out")

    assert done.returncode == 130
    assert [path.name for path in Path().iterdir()] == ["pyproject.toml"]


@pytest.mark.parametrize("case", ["raises", "short rows", "scores of another shape"])
def test_a_recording_of_a_broken_candidate_leaves_nothing(
    case: str, cli: Cli, candidate_named: Named, run_options: Options, wrapped: Wrapped
) -> None:
    change, message = BROKEN[case]
    name = candidate_named("test:wrapped", wrapped(change))

    done = cli("record", *run_options, "--candidate", name, "--out", "out")

    assert done.returncode == 2
    assert message in done.stderr
    assert [path.name for path in Path().iterdir()] == ["pyproject.toml"]


def test_a_module_outside_of_the_package_can_be_judged(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_options: Options
) -> None:
    (tmp_path / "outside.py").write_text(
        "from needlepoint.optimized.candidates.catalogue import create\n"
        "def fused(): return create('emulated:fused-fp4')\n"
        "def broken(): raise ImportError('no kernel for this machine')\n"
        "def leaves(): raise SystemExit(0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outside", raising=False)

    options = (*run_options, "--layers", "0")
    assert cli("verify", *options, "--candidate", "outside:fused").returncode == 0
    done = cli("verify", *options, "--candidate", "outside:broken")
    assert done.returncode == 2
    assert "no kernel for this machine" in done.stderr
    assert done.stderr.count("\n") == 1
    done = cli("verify", *options, "--candidate", "outside:leaves")
    assert done.returncode == 2
    assert "outside:leaves" in done.stderr


def test_every_candidate_is_named_once(judge: Judge, small_inputs: Load) -> None:
    twice = [create("emulated:fused-fp8")] * 2
    with pytest.raises(ValueError, match=r"candidates 1 and 2 .* call themselves emulated:"):
        judge(small_inputs(), *twice)
    with pytest.raises(ValueError, match="no candidate"):
        judge(small_inputs())


def test_two_names_of_one_candidate_are_told_apart(
    cli: Cli, candidate_named: Callable[[str, Candidate], str]
) -> None:
    names = [candidate_named(name, create("emulated:fused-fp8")) for name in ("test:a", "test:b")]

    found = cli("verify", "--candidate", names[0], "--candidate", names[1], "--tokens", "600")

    assert found.returncode == 2
    assert "candidates 1 and 2 of this run both call themselves emulated:fused-fp8" in found.stderr
    assert "info.name" in found.stderr


def test_a_name_on_two_lines_is_refused(judge: Judge, small_inputs: Load, wrapped: Wrapped) -> None:
    # Such a name would print a verdict of its own.
    with pytest.raises(ValueError, match="printable text on one line"):
        judge(small_inputs(), wrapped(untouched, claims={"name": "a\nmatch: 1 of 1"}))
