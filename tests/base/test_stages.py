from __future__ import annotations

import pytest

from needlepoint.verify.base.stages import (
    declared_stages,
    feeds,
    is_key_side,
    rows_expected,
    stage_kind,
    stage_order,
)

RATIO4 = """main.input index.projected main.projected query.projected index.pooled main.pooled
index.normed main.normed index.roped main.roped index.rotated index.stored main.stored query.query
query.weights index.scores index.topk main.attention"""
RATIO128 = "main.input main.projected main.pooled main.normed main.roped main.stored main.attention"
RATIO0 = "main.input main.attention"


@pytest.mark.parametrize(("ratio", "expected"), [(4, RATIO4), (128, RATIO128), (0, RATIO0)])
def test_declared_stages_of_each_ratio_in_order(ratio: int, expected: str) -> None:
    assert [".".join(key) for key in declared_stages(ratio)] == expected.split()


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_a_stage_comes_after_everything_that_feeds_it(ratio: int) -> None:
    for key in declared_stages(ratio):
        assert all(stage_order(feed) < stage_order(key) for feed in feeds(key, ratio))
        assert all(feed in declared_stages(ratio) for feed in feeds(key, ratio))
        assert bool(feeds(key, ratio)) == (key != ("main", "input"))


@pytest.mark.parametrize(
    ("key", "ratio", "expected"),
    [
        (("main", "input"), 4, 266),
        (("index", "projected"), 4, 266),
        (("query", "query"), 4, 266),
        (("query", "weights"), 4, 266),
        (("index", "scores"), 4, 266),
        (("index", "topk"), 4, 266),
        (("main", "attention"), 4, 266),
        (("index", "pooled"), 4, 65),
        (("index", "stored"), 4, 65),
        (("main", "stored"), 4, 65),
        (("main", "pooled"), 128, 2),
        (("main", "attention"), 0, 266),
    ],
)
def test_rows_expected(key: tuple[str, str], ratio: int, expected: int) -> None:
    # 7 // 4 + 3 // 4 + 256 // 4 = 65 entries, not 266 // 4 = 66: requests do not share windows.
    assert rows_expected(key, (7, 3, 256), ratio) == expected


def test_only_the_compressed_rows_are_key_side() -> None:
    keys = {key for key in declared_stages(4) if is_key_side(key)}
    assert keys == {(path, s) for path in ("index", "main") for s in STEPS} | {("index", "rotated")}


STEPS = ("pooled", "normed", "roped", "stored")


def test_kinds_follow_what_the_candidate_brings() -> None:
    brought = {("index", "pooled"), ("index", "projected"), ("main", "attention")}

    assert stage_kind(("index", "pooled"), brought) == "compared"
    assert stage_kind(("index", "projected"), brought) == "compared"
    assert stage_kind(("main", "projected"), brought) == "given"
    assert stage_kind(("main", "input"), brought) == "given"
    assert stage_kind(("main", "pooled"), brought) == "not covered"
    assert stage_kind(("main", "attention"), brought) == "consequence"


def test_unknown_names_and_ratios_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio 8: expected one of 0, 1, 4 and 128"):
        declared_stages(8)
    with pytest.raises(ValueError, match=r"stage index\.stored: a layer of ratio 128 has only"):
        rows_expected(("index", "stored"), (128,), 128)
    with pytest.raises(ValueError, match=r"stage index\.pool: expected PATH\.STAGE"):
        stage_kind(("index", "pool"), ())
