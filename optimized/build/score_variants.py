"""The variants of the score and top-k kernels, and which of them an architecture runs."""

from __future__ import annotations

from itertools import product

from needlepoint.optimized.build.arguments import (
    ScoreArguments,
    ScoreTopkArguments,
    TopkArguments,
)
from needlepoint.optimized.build.variant import Variant

SCORE_ROWS = ("bf16", "fp8", "fp4")
HELD_HEADS = (32, 64)
"""Heads that a kernel holds of a query row; fewer are padded with weight zero."""
MAX_HEADS = HELD_HEADS[-1]
MMA, WGMMA = "mma", "wgmma"
UNITS = (MMA, WGMMA)
WGMMA_ROWS = ("bf16", "fp8")
WGMMA_ARCHITECTURES = ("90a",)
TILES = {MMA: {"wide": 512, "narrow": 256}, WGMMA: {"c256": 256, "c128": 128, "c64": 64}}
"""By unit: the tiles of its kernels and the head rows that a block of each keeps."""
TOPK_KINDS = ("rows", "few", "long")
TOPK_LIMITS = {"rows": 1024, "few": 1024, "long": 2048}
"""Largest k of each top-k kernel."""

_KEY_BYTES = {"bf16": 256, "fp8": 132, "fp4": 68}
_STAGES = {"bf16": 3, "fp8": 4, "fp4": 4}
_STAGE_KEYS = 128
_MMA_TOPK_BYTES = {"bf16": 90416, "fp8": 92464, "fp4": 59696}
_WGMMA_BYTES = {
    ("bf16", "c256"): 231584,
    ("bf16", "c128"): 197776,
    ("bf16", "c64"): 98928,
    ("fp8", "c256"): 207088,
    ("fp8", "c128"): 173264,
    ("fp8", "c64"): 104096,
}
_WGMMA_TOPK_BYTES = {"bf16": 107136, "fp8": 103072}
_TOPK_BYTES = {"rows": 41424, "few": 41648, "long": 74384}
_TOPK_TRAITS = {
    "rows": ("topk/topk.cuh", "run_topk", "TopkRows"),
    "few": ("topk/pair.cuh", "run_topk_pair", "TopkFew"),
    "long": ("topk/topk.cuh", "run_topk", "TopkLong"),
}


def held_heads(heads: int) -> int:
    """Return the heads of the kernel that serves a head count.

    Raises
    ------
    ValueError
        If none does.
    """
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"{heads} heads: supported are 1 to {MAX_HEADS}")
    return next(held for held in HELD_HEADS if heads <= held)


def default_unit(row: str, architecture: str) -> str:
    """Return the unit that scores rows of a format fastest on an architecture."""
    return WGMMA if architecture in WGMMA_ARCHITECTURES and row in WGMMA_ROWS else MMA


def described_unit(unit: str, row: str, architecture: str) -> str:
    """Return what a unit multiplies and sums in, for results."""
    if unit == WGMMA:
        return f"wgmma {row}" + (", sums of about 14 bits" if row == "fp8" else "")
    if row != "fp8":
        return "mma.sync bf16"
    native = architecture in ("120a", "121a")
    return "mma.sync e4m3" if native else "mma.sync f16 of widened e4m3"


def accumulator(unit: str, row: str) -> str:
    """Return the name of what a unit sums in: the bound of scores pays for it."""
    return "sm90-fp8" if (unit, row) == (WGMMA, "fp8") else "fp32"


def score_name(heads: int, row: str, unit: str, tile: str) -> str:
    """Return the name of a score kernel.

    Raises
    ------
    ValueError
        If no such variant exists; the message lists what is supported.
    """
    if row not in SCORE_ROWS:
        raise ValueError(f"scores of {row} rows: supported rows are bf16, fp8 and fp4")
    if unit not in UNITS or (unit == WGMMA and row not in WGMMA_ROWS):
        raise ValueError(
            f"scores of {row} rows by {unit}: supported are mma, and wgmma for bf16 and fp8"
        )
    if tile not in TILES[unit]:
        raise ValueError(f"tile {tile!r} of {unit}: expected one of {list(TILES[unit])}")
    return f"scores_{unit}_{row}_h{held_heads(heads)}_{tile}"


def score_topk_name(heads: int, row: str, unit: str) -> str:
    """Return the name of a kernel that keeps the best scores of every span of keys.

    Raises
    ------
    ValueError
        If no such variant exists; the message lists what is supported.
    """
    last = list(TILES[unit])[-1] if unit in TILES else ""
    return score_name(heads, row, unit, last).removesuffix(last) + "topk"


def topk_name(kind: str) -> str:
    """Return the name of a top-k kernel.

    Raises
    ------
    ValueError
        For an unknown kind.
    """
    if kind not in TOPK_KINDS:
        raise ValueError(f"top-k kernel {kind!r}: expected one of {list(TOPK_KINDS)}")
    return f"topk_{kind}"


def _scores(heads: int, row: str, unit: str, tile: str) -> Variant:
    if unit == MMA:
        shared = _STAGES[row] * _STAGE_KEYS * _KEY_BYTES[row]
        run, traits = "run_scores", f"ScoreTraits<{heads}, Row::{row}, Tile::{tile}>"
    else:
        shared = _WGMMA_BYTES[row, tile]
        run, traits = "run_wgmma", f"WgmmaTraits<{heads}, Row::{row}, {TILES[WGMMA][tile]}>"
    return Variant(
        name=score_name(heads, row, unit, tile),
        module=f"scores_{unit}_{row}",
        header=f"score/{unit}.cuh",
        run=run,
        traits=traits,
        arguments=ScoreArguments,
        smem_dynamic=shared,
        architectures=WGMMA_ARCHITECTURES if unit == WGMMA else None,
    )


def _score_topk(heads: int, row: str, unit: str) -> Variant:
    if unit == MMA:
        header, run, traits = "score/mma_topk.cuh", "run_score_topk", "ScoreTopkTraits"
    else:
        header, run, traits = "score/wgmma.cuh", "run_wgmma_topk", "WgmmaTopkTraits"
    return Variant(
        name=score_topk_name(heads, row, unit),
        module=f"scores_{unit}_{row}",
        header=header,
        run=run,
        traits=f"{traits}<{heads}, Row::{row}>",
        arguments=ScoreTopkArguments,
        smem_dynamic=(_MMA_TOPK_BYTES if unit == MMA else _WGMMA_TOPK_BYTES)[row],
        architectures=WGMMA_ARCHITECTURES if unit == WGMMA else None,
    )


def _topk(kind: str) -> Variant:
    header, run, traits = _TOPK_TRAITS[kind]
    return Variant(
        name=topk_name(kind),
        module="topk",
        header=header,
        run=run,
        traits=traits,
        arguments=TopkArguments,
        smem_dynamic=_TOPK_BYTES[kind],
    )


def _units() -> tuple[tuple[str, str], ...]:
    rows = {MMA: SCORE_ROWS, WGMMA: WGMMA_ROWS}
    return tuple((unit, row) for unit in UNITS for row in rows[unit])


SCORE_VARIANTS: tuple[Variant, ...] = (
    *(
        _scores(heads, row, unit, tile)
        for heads, (unit, row) in product(HELD_HEADS, _units())
        for tile in TILES[unit]
    ),
    *(_score_topk(heads, row, unit) for heads, (unit, row) in product(HELD_HEADS, _units())),
    *(_topk(kind) for kind in TOPK_KINDS),
)
