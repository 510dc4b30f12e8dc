from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.emulation.readback import read_index_keys, read_queries
from needlepoint.optimized.protocol.interface import INDEX, MAIN, LayerInputs, Observed, QueryRows
from needlepoint.reference.formats import BF16, FP4_OFFICIAL, FP8_PLAIN, MAIN_FP8, Format
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.inputs.layer_inputs import given_layer
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.layout.stored_rows import (
    decoded_queries,
    encoded_queries,
    read_stored,
    replayable,
    unfolded_weights,
)

FORMATS = {"bf16": BF16, "fp8": FP8_PLAIN, "fp4": FP4_OFFICIAL}
Seen = Callable[[str], Observed]


@pytest.fixture(scope="module")
def seen(small_inputs: Callable[..., Inputs]) -> Seen:
    inputs = small_inputs(tokens=400, layers=(0,))
    reference = ReferenceLayer(inputs.config, 0, inputs.weights(0), BF16_CONTRACT)
    given: LayerInputs = given_layer(inputs, 0, reference).inputs
    made: dict[str, Observed] = {}

    def run(key_format: str) -> Observed:
        if key_format not in made:
            made[key_format] = create(f"emulated:fused-{key_format}").run(given)
        return made[key_format]

    return run


@pytest.mark.parametrize("key_format", FORMATS)
def test_the_judge_reads_what_the_candidate_reads(key_format: str, seen: Seen) -> None:
    """Two readers, written apart, of the same pages."""
    paged = seen(key_format).stored[INDEX]

    rows = read_stored(paged)

    own = [read_index_keys(paged, request) for request in range(3)]
    values = torch.cat(
        [k.values if k.scale is None else k.values.double() * k.scale[:, None] for k in own]
    )
    assert torch.equal(rows.values, values.double())
    assert rows.rope is None
    rows.require(FORMATS[key_format])


def test_main_rows_are_read_in_two_parts(seen: Seen) -> None:
    rows = read_stored(seen("fp8").stored[MAIN])

    assert rows.values.shape == (98, 512)
    assert rows.encoded.codes.shape == (98, 448)
    assert rows.rope is not None
    assert torch.equal(rows.rope, rows.values[:, 448:])
    assert torch.equal(rows.rope, rows.rope.bfloat16().double())
    rows.require(MAIN_FP8)


@pytest.mark.parametrize(
    ("written", "profile"), [("fp8", BF16), ("bf16", FP8_PLAIN), ("fp4", BF16)]
)
def test_another_element_than_the_profile_s_is_refused(
    written: str, profile: Format, seen: Seen
) -> None:
    observed = seen(written)
    with pytest.raises(ValueError, match=f"layout index-{written} stores .*profile of what it"):
        read_stored(observed.stored[INDEX]).require(profile)
    assert observed.query is not None
    with pytest.raises(ValueError, match=f"query format '{written}', the profile stores"):
        encoded_queries(observed.query, profile)


@pytest.mark.parametrize("key_format", FORMATS)
def test_queries_are_read_as_the_candidate_reads_them(key_format: str, seen: Seen) -> None:
    query = seen(key_format).query
    assert query is not None

    values = decoded_queries(query, FORMATS[key_format])

    own = read_queries(query, slice(None)).double()
    if query.format == "fp8":
        assert query.scales is not None
        own = own * query.scales.double().unsqueeze(-1)
    assert torch.equal(values, own)


def test_weights_are_compared_without_the_query_scale(seen: Seen) -> None:
    query, plain = seen("fp8").query, seen("bf16").query
    assert query is not None
    assert plain is not None

    unfolded = unfolded_weights(query)

    torch.testing.assert_close(unfolded, plain.weights.double(), rtol=1e-6, atol=0)
    assert not torch.allclose(query.weights.double(), unfolded, rtol=0.1)
    assert torch.equal(unfolded_weights(plain), plain.weights.double())
    untold: QueryRows = replace(query, scale_folded=False)
    assert torch.equal(unfolded_weights(untold), query.weights.double())


def test_what_cannot_be_replayed_counts_as_zero() -> None:
    seen = torch.tensor([1.5, -(2.0**58), 2.0**59, -torch.inf, torch.nan])

    assert replayable(seen).tolist() == [1.5, -(2.0**58), 0.0, 0.0, 0.0]
