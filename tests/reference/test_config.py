from __future__ import annotations

from dataclasses import replace

import pytest

from needlepoint.reference.config import MODELS, ModelConfig


def test_flash_has_the_published_layers() -> None:
    ratios = MODELS["v4-flash"].compress_ratios
    assert len(ratios) == 44  # 43 layers and the MTP layer
    assert ratios[:2] == (0, 0)
    assert all(ratios[i] == 4 for i in range(2, 43, 2))
    assert all(ratios[i] == 128 for i in range(3, 42, 2))
    assert ratios[43] == 0
    assert (ratios.count(4), ratios.count(128)) == (21, 20)


def test_pro_has_the_published_layers() -> None:
    ratios = MODELS["v4-pro"].compress_ratios
    assert len(ratios) == 62
    assert ratios[:2] == (128, 128)
    assert all(ratios[i] == 4 for i in range(2, 61, 2))
    assert all(ratios[i] == 128 for i in range(3, 60, 2))
    assert ratios[61] == 0
    assert (ratios.count(4), ratios.count(128)) == (30, 31)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mini", (384, 4, 128, 8, 128)),
        ("v4-flash", (4096, 64, 1024, 64, 512)),
        ("v4-pro", (7168, 128, 1536, 64, 1024)),
    ],
)
def test_preset_shapes(name: str, shape: tuple[int, ...]) -> None:
    m = MODELS[name]
    assert (m.hidden_size, m.n_heads, m.q_lora_rank, m.index_n_heads, m.index_topk) == shape
    assert (m.head_dim, m.rope_head_dim, m.window_size, m.index_head_dim) == (512, 64, 128, 128)
    assert (m.rope_theta, m.compress_rope_theta, m.norm_eps) == (10000.0, 160000.0, 1e-6)
    assert (m.rope_factor, m.original_length, m.beta_fast, m.beta_slow) == (16.0, 65536, 32.0, 1.0)


def test_weight_scale_is_two_to_minus_six_and_a_half() -> None:
    assert MODELS["v4-flash"].index_weight_scale == pytest.approx(2**-6.5, rel=1e-15)
    assert MODELS["v4-flash"].index_weight_scale == pytest.approx(0.0110485434560398, rel=1e-12)


def test_yarn_range() -> None:
    assert MODELS["v4-flash"].rope(compressed=True).correction_range() == (15, 25)


def test_ratio_0_layers_have_no_yarn() -> None:
    rope = MODELS["v4-flash"].rope(compressed=False)
    assert (rope.theta, rope.original_length) == (10000.0, 0)


@pytest.mark.parametrize("layer", [-1, 2])
def test_unknown_layer(layer: int) -> None:
    with pytest.raises(ValueError, match=rf"layer {layer}.*0 to 1"):
        MODELS["mini"].ratio(layer)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("n_heads", -1),
        ("index_topk", 0),
        ("norm_eps", 0.0),
        ("norm_eps", float("nan")),
        ("original_length", -1),
        ("rope_head_dim", 63),
        ("rope_head_dim", 512),
        ("index_head_dim", 64),
        ("compress_ratios", ()),
        ("compress_ratios", (4, 7)),
    ],
)
def test_impossible_shapes_are_named(key: str, value: object) -> None:
    changes: dict[str, object] = {key: value}
    with pytest.raises(ValueError, match=f"'mini'.*{key}"):
        replace(MODELS["mini"], **changes)  # type: ignore[arg-type]


def test_models_are_immutable() -> None:
    model: ModelConfig = MODELS["mini"]
    with pytest.raises(AttributeError, match="cannot assign"):
        model.n_heads = 3  # type: ignore[misc]
