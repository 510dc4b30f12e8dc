from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from needlepoint.reference.config import MODELS
from needlepoint.reference.weights import random_layer_weights
from needlepoint.verify.inputs.checks import default_layers, tensor_digest
from needlepoint.verify.inputs.load import Inputs, load_inputs, mini_directory
from needlepoint.verify.inputs.synthetic import KINDS, synthetic_hidden, synthetic_weights
from needlepoint.verify.recording.recording import Manifest, RecordingWriter


def made(directory: Path, tensors: dict[str, Tensor], requests: list[int], **more: object) -> str:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "t.safetensors")
    records = {
        name: {"file": "t.safetensors", "dtype": "BF16", "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    }
    manifest = {
        "schema": "needlepoint.recording/1", "kind": "input", "model": "mini",
        "requests": requests, "tensors": records,
    }  # fmt: skip
    (directory / "manifest.json").write_text(json.dumps(manifest | more))
    return str(directory)


def states(tokens: int, width: int = 384) -> Tensor:
    values = torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens))
    return values.to(torch.bfloat16)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_mini_is_the_shipped_recording() -> None:
    inputs = load_inputs("mini")
    manifest = json.loads((mini_directory() / "manifest.json").read_text())

    assert inputs.name == "mini"
    assert inputs.config == MODELS["mini"]
    assert list(inputs.requests) == manifest["requests"]
    assert inputs.tokens >= 8192
    assert inputs.layers == (0, 1)
    assert inputs.hidden(0).dtype is torch.bfloat16
    assert inputs.hidden(0).shape == (inputs.tokens, 384)
    assert inputs.hidden(0) is inputs.hidden(1)
    assert inputs.sha256 == digest(inputs.hidden(0))
    # No two tokens are alike: the text does not repeat and the encoder sees context.
    assert len(torch.unique(inputs.hidden(0)[:2048], dim=0)) == 2048


def test_a_writer_made_recording_is_an_input(tmp_path: Path) -> None:
    hidden = states(200)
    head = Manifest(kind="input", model="mini", requests=(150, 50), tensors={})
    with RecordingWriter(tmp_path / "out", head, hidden):
        pass

    inputs = load_inputs(str(tmp_path / "out"))

    assert torch.equal(inputs.hidden(0), hidden)
    assert inputs.requests == (150, 50)
    assert inputs.name == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("tokens", "requests"),
    [(200, (150, 50)), (199, (150, 49)), (151, (150, 1)), (150, (150,)), (128, (128,))],
)
def test_the_first_tokens_are_kept(tmp_path: Path, tokens: int, requests: tuple[int, ...]) -> None:
    hidden = states(200)
    source = made(tmp_path / "in", {"input": hidden}, [150, 50])

    inputs = load_inputs(source, tokens=tokens)

    assert inputs.requests == requests
    assert inputs.tokens == tokens
    assert torch.equal(inputs.hidden(1), hidden[:tokens])
    assert inputs.sha256 == digest(hidden[:tokens])


def test_layers_may_have_their_own_input(tmp_path: Path) -> None:
    one, two = states(130), states(130) + 1
    source = made(tmp_path / "in", {"input": one, "layer1.input": two}, [130])

    inputs = load_inputs(source)

    assert torch.equal(inputs.hidden(0), one)
    assert torch.equal(inputs.hidden(1), two)
    assert inputs.sha256 == tensor_digest([one, two])
    assert inputs.sha256 != tensor_digest([two, one])
    only = made(tmp_path / "only", {"layer1.input": two}, [130])
    with pytest.raises(ValueError, match=r"layer 0: neither tensor layer0\.input nor tensor input"):
        load_inputs(only)
    assert load_inputs(only, layers=(1,)).layers == (1,)


def test_weights_are_random_by_seed_and_adjusted_by_kind() -> None:
    inputs = load_inputs("synthetic:ties", seed=5)

    got, plain = inputs.weights(0), random_layer_weights(MODELS["mini"], 0, 5)
    want = synthetic_weights("ties", plain, 5)
    assert got.index_wq_b is not None
    assert want.index_wq_b is not None
    assert plain.index_wq_b is not None
    assert torch.equal(got.index_wq_b, want.index_wq_b)
    assert not torch.equal(got.index_wq_b, plain.index_wq_b)
    assert torch.equal(load_inputs("mini", seed=5).weights(1).wq_a, inputs.weights(1).wq_a)
    assert not torch.equal(load_inputs("mini", seed=6).weights(1).wq_a, inputs.weights(1).wq_a)


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_kinds_by_name(kind: str) -> None:
    inputs = load_inputs(f"synthetic:{kind}", tokens=140, seed=2)

    assert inputs.name == f"synthetic:{kind}"
    assert inputs.requests == (140,)
    assert torch.equal(inputs.hidden(0), synthetic_hidden(kind, (140,), 384, 2))
    assert inputs.sha256 == digest(inputs.hidden(0))


def test_synthetic_lengths_leave_residues() -> None:
    assert load_inputs("synthetic").name == "synthetic:gaussian"
    assert load_inputs("synthetic").requests == (2051, 130, 123)
    assert load_inputs("synthetic", tokens=383).requests == (130, 130, 123)
    assert load_inputs("synthetic", tokens=382).requests == (382,)


