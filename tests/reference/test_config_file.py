from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from needlepoint.reference.config import MODELS
from needlepoint.reference.config_file import MAX_BYTES, load_config

FLASH = MODELS["v4-flash"]
FLASH_HF: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rms_norm_eps": 1e-6,
    "compress_ratios": list(FLASH.compress_ratios),
}
PRO_OFFICIAL: dict[str, Any] = {
    "dim": 7168,
    "n_layers": 61,
    "n_heads": 128,
    "head_dim": 512,
    "rope_head_dim": 64,
    "q_lora_rank": 1536,
    "window_size": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 1024,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "original_seq_len": 65536,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "compress_ratios": list(MODELS["v4-pro"].compress_ratios),
}
FLASH_TRANSFORMERS: dict[str, Any] = {
    **{
        k: v
        for k, v in FLASH_HF.items()
        if k not in ("rope_scaling", "compress_ratios", "qk_rope_head_dim")
    },
    "partial_rotary_factor": 0.125,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "layer_types": [
        {0: "sliding_attention", 4: "compressed_sparse_attention"}.get(
            r, "heavily_compressed_attention"
        )
        for r in FLASH.compress_ratios[:43]
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
}


def written(tmp_path: Path, values: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def same_model(path: Path, preset: str, layers: int) -> None:
    found, wanted = load_config(path), MODELS[preset]
    for key, value in vars(wanted).items():
        if key not in ("name", "compress_ratios"):
            assert getattr(found, key) == value, key
    assert found.compress_ratios == wanted.compress_ratios[:layers]
    assert found.name == str(path)


def test_presets_load_by_name() -> None:
    for name, model in MODELS.items():
        assert load_config(name) is model


def test_published_hugging_face_file(tmp_path: Path) -> None:
    same_model(written(tmp_path, FLASH_HF), "v4-flash", 44)


def test_official_file(tmp_path: Path) -> None:
    same_model(written(tmp_path, PRO_OFFICIAL), "v4-pro", 62)


def test_file_written_by_transformers(tmp_path: Path) -> None:
    same_model(written(tmp_path, FLASH_TRANSFORMERS), "v4-flash", 43)


V32_HF: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rms_norm_eps": 1e-6,
}
GLM_HF: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "head_dim": 192,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "indexer_rope_interleave": True,
    "indexer_types": ["full" if r else "shared" for r in MODELS["glm-5.2"].compress_ratios],
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "rms_norm_eps": 1e-5,
}


