"""Write a recording of input: hidden states of two requests, here random ones.

python make_input.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

REQUESTS = [520, 45]  # tokens of each request, one after another in the tensor

states = torch.randn(sum(REQUESTS), 384, generator=torch.Generator().manual_seed(1)).bfloat16()
manifest = {
    "schema": "needlepoint.recording/1",
    "kind": "input",
    "model": "mini",  # or every field of the model's shapes
    "requests": REQUESTS,
    "tensors": {
        "input": {"file": "states.safetensors", "dtype": "BF16", "shape": list(states.shape)}
    },
}
folder = Path(sys.argv[1])
folder.mkdir()
save_file({"input": states}, folder / "states.safetensors")
(folder / "manifest.json").write_text(json.dumps(manifest))
