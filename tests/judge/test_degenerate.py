"""Comparisons that say nothing are refused, and say why."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from support.wrapped import WrappedCandidate, keep, planted, then
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.emulation.compressor import EntryBlock
from needlepoint.optimized.emulation.keyside import KeySide
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.reference.weights import LayerWeights
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.candidate_run import CandidateFailed
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.numerics.directions import limit_fault, passing_limit
from needlepoint.verify.numerics.limits import Limits

Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]
Cli = Callable[..., CompletedProcess[str]]
FP8 = "emulated:fused-fp8"


@dataclass
class Changed:
    """The sound candidate with its results changed, and all of them kept."""

    change: Callable[[LayerInputs, Observed], Observed] = lambda _, observed: observed
    name: str = "test:changed"
    returned: list[Observed] = field(default_factory=list)

    @property
    def info(self) -> CandidateInfo:
        return replace(create(FP8).info, name=self.name)

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return create(FP8).stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        observed = self.change(inputs, create(FP8).run(inputs))
        self.returned.append(observed)
        return observed


def with_dense(observed: Observed, key: StageKey, rows: Tensor) -> Observed:
    return replace(observed, dense={**observed.dense, key: rows})


def given_itself(inputs: LayerInputs, observed: Observed) -> Observed:
    """Hand the given projection back as the pooled row: the memory of the other side."""
    entries = sum(length // inputs.ratio for length in inputs.lengths)
    assert inputs.index is not None
    return with_dense(observed, (INDEX, "pooled"), inputs.index.kv[:entries, :128])


def test_memory_of_the_other_side_is_refused(judge: Judge, small_inputs: Load) -> None:
    with pytest.raises(CandidateFailed, match=r"index\.pooled lies in the memory of the given"):
        judge(small_inputs(tokens=136, layers=(0,)), Changed(given_itself))


def test_candidates_that_share_memory_are_refused(judge: Judge, small_inputs: Load) -> None:
    first = Changed(name="test:first")

    def borrowed(inputs: LayerInputs, observed: Observed) -> Observed:
        rows = first.returned[-1].dense[MAIN, "roped"]
        return with_dense(observed, (MAIN, "roped"), rows)

    with pytest.raises(ValueError, match=r"main\.roped of candidate test:second lies in memory"):
        judge(small_inputs(tokens=136, layers=(0,)), first, Changed(borrowed, "test:second"))


def test_recordings_of_equal_bytes_are_a_match(
    cli: Cli, recordings: Callable[..., Path], tmp_path: Path
) -> None:
    one = recordings(FP8)
    other = tmp_path / "copy"
    shutil.copytree(one, other)

    assert cli("diff", one, other, "--quiet").returncode == 0
    assert cli("diff", one, one, "--quiet").returncode == 0


def repeated(inputs: Inputs, period: int) -> Inputs:
    """Return the input with its first tokens over and over in every request; none for zeros."""
    (layer,) = inputs.layers
    at = [torch.arange(length) % max(1, period) for length in inputs.requests]
    states = inputs.hidden(layer)[torch.cat(at)] * min(1, period)
    return replace(inputs, states={layer: states})


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("period", ["zeros", "one token", "one window"])
def test_constant_stages_are_refused_unless_the_input_declares_them(
    period: str, ratio: int, judge: Judge, small_inputs: Load
) -> None:
    layer = {4: 0, 128: 1}[ratio]
    inputs = small_inputs(tokens=530, layers=(layer,))
    inputs = repeated(inputs, {"zeros": 0, "one token": 1, "one window": ratio}[period])

    why = "zero" if period == "zeros" else "equal input"
    with pytest.raises(ValueError, match=f"layer {layer} .*pooled.*{why}.*declares itself"):
        judge(inputs, create(FP8))
    declared = judge(replace(inputs, constant=True), create(FP8)).result
    assert declared.verdict == "match"


def test_one_window_that_differs_is_no_constant(judge: Judge, small_inputs: Load) -> None:
    inputs = repeated(small_inputs(tokens=530, layers=(0,)), 4)
    inputs.states[0][-9:-5] *= 2

    assert judge(inputs, create(FP8)).result.verdict == "match"


@pytest.mark.parametrize("ratio", [4, 128])
def test_short_prompts_that_are_all_the_same_are_judged_by_their_windows(
    ratio: int, judge: Judge, small_inputs: Load
) -> None:
    """Two windows that differ can change places, however often the prompt comes again."""
    layer = {4: 0, 128: 1}[ratio]
    inputs = small_inputs(tokens=2 * ratio, layers=(layer,))
    prompt = inputs.hidden(layer)[: inputs.requests[0]]
    asked = frozenset({(MAIN, "stored")})

    batch = replace(inputs, states={layer: prompt.repeat(3, 1)}, requests=(len(prompt),) * 3)
    assert judge(batch, create(FP8), stages=asked).result.verdict == "match"
    one = prompt[:ratio].repeat(6, 1)
    alike = replace(batch, states={layer: one}, requests=(2 * ratio,) * 3)
    with pytest.raises(ValueError, match=r"main\.stored: .* made from equal input"):
        judge(alike, create(FP8), stages=asked)


def test_only_stages_that_are_asked_for_are_refused(judge: Judge, small_inputs: Load) -> None:
    """Rows near zero differ, and all their scores are the same: the store can be judged."""
    inputs = small_inputs(tokens=136, layers=(0,))
    inputs = replace(inputs, states={0: inputs.hidden(0) * 2.0**-100})
    candidate = create("emulated:fused-bf16")

    with pytest.raises(ValueError, match=r"index\.scores: every query scores all"):
        judge(inputs, candidate)
    stored = judge(inputs, candidate, stages=frozenset({(MAIN, "stored")})).result
    assert stored.verdict == "match"


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("small", [True, False])
def test_picks_are_refused_where_every_choice_is_a_tie(
    small: bool, scored: bool, judge: Judge, small_inputs: Load
) -> None:
    """Also for a candidate that shows no scores, whose picks its rows and queries justify."""
    shown: set[StageKey] = {(INDEX, "topk")}
    shown |= (
        {(INDEX, "scores")} if scored else {(INDEX, "stored"), (QUERY, "query"), (QUERY, "weights")}
    )
    change = then(planted("newest-entries-picked"), keep(*shown))
    candidate = WrappedCandidate(change, shown=frozenset(shown))
    asked = frozenset({(INDEX, "topk")})
    sound = small_inputs(tokens=136, layers=(0,))
    tied = replace(sound, states={0: sound.hidden(0) * 2.0**-100})
    tied = tied if small else repeated(sound, 1)

    with pytest.raises(ValueError, match=r"index\.topk: every query scores all"):
        judge(tied, candidate, stages=asked)
    assert judge(sound, candidate, stages=asked).result.verdict == "differ"


def equal_keys(inputs: Inputs) -> Inputs:
    """Return an input whose index keys are all one and the same, the first of a request too."""

    def weights(layer: int) -> LayerWeights:
        drawn = inputs.weights(layer)
        assert drawn.index is not None
        norm = drawn.index.norm.clone()
        norm[-64:] = 0  # what RoPE turns
        half = drawn.index.wkv[: len(norm)]
        index = replace(drawn.index, norm=norm, wkv=torch.cat((half, half)))
        return replace(drawn, index=index)

    return replace(repeated(inputs, 1), weights_of=weights)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ([(QUERY, "query"), (QUERY, "weights")], r"query\.query: .* made from equal input"),
        ([(INDEX, "scores")], r"index\.scores: every query scores all its entries alike"),
    ],
)
def test_a_constant_is_refused_where_it_is_all_that_is_shown(
    keys: list[StageKey], why: str, judge: Judge, small_inputs: Load
) -> None:
    inputs = equal_keys(small_inputs(tokens=136, layers=(0,)))
    candidate = WrappedCandidate(keep(*keys), shown=frozenset(keys))

    with pytest.raises(ValueError, match=why):
        judge(inputs, candidate)
    assert judge(replace(inputs, constant=True), candidate).result.verdict == "match"
    assert judge(small_inputs(tokens=136, layers=(0,)), candidate).result.verdict == "match"


def test_a_candidate_that_returns_a_constant_differs(judge: Judge, small_inputs: Load) -> None:
    """The reference's rows say whether a stage is constant, never the candidate's."""

    def constant(_: LayerInputs, observed: Observed) -> Observed:
        rows = observed.dense[MAIN, "normed"]
        return with_dense(observed, (MAIN, "normed"), rows[:1].expand_as(rows).clone())

    found = judge(small_inputs(tokens=136, layers=(0,)), Changed(constant)).result
    assert found.verdict == "differ"


def test_a_recording_declares_its_kind_too(
    cli: Cli,
    recorded: Callable[..., Path],
    manifest: Callable[[Path, Callable[[dict[str, object]], None]], None],
) -> None:
    """What a kind declares holds for `verify` and `diff` of what was recorded from it."""
    words = ("--tokens", "136", "--layers", "0", "--input", "synthetic:constant")
    a, b = (recorded(who, name, *words) for who, name in (("bf16", "a"), (FP8, "b")))

    assert cli("verify", "--input", b, "--candidate", FP8, "--quiet").returncode == 0
    assert cli("diff", a, b, "--quiet").returncode == 0
    for recording in (a, b):
        manifest(recording, lambda record: record.update(input_name="somewhere"))
    refused = cli("diff", a, b, "--quiet")
    assert refused.returncode == 2
    assert "declares itself constant (synthetic:constant)" in refused.stderr
    # Equal bytes are a match, whatever they hold.
    assert cli("diff", b, b, "--quiet").returncode == 0


def test_a_selection_that_leaves_nothing_out_is_refused(judge: Judge, small_inputs: Load) -> None:
    """Eight picks of eight entries: every query picks all it sees."""
    inputs = small_inputs(tokens=33, layers=(0,))

    with pytest.raises(ValueError, match="k 8 is no smaller than the pool"):
        judge(inputs, create(FP8))
    assert judge(small_inputs(tokens=36, layers=(0,)), create(FP8)).result.verdict == "match"


@pytest.mark.parametrize(("scale", "why"), [(1e7, "wider than the data"), (1e-3, "half an ULP")])
def test_limits_that_cannot_judge_are_refused(
    scale: float, why: str, cli: Cli, small_model: Path
) -> None:
    Path("limits.toml").write_text(f"scale = {scale!r}")
    words = ["verify", "--input", "synthetic", "--model", small_model, "--tokens", "136"]

    found = cli(*words, "--candidate", FP8, "--limits", "limits.toml", "--quiet")

    assert found.returncode == 2
    assert why in found.stdout


def test_zeros_never_pass_a_limit_that_is_accepted(
    judge: Judge, small_inputs: Load, tmp_path: Path
) -> None:
    """Just below the widest limit the stage is judged, and zeros fail it."""
    inputs = small_inputs(tokens=136, layers=(0,))
    key: StageKey = (INDEX, "pooled")
    sound = judge(inputs, create(FP8)).result.candidates[0].layers[0].stages
    widest = next(s.limit.widest for s in sound if (s.path, s.stage) == key and s.limit)
    assert widest is not None

    def zeros(_: LayerInputs, observed: Observed) -> Observed:
        return with_dense(observed, key, torch.zeros_like(observed.dense[key]))

    for factor, verdict in ((0.99, "differ"), (1.01, "cannot-judge")):
        path = tmp_path / "limits.toml"
        path.write_text(f"[pooled]\nvalue = {widest * factor!r}")
        found = judge(inputs, Changed(zeros), limits=Limits.load(path)).result
        judged = found.candidates[0].layers[0].stages
        assert [s.verdict for s in judged if (s.path, s.stage) == key] == [verdict]


def test_the_range_of_limits_in_words() -> None:
    assert limit_fault(1.0, 0.1, 1e5) is None
    assert limit_fault(1.0, None, None) is None
    assert "smaller limit" in (limit_fault(1e5, 0.1, 1e5) or "")
    assert "larger limit" in (limit_fault(0.05, 0.1, 1e5) or "")
    assert passing_limit(float("inf"), [], None, None) is None
    assert passing_limit(2e5, [], None, 1e5) is None
    assert passing_limit(0.01, [], 0.1, None) == pytest.approx(0.1)


def test_verify_changes_nothing_of_what_it_was_handed(judge: Judge, small_inputs: Load) -> None:
    before: list[bytes] = []

    def bytes_of(observed: Observed) -> list[bytes]:
        tensors = [*observed.dense.values(), *(p.pool for p in observed.stored.values())]
        if observed.query is not None and observed.topk is not None:
            tensors += [observed.query.codes, observed.query.weights, observed.topk]
        return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]

    def kept(_: LayerInputs, observed: Observed) -> Observed:
        before.extend(bytes_of(observed))
        return observed

    candidate = Changed(kept)
    inputs = small_inputs(tokens=400)
    hidden = {layer: states.clone() for layer, states in inputs.states.items()}

    judge(inputs, candidate, swap=True)

    assert before == [part for observed in candidate.returned for part in bytes_of(observed)]
    assert all(torch.equal(inputs.states[layer], states) for layer, states in hidden.items())


def test_rows_that_nobody_wrote_show(
    judge: Judge, small_inputs: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is left out keeps its 0xFF, in every run: no earlier answer shines through."""
    whole = KeySide._norm

    def skips(self: KeySide, block: EntryBlock) -> None:
        if block.first == 0 and self._rows["normed"].shape[1] == 512:
            assert bool((self._rows["normed"].view("int32") == -1).all())
            return
        whole(self, block)

    monkeypatch.setattr(KeySide, "_norm", skips)

    result = judge(small_inputs(tokens=136, layers=(0,)), create(FP8), repeat=2).result

    first = result.candidates[0].first_divergence
    assert result.verdict == "differ"
    assert first is not None
    assert (first.path, first.stage, first.entry) == (MAIN, "normed", 0)
    assert "nan" in first.detail


def test_a_refusal_is_exit_code_2_and_one_message(
    cli: Cli, candidate_named: Callable[[str, Candidate], str], small_model: Path
) -> None:
    words = ["verify", "--input", "synthetic", "--model", small_model, "--tokens", "136"]
    name = candidate_named("test:changed", Changed(given_itself))

    found = cli(*words, "--candidate", name)

    assert found.returncode == 2
    assert "expected a tensor that the candidate computed" in found.stderr