def test_models_choose_width_and_layers(tmp_path: Path) -> None:
    inputs = load_inputs("synthetic", model="v4-flash", tokens=130)

    assert inputs.config == MODELS["v4-flash"]
    assert inputs.hidden(2).shape == (130, 4096)
    assert inputs.layers == (2, 3)
    assert load_inputs("synthetic", model="v4-flash", tokens=130, layers=(7, 4, 4)).layers == (4, 7)
    own = MODELS["mini"].__class__(**(vars(MODELS["mini"]) | {"n_heads": 2, "name": "x"}))
    shapes = vars(own) | {"compress_ratios": [4, 128], "index_rope": own.index_rope.value}
    source = made(tmp_path / "in", {"input": states(130)}, [130], model=shapes)
    assert load_inputs(source).config.n_heads == 2
    assert load_inputs(source, model="mini").config == MODELS["mini"]


def test_default_layers_are_the_first_of_each_ratio() -> None:
    assert default_layers(MODELS["v4-flash"]) == (2, 3)
    assert default_layers(MODELS["v4-pro"]) == (0, 2)
    plain = MODELS["mini"].__class__(**(vars(MODELS["mini"]) | {"compress_ratios": (0, 0)}))
    with pytest.raises(ValueError, match="no layer has a compressor"):
        default_layers(plain)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nothing", {}, "input 'nothing': neither mini, one of synthetic:gaussian, "),
        ("synthetic:uniform", {}, "synthetic kind 'uniform': expected one of gaussian"),
        ("mini", {"tokens": 0}, "tokens 0: expected at least 1"),
        ("mini", {"tokens": -5}, "tokens -5: expected at least 1"),
        ("mini", {"tokens": 9000}, "tokens 9000: the recording has 8585; ask for fewer"),
        ("mini", {"tokens": 3}, "layer 0: ratio 4 needs a request of at least 4 tokens and the"),
        ("mini", {"tokens": 127}, "layer 1: ratio 128 needs .* the longest has 127; give more"),
        ("synthetic", {"tokens": 127}, "layer 1: ratio 128 needs"),
        ("mini", {"layers": (2,)}, "layer 2: model 'mini' has layers 0 to 1"),
        ("mini", {"layers": ()}, r"layers \[\]: none has a compressor"),
        (
            "synthetic",
            {"model": "v4-flash", "tokens": 130, "layers": (0,)},
            r"layers \[2, 3\] have",
        ),
        ("mini", {"model": "v4-flash"}, "384 wide, model 'v4-flash' expects 4096"),
        ("mini", {"model": "v5"}, "model 'v5': neither a preset"),
        ("mini", {"seed": -1}, "seed -1: expected 0"),
        ("mini", {"seed": 1 << 63}, "seed 9223372036854775808: expected 0"),
    ],
)
def test_bad_input_is_named(source: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_inputs(source, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "name"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf")]
)
def test_values_that_are_not_finite_are_named_by_token(
    tmp_path: Path, value: float, name: str
) -> None:
    hidden = states(5000)
    hidden[4860, 17] = value
    source = made(tmp_path / "in", {"input": hidden}, [4800, 200])

    with pytest.raises(ValueError, match=f"{name} at request 1, position 60, dim 17; expected"):
        load_inputs(source)
    # What is not used is not judged.
    assert load_inputs(source, tokens=4860).tokens == 4860


def test_an_input_knows_its_layers() -> None:
    inputs: Inputs = load_inputs("mini", layers=(1,), tokens=128)

    for ask in (inputs.hidden, inputs.weights):
        with pytest.raises(ValueError, match=r"layer 0: this input has layers \[1\]"):
            ask(0)


def test_a_missing_fixture_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("needlepoint.verify.inputs.load.files", lambda package: tmp_path)

    with pytest.raises(ValueError, match=r"input mini: .*mini is missing; install the pack"):
        load_inputs("mini")


def test_a_recording_brings_its_own_seed_and_kind(tmp_path: Path) -> None:
    made = load_inputs("synthetic:ties", tokens=140, seed=3)
    head = Manifest.model_validate(
        {
            "kind": "input",
            "model": "mini",
            "requests": made.requests,
            "tensors": {},
            "seed": 3,
            "input_name": made.name,
        }
    )
    with RecordingWriter(tmp_path / "r", head, made.hidden(1)):
        pass
    again = load_inputs(str(tmp_path / "r"), layers=(1,))
    assert again.seed == 3
    assert torch.equal(again.weights(1).wq_a, made.weights(1).wq_a)
    main, meant = again.weights(1).main, made.weights(1).main
    assert main is not None
    assert meant is not None
    assert torch.equal(main.norm, meant.norm)
    other = load_inputs(str(tmp_path / "r"), layers=(1,), seed=4)
    assert not torch.equal(other.weights(1).wq_a, made.weights(1).wq_a)


@pytest.mark.parametrize("model", ["mini", "v4-flash", "v4-pro"])
def test_default_synthetic_input_exercises_the_selection(model: str) -> None:
    config = MODELS[model]
    lengths = load_inputs("synthetic", model=model).requests
    assert lengths[0] // 4 >= 2 * config.index_topk
    assert {length % 4 for length in lengths} >= {2, 3}