def test_files_of_one_index_key_a_token(tmp_path: Path) -> None:
    same_model(written(tmp_path, V32_HF), "v3.2", 61)
    glm = load_config(written(tmp_path, GLM_HF))
    wanted = MODELS["glm-5.2"]
    assert glm.rope(compressed=True) == wanted.rope(compressed=True)
    assert (glm.index_rope, glm.norm_eps, glm.index_norm_eps) == (wanted.index_rope, 1e-5, 1e-6)
    assert glm.compress_ratios == wanted.compress_ratios


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "another"}, "indexer_rope_interleave is None"),
        ({"indexer_rope_interleave": "yes"}, "indexer_rope_interleave is 'yes'"),
        ({"index_kpool": 4}, "index_kpool is 4"),
        ({"index_topk_freq": 4}, "index_topk_freq is 4"),
        ({"indexer_types": ["full"]}, "61 times"),
        ({"indexer_types": ["some"] * 61}, "61 times"),
        ({"indexer_types": "full"}, "61 times"),
    ],
)
def test_what_is_not_one_key_a_token_is_refused(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        load_config(written(tmp_path, V32_HF | change))


def test_a_ratio_of_one_in_a_list_of_ratios_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compress_ratios"):
        load_config(written(tmp_path, FLASH_HF | {"compress_ratios": [1] * 44}))


def test_directory_with_a_config(tmp_path: Path) -> None:
    written(tmp_path, FLASH_HF)
    assert load_config(tmp_path).hidden_size == 4096


def test_no_yarn(tmp_path: Path) -> None:
    config = {**FLASH_HF, "rope_scaling": {"type": "default"}}
    assert load_config(written(tmp_path, config)).rope(compressed=True).original_length == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "4096"),
        ("hidden_size", 0),
        ("hidden_size", 4096.0),
        ("head_dim", True),
        ("index_topk", -1),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rope_theta", False),
        ("rope_theta", 10**400),
        ("compress_ratios", [4, 7]),
        ("compress_ratios", [4.0]),
        ("compress_ratios", [True]),
        ("compress_ratios", []),
        ("compress_ratios", "4"),
        ("num_hidden_layers", 45),
        ("num_hidden_layers", "43"),
        ("qk_rope_head_dim", 63),
        ("index_head_dim", 64),
    ],
)
def test_bad_value_names_key_and_value(tmp_path: Path, key: str, value: object) -> None:
    path = written(tmp_path, {**FLASH_HF, key: value})
    field = {"qk_rope_head_dim": "rope_head_dim"}.get(key, key)
    with pytest.raises(ValueError, match=field) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert (str(value) if not isinstance(value, list) else "compress_ratios") in str(caught.value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"type": "linear", "factor": 16}, "linear"),
        ({**FLASH_HF["rope_scaling"], "factor": -1}, "-1"),
        ({**FLASH_HF["rope_scaling"], "original_max_position_embeddings": 0.5}, "0.5"),
    ],
)
def test_bad_scaling(tmp_path: Path, value: object, shown: str) -> None:
    with pytest.raises(ValueError, match=f"rope_scaling.*{shown}"):
        load_config(written(tmp_path, {**FLASH_HF, "rope_scaling": value}))


@pytest.mark.parametrize(
    "key",
    [
        k
        for k in FLASH_HF
        if k
        not in (
            "model_type",
            "vocab_size",
            "num_hidden_layers",
            "num_nextn_predict_layers",
            "num_key_value_heads",
            "rms_norm_eps",
        )
    ],
)
def test_missing_key_is_named(tmp_path: Path, key: str) -> None:
    spelling = {"rope_scaling": r"rope_scaling\.original"}
    config = {k: v for k, v in FLASH_HF.items() if k != key}
    with pytest.raises(ValueError, match=f"no .*{spelling.get(key, key)}"):
        load_config(written(tmp_path, config))


def test_norm_eps_is_the_one_default(tmp_path: Path) -> None:
    config = {k: v for k, v in FLASH_HF.items() if k != "rms_norm_eps"}
    assert load_config(written(tmp_path, config)).norm_eps == 1e-6


def test_contradicting_spellings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dim is 7168.*hidden_size.*4096"):
        load_config(written(tmp_path, {**FLASH_HF, "dim": 7168}))
    assert load_config(written(tmp_path, {**FLASH_HF, "dim": 4096})).hidden_size == 4096


@pytest.mark.parametrize("value", [["other_attention"], "sliding_attention", [3]])
def test_unknown_layer_types(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="layer_types"):
        load_config(written(tmp_path, {**FLASH_TRANSFORMERS, "layer_types": value}))


def test_unusual_rates_are_refused(tmp_path: Path) -> None:
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 128}
    with pytest.raises(ValueError, match="compress_ratios"):
        load_config(written(tmp_path, {**FLASH_TRANSFORMERS, "compress_rates": rates}))


def test_fractional_rotary_share(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"partial_rotary_factor is 0\.3"):
        load_config(written(tmp_path, {**FLASH_TRANSFORMERS, "partial_rotary_factor": 0.3}))


def test_unknown_name_lists_the_presets() -> None:
    with pytest.raises(ValueError, match=r"'v5'.*mini, v4-flash, v4-pro"):
        load_config("v5")


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "\xff", "[" * 100_000])
def test_not_a_json_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(path)


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(ValueError, match=str(MAX_BYTES + 1)):
        load_config(path)
