"""Hand-made results for the tests of result, report, gates and commands."""

from __future__ import annotations

import pytest

from needlepoint.verify.schema.result import (
    CandidateResult,
    ContractCost,
    Counts,
    Environment,
    ErrorStats,
    FirstDivergence,
    FormatCost,
    InputInfo,
    Kernel,
    Kind,
    LayerResult,
    MemoryLaw,
    MemoryPoint,
    MemoryResult,
    Path,
    Profile,
    Result,
    Spread,
    StageLimit,
    StageName,
    StageRef,
    StageResult,
    Swaps,
    TopkResult,
    Verdict,
    WorstRow,
)

_TOKENS = 8192
_COMPARED: tuple[tuple[Path, StageName], ...] = (
    ("index", "pooled"),
    ("main", "pooled"),
    ("index", "stored"),
    ("main", "stored"),
    ("query", "query"),
    ("query", "weights"),
    ("index", "scores"),
    ("index", "topk"),
)


def _errors(worst: float | None, failed: int = 0) -> ErrorStats:
    return ErrorStats(
        error=Spread(max=worst, mean=0.1, p99=0.3),
        relative=Spread(max=1e-6, mean=1e-7, p99=5e-7),
        distance_max=2,
        distance_unit="codes",
        rows_failed=failed,
        rows_not_finite=1 if worst is None else 0,
    )


def _stage(
    path: Path, stage: StageName, ratio: int, kind: Kind = "compared", worst: float | None = 0.4
) -> StageResult:
    key_side = stage in ("pooled", "stored")
    rows = _TOKENS // ratio if key_side else _TOKENS
    judged = kind == "compared"
    failed = judged and not (worst is not None and worst <= 1)
    verdict: Verdict | None = ("differ" if failed else "match") if judged else None
    row = WorstRow(
        request=0,
        position=511,
        entry=512 // ratio - 1 if key_side else None,
        dim=17,
        error=worst,
        expected=0.12345679,
        found=0.12345678,
    )
    return StageResult(
        stage=stage,
        path=path,
        kind=kind,
        verdict=verdict,
        rows_expected=rows,
        rows_compared=rows if judged else 0,
        limit=StageLimit(value=1.0, unit="of the a-priori bound", derivation="running analysis"),
        local=_errors(worst, int(failed)) if judged else None,
        accumulated=_errors(worst, int(failed)) if judged else None,
        worst=(row,) if judged else (),
    )


def _layers(broken: bool) -> tuple[LayerResult, ...]:
    first = [_stage("index", "projected", 4, "given")]
    for path, stage in _COMPARED:
        fails = broken and (path, stage) == ("index", "stored")
        first.append(_stage(path, stage, 4, worst=3.25 if fails else 0.4))
    first.append(_stage("main", "attention", 4, "consequence"))
    topk = TopkResult(
        k=128,
        rows=_TOKENS,
        discarded_mean=0.75,
        overlap_mean=0.9991,
        overlap_min=0.98,
        swaps=Swaps(tie=1, explained=2, upstream=3 if broken else 0),
        score_lost_max=0.002,
        invalid=0,
    )
    second = (_stage("main", "pooled", 128), _stage("main", "stored", 128))
    return (
        LayerResult(layer=2, ratio=4, stages=tuple(first), topk=topk),
        LayerResult(layer=3, ratio=128, stages=second),
    )


def _candidate(name: str, broken: bool = False) -> CandidateResult:
    return CandidateResult(
        name=name,
        format="fp8",
        device="cpu",
        kernel=Kernel(variant="fp8-132", source_sha256="ab" * 32, path_taken="prefill"),
        profile=Profile(name="needlepoint", switches={"index_key": "fp8", "hadamard": True}),
        verdict="differ" if broken else "match",
        first_divergence=FirstDivergence(
            layer=2,
            stage="stored",
            path="index",
            request=0,
            position=511,
            entry=127,
            detail="code",
            error=3.25,
        )
        if broken
        else None,
        layers=_layers(broken),
        format_cost=FormatCost(
            bf16=ContractCost(rel_mean=0.02, rel_max=0.04, overlap_mean=0.985, score_lost_max=0.01),
            cache_bytes_per_token=179.0,
        ),
        memory=MemoryResult(
            peak_transient_bytes=1 << 20,
            law=MemoryLaw(
                bytes_per_product=4.0,
                points=(MemoryPoint(queries=512, heads=8, keys=128, bytes=2 << 20),),
                predicted_tokens=22528,
                predicted_bytes=8858370048,
            ),
        ),
    )


def _result(candidates: tuple[CandidateResult, ...], verdict: Verdict) -> Result:
    judged = sum(len(_COMPARED) + 2 for _ in candidates)
    return Result(
        verdict=verdict,
        contract="bf16",
        environment=Environment(
            needlepoint="0.1.0",
            python="3.11.7",
            torch="2.13.0",
            numpy="2.4.6",
            platform="Linux x86_64",
            cpu="Example CPU",
            threads=2,
            device="cpu",
            world=1,
        ),
        input=InputInfo(
            name="mini", sha256="0f" * 32, tokens=_TOKENS, requests=1, model="mini", seed=0
        ),
        counts=Counts(
            expected=judged,
            compared=judged,
            not_covered=tuple(
                StageRef(candidate=c.name, layer=2, stage="input", path="main") for c in candidates
            ),
        ),
        candidates=candidates,
    )


@pytest.fixture
def matching() -> Result:
    """Return two candidates that match in a ratio-4 and a ratio-128 layer."""
    return _result((_candidate("emulated:fused-bf16"), _candidate("emulated:fused-fp8")), "match")


@pytest.fixture
def differing() -> Result:
    """Return the same run with one stored index row wrong in the second candidate."""
    broken = _candidate("emulated:fused-fp8", broken=True)
    return _result((_candidate("emulated:fused-bf16"), broken), "differ")
