"""The registry of stages: everything that is known of a stage without computing it, in one place.

A stage is named by ``(path, stage)``. The protocol, recordings, dumps, limits, results and docs all
read this table. To add a stage, add one entry here and its arithmetic (docs/extend.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

INDEX: Final = "index"
MAIN: Final = "main"
QUERY: Final = "query"
PATHS: Final = (INDEX, MAIN, QUERY)

StageKey = tuple[str, str]
"""(path, stage), for example ``("index", "pooled")``."""

FLOATS: Final = ("BF16", "F16", "F32", "F64")
"""Dtypes of computed numbers, as safetensors names them."""

Feeds = Mapping[str, tuple[StageKey, ...]]
"""Path to the stages that a stage is computed from."""


@dataclass(frozen=True)
class StageTensor:
    """One tensor of a stage.

    Attributes
    ----------
    part
        What its name adds to ``PATH.STAGE``; empty for the only tensor of a stage. ``{request}``
        stands where every request has one.
    dtypes
        As safetensors names them.
    shape
        Words for dims: ``tokens`` and ``entries`` of all requests; ``length`` and ``windows`` of
        one; ``width`` of a row, ``columns`` and ``gates`` of its projections; ``heads``;
        ``half`` and ``blocks`` of a row of FP4. ``any`` is free, a last ``...`` any more dims.
    formats
        Stored formats of a query that have this tensor; empty for all.
    dumped
        Whether a dump may hold its rows under this name; pages have a mapping of their own.
    """

    part: str
    dtypes: tuple[str, ...]
    shape: tuple[str, ...]
    formats: tuple[str, ...] = ()
    dumped: bool = True

    @property
    def dumped_part(self) -> str:
        """What the name adds in a dump, where one tensor holds the rows of all requests."""
        return self.part.replace("{request}", "").strip(".")

    def fault(self, dtype: str, shape: Sequence[int], dims: Mapping[str, int]) -> str | None:
        """Return what is wrong with a tensor of this dtype and shape, None if nothing is.

        Parameters
        ----------
        dtype
            As safetensors names it.
        shape
            Of the tensor.
        dims
            Size of every word of ``shape``; a word that is missing is free.
        """
        if dtype not in self.dtypes:
            return f"dtype {dtype}, expected {' or '.join(self.dtypes)}"
        more = self.shape[-1:] == ("...",)
        wanted = [dims.get(word) for word in (self.shape[:-1] if more else self.shape)]
        have = list(shape[: len(wanted)] if more else shape)
        if len(have) == len(wanted) and all(
            want in (None, size) for want, size in zip(wanted, have, strict=True)
        ):
            return None
        words = ["any" if want is None else str(want) for want in wanted]
        return f"shape {list(shape)}, expected [{', '.join(words)}{', ...' if more else ''}]"


@dataclass(frozen=True)
class Stage:
    """One stage on every path that has it.

    Attributes
    ----------
    name
        As results spell it.
    kind
        ``given``: common input of both sides unless a candidate brings its own. ``compared``.
        ``consequence``: reported and never judged.
    dense
        Whether it is a row of numbers on the key side, before the store; such stages stand in
        ``Observed.dense``.
    feeds
        Compression ratio to what the stage is computed from; a layer of another ratio does not
        have it.
    tensors
        Path to its tensors; the key ``""`` serves every path.
    canonical
        The form in which both sides are compared.
    limit_unit, derivation
        What a row error is measured in, and where that unit comes from.
    distance
        What the distance beside a row error counts; None where there is none.
    rounding
        Point of the profile at which a dense stage is rounded; empty for the stage's own name.
    """

    name: str
    kind: Literal["given", "compared", "consequence"]
    feeds: Mapping[int, Feeds]
    tensors: Mapping[str, tuple[StageTensor, ...]]
    canonical: str
    derivation: str
    limit_unit: str = "of the a-priori radius"
    dense: bool = False
    rows: Literal["tokens", "entries"] = field(default="tokens")
    distance: Literal["ulp", "codes"] | None = "ulp"
    rounding: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths that have the stage in a layer of some ratio."""
        return tuple(path for path in PATHS if any(path in by for by in self.feeds.values()))

    def tensors_of(self, path: str) -> tuple[StageTensor, ...]:
        """Return the tensors on one path."""
        return self.tensors.get(path, self.tensors.get("", ()))


