"""SGLang's DeepSeek-V4 kernels, unmodified, without importing SGLang itself.

``import sglang`` pulls in a serving stack. Its kernels need little of it: the package names are
registered as bare namespaces whose paths point into the installed (or unpacked) wheel, the three
heavy modules they touch are replaced by stand-ins with the few names used, and the kernel modules
are then imported as they are.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

VERSION = "0.5.23"
_NAMESPACES = (
    "sglang",
    "sglang.kernels",
    "sglang.kernels.ops",
    "sglang.kernels.ops.attention",
    "sglang.srt",
    "sglang.srt.layers",
    "sglang.srt.layers.attention",
    "sglang.srt.layers.attention.dsa",
)


@dataclass(frozen=True)
class SglangKernels:
    """The modules of SGLang's kernels that are compared with.

    Attributes
    ----------
    compress
        ``compress_forward``, ``compress_norm_rope_store`` and the plans.
    norm_rope
        The query kernels.
    """

    compress: Any
    norm_rope: Any


def find_sglang() -> Path:
    """Return the folder of an installed SGLang without importing it, or of the one that is loaded.

    Raises
    ------
    ValueError
        If it is not installed.
    """
    loaded = sys.modules.get("sglang")
    if loaded is not None and loaded.__spec__ is None:  # a bare namespace of load_sglang
        return Path(loaded.__path__[0])
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"sglang is not installed; `pip install --no-deps sglang=={VERSION}` and `pip install "
            "msgspec` are enough"
        )
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def load_sglang(root: Path) -> SglangKernels:
    """Import SGLang's kernels from a package folder, once.

    Parameters
    ----------
    root
        The ``sglang`` folder of an installed or unpacked wheel.

    Raises
    ------
    ValueError
        If the folder does not hold the kernels, a package that they need is missing, or the real
        package is imported already.
    """
    if not (root / "kernels" / "jit" / "csrc" / "deepseek_v4" / "c4_v2.cuh").is_file():
        raise ValueError(
            f"{root}: no SGLang {VERSION} kernels; expected kernels/jit/csrc/deepseek_v4"
        )
    if "sglang" in sys.modules and not hasattr(sys.modules["sglang"], "_needlepoint"):
        raise ValueError("sglang is imported already; the bench needs a process of its own")
    for name in _NAMESPACES:
        module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    sys.modules["sglang"]._needlepoint = True  # type: ignore[attr-defined]
    false = dict.fromkeys(("is_hip", "is_xpu", "is_gfx95_supported"), lambda: False)
    _stand_in("sglang.srt.utils", **false).__path__ = []
    _stand_in("sglang.srt.utils.common", is_cuda=lambda: True, get_cuda_version=lambda: (13, 0))
    _stand_in("sglang.utils", is_in_ci=lambda: False)
    _stand_in(
        "sglang.srt.layers.attention.dsa.utils",
        INDEXER_K_CACHE_PRESHUFFLE_TILE=0,
        aiter_can_use_preshuffle_paged_mqa=lambda: False,
    )
    base = "sglang.kernels.ops.attention.dsv4"
    try:
        compress = importlib.import_module(f"{base}.compress")
        norm_rope = importlib.import_module(f"{base}.norm_rope")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"SGLang's kernels need the package {error.name}, which is not installed; "
            f"`pip install {error.name}`"
        ) from error
    return SglangKernels(compress=compress, norm_rope=norm_rope)


def _stand_in(name: str, **names: Any) -> ModuleType:  # noqa: ANN401
    module = ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module
    return module
