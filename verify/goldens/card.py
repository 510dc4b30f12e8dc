"""Recorded on a card: what its kernels give for drawn cases, replayed on any machine."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from torch import Tensor

from needlepoint.optimized.build.compile import sources_sha256
from needlepoint.optimized.cuda.runtime import require_cuda
from needlepoint.optimized.emulation.specification import SPEC_VERSION
from needlepoint.verify.goldens import scores, stores
from needlepoint.verify.goldens.compute import Computed, differing
from needlepoint.verify.goldens.manifest import Cases, GoldenError
from needlepoint.verify.schema.environment import collect_environment, driver_version

TOOLS: Final = ("needlepoint", "python", "torch", "numpy")
"""Versions that every golden keeps."""


@dataclass(frozen=True)
class Kernels:
    """Drawn cases for some of the kernels."""

    run: Callable[[str], dict[str, Tensor]]
    """From a card's architecture to what the card gives."""
    modules: Callable[[str], list[str]]
    """The kernel modules that this runs."""
    faults: Callable[[Mapping[str, Tensor]], list[str]]
    """What a recording has that the emulation does not give."""


def _store_faults(tensors: Mapping[str, Tensor]) -> list[str]:
    changed = differing(tensors, Computed(stores.expected_bytes(), {}))
    return [f"other bytes of {', '.join(changed)}"] if changed else []


CASES: Final[Mapping[Cases, Kernels]] = {
    "stores": Kernels(stores.run, stores.modules, _store_faults),
    "scores": Kernels(scores.run, scores.modules, scores.faults),
}


@dataclass(frozen=True)
class CardRecording:
    """Tensors that a card gave, and text about the run, as the file's metadata keeps it."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, str]

    @property
    def card(self) -> str:
        """Product name of the card."""
        return self.facts["card"]

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the tools, as far as the file says."""
        return {name: self.facts[name] for name in TOOLS if name in self.facts}

    @property
    def kernel(self) -> dict[str, JsonValue]:
        """SHA-256 of the sources of every kernel module that ran."""
        if "sources" in self.facts:  # scores of 2026-11-30: "MODULE SHA256; MODULE SHA256"
            pairs = (entry.split(" ") for entry in self.facts["sources"].split("; "))
            return {"sources_sha256": {name: digest for name, digest in pairs}}
        return {"sources_sha256": json.loads(self.facts["sources_sha256"])}

    @property
    def environment(self) -> dict[str, JsonValue]:
        """What else is known of the run."""
        apart = {*TOOLS, "sources", "sources_sha256"}
        return {name: text for name, text in sorted(self.facts.items()) if name not in apart}


def record_card(cases: Cases) -> CardRecording:
    """Run kernel cases on the current card.

    Raises
    ------
    ValueError
        If there is no card, or none that the kernels are written for.
    """
    architecture = require_cuda()
    kernels = CASES[cases]
    tensors = {name: t.cpu().contiguous() for name, t in kernels.run(architecture).items()}
    here = collect_environment().model_dump(mode="json")
    facts = {
        "card": torch.cuda.get_device_name(),
        "architecture": f"sm_{architecture}",
        "driver": driver_version(),
        **{name: str(here[name]) for name in TOOLS},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "specification": str(SPEC_VERSION),
        "sources_sha256": json.dumps(
            {name: sources_sha256(name) for name in kernels.modules(architecture)}
        ),
    }
    return CardRecording(tensors, facts)


def read_card(path: Path) -> CardRecording:
    """Return a recording that a card left in a file.

    Raises
    ------
    GoldenError
        If the file is not one, or does not say which card and kernels it is of.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise GoldenError(f"{path}: {error}; expected a safetensors file of a card") from error
    if "card" not in facts or not {"sources", "sources_sha256"} & facts.keys():
        raise GoldenError(
            f"{path}: metadata {sorted(facts)}, expected card and sources_sha256; record it with "
            "`needlepoint fixtures propose NAME --cases CASES` on a machine with a card"
        )
    return CardRecording(tensors, facts)
