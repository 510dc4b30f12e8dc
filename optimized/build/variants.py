"""The kernel variants: their names, the C++ traits of each, and the modules they ship in.

A variant is one kernel for one combination of stage, ratio, head_dim, input dtype and row format. A
module is one translation unit and one shared library; variants that a caller needs together share
one.
"""

from __future__ import annotations

from itertools import product

from needlepoint.optimized.build.arguments import QueryArguments, StepArguments, StoreArguments
from needlepoint.optimized.build.score_variants import SCORE_VARIANTS
from needlepoint.optimized.build.variant import Variant

INPUTS = ("fp32", "bf16")
INDEX_ROWS = ("bf16", "fp8", "fp4")
MAIN_ROWS = ("bf16", "584")
MODES = ("prefill", "decode")
SHAPES = ((4, 128), (4, 512), (128, 512))
"""Supported (ratio, head_dim)."""

_CPP_INPUT = {"fp32": "float", "bf16": "bf16"}
_CPP_ROW = {"bf16": "bf16", "fp8": "fp8", "fp4": "fp4", "584": "packed584", "fp32": "fp32"}
_STAGE_R128 = {"fp32": 2**16, "bf16": 2**15}  # kv and score of a block's slice of a window
_STEPS = ("norm", "rope", "hadamard", "store")
_STORES = {
    ("prefill", 4): ("store4/prefill.cuh", "run_prefill4"),
    ("decode", 4): ("store4/decode.cuh", "run_decode4"),
    ("prefill", 128): ("store128/store.cuh", "run_store128"),
    ("decode", 128): ("store128/store.cuh", "run_store128"),
}
"""Header and launch function by mode and ratio."""


def row_formats(head_dim: int) -> tuple[str, ...]:
    """Return the row formats a store of this head_dim supports."""
    return INDEX_ROWS if head_dim == 128 else MAIN_ROWS


def store_name(mode: str, ratio: int, head_dim: int, inputs: str, row: str) -> str:
    """Return the name of a one-launch store, or of the pooling step for ``row="fp32"``.

    Raises
    ------
    ValueError
        If no such variant exists; the message lists what is supported.
    """
    if (ratio, head_dim) not in SHAPES:
        raise ValueError(
            f"ratio {ratio} with head_dim {head_dim}: supported are ratio 4 with head_dim 128 or "
            "512, ratio 128 with head_dim 512"
        )
    if inputs not in INPUTS:
        raise ValueError(f"input {inputs}: supported inputs are fp32 and bf16")
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: expected one of {list(MODES)}")
    if row == "fp32":
        return f"pool_r{ratio}_d{head_dim}_{inputs}"
    if row not in row_formats(head_dim):
        raise ValueError(
            f"row format {row} at head_dim {head_dim}: supported rows are bf16, fp8 and fp4 at "
            "head_dim 128; bf16 and 584 at head_dim 512"
        )
    return f"store_{mode}_r{ratio}_d{head_dim}_{inputs}_{row}"


def query_name(inputs: str, row: str) -> str:
    """Return the name of a query kernel.

    Raises
    ------
    ValueError
        If no such variant exists; the message lists what is supported.
    """
    if inputs not in INPUTS or row not in INDEX_ROWS:
        raise ValueError(
            f"query of {inputs} to {row}: supported inputs are fp32 and bf16, supported formats "
            "bf16, fp8 and fp4"
        )
    return f"query_{inputs}_{row}"


def step_name(step: str, head_dim: int, row: str = "fp32") -> str:
    """Return the name of a separate step after pooling.

    Raises
    ------
    ValueError
        If the step is unknown at this head_dim.
    """
    known = step in _STEPS and (step != "hadamard" or head_dim == 128)
    if not known or (step == "store" and row not in row_formats(head_dim)):
        raise ValueError(
            f"step {step} to {row} at head_dim {head_dim}: supported are norm, rope, hadamard "
            f"(head_dim 128) and store to {list(row_formats(head_dim))}"
        )
    return f"step_{step}_d{head_dim}" + (f"_{row}" if step == "store" else "")


def _store(mode: str, ratio: int, head_dim: int, inputs: str, row: str) -> Variant:
    traits = f"{ratio}, {head_dim}, {_CPP_INPUT[inputs]}, Row::{_CPP_ROW[row]}, Mode::{mode}"
    header, run = _STORES[mode, ratio]
    return Variant(
        name=store_name(mode, ratio, head_dim, inputs, row),
        module="steps" if row == "fp32" else f"store_{mode}_r{ratio}_d{head_dim}",
        header=header,
        run=run,
        traits=f"StoreTraits<{traits}>",
        arguments=StoreArguments,
        smem_dynamic=_STAGE_R128[inputs] if ratio == 128 else 0,
    )


def _query(inputs: str, row: str) -> Variant:
    return Variant(
        name=query_name(inputs, row),
        module="query",
        header="query/query.cuh",
        run="run_query",
        traits=f"QueryTraits<{_CPP_INPUT[inputs]}, Row::{_CPP_ROW[row]}>",
        arguments=QueryArguments,
    )


def _step(step: str, head_dim: int, row: str) -> Variant:
    return Variant(
        name=step_name(step, head_dim, row),
        module="steps",
        header="common/separate_steps.cuh",
        run="run_step",
        traits=f"StepTraits<{head_dim}, Step::{step}, Row::{_CPP_ROW[row]}>",
        arguments=StepArguments,
    )


def _variants() -> tuple[Variant, ...]:
    out = [
        _store(mode, ratio, head_dim, inputs, row)
        for mode, (ratio, head_dim) in product(MODES, SHAPES)
        for inputs, row in product(INPUTS, row_formats(head_dim))
    ]
    out += [_query(inputs, row) for inputs, row in product(INPUTS, INDEX_ROWS)]
    out += [
        _store("prefill", ratio, head_dim, inputs, "fp32")
        for (ratio, head_dim), inputs in product(SHAPES, INPUTS)
    ]
    for head_dim in (128, 512):
        steps = ("norm", "rope", "hadamard") if head_dim == 128 else ("norm", "rope")
        out += [_step(step, head_dim, "fp32") for step in steps]
        out += [_step("store", head_dim, row) for row in row_formats(head_dim)]
    return (*out, *SCORE_VARIANTS)


VARIANTS: tuple[Variant, ...] = _variants()
BY_NAME: dict[str, Variant] = {variant.name: variant for variant in VARIANTS}
MODULES: dict[str, tuple[Variant, ...]] = {
    module: tuple(v for v in VARIANTS if v.module == module)
    for module in dict.fromkeys(v.module for v in VARIANTS)
}
