from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import INDEX, MAIN, LayerInputs, Observed
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import (
    BF16_CONTRACT,
    OFFICIAL,
    Arithmetic,
    Precision,
    needlepoint_profile,
)
from needlepoint.reference.rounding import round_to
from needlepoint.verify.inputs.layer_inputs import GivenLayer, given_layer
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.sides import key_side
from needlepoint.verify.judge.sides.key_side import (
    KeyReference,
    compare_key_stages,
    key_reference,
    reference_rows,
    window_table,
)
from needlepoint.verify.layout.stored_rows import StoredRows, read_stored
from needlepoint.verify.numerics.error_bound import precision_of
from needlepoint.verify.numerics.row_errors import StageErrors

Load = Callable[..., Inputs]


def give(inputs: Inputs, layer: int) -> GivenLayer:
    reference = ReferenceLayer(inputs.config, layer, inputs.weights(layer), BF16_CONTRACT)
    return given_layer(inputs, layer, reference)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("profile", [needlepoint_profile("fp8"), BF16_CONTRACT, OFFICIAL])
def test_the_enclosed_chain_is_the_reference_layer_s(
    layer: int, profile: Arithmetic, small_inputs: Load
) -> None:
    """Two ways through the same arithmetic: error bounds, and the layer that contracts run."""
    inputs = small_inputs(tokens=400)
    given = give(inputs, layer)
    plain = ReferenceLayer(inputs.config, layer, inputs.weights(layer), profile)
    stages = [
        plain.forward_projected(given.projected(r, 0, length), plain.new_request(), attend=False)
        for r, length in enumerate(inputs.requests)
    ]
    for path in (INDEX, MAIN) if layer == 0 else (MAIN,):
        reference = key_reference(path, given.inputs, profile)
        own = [s.index if path == INDEX else s.main for s in stages]
        for stage, error_bound in reference.stages.items():
            expected = torch.cat([getattr(rows, stage) for rows in own if rows is not None])
            held = round_to(error_bound.value, precision_of(stage, profile))
            if precision_of(stage, profile) is Precision.BF16:
                assert torch.equal(held, expected), (path, stage)
            else:  # fp32 points are not rounded: the radius pays for them
                torch.testing.assert_close(held, expected, rtol=1e-5, atol=1e-6)
        values = torch.cat([rows.stored.values for rows in own if rows is not None])
        apart = (reference_rows(reference) - values).abs() > 1e-5 * values.abs() + 1e-6
        assert apart.double().mean() < 1e-3


def test_state_is_carried_over_blocks_of_tokens(
    small_inputs: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer in (0, 1):
        given = give(small_inputs(tokens=600), layer).inputs
        whole = key_reference(MAIN, given, needlepoint_profile("fp8"))
        monkeypatch.setattr(key_side, "_BLOCK_TOKENS", 128)
        parts = key_reference(MAIN, given, needlepoint_profile("fp8"))
        monkeypatch.undo()
        for stage in ("pooled", "roped"):
            assert torch.equal(parts.stages[stage].value, whole.stages[stage].value)
            assert torch.equal(parts.stages[stage].delta, whole.stages[stage].delta)


def test_windows_stand_at_their_first_token(small_inputs: Load) -> None:
    given = give(small_inputs(tokens=400), 0).inputs

    table = window_table(given)

    assert table.shape == (36 + 32 + 30, 32, 2)
    # Entry 5 of request 1 starts at token 20 of that request.
    assert torch.equal(table[36 + 5], given.rope_table[20].double())


def test_a_path_that_a_layer_has_not_is_refused(small_inputs: Load) -> None:
    given = give(small_inputs(tokens=400), 1).inputs
    with pytest.raises(ValueError, match="layer 1 of ratio 128 has no index path"):
        key_reference(INDEX, given, needlepoint_profile("fp8"))


class Judged:
    """Index rows of the fp8 candidate, compared after a change."""

    def __init__(self, given: LayerInputs) -> None:
        self.reference: KeyReference = key_reference(INDEX, given, needlepoint_profile("fp8"))
        observed: Observed = create("emulated:fused-fp8").run(given)
        self.dense = {
            stage: rows for (path, stage), rows in observed.dense.items() if path == INDEX
        }
        self.stored: StoredRows = read_stored(observed.stored[INDEX])

    def changed(self, stage: str, change: Callable[[Tensor], None]) -> dict[str, StageErrors]:
        rows = self.dense[stage].clone()
        change(rows)
        found = compare_key_stages(self.reference, {**self.dense, stage: rows}, self.stored)
        return {errors.key[1]: errors for errors in found}


@pytest.fixture(scope="module")
def judged(small_inputs: Load) -> Judged:
    return Judged(give(small_inputs(), 0).inputs)


def test_sound_rows_stay_within_their_radius(judged: Judged) -> None:
    found = compare_key_stages(judged.reference, judged.dense, judged.stored)

    assert [e.key[1] for e in found] == ["pooled", "normed", "roped", "rotated", "stored"]
    for errors in found:
        assert errors.local.rows == errors.accumulated.rows == 50
        assert not errors.local.failed(1.0).any()
        assert not errors.accumulated.failed(1.0).any()


@pytest.mark.parametrize("stage", ["pooled", "normed", "roped", "rotated"])
@pytest.mark.parametrize("value", [0.5, torch.nan, torch.inf])
def test_a_wrong_row_fails_its_stage_and_the_next_one_alone(
    stage: str, value: float, judged: Judged
) -> None:
    """The stage behind it is replayed from the wrong row, which it did not compute from."""

    def spoil(rows: Tensor) -> None:
        rows[7, 3] = value

    found = judged.changed(stage, spoil)

    names = list(found)
    at = names.index(stage)
    for name, errors in found.items():
        failed = errors.local.failed(1.0).nonzero().flatten().tolist()
        assert failed == ([7] if name in names[at : at + 2] else []), name
        # From the projections on, only the row that was changed is wrong.
        failed = errors.accumulated.failed(1.0).nonzero().flatten().tolist()
        assert failed == ([7] if name == stage else []), name


def test_without_the_stages_between_local_starts_further_back(judged: Judged) -> None:
    def gain(rows: Tensor) -> None:
        rows[7] *= 1.004

    rows = judged.dense["pooled"].clone()
    gain(rows)
    (pooled, stored) = compare_key_stages(judged.reference, {"pooled": rows}, judged.stored)

    assert pooled.local.failed(1.0).nonzero().flatten().tolist() == [7]
    # The norm takes the gain away again: the stored row follows from either.
    assert not stored.local.failed(1.0).any()
    (alone,) = compare_key_stages(judged.reference, {}, judged.stored)
    assert torch.equal(alone.local.ratio, alone.accumulated.ratio)


def test_no_entries_are_no_comparison(small_inputs: Load) -> None:
    inputs = small_inputs()
    short = replace(inputs, requests=(3, 2), states={0: inputs.hidden(0)[:5]})
    given = give(short, 0).inputs
    reference = key_reference(INDEX, given, needlepoint_profile("fp8"))

    assert len(reference.stages["pooled"].value) == 0
    assert compare_key_stages(reference, {"pooled": torch.empty(0, 128)}, None) == []
