from __future__ import annotations

import json
import math

import jsonschema
import pytest
from pydantic import ValidationError

from needlepoint.verify.recording.results import MODELS, schema_text, shipped_schema
from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    DIFFER,
    MATCH,
    GateResult,
    RecallCell,
    RecallResult,
    Result,
    ScenarioResult,
    Spread,
    Verdict,
    worst_verdict,
)

# Names that other tools rely on: nesting and spelling, as published.
PUBLISHED = {
    "": "schema verdict detail contract gates environment input counts candidates scenario",
    "gates": "path limit found exceeded",
    "environment": "world",
    "input": "name sha256 tokens requests",
    "counts": "expected compared skipped not_covered",
    "candidates": "name format device kernel profile verdict first_divergence layers recall "
    "format_cost memory",
    "candidates.kernel": "variant source_sha256 path_taken",
    "candidates.profile": "name switches",
    "candidates.first_divergence": "layer stage path request position entry detail",
    "candidates.layers": "layer ratio stages topk",
    "candidates.layers.stages": "stage path kind verdict rows_expected rows_compared limit local "
    "accumulated worst",
    "candidates.layers.stages.limit": "value unit derivation",
    "candidates.layers.stages.worst": "request position entry dim error expected found",
    "candidates.layers.topk": "k rows discarded_mean overlap_mean overlap_min swaps "
    "score_lost_max invalid",
    "candidates.layers.topk.swaps": "tie explained selector unknown upstream",
    "candidates.recall": "rows hits rate ci95 reference_rate lost gained delta delta_ci95 "
    "mcnemar_p detectable_drop cells causes",
    "candidates.recall.cells": "length depth k distractors rows hits ci95 reference_hits lost "
    "gained exercised",
    "candidates.format_cost": "exact bf16 official cache_bytes_per_token",
    "candidates.format_cost.bf16": "rel_mean rel_max overlap_mean score_lost_max",
    "candidates.memory": "peak_transient_bytes",
    "scenario": "histories distinct events residues4 residues128 failures",
}


@pytest.fixture
def complete(differing: Result) -> Result:
    """Return a result in which no part is null."""
    cell = RecallCell(
        length=2560,
        depth=0.5,
        k=128,
        distractors=0,
        rows=20,
        hits=19,
        ci95=(0.76, 0.99),
        reference_hits=20,
        lost=1,
        gained=0,
        exercised=True,
    )
    recall = RecallResult(
        rows=20,
        hits=19,
        rate=0.95,
        ci95=(0.76, 0.99),
        reference_rate=1.0,
        lost=1,
        gained=0,
        delta=-0.05,
        delta_ci95=(-0.2, 0.01),
        mcnemar_p=1.0,
        detectable_drop=0.2,
        cells=(cell,),
        causes={"outranked": 1},
    )
    gate = GateResult(path="recall.lost", limit=0.0, found=1.0, exceeded=True, candidate="x")
    scenario = ScenarioResult(
        histories=3, distinct=3, events={"decode": 4}, residues4=4, residues128=9, failures=0
    )
    candidates = tuple(
        c.model_copy(update={"recall": recall}) for c in reversed(differing.candidates)
    )
    return differing.model_copy(
        update={
            "gates": (gate,),
            "scenario": scenario,
            "candidates": candidates,
            "detail": "upstream",
        }
    )


def _follow(node: object, path: str) -> object:
    for name in path.split(".") if path else []:
        node = node[name]  # type: ignore[index]
        if isinstance(node, list):
            # Any element will do, but some parts are null in the first ones.
            node = max(node, key=lambda element: len(json.dumps(element)))
    return node


@pytest.mark.parametrize("place", PUBLISHED)
def test_published_names_stand_where_published(place: str, complete: Result) -> None:
    found = _follow(json.loads(complete.model_dump_json(by_alias=True)), place)

    assert isinstance(found, dict)
    assert set(PUBLISHED[place].split()) <= set(found)


@pytest.mark.parametrize("name", MODELS)
def test_shipped_schemas_are_those_of_the_models(name: str) -> None:
    assert shipped_schema(name) == schema_text(name), (
        "run: python -c 'from needlepoint.verify.recording.results import MODELS, schema_text; "
        f'print(schema_text("{name}"), end="")\' > verify/schema/{name}.schema.json'
    )
    assert json.loads(shipped_schema(name))["$id"] == f"needlepoint.{name}/1"


@pytest.mark.parametrize("name", ["matching", "differing", "complete"])
def test_results_validate_against_the_shipped_schema(
    name: str, request: pytest.FixtureRequest
) -> None:
    result: Result = request.getfixturevalue(name)
    schema = json.loads(shipped_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    document = json.loads(result.model_dump_json(by_alias=True))

    validator.validate(document)

    document["candidates"][0]["verdict"] = "ok"
    assert not validator.is_valid(document)


def test_json_round_trip_keeps_everything(complete: Result) -> None:
    assert Result.model_validate_json(complete.model_dump_json(by_alias=True)) == complete


def test_schema_name_is_written_and_required_to_agree(matching: Result) -> None:
    document = json.loads(matching.model_dump_json(by_alias=True))
    assert document["schema"] == "needlepoint.result/1"

    document["schema"] = "needlepoint.result/2"
    with pytest.raises(ValidationError, match="schema"):
        Result.model_validate_json(json.dumps(document))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite_or_null(value: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Spread(max=value, mean=None, p99=None)


def test_models_refuse_unknown_fields_and_other_types(matching: Result) -> None:
    document = json.loads(matching.model_dump_json(by_alias=True))

    with pytest.raises(ValidationError, match="extra"):
        Result.model_validate_json(json.dumps({**document, "note": "x"}))
    document["input"]["tokens"] = "8192"
    with pytest.raises(ValidationError, match="tokens"):
        Result.model_validate_json(json.dumps(document))


def test_results_are_frozen(matching: Result) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        matching.verdict = "differ"


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([], CANNOT_JUDGE),
        ([MATCH], MATCH),
        ([MATCH, DIFFER, MATCH], DIFFER),
        ([DIFFER, CANNOT_JUDGE, MATCH], CANNOT_JUDGE),
    ],
)
def test_worst_verdict(parts: list[Verdict], whole: Verdict) -> None:
    assert worst_verdict(parts) == whole
