"""From outcomes to figures: cells, paired comparison, intervals, causes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from statistics import median

from needlepoint.verify.recall.outcomes import MARGINS, Outcome
from needlepoint.verify.recall.run import Gathered, Miss
from needlepoint.verify.recall.stats import (
    Pairs,
    cluster_p,
    conclusion,
    design_effect,
    detectable_drop,
    difference_interval,
    holm,
    mcnemar_p,
    wilson,
)
from needlepoint.verify.schema.recall import (
    ATTENUATED,
    CAUSES,
    RecallAside,
    RecallCell,
    RecallLayer,
    RecallMargin,
    RecallMiss,
    RecallResult,
)


def recall_result(gathered: Gathered, k: int, distractors: int, label: str) -> RecallResult:
    """Return the recall of one candidate.

    Parameters
    ----------
    gathered
        What all prompts said.
    k, distractors
        Those of the top-level figures.
    label
        What the figures are of.
    """
    default = [o for o in gathered.outcomes if o.setting.distractors == distractors]
    outside = [o for o in default if not o.windowed]
    counted = [o for o in outside if o.exercised(k)]
    pairs = _pairs(counted, k)
    differences = [int(o.hits[k]) - int(o.reference_hits[k]) for o in counted]
    clusters = [hash(_cluster(o)) for o in counted]
    effect = design_effect(differences, clusters)
    hit_effect = design_effect([float(o.hits[k]) for o in counted], clusters)
    names = len(set(clusters))
    p = mcnemar_p(pairs.lost, pairs.gained) if counted else None
    by_cluster = _cluster_p(counted, k) if counted else None
    delta = (pairs.gained - pairs.lost) / pairs.rows if pairs.rows else None
    return RecallResult(
        rows=pairs.rows,
        hits=pairs.hits,
        rate=pairs.hits / pairs.rows if pairs.rows else None,
        ci95=wilson(pairs.hits, pairs.rows, hit_effect or 1.0),
        reference_rate=pairs.reference_hits / pairs.rows if pairs.rows else None,
        lost=pairs.lost,
        gained=pairs.gained,
        delta=delta,
        delta_ci95=difference_interval(pairs.lost, pairs.gained, pairs.rows, effect or 1.0, names),
        mcnemar_p=p,
        detectable_drop=detectable_drop(pairs.rows, effect or 1.0),
        cells=_cells(gathered.outcomes),
        causes=_causes(gathered, distractors),
        label=label,
        k=k,
        distractors=distractors,
        haystacks=names,
        design_effect=effect,
        cluster_p=by_cluster,
        conclusion=conclusion(delta, p, by_cluster),
        not_exercised=_aside([o for o in outside if not o.exercised(k)], k),
        window=_aside([o for o in default if o.windowed], k),
        misses=tuple(
            _miss(m, k) for m in gathered.misses if m.outcome.setting.distractors == distractors
        ),
        margins=tuple(
            RecallMargin(margin=m, rows=n, hits=h, ci95=wilson(h, n))
            for m, n, h in zip(MARGINS, gathered.margins.rows, gathered.margins.hits, strict=True)
        ),
        layers=_layers(counted, k),
        reach=_reach(counted, k),
    )


def _cluster(outcome: Outcome) -> Hashable:
    return outcome.setting


def _pairs(outcomes: Sequence[Outcome], k: int) -> Pairs:
    return Pairs.of([o.hits[k] for o in outcomes], [o.reference_hits[k] for o in outcomes])


def _cluster_p(outcomes: Sequence[Outcome], k: int) -> float:
    sums: Counter[Hashable] = Counter()
    for o in outcomes:
        sums[_cluster(o)] += int(o.reference_hits[k]) - int(o.hits[k])
    return cluster_p(list(sums.values()))


def _cells(outcomes: Sequence[Outcome]) -> tuple[RecallCell, ...]:
    """Return every cell, and the Holm adjustment within each k and density."""
    grouped: dict[tuple[int, int, int, float, bool], list[Outcome]] = defaultdict(list)
    for o in outcomes:
        if o.windowed:
            continue
        for k in o.hits:
            place = (o.setting.distractors, k, o.setting.length, o.needle.depth, o.exercised(k))
            grouped[place].append(o)
    cells: list[RecallCell] = []
    families: dict[tuple[int, int], list[int]] = defaultdict(list)
    order = sorted(grouped, key=lambda c: (c[0], -c[1], *c[2:]))
    for distractors, k, length, depth, exercised in order:
        members = grouped[distractors, k, length, depth, exercised]
        pairs = _pairs(members, k)
        if exercised:
            families[distractors, k].append(len(cells))
        cells.append(
            RecallCell(
                length=length,
                depth=depth,
                k=k,
                distractors=distractors,
                rows=pairs.rows,
                hits=pairs.hits,
                ci95=wilson(pairs.hits, pairs.rows),
                reference_hits=pairs.reference_hits,
                lost=pairs.lost,
                gained=pairs.gained,
                exercised=exercised,
                mcnemar_p=mcnemar_p(pairs.lost, pairs.gained) if exercised else None,
                detectable_drop=detectable_drop(pairs.rows) if exercised else None,
            )
        )
    for family in families.values():
        adjusted = holm([cells[i].mcnemar_p or 0.0 for i in family])
        for i, p in zip(family, adjusted, strict=True):
            cells[i] = cells[i].model_copy(update={"holm_p": p})
    return tuple(cells)


def _causes(gathered: Gathered, distractors: int) -> dict[str, int]:
    """Count causes; one that could not be judged is left out, for 0 would say that it was."""
    counts = Counter(
        m.cause.cause for m in gathered.misses if m.outcome.setting.distractors == distractors
    )
    judged = [c for c in CAUSES if c != ATTENUATED or gathered.main_rows]
    return {cause: counts[cause] for cause in judged}


def _aside(outcomes: Sequence[Outcome], k: int) -> RecallAside:
    pairs = _pairs(outcomes, k)
    return RecallAside(rows=pairs.rows, picked=pairs.hits, reference_picked=pairs.reference_hits)


def _miss(miss: Miss, k: int) -> RecallMiss:
    o, cause, price = miss.outcome, miss.cause, miss.price
    return RecallMiss(
        length=o.setting.length,
        depth=o.needle.depth,
        haystack=o.setting.cluster,
        layer=o.layer,
        start=o.needle.start,
        stop=o.needle.stop,
        query=o.needle.query,
        cause=cause.cause,
        by=cause.by,
        rank=o.rank,
        reference_rank=o.reference_rank,
        beyond=None if o.rank is None else max(0, o.rank - k + 1),
        gap=cause.gap,
        allowed=cause.allowed,
        page=cause.page,
        mass=None if price is None else price.mass,
        mass_kept=None if price is None else price.kept,
        output_error=None if price is None else price.output_error,
    )


def _layers(outcomes: Sequence[Outcome], k: int) -> tuple[RecallLayer, ...]:
    found = []
    for layer in sorted({o.layer for o in outcomes}):
        members = [o for o in outcomes if o.layer == layer]
        pairs = _pairs(members, k)
        ranks = [o.rank for o in members if o.rank is not None]
        expected = [o.reference_rank for o in members if o.reference_rank is not None]
        found.append(
            RecallLayer(
                layer=layer,
                rows=pairs.rows,
                hits=pairs.hits,
                reference_hits=pairs.reference_hits,
                rank_median=float(median(ranks)) if ranks else None,
                reference_rank_median=float(median(expected)) if expected else None,
            )
        )
    return tuple(found)


def _reach(outcomes: Sequence[Outcome], k: int) -> tuple[int, ...]:
    """Return how many needles 0, 1, .. of the layers pick; nothing with fewer than two layers."""
    layers = {o.layer for o in outcomes}
    if len(layers) < 2:
        return ()
    reached: Counter[Hashable] = Counter()
    for o in outcomes:
        reached[o.setting, o.needle] += o.hits[k]
    counts = Counter(reached.values())
    return tuple(counts[i] for i in range(len(layers) + 1))
