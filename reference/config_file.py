"""Model shapes from a ``config.json``: the published one, transformers' own, or the official one.

Files of DeepSeek-V3.2 and GLM-5 are read too: they have ``kv_lora_rank`` and no ratios, and each of
their layers has one index key a token. The same number has up to four spellings: the published
Hugging Face file (``hidden_size``, ``rope_scaling.factor``), the file that transformers writes back
(``rope_parameters.compress``, ``layer_types``) and the official ``inference/config.json`` (``dim``,
``rope_factor``).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from needlepoint.reference.config import MODELS, ModelConfig
from needlepoint.reference.formats.names import PER_TOKEN, RopeLayout

MAX_BYTES = 1 << 20
"""A configuration is a few kilobytes; a larger file is something else."""

_MOST = 1 << 24
"""Every size of a model is far below; a larger one would be allocated before it is noticed."""

_INTEGERS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "dim"),
    "n_heads": ("num_attention_heads", "n_heads"),
    "head_dim": ("head_dim",),
    "rope_head_dim": ("qk_rope_head_dim", "rope_head_dim"),
    "q_lora_rank": ("q_lora_rank",),
    "window_size": ("sliding_window", "window_size"),
    "index_n_heads": ("index_n_heads",),
    "index_head_dim": ("index_head_dim",),
    "index_topk": ("index_topk",),
    "original_length": (
        "rope_scaling.original_max_position_embeddings",
        "rope_parameters.compress.original_max_position_embeddings",
        "rope_parameters.original_max_position_embeddings",
        "original_seq_len",
    ),
}
_NUMBERS: dict[str, tuple[str, ...]] = {
    "rope_theta": ("rope_theta", "rope_parameters.main.rope_theta"),
    "compress_rope_theta": ("compress_rope_theta", "rope_parameters.compress.rope_theta"),
    "rope_factor": (
        "rope_scaling.factor",
        "rope_parameters.compress.factor",
        "rope_parameters.factor",
        "rope_factor",
    ),
    "beta_fast": (
        "rope_scaling.beta_fast",
        "rope_parameters.compress.beta_fast",
        "rope_parameters.beta_fast",
        "beta_fast",
    ),
    "beta_slow": (
        "rope_scaling.beta_slow",
        "rope_parameters.compress.beta_slow",
        "rope_parameters.beta_slow",
        "beta_slow",
    ),
    "norm_eps": ("rms_norm_eps", "norm_eps"),
}
_ROPE_TYPES = ("rope_scaling", "rope_parameters.compress", "rope_parameters")
_YARN = ("rope_factor", "original_length", "beta_fast", "beta_slow")
_DEFAULTS: dict[str, float] = {"norm_eps": 1e-6}  # the one key that published files leave out
_PAIRED = {"deepseek_v32": False, "glm_moe_dsa": True}
"""Whether a model's indexer pairs adjacent dims, where its file does not say so."""
_OWN_INDEXER = {"full": PER_TOKEN, "shared": 0}
_NOT_PER_TOKEN = ("head_dim", "window_size", "rope_theta")
"""What only the attention of DeepSeek-V4 has."""
_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def load_config(name: str | Path) -> ModelConfig:
    """Return a preset by name, or read a ``config.json`` (or the directory that holds one).

    Raises
    ------
    ValueError
        For an unknown name, a file that cannot be read as a JSON object of at most
        :data:`MAX_BYTES`, or a key that is missing, contradicts another spelling or has a value of
        the wrong type or range; the message names file, key and value.
    """
    if str(name) in MODELS:
        return MODELS[str(name)]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    return _ConfigFile(path, _read(path, str(name))).model()


def _read(path: Path, name: str) -> Mapping[str, object]:
    if not path.is_file():
        raise ValueError(
            f"model {name!r}: neither a preset ({', '.join(MODELS)}) nor a file; pass one of "
            "these names or the path of a config.json"
        )
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path}: {size} bytes, expected a model configuration of at most 1 MiB")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a JSON {type(values).__name__}, expected an object")
    return values


