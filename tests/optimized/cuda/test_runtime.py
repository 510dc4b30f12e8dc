"""Launches by name, without a card: what reaches the compiled function, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from needlepoint.optimized.build.arguments import ScoreArguments, StepArguments, cpp_fields
from needlepoint.optimized.cuda import runtime
from needlepoint.optimized.cuda.scores import launch_scores, require_scores
from needlepoint.verify.workloads.scores import make_case

CPU = torch.device("cpu")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[object, ...]]]:
    """Return what compiled functions are called with, instead of a card."""
    calls: list[tuple[str, tuple[object, ...]]] = []
    monkeypatch.setattr(runtime, "require_cuda", lambda: "90a")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(
        runtime, "_function", lambda name, _: lambda *arguments: calls.append((name, arguments))
    )
    return calls


def test_a_function_gets_its_fields_in_the_order_of_the_list(
    launched: list[tuple[str, tuple[object, ...]]],
) -> None:
    names = [name for _, name in cpp_fields(StepArguments)]
    tensors = {name: torch.empty(0) for name in reversed(names[:6])}
    runtime.launch("step_norm_d128", StepArguments(eps=0.5, page_shift=3, **tensors), CPU)
    ((name, values),) = launched
    assert name == "step_norm_d128"
    assert all(value is tensors[own] for value, own in zip(values[:6], names, strict=False))
    assert dict(zip(names[6:], values[6:], strict=True)) == {"page_shift": 3, "eps": 0.5}


def test_names_must_agree() -> None:
    """What a dict in the right order used to hide."""
    empty = torch.empty(0)
    fields = dict.fromkeys(("positions", "rope", "pool", "rows", "norm_weight"), empty)
    with pytest.raises(TypeError, match="unexpected keyword argument 'slot'"):
        StepArguments(eps=0.5, page_shift=3, slot=empty, **fields)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'slots'"):
        StepArguments(eps=0.5, page_shift=3, **fields)


def test_arguments_of_another_kind_are_refused() -> None:
    empty = torch.empty(0)
    arguments = StepArguments(*(empty,) * 6, 0, 0.5)
    with pytest.raises(TypeError, match="query_fp32_fp8: StepArguments, expected QueryArguments"):
        runtime.launch("query_fp32_fp8", arguments, CPU)


def test_scores_pass_what_was_checked(
    launched: list[tuple[str, tuple[object, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "needlepoint.optimized.cuda.scores.require_same_device", lambda **tensors: CPU
    )
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    case = make_case("fp4", 8, (3, 0, 5), (40, 7, 9), device="cpu")
    keys, plan, out = case.paged(8), case.plan(), torch.empty(8, 40)
    launch_scores(require_scores(case.query, case.context_lens, keys, plan, 40), plan, out)

    ((name, values),) = launched
    assert name == "scores_mma_fp4_h32_narrow"
    passed = ScoreArguments(*values)  # type: ignore[arg-type]
    assert torch.equal(passed.context_lens, case.context_lens)
    assert passed.groups is plan.groups["narrow"]
    assert passed.keys.data_ptr() == keys.pages.data_ptr()
    assert passed.key_scales.data_ptr() == keys.pages.data_ptr() + 8 * 64
    assert passed.query_scales is case.query.scales
    assert (passed.page_shift, passed.columns, passed.overlap) == (3, 40, True)
    assert passed.out is out
