"""Every precondition is refused with the tensor and the token named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.emulation.preconditions import locate, require_preconditions
from needlepoint.optimized.protocol.interface import CompressorInputs, LayerInputs

Make = Callable[..., LayerInputs]
LENGTHS = (6, 9)  # row 8 is request 1, position 2


def with_main(inputs: LayerInputs, **changes: Tensor) -> LayerInputs:
    return replace(inputs, main=replace(inputs.main, **changes))


def poke(tensor: Tensor, at: tuple[int, ...], value: float) -> Tensor:
    changed = tensor.clone()
    changed[at] = value
    return changed


@pytest.mark.parametrize("ratio", [4, 128])
def test_good_inputs_pass(make_inputs: Make, ratio: int) -> None:
    require_preconditions(make_inputs(ratio, LENGTHS))
    require_preconditions(make_inputs(ratio, LENGTHS, torch.bfloat16))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**59])
@pytest.mark.parametrize("name", ["kv", "score"])
def test_a_bad_value_names_its_token(make_inputs: Make, name: str, value: float) -> None:
    inputs = make_inputs(4, LENGTHS)
    bad = with_main(inputs, **{name: poke(getattr(inputs.main, name), (8, 17), value)})
    with pytest.raises(ValueError, match=rf"main\.{name}: .* request 1, position 2, index \(17,\)"):
        require_preconditions(bad)


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_bad_query_names_its_token(make_inputs: Make, value: float) -> None:
    inputs = make_inputs(4, LENGTHS)
    assert inputs.query is not None
    q = replace(inputs.query, q=poke(inputs.query.q, (3, 1, 5), value))
    with pytest.raises(ValueError, match=r"query\.q: .* request 0, position 3, index \(1, 5\)"):
        require_preconditions(replace(inputs, query=q))
    w = replace(inputs.query, weights=poke(inputs.query.weights, (14, 1), value))
    with pytest.raises(ValueError, match=r"query\.weights: .* request 1, position 8"):
        require_preconditions(replace(inputs, query=w))


def test_prescaled_scores_stay_below_two_to_the_22(make_inputs: Make) -> None:
    inputs = make_inputs(4, LENGTHS)
    limit = 2.0**22 / 1.4426950408889634
    for value, sign in ((limit * 0.999, 1), (limit * 0.999, -1)):
        require_preconditions(
            with_main(inputs, score=poke(inputs.main.score, (7, 3), sign * value))
        )
    for sign in (1, -1):
        bad = with_main(inputs, score=poke(inputs.main.score, (7, 3), sign * limit * 1.00001))
        with pytest.raises(ValueError, match=r"main\.score: request 1, position 1, column 3"):
            require_preconditions(bad)


def test_large_scores_and_embeddings_of_different_columns_pass(make_inputs: Make) -> None:
    inputs = make_inputs(4, LENGTHS)
    changed = with_main(
        inputs,
        score=poke(inputs.main.score, (7, 3), 2.5e6),
        ape=poke(inputs.main.ape, (2, 700), 2.5e6),
    )
    require_preconditions(changed)


def test_the_position_embedding_counts_into_the_score(make_inputs: Make) -> None:
    inputs = make_inputs(4, LENGTHS)
    bad = with_main(inputs, ape=poke(inputs.main.ape, (2, 700), 4e6))
    with pytest.raises(ValueError, match=r"main\.score: request 0, position 2, column 700"):
        require_preconditions(bad)


def test_norm_weight_ape_and_table_are_checked(make_inputs: Make) -> None:
    inputs = make_inputs(4, LENGTHS)
    for name, at in (("norm_weight", (4,)), ("ape", (1, 4))):
        tensor: Tensor = getattr(inputs.main, name)
        bad = with_main(inputs, **{name: poke(tensor, at, float("nan"))})
        with pytest.raises(ValueError, match=rf"main\.{name}: nan"):
            require_preconditions(bad)
    require_preconditions(replace(inputs, rope_table=poke(inputs.rope_table, (1, 2, 0), -1.0)))
    for value in (float("nan"), 1.0000002):
        table = poke(inputs.rope_table, (1, 2, 0), value)
        with pytest.raises(ValueError, match=r"rope_table: .* at index \(1, 2, 0\)"):
            require_preconditions(replace(inputs, rope_table=table))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": 8}, "ratio 8, expected one of"),
        ({"lengths": (15, 0)}, "expected at least 1 token"),
        ({"lengths": ()}, "expected at least 1 token"),
        ({"lengths": (6, 8)}, r"main\.kv: shape \(15, 1024\), expected \(14, 1024\)"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"norm_eps": float("inf")}, "norm_eps"),
        ({"index": None}, "absent and given"),
        ({"query": None}, "given and absent"),
        ({"rope_table": torch.zeros(8, 32, 2)}, "8 positions, expected at least 9"),
        ({"rope_table": torch.zeros(9, 2, 32)}, r"expected \(any, 32, 2\)"),
    ],
)
def test_shapes_and_scalars(make_inputs: Make, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_preconditions(replace(make_inputs(4, LENGTHS), **changes))  # type: ignore[arg-type]


def test_ratio_128_has_no_indexer(make_inputs: Make) -> None:
    sparse = make_inputs(4, LENGTHS)
    with pytest.raises(ValueError, match="given and given, expected both at ratio 4 alone"):
        require_preconditions(
            replace(make_inputs(128, LENGTHS), index=sparse.index, query=sparse.query)
        )


def test_dtypes(make_inputs: Make) -> None:
    inputs = make_inputs(4, LENGTHS)
    bad = with_main(inputs, kv=inputs.main.kv.double())
    with pytest.raises(ValueError, match=r"main\.kv: torch\.float64 on cpu"):
        require_preconditions(bad)


@pytest.mark.parametrize("name", ["score", "ape", "norm_weight"])
def test_every_shape_is_checked(make_inputs: Make, name: str) -> None:
    inputs = make_inputs(4, LENGTHS)
    tensor: Tensor = getattr(inputs.main, name)
    with pytest.raises(ValueError, match=rf"main\.{name}: shape"):
        require_preconditions(with_main(inputs, **{name: tensor[..., :-1]}))


def test_no_heads(make_inputs: Make) -> None:
    with pytest.raises(ValueError, match="0 heads"):
        require_preconditions(make_inputs(4, LENGTHS, heads=0))


def test_bf16_position_embeddings_are_accepted(make_inputs: Make) -> None:
    inputs = make_inputs(4, LENGTHS)
    ape = poke(inputs.main.ape, (2, 700), 4e6).bfloat16()
    with pytest.raises(ValueError, match=r"main\.score: request 0, position 2, column 700"):
        require_preconditions(with_main(inputs, ape=ape))


def test_locate() -> None:
    assert [locate(row, (2, 1)) for row in range(3)] == [(0, 0), (0, 1), (1, 0)]
    with pytest.raises(ValueError, match="past the last"):
        locate(3, (2, 1))


def test_index_compressor_is_checked(make_inputs: Make) -> None:
    inputs = make_inputs(4, LENGTHS)
    index = inputs.index
    assert isinstance(index, CompressorInputs)
    bad = replace(inputs, index=replace(index, kv=poke(index.kv, (0, 0), float("nan"))))
    with pytest.raises(ValueError, match=r"index\.kv: nan at request 0, position 0"):
        require_preconditions(bad)