class _ConfigFile:
    """One configuration with its path, for messages."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self.values = values

    def model(self) -> ModelConfig:
        yarn_off = not self._has_yarn()
        per_token = self._look_up("kv_lora_rank") is not None
        unread = (_YARN if yarn_off else ()) + (_NOT_PER_TOKEN if per_token else ())
        integers = {k: v for k, v in _INTEGERS.items() if k not in unread}
        numbers = {k: v for k, v in _NUMBERS.items() if k not in unread}
        if per_token:
            numbers["compress_rope_theta"] = ("rope_theta", "rope_parameters.rope_theta")
        whole = {key: self._integer(key, spellings) for key, spellings in integers.items()}
        real = {key: self._number(key, spellings) for key, spellings in numbers.items()}
        if yarn_off:
            whole["original_length"] = 0
        return ModelConfig(
            name=str(self.path),
            compress_ratios=self._indexers() if per_token else self._ratios(),
            index_rope=self._index_rope() if per_token else RopeLayout.TRAILING_PAIRS,
            **whole,
            **real,  # type: ignore[arg-type]
        )

    def _refuse(self, key: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{self.path}: {key} is {value!r}, expected {expected}")

    def _look_up(self, dotted: str) -> object:
        node: object = self.values
        for part in dotted.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def _find(self, key: str, spellings: tuple[str, ...]) -> tuple[str, object]:
        found = [(s, v) for s in spellings if (v := self._look_up(s)) is not None]
        share = "partial_rotary_factor"
        if not found and key == "rope_head_dim" and self._look_up(share) is not None:
            return share, self._partial_rotary(share)
        if not found and key in _DEFAULTS:
            return spellings[0], _DEFAULTS[key]
        if not found:
            raise ValueError(f"{self.path}: no {' or '.join(spellings)}; the model needs {key}")
        for spelling, value in found[1:]:
            if value != found[0][1]:
                raise self._refuse(spelling, value, f"{found[0][0]}'s value {found[0][1]!r}")
        return found[0]

    def _integer(self, key: str, spellings: tuple[str, ...]) -> int:
        spelling, value = self._find(key, spellings)
        low = 0 if key == "original_length" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self._refuse(spelling, value, f"an integer of at least {low}")
        if value > _MOST:
            raise self._refuse(spelling, value, f"an integer of at most {_MOST}")
        return value

    def _number(self, key: str, spellings: tuple[str, ...]) -> float:
        spelling, value = self._find(key, spellings)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refuse(spelling, value, "a number")
        if not 0 < value < math.inf:
            raise self._refuse(spelling, value, "a positive finite number")
        if value > sys.float_info.max:  # an integer that float() cannot hold
            raise self._refuse(spelling, value, "a number that a float holds")
        return float(value)

    def _partial_rotary(self, spelling: str) -> int:
        share = self._number(spelling, (spelling,))
        dims = share * self._integer("head_dim", ("head_dim",))
        if dims != int(dims):
            raise self._refuse(spelling, share, "a whole number of rotary dims")
        return int(dims)

    def _has_yarn(self) -> bool:
        for parent in _ROPE_TYPES:
            for key in (f"{parent}.rope_type", f"{parent}.type"):
                kind = self._look_up(key)
                if kind not in (None, "yarn", "default"):
                    raise self._refuse(key, kind, "'yarn' or 'default'")
                if kind is not None:
                    return kind == "yarn"
        return True

    def _ratios(self) -> tuple[int, ...]:
        key, ratios = "compress_ratios", self._look_up("compress_ratios")
        if ratios is None:
            key, ratios = "layer_types", self._from_layer_types()
        if not isinstance(ratios, list) or any(type(r) is not int or r == 1 for r in ratios):
            raise self._refuse(key, ratios, "a list of integers 0, 4 or 128")
        for spelling in ("num_hidden_layers", "n_layers"):
            layers = self._look_up(spelling)
            if layers is not None and self._integer(spelling, (spelling,)) > len(ratios):
                raise self._refuse(spelling, layers, f"at most the {len(ratios)} entries of {key}")
        return tuple(ratios)

    def _indexers(self) -> tuple[int, ...]:
        """Return a ratio for each layer of a model with one index key a token."""
        pooled = self._look_up("index_kpool")
        if pooled not in (None, 1):
            raise self._refuse("index_kpool", pooled, "1: pooled index keys are not modelled")
        spellings = ("num_hidden_layers", "n_layers")
        layers, types = self._integer("layers", spellings), self._look_up("indexer_types")
        if types is None:
            for key in ("index_topk_freq", "index_topk_pattern"):
                if (value := self._look_up(key)) not in (None, 1):
                    raise self._refuse(key, value, "a list indexer_types that spells it out")
            return (PER_TOKEN,) * layers
        if (
            not isinstance(types, list)
            or len(types) != layers
            or any(not isinstance(t, str) or t not in _OWN_INDEXER for t in types)
        ):
            raise self._refuse("indexer_types", types, f"{layers} times 'full' or 'shared'")
        return tuple(_OWN_INDEXER[t] for t in types)

    def _index_rope(self) -> RopeLayout:
        key = "indexer_rope_interleave"
        paired = self._look_up(key)
        if paired is None:
            paired = _PAIRED.get(str(self._look_up("model_type")))
        if not isinstance(paired, bool):
            models = " or ".join(_PAIRED)
            raise self._refuse(key, paired, f"true or false, or a model_type of {models}")
        return RopeLayout.LEADING_PAIRS if paired else RopeLayout.LEADING_HALVES

    def _from_layer_types(self) -> list[object]:
        types = self._look_up("layer_types")
        rates = self._look_up("compress_rates")
        if types is None:
            raise ValueError(
                f"{self.path}: no compress_ratios or layer_types; the model needs a ratio for "
                "each layer (defaults differ from the published schedule)"
            )
        names = isinstance(types, list) and all(isinstance(t, str) for t in types)
        if not isinstance(types, list) or not names or any(t not in _LAYER_TYPES for t in types):
            raise self._refuse("layer_types", types, f"a list of {sorted(_LAYER_TYPES)}")
        table: dict[str, object] = {**_LAYER_TYPES, **(rates if isinstance(rates, dict) else {})}
        return [table[t] for t in types]
