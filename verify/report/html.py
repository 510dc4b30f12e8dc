"""The HTML report: one file that loads nothing, made from a result and its row errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from numpy.typing import ArrayLike

from needlepoint.verify.base.numbers import number
from needlepoint.verify.report.html_recall import recall_view
from needlepoint.verify.report.html_strips import HEIGHT, LIMIT_Y
from needlepoint.verify.report.html_view import CandidateView, candidate_views
from needlepoint.verify.report.summary import details, exact_number, headline
from needlepoint.verify.schema.result import ContractCost, Result

TEMPLATE = "report.html.j2"
MOST_LENGTHS = 4096
"""Beyond this the positions of a strip's bins are not told."""


@dataclass(frozen=True)
class CostView:
    """One line of the cost table."""

    candidate: str
    contract: str
    key_mean: str
    key_max: str
    overlap: str
    lost: str
    bytes_per_token: str


def html_report(result: Result, rows: Mapping[str, ArrayLike]) -> bytes:
    """Return the report of a result as one HTML document.

    Parameters
    ----------
    result
        The result, its gates applied.
    rows
        Row errors by ``candidate/layerN/path/stage/local|accumulated``; may be empty.
    """
    candidates = candidate_views(result, rows)
    environment = Environment(
        loader=FunctionLoader(template_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(TEMPLATE).render(
        result=result,
        headline=headline(result),
        details=details(result),
        candidates=candidates,
        first=_first(result, candidates),
        gates=[
            (
                f"{gate.path}{gate.operator}{exact_number(gate.limit)}",
                gate.candidate or "",
                exact_number(gate.found),
                {True: "exceeded", False: "kept", None: "cannot judge"}[gate.exceeded],
                gate.detail or "",
            )
            for gate in result.gates
        ],
        costs=list(_costs(result)),
        memory=list(_memory(result)),
        recalls=[
            recall_view(candidate.name, candidate.recall)
            for candidate in result.candidates
            if candidate.recall is not None
        ],
        machine=_machine(result),
        lengths=",".join(map(str, _lengths(result))),
        height=HEIGHT,
        limit_y=LIMIT_Y,
        has_rows=bool(rows),
    )
    return text.encode()


def template_text(name: str) -> str:
    """Return the text of a template that ships in the package."""
    return (
        files("needlepoint.verify.report").joinpath("templates", name).read_text(encoding="utf-8")
    )


def _first(result: Result, candidates: list[CandidateView]) -> str | None:
    """Return the anchor of the first divergence."""
    for candidate, view in zip(result.candidates, candidates, strict=True):
        where = candidate.first_divergence
        if where is not None:
            return f"{view.anchor}-l{where.layer}-{where.path}-{where.stage}"
    return None


def _lengths(result: Result) -> tuple[int, ...]:
    lengths = result.input.lengths or ()
    return lengths if len(lengths) <= MOST_LENGTHS else ()


def _costs(result: Result) -> list[CostView]:
    found = []
    for candidate in result.candidates:
        cost = candidate.format_cost
        for contract in ("exact", "bf16", "official"):
            part: ContractCost | None = getattr(cost, contract)
            if part is not None:
                found.append(
                    CostView(
                        candidate=candidate.name,
                        contract=contract,
                        key_mean=number(part.rel_mean),
                        key_max=number(part.rel_max),
                        overlap=exact_number(part.overlap_mean),
                        lost=number(part.score_lost_max),
                        bytes_per_token=number(cost.cache_bytes_per_token),
                    )
                )
    return found


def _memory(result: Result) -> list[tuple[str, str, str]]:
    found = []
    for candidate in result.candidates:
        memory = candidate.memory
        peak = "-" if memory.peak_transient_bytes is None else f"{memory.peak_transient_bytes:,}"
        law = ""
        if memory.law is not None:
            law = (
                f"{number(memory.law.bytes_per_product)} bytes x queries x heads x keys, fitted to "
                f"{len(memory.law.points)} sizes; predicted for {memory.law.predicted_tokens:,} "
                f"tokens, not allocated: {memory.law.predicted_bytes / 2**30:.2f} GiB"
            )
        found.append((candidate.name, peak, law))
    return found


def _machine(result: Result) -> list[tuple[str, str]]:
    given = result.input
    facts = [
        ("input", f"{given.name}, {given.tokens:,} tokens in {given.requests} requests"),
        ("input sha256", given.sha256),
        ("model", given.model or "-"),
        ("seed", "-" if given.seed is None else str(given.seed)),
    ]
    return facts + [
        (name, str(value)) for name, value in result.environment.model_dump(mode="json").items()
    ]