def _dense() -> Mapping[str, tuple[StageTensor, ...]]:
    return {"": (StageTensor("", FLOATS, ("entries", "width")),)}


def _from(stage: str, *paths: str) -> Feeds:
    """Return that each path is fed by a stage of its own."""
    return {path: ((path, stage),) for path in paths}


_HIDDEN: Final = (MAIN, "input")
_SCORED: Final = ((INDEX, "stored"), (QUERY, "query"), (QUERY, "weights"))

REGISTRY: Final[tuple[Stage, ...]] = (
    Stage(
        "input",
        kind="given",
        feeds={ratio: {MAIN: ()} for ratio in (0, 1, 4, 128)},
        tensors={MAIN: (StageTensor("", ("BF16",), ("tokens", "any")),)},
        canonical="hidden states after the layer's norm, as recorded",
        derivation="the input is common to both sides: radius 0, any other value exceeds it",
    ),
    Stage(
        "projected",
        kind="given",
        feeds={
            1: {INDEX: (_HIDDEN,), QUERY: (_HIDDEN,)},
            4: {MAIN: (_HIDDEN,), INDEX: (_HIDDEN,), QUERY: (_HIDDEN,)},
            128: {MAIN: (_HIDDEN,)},
        },
        tensors={
            "": (
                StageTensor("kv", FLOATS, ("tokens", "columns")),
                StageTensor("score", FLOATS, ("tokens", "gates")),
            ),
            QUERY: (
                StageTensor("q", FLOATS, ("tokens", "heads", "width")),
                StageTensor("weights", FLOATS, ("tokens", "heads")),
            ),
        },
        canonical="projections of each token, before position embedding and constants",
        derivation="fp32 sum of n products in any order: 8 U sqrt(n) sum |x w|",
    ),
    Stage(
        "pooled",
        kind="compared",
        feeds={4: _from("projected", MAIN, INDEX), 128: _from("projected", MAIN)},
        tensors=_dense(),
        canonical="one row a window, at the profile's rounding point",
        derivation="fp32 softmax over the slots in any order: exponents, one exponential a tap and "
        "a rescale, two sums, one division",
        dense=True,
        rows="entries",
    ),
    Stage(
        "normed",
        kind="compared",
        feeds={
            1: _from("projected", INDEX),
            4: _from("pooled", MAIN, INDEX),
            128: _from("pooled", MAIN),
        },
        tensors=_dense(),
        canonical="rows after the norm, at the profile's rounding point",
        derivation="radius of pooled through x w / sqrt(mean x^2 + eps), plus 7 U and half a sum",
        dense=True,
        rows="entries",
    ),
    Stage(
        "roped",
        kind="compared",
        feeds={
            1: _from("normed", INDEX),
            4: _from("normed", MAIN, INDEX),
            128: _from("normed", MAIN),
        },
        tensors=_dense(),
        canonical="rows after RoPE, at the profile's rounding point",
        derivation="radius of normed through the rotation, plus 2 U (|a c| + |b s|)",
        dense=True,
        rows="entries",
    ),
    Stage(
        "rotated",
        kind="compared",
        feeds={1: _from("roped", INDEX), 4: _from("roped", INDEX)},
        tensors=_dense(),
        canonical="rows after the Hadamard rotation, at the profile's rounding point",
        derivation="sum of the radii over the row / sqrt(128), plus seven adds and one product",
        dense=True,
        rows="entries",
    ),
    Stage(
        "stored",
        kind="compared",
        feeds={
            1: _from("rotated", INDEX),
            4: {INDEX: ((INDEX, "rotated"),), MAIN: ((MAIN, "roped"),)},
            128: {MAIN: ((MAIN, "roped"),)},
        },
        tensors={
            "": (
                StageTensor("pages", ("U8",), ("any", "any"), dumped=False),
                StageTensor("page_table.{request}", ("I32",), ("any",), dumped=False),
            )
        },
        canonical="codes and scales read through the page table, decoded",
        derivation="distance to the rounding cell of the stored code under the candidate's own "
        "scale; the scale must follow from an amax within the radius",
        rows="entries",
        distance="codes",
    ),
    Stage(
        "query",
        kind="compared",
        feeds={ratio: _from("projected", QUERY) for ratio in (1, 4)},
        tensors={
            "": (
                StageTensor("codes", ("BF16",), ("tokens", "heads", "width"), ("bf16",)),
                StageTensor("codes", ("F64",), ("tokens", "heads", "width"), ("float64",)),
                StageTensor("codes", ("U8",), ("tokens", "heads", "width"), ("fp8",)),
                StageTensor("codes", ("U8",), ("tokens", "heads", "half"), ("fp4",)),
                StageTensor("scales", ("F32",), ("tokens", "heads"), ("fp8",)),
                StageTensor("scales", ("U8",), ("tokens", "heads", "blocks"), ("fp4",)),
            )
        },
        canonical="codes and scales, decoded",
        derivation="as stored, from the projected query through RoPE and Hadamard",
        distance="codes",
    ),
    Stage(
        "weights",
        kind="compared",
        feeds={ratio: _from("projected", QUERY) for ratio in (1, 4)},
        tensors={"": (StageTensor("", FLOATS, ("tokens", "heads")),)},
        canonical="head weights without the query scale",
        derivation="projection times a constant: 4 U",
    ),
    Stage(
        "scores",
        kind="compared",
        feeds={ratio: {INDEX: _SCORED} for ratio in (1, 4)},
        tensors={"": (StageTensor("{request}", FLOATS, ("length", "windows")),)},
        canonical="after the key scale, entries that are not visible -inf",
        derivation="2^-20 sum |w| sum |q k| (fp32 accumulation), plus the code steps that the "
        "radii of key and query leave open",
        limit_unit="of the a-priori bound",
    ),
    Stage(
        "topk",
        kind="compared",
        feeds={ratio: _from("scores", INDEX) for ratio in (1, 4)},
        tensors={"": (StageTensor("", ("I32",), ("tokens", "any")),)},
        canonical="entries of the request, padded with -1",
        derivation="a swap is explained when the reference scores of the lost and the gained entry "
        "differ by no more than the bounds of the two",
        limit_unit="of the a-priori bounds of both scores",
        distance=None,
    ),
    Stage(
        "attention",
        kind="consequence",
        feeds={
            0: {MAIN: (_HIDDEN,)},
            4: {MAIN: (_HIDDEN, (MAIN, "stored"), (INDEX, "topk"))},
            128: {MAIN: (_HIDDEN, (MAIN, "stored"))},
        },
        tensors={"": (StageTensor("", FLOATS, ("tokens", "...")),)},
        canonical="output of attention over window, picks and sink",
        derivation="a consequence of rows and picks: reported, never counted",
        limit_unit="not judged",
    ),
)
"""Every stage, in the order in which a token passes them."""

STAGES: Final = tuple(stage.name for stage in REGISTRY)
RATIOS: Final = tuple(sorted({ratio for stage in REGISTRY for ratio in stage.feeds}))


def stage_named(name: str) -> Stage:
    """Return the entry of a stage.

    Raises
    ------
    ValueError
        Where there is none.
    """
    for stage in REGISTRY:
        if stage.name == name:
            return stage
    raise ValueError(f"stage {name!r}: expected one of {', '.join(STAGES)}")


def dense_stages(path: str, ratio: int | None = None) -> tuple[str, ...]:
    """Return the stages of the key side before the store that a path has, in order.

    Without a ratio, those of a layer that has all of them.
    """
    return tuple(
        stage.name
        for stage in REGISTRY
        if stage.dense and path in (stage.paths if ratio is None else stage.feeds.get(ratio, ()))
    )
