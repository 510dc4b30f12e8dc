"""Capture one layer of a small transformers DeepSeek-V4 model and judge what it did.

Writes three folders: ``weights`` (the model's own checkpoint), ``states`` (the hidden states that
entered the layer) and ``captured`` (what the layer made of them, three passes, one of them a single
token). With them:

    needlepoint record --input states --checkpoint weights --layers 0 --out reference
    needlepoint diff reference captured
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4Model

from needlepoint import Capture, Manifest, RecordingWriter, Tap, first_input

CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "sliding_window": 128,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 8,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": [4],
    "num_hidden_layers": 1,
}
YARN = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
SMALL = {
    "vocab_size": 256,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "o_groups": 1,
    "o_lora_rank": 16,
    "mlp_layer_types": ["moe"],
}
KEPT_IN_FP32 = ("position_bias", "norm", "sinks", "hc")
TOKENS, ATTENTION = 150, "layers.0.self_attn"


def norm_input(args: tuple, kwargs: dict, output: Tensor) -> Tensor:
    """Return the pooled rows: what goes into the norm."""
    return args[0]


def by_head(args: tuple, kwargs: dict, output: Tensor) -> Tensor:
    """Return projected queries with an axis of heads."""
    return output.unflatten(-1, (CONFIG["index_n_heads"], -1))


def head_weights(args: tuple, kwargs: dict, output: Tensor) -> Tensor:
    """Return the head weights with the two constants that their scorer applies."""
    return output.float() * CONFIG["index_n_heads"] ** -0.5 * CONFIG["index_head_dim"] ** -0.5


INDEXER = f"{ATTENTION}.compressor.indexer"
TAPS = [
    Tap(0, "main.input", ATTENTION, first_input),
    Tap(0, "main.pooled", f"{ATTENTION}.compressor.kv_norm", norm_input),
    Tap(0, "main.normed", f"{ATTENTION}.compressor.kv_norm"),
    Tap(0, "index.pooled", f"{INDEXER}.kv_norm", norm_input),
    Tap(0, "index.normed", f"{INDEXER}.kv_norm"),
    Tap(0, "query.projected.q", f"{INDEXER}.q_b_proj", by_head),
    Tap(0, "query.projected.weights", f"{INDEXER}.scorer.weights_proj"),
    Tap(0, "query.query.codes", f"{INDEXER}.scorer", first_input),
    Tap(0, "query.weights", f"{INDEXER}.scorer.weights_proj", head_weights),
    Tap(0, "index.scores", f"{INDEXER}.scorer"),
    Tap(0, "index.topk", INDEXER),
]
for path, prefix in (("main", f"{ATTENTION}.compressor"), ("index", INDEXER)):
    for part, module in (("kv", "kv_proj"), ("score", "gate_proj")):
        TAPS.append(Tap(0, f"{path}.projected.{part}", f"{prefix}.{module}"))


def main() -> None:
    """Build, run in three passes, capture and write."""
    torch.manual_seed(0)
    config = DeepseekV4Config(**CONFIG, **SMALL, rope_parameters={"rope_type": "yarn", **YARN})
    model = DeepseekV4Model(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "self_attn" in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        if not any(part in name for part in KEPT_IN_FP32):
            parameter.data = parameter.data.to(torch.bfloat16)
    # Not model.to(torch.bfloat16): that would cast the rotary frequencies too.

    tokens = torch.randint(256, (1, TOKENS))
    cache = DynamicCache(config=config)
    with torch.no_grad(), Capture(model, TAPS) as capture:
        for start, stop in ((0, 70), (70, 148), (148, TOKENS)):
            positions = torch.arange(start, stop)
            with capture.step(positions, torch.zeros_like(positions)):
                model(tokens[:, start:stop], cache=cache)
    capture.save(
        Path("captured"),
        name="transformers, captured",
        profile="transformers",
        key_format="bf16",
        requests=[TOKENS],
    )

    Path("weights").mkdir()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, "weights/model.safetensors")
    published = {**CONFIG, "rope_scaling": {"type": "yarn", **YARN}}
    Path("weights/config.json").write_text(json.dumps(published))

    hidden = torch.cat([capture.tensor(f"layer0.main.input.{step}") for step in range(3)])
    head = Manifest.model_validate(
        {
            "schema": "needlepoint.recording/1",
            "kind": "input",
            "model": "mini",
            "requests": (TOKENS,),
            "tensors": {},
        }
    )
    with RecordingWriter(Path("states"), head, hidden):
        pass


if __name__ == "__main__":
    main()
