"""From replies of live endpoints to figures. Only answers count; the rest is listed by reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from needlepoint.verify.probe.client import ANSWERED, Arm, Reply, shown_url
from needlepoint.verify.probe.journal import Journal, Pass
from needlepoint.verify.probe.questions import Question
from needlepoint.verify.recall.stats import (
    Pairs,
    cluster_p,
    conclusion,
    design_effect,
    detectable_drop,
    difference_interval,
    mcnemar_p,
    wilson,
)
from needlepoint.verify.schema.probe import (
    ProbeArm,
    ProbeCell,
    ProbePair,
    ProbePass,
    ProbeResult,
)

LABEL: Final = "synthetic facts among passages of a novel; one prompt style, not the model's recall"

Replies = Mapping[tuple[str, str, str], Reply]


def probe_result(
    arms: Sequence[Arm],
    questions: Sequence[Question],
    passes: Sequence[Pass],
    journal: Journal,
    *,
    complete: bool,
) -> ProbeResult:
    """Return the result of a probe; ``cannot-judge`` where an arm answered nothing."""
    replies = journal.records
    found = tuple(_arm(arm, questions, passes, replies) for arm in arms)
    silent = [arm.label for arm in found if not arm.rows]
    detail = "recall measured" if not silent else f"no answer from {', '.join(silent)}"
    if not complete:
        detail += "; the token budget ended the run, resume to go on"
    return ProbeResult(
        verdict="cannot-judge" if silent else "match",
        detail=detail,
        complete=complete,
        questions=len(questions),
        label=LABEL,
        arms=found,
        pairs=tuple(_pair(arms[0], arm, questions, passes, replies) for arm in arms[1:]),
    )


def _arm(
    arm: Arm, questions: Sequence[Question], passes: Sequence[Pass], replies: Replies
) -> ProbeArm:
    everything = {
        (one, q): replies[arm.label, one.name, q.name]
        for one in passes
        for q in questions
        if (arm.label, one.name, q.name) in replies
    }
    rows, hits = _count(everything.values())
    clusters = [q.haystack for (_, q), r in everything.items() if r.state in ANSWERED]
    values = [float(r.state == "hit") for r in everything.values() if r.state in ANSWERED]
    effect = design_effect(values, clusters) if values else None
    prompts = [r.prompt_tokens for r in everything.values() if r.prompt_tokens is not None]
    cached = [r.cached_tokens for r in everything.values() if r.cached_tokens is not None]
    states: dict[str, set[str]] = defaultdict(set)
    for (_, q), reply in everything.items():
        if reply.state in ANSWERED:
            states[q.name].add(reply.state)
    cells: dict[tuple[int, float, str], list[Reply]] = defaultdict(list)
    for (_, q), reply in everything.items():
        cells[q.length, q.depth, q.kind].append(reply)
    return ProbeArm(
        label=arm.label,
        url=shown_url(arm.url),
        model=arm.model,
        rows=rows,
        hits=hits,
        rate=hits / rows if rows else None,
        ci95=wilson(hits, rows, effect or 1.0),
        unanswered=_unanswered(everything.values()),
        prompt_tokens_max=max(prompts, default=None),
        cached_tokens=sum(cached) if cached else None,
        picks=_picks(everything.values()),
        cells=tuple(_cell(place, members) for place, members in sorted(cells.items())),
        passes=tuple(
            _pass(one, [r for (p, _), r in everything.items() if p == one]) for one in passes
        ),
        unstable=sum(len(found) > 1 for found in states.values()),
    )


def _cell(place: tuple[int, float, str], members: Sequence[Reply]) -> ProbeCell:
    rows, hits = _count(members)
    return ProbeCell.model_validate(
        {
            "length": place[0],
            "depth": place[1],
            "kind": place[2],
            "rows": rows,
            "hits": hits,
            "ci95": wilson(hits, rows),
            "unanswered": len(members) - rows,
        }
    )


def _pass(one: Pass, members: Sequence[Reply]) -> ProbePass:
    rows, hits = _count(members)
    return ProbePass.model_validate(
        {
            "start": one.start,
            "cache": one.cache,
            "concurrency": one.concurrency,
            "rows": rows,
            "hits": hits,
            "ci95": wilson(hits, rows),
            "unanswered": _unanswered(members),
        }
    )


def _pair(
    first: Arm,
    second: Arm,
    questions: Sequence[Question],
    passes: Sequence[Pass],
    replies: Replies,
) -> ProbePair:
    hits, reference, clusters = [], [], []
    for one in passes:
        for q in questions:
            a = replies.get((first.label, one.name, q.name))
            b = replies.get((second.label, one.name, q.name))
            if a is None or b is None or not {a.state, b.state} <= ANSWERED:
                continue
            hits.append(b.state == "hit")
            reference.append(a.state == "hit")
            clusters.append(q.haystack)
    pairs = Pairs.of(hits, reference)
    differences = [int(h) - int(r) for h, r in zip(hits, reference, strict=True)]
    effect = design_effect(differences, clusters) if differences else None
    sums: Counter[int] = Counter()
    for cluster, difference in zip(clusters, differences, strict=True):
        sums[cluster] -= difference
    delta = (pairs.gained - pairs.lost) / pairs.rows if pairs.rows else None
    p = mcnemar_p(pairs.lost, pairs.gained) if pairs.rows else None
    by_cluster = cluster_p(list(sums.values())) if pairs.rows else None
    return ProbePair(
        first=first.label,
        second=second.label,
        rows=pairs.rows,
        hits=pairs.hits,
        reference_hits=pairs.reference_hits,
        lost=pairs.lost,
        gained=pairs.gained,
        delta=delta,
        delta_ci95=difference_interval(
            pairs.lost, pairs.gained, pairs.rows, effect or 1.0, len(set(clusters))
        ),
        mcnemar_p=p,
        cluster_p=by_cluster,
        detectable_drop=detectable_drop(pairs.rows, effect or 1.0),
        conclusion=conclusion(delta, p, by_cluster),
    )


def _count(replies: Iterable[Reply]) -> tuple[int, int]:
    states = Counter(reply.state for reply in replies)
    return states["hit"] + states["miss"], states["hit"]


def _unanswered(replies: Iterable[Reply]) -> dict[str, int]:
    return dict(sorted(Counter(r.state for r in replies if r.state not in ANSWERED).items()))


def _picks(replies: Iterable[Reply]) -> dict[str, int]:
    return dict(
        sorted(
            Counter(
                f"{r.state}: {r.layers_reached} layers"
                for r in replies
                if r.layers_reached is not None and r.state in ANSWERED
            ).items()
        )
    )
