"""Capture from a live model: what is kept, what is refused, and a whole way to a verdict."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from needlepoint.verify.diff.capture import Capture, CaptureError, Tap, first_input
from needlepoint.verify.diff.files import DumpError, DumpFiles
from needlepoint.verify.diff.mapping import MAPPING_FILE, load_mapping
from needlepoint.verify.recording.results import load_result

Cli = Callable[..., CompletedProcess[str]]
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "capture_transformers.py"


class Layer(nn.Module):
    """A projection that writes every pass into the same buffer, as serving engines do."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(4, 6, bias=False)
        self.buffer = torch.zeros(1, 8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.buffer[:, : x.shape[1]]
        out.copy_(self.kv(x))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer(x)
        return x


TAPS = [Tap(n, "main.projected.kv", f"layers.{n}") for n in (0, 1)]
ROWS = torch.arange(3), torch.zeros(3, dtype=torch.int64)


def run(capture: Capture, model: nn.Module, *passes: Tensor) -> None:
    first = 0
    with torch.no_grad():
        for x in passes:
            rows = torch.arange(first, first + x.shape[1])
            with capture.step(rows, torch.zeros_like(rows)):
                model(x)
            first += x.shape[1]


def test_every_pass_is_cloned_before_the_next_overwrites_it() -> None:
    torch.manual_seed(0)
    model, one, two = Model(), torch.randn(1, 3, 4), torch.randn(1, 2, 4)
    with Capture(model, TAPS) as capture:
        run(capture, model, one, two)
    for step, x in enumerate((one, two)):
        wanted = model.layers[1].kv(x)[0].detach()  # type: ignore[operator]
        assert torch.equal(capture.tensor(f"layer1.main.projected.kv.{step}"), wanted)


def test_layers_and_tokens_are_filtered_and_hooks_go_away() -> None:
    model = Model()
    with Capture(
        model, TAPS, layers=frozenset({1}), keep=lambda positions: positions < 2
    ) as capture:
        run(capture, model, torch.ones(1, 3, 4), torch.ones(1, 1, 4))
        model(torch.ones(1, 3, 4))  # outside of a pass: a warm-up
    assert capture.tensor("layer1.main.projected.kv.0").shape == (2, 6)
    assert capture.tensor("layer1.main.projected.kv.1").shape == (0, 6)
    with pytest.raises(CaptureError, match=r"layer0.main.projected.kv.0: not captured"):
        capture.tensor("layer0.main.projected.kv.0")
    assert not any(module._forward_hooks for module in model.modules())


def test_a_dump_that_the_reader_takes(tmp_path: Path) -> None:
    model = Model()
    with Capture(model, [*TAPS, Tap(0, "main.input", "layers.0", first_input)]) as capture:
        run(capture, model, torch.ones(1, 3, 4))
        capture.add("pages", torch.zeros(2, 8, dtype=torch.uint8))
    with pytest.raises(DumpError, match="format: got"):
        capture.save(tmp_path / "bad", name="x", profile="y", key_format="fp9", requests=[3])
    assert list(tmp_path.iterdir()) == []  # whole or not at all
    out = capture.save(tmp_path / "out", name="x", profile="vllm", key_format="fp8", requests=[3])
    assert load_mapping(out / MAPPING_FILE).layers == (0, 1)
    assert DumpFiles(out).tensor("pages").shape == (2, 8)
    with pytest.raises(CaptureError, match="is there already"):
        capture.save(out, name="x", profile="vllm", key_format="fp8", requests=[3])


@pytest.mark.parametrize(
    ("taps", "options", "message"),
    [
        ([Tap(0, "main.projected.kv", "layers.7")], {}, "the model has no module of this name"),
        ([Tap(0, "main.kv", "layers.0")], {}, "stage 'main.kv': expected one of main.input"),
        (
            [Tap(0, "main.pooled", "layers.0")],
            {"keep": lambda positions: positions < 1},
            "main.pooled has a row a window",
        ),
        (
            TAPS,
            {"budget_bytes": 100},
            r"layer0.main.projected.kv.0: 72 bytes more than the 52 left",
        ),
        ([Tap(0, "main.projected.kv", "layers.0.unused")], {}, "was not called"),
        ([TAPS[0], TAPS[0]], {}, "captured twice in one pass"),
    ],
)
def test_what_cannot_be_captured(taps: list[Tap], options: dict[str, object], message: str) -> None:
    model = Model()
    model.layers[0].unused = nn.Linear(1, 1)
    with pytest.raises(CaptureError, match=message):
        with Capture(model, taps, **options) as capture:  # type: ignore[arg-type]
            run(capture, model, torch.ones(1, 3, 4))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_window_stage_that_never_came_is_missed_on_saving(tmp_path: Path) -> None:
    model = Model()
    model.layers[0].unused = nn.Linear(1, 1)
    with Capture(model, [Tap(0, "main.pooled", "layers.0.unused")]) as capture:
        run(capture, model, torch.ones(1, 3, 4))
    with pytest.raises(CaptureError, match="was never called"):
        capture.save(tmp_path / "x", name="x", profile="vllm", key_format="fp8", requests=[3])


def test_nothing_captured_is_no_dump(tmp_path: Path) -> None:
    with Capture(Model(), TAPS) as capture:
        pass
    with pytest.raises(CaptureError, match="no pass was captured"):
        capture.save(tmp_path / "x", name="x", profile="vllm", key_format="fp8", requests=[3])


def test_compiled_models_are_refused() -> None:
    compiled = torch.compile(Model(), backend="eager")
    with pytest.raises(CaptureError, match="is compiled: hooks do not see its runs"):
        Capture(compiled, TAPS).__enter__()  # type: ignore[arg-type]


def test_a_model_that_is_compiled_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    with Capture(model, TAPS) as capture, capture.step(*ROWS):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # while it is traced
        with pytest.raises(CaptureError, match="is being compiled"):
            model(torch.ones(1, 3, 4))
        monkeypatch.undo()
        model(torch.ones(1, 3, 4))


def test_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    with Capture(model, TAPS) as capture, capture.step(*ROWS):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(CaptureError, match="CUDA graph capture: replays do not call hooks"):
            model(torch.ones(1, 3, 4))
        monkeypatch.undo()
        model(torch.ones(1, 3, 4))


@pytest.fixture(scope="module")
def example() -> ModuleType:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("the package transformers (extra `engines`) is not installed")
    spec = importlib.util.spec_from_file_location("capture_transformers", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(cli: Cli) -> CompletedProcess[str]:
    recorded = cli(
        *("record", "--input", "states", "--checkpoint", "weights", "--layers", "0"),
        *("--out", "reference"),
    )
    assert recorded.returncode == 0, recorded.stderr
    return cli("diff", "reference", "captured", "--json", "result.json")


def test_from_a_running_model_to_a_verdict(example: ModuleType, cli: Cli) -> None:
    """Three passes with a cache, their own weights through a checkpoint, every stage they have."""
    example.main()

    done = judge(cli)

    assert done.returncode == 0, done.stdout
    result = load_result(Path("result.json"))
    assert (result.verdict, result.detail, result.counts.compared) == ("match", None, 12)
    assert "3 passes placed by position" in result.candidates[0].kernel.path_taken


def test_a_model_cast_as_a_whole_loses_its_rotary_frequencies(
    example: ModuleType, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``model.to(bfloat16)`` casts the frequencies too; the first roped stage shows it."""
    build = example.DeepseekV4Model

    def cast(config: object) -> nn.Module:
        model: nn.Module = build(config)
        for name, buffer in model.named_buffers():
            if "inv_freq" in name:
                buffer.data = buffer.data.to(torch.bfloat16)
        return model

    monkeypatch.setattr(example, "DeepseekV4Model", cast)
    example.main()

    done = judge(cli)

    assert done.returncode == 1
    assert re.match(r"differ: layer 0 query.query, request 0 position \d+\n", done.stdout)
