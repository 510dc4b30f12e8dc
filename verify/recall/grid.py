"""The grid of ``needlepoint recall``: depth by length, and the prompts for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from needlepoint.verify.recall.model import MakePrompt, NeedlePrompt, Setting
from needlepoint.verify.recall.pool import Pool
from needlepoint.verify.recall.prompts import Spot, compose

DEPTHS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
HAYSTACKS: Final = 20
NEEDLES: Final = 2
DISTRACTORS: Final = 64
DENSE: Final = (160,)
"""Distractors of the denser prompts, at the lengths that hold them."""
DENSE_FROM: Final = 10_000
DENSE_TO: Final = 12_000
MAX_LENGTH: Final = 131_072
_LENGTH = re.compile(r"([0-9]{1,7})(?:@([0-9]{1,7}))?")


@dataclass(frozen=True)
class Length:
    """One length, and the position of its only needle where one is fixed."""

    tokens: int
    position: int | None = None


@dataclass(frozen=True)
class Grid:
    """What is asked.

    Attributes
    ----------
    lengths, depths
        Of the grid.
    haystacks
        Prompts a length.
    needles
        Needles a depth and prompt.
    distractors
        Near-duplicates of a prompt, default density first; the denser ones only at lengths of about
        ten thousand tokens unless ``everywhere``.
    everywhere
        Whether every density runs at every length.
    seed
        Of the draws.
    passages
        Folder of a pool; None for the shipped one.
    """

    lengths: tuple[Length, ...]
    depths: tuple[float, ...] = DEPTHS
    haystacks: int = HAYSTACKS
    needles: int = NEEDLES
    distractors: tuple[int, ...] = (DISTRACTORS, *DENSE)
    everywhere: bool = False
    seed: int = 0
    passages: Path | None = None


def parse_lengths(text: str) -> tuple[Length, ...]:
    """Return the lengths of ``2560,5200@5``: tokens, and a fixed position behind ``@``.

    Raises
    ------
    ValueError
        Where an item has another form, or is out of range.
    """
    found = []
    for item in text.replace(" ", "").split(","):
        match = _LENGTH.fullmatch(item)
        if match is None or not 0 < int(match[1]) <= MAX_LENGTH:
            raise ValueError(
                f"--lengths {item!r}: expected tokens from 1 to {MAX_LENGTH}, or TOKENS@POSITION"
            )
        position = None if match[2] is None else int(match[2])
        if position is not None and position >= int(match[1]):
            raise ValueError(f"--lengths {item!r}: position {position} lies outside the prompt")
        found.append(Length(int(match[1]), position))
    return tuple(dict.fromkeys(found))


def parse_depths(text: str) -> tuple[float, ...]:
    """Return the depths of ``0,25,50``, percent of the prompt, as fractions.

    Raises
    ------
    ValueError
        Where an item is not a number from 0 to 100.
    """
    found = []
    for item in text.replace(" ", "").split(","):
        if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,4})?", item) is None or float(item) > 100:
            raise ValueError(f"--depths {item!r}: expected percent from 0 to 100")
        found.append(float(item) / 100)
    return tuple(dict.fromkeys(found))


def grid_prompts(grid: Grid, pool: Pool) -> list[MakePrompt]:
    """Return the prompts of a grid, each made when it is called; longest first.

    The first prompt of every length and density is made here once, so that a length the pool
    cannot fill is refused before anything has run.

    Raises
    ------
    ValueError
        As :func:`~needlepoint.verify.recall.prompts.compose`.
    """
    found: list[MakePrompt] = []
    for place, distractors in enumerate(grid.distractors):
        for length in sorted(grid.lengths, key=lambda item: -item.tokens):
            dense = place > 0 and not grid.everywhere
            if dense and not DENSE_FROM <= length.tokens <= DENSE_TO:
                continue
            make = partial(_prompt, grid, pool, length, distractors)
            make(0)
            found += [partial(make, number) for number in range(grid.haystacks)]
    return found


def _spots(grid: Grid, length: Length) -> list[Spot]:
    if length.position is not None:
        return [Spot(depth=None, position=length.position)]
    return [*(Spot(depth) for depth in grid.depths for _ in range(grid.needles)), Spot(None)]


def _prompt(grid: Grid, pool: Pool, length: Length, distractors: int, number: int) -> NeedlePrompt:
    spots = _spots(grid, length)
    haystack = compose(pool, number, length.tokens, spots, distractors, grid.seed)
    setting = Setting(length.tokens, distractors, number)
    return NeedlePrompt(setting, haystack.needles, lambda layer: pool.states[haystack.rows])
