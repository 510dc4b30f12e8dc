"""Capture stages from a live PyTorch model as a dump that ``needlepoint diff`` reads.

Hooks clone what passes through chosen modules, pass by pass, and keep it in host memory up to a
budget. Nothing is recorded from compiled code or under CUDA graph capture: a hook sees such code
once, while it is traced, and never its runs, so both are refused.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from needlepoint.verify.diff.capture_taps import Tap, by_window, first_input, first_output
from needlepoint.verify.diff.mapping import MAPPING_FILE, ROWS, load_mapping

__all__ = ["Capture", "CaptureError", "Tap", "first_input", "first_output"]

BUDGET_BYTES = 4 << 30


class CaptureError(ValueError):
    """A capture that cannot be trusted; says why and what to do."""


@dataclass
class Capture:
    """Context manager that hooks a model.

    Parameters
    ----------
    model
        The model, eager.
    taps
        What to capture.
    layers
        Only taps of these layers; None for all.
    keep
        Which rows to keep of the positions of a pass, bool ``[rows]``; None for all. Applies to
        tensors with one row a token; stages with a row a window cannot be captured with it.
    budget_bytes
        Host memory for what is captured.

    Raises
    ------
    CaptureError
        On entering, for an unknown stage or module, or a compiled model; from inside the model's
        forward pass when it is traced, captured into a CUDA graph, or beyond the budget.
    """

    model: nn.Module
    taps: Sequence[Tap]
    layers: frozenset[int] | None = None
    keep: Callable[[Tensor], Tensor] | None = None
    budget_bytes: int = BUDGET_BYTES
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _used: int = 0
    _steps: int = 0
    _positions: Tensor | None = None

    def __enter__(self) -> Self:
        modules = dict(self.model.named_modules())
        compiled = [n for n, m in modules.items() if type(m).__name__ == "OptimizedModule"]
        if compiled:
            raise CaptureError(
                f"module {compiled[0]!r} is compiled: hooks do not see its runs; capture from the "
                "model before torch.compile"
            )
        for tap in self._wanted():
            if tap.stage not in ROWS:
                raise CaptureError(f"stage {tap.stage!r}: expected one of {', '.join(ROWS)}")
            if self.keep is not None and by_window(tap.stage):
                raise CaptureError(
                    f"keep: {tap.stage} has a row a window, not a token; capture it without keep"
                )
            if tap.module not in modules:
                raise CaptureError(f"module {tap.module!r}: the model has no module of this name")
            hook = modules[tap.module].register_forward_hook(self._hook(tap), with_kwargs=True)
            self._handles.append(hook)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def step(self, positions: Tensor, requests: Tensor) -> Iterator[None]:
        """Run one forward pass inside.

        Parameters
        ----------
        positions, requests
            Integers ``[rows]``: which token each row of the pass is; negative for padding.

        Raises
        ------
        CaptureError
            If the pass went by and a tap saw nothing: it would be missing without a word.
        """
        rows = positions.reshape(-1).cpu().to(torch.int64)
        owners = requests.reshape(-1).cpu().to(torch.int64)
        if rows.shape != owners.shape:
            raise CaptureError(f"{len(rows)} positions and {len(owners)} requests; expected equal")
        self._positions = rows
        chosen = self._chosen()
        self._store(f"positions.{self._steps}", rows if chosen is None else rows[chosen])
        self._store(f"requests.{self._steps}", owners if chosen is None else owners[chosen])
        yield
        for tap in self._wanted():
            # A pass that completes no window makes no rows; a diff counts the others.
            if self._name(tap) not in self._tensors and not by_window(tap.stage):
                raise CaptureError(
                    f"pass {self._steps}: module {tap.module!r} was not called, {tap.stage} of "
                    f"layer {tap.layer} is missing"
                )
        self._steps += 1
        self._positions = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor of the serving state: cache pages, a page table."""
        self._store(name, tensor.detach())

    def tensor(self, name: str) -> Tensor:
        """Return what was kept under a name: ``layer0.main.input.2`` is that of pass 2.

        Raises
        ------
        CaptureError
            If nothing was.
        """
        if name not in self._tensors:
            raise CaptureError(f"{name}: not captured; there are {', '.join(self._tensors)}")
        return self._tensors[name]

    def save(
        self,
        out: Path,
        *,
        name: str,
        profile: str,
        key_format: str,
        requests: Sequence[int],
        extra: str = "",
    ) -> Path:
        """Write everything as a dump with its mapping, whole or not at all.

        Parameters
        ----------
        out
            Folder to appear.
        name, profile, key_format, requests
            As in the mapping (docs/engines.md).
        extra
            More TOML for the mapping: ``scale_folded``, ``picks``, ``[pages.index]``.

        Raises
        ------
        CaptureError
            If nothing was captured, or the folder is there.
        DumpError
            If the mapping that results is not valid.
        """
        if not self._steps:
            raise CaptureError("no pass was captured: run the model inside step()")
        if out.exists():
            raise CaptureError(f"{out}: is there already; give a new folder")
        self._fill_empty()
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        try:
            save_file(self._tensors, folder / "captured.safetensors")
            layers = sorted({tap.layer for tap in self._wanted()})
            stages = sorted({tap.stage for tap in self._wanted()})
            rows = "".join(f'"{stage}" = "layer{{layer}}.{stage}.{{step}}"\n' for stage in stages)
            text = (
                f'schema = "needlepoint.dump/1"\nname = {json.dumps(name)}\n'
                f"format = {json.dumps(key_format)}\nprofile = {json.dumps(profile)}\n"
                f"requests = {list(requests)}\nlayers = {layers}\n"
                f"steps = {list(range(self._steps))}\n{extra}\n"
                '[tokens]\npositions = "positions.{step}"\nrequests = "requests.{step}"\n\n'
                f"[rows]\n{rows}"
            )
            (folder / MAPPING_FILE).write_text(text, encoding="utf-8")
            load_mapping(folder / MAPPING_FILE)
            os.rename(folder, out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return out

    def _fill_empty(self) -> None:
        """Give every pass that completed no window a tensor without rows."""
        for tap in self._wanted():
            names = [f"layer{tap.layer}.{tap.stage}.{step}" for step in range(self._steps)]
            found = [self._tensors[name] for name in names if name in self._tensors]
            if not found:
                raise CaptureError(
                    f"module {tap.module!r} was never called, {tap.stage} of layer {tap.layer} is "
                    "missing; run passes that complete a window, or leave the tap out"
                )
            for name in names:
                self._tensors.setdefault(name, found[0][:0].clone())

    def _wanted(self) -> list[Tap]:
        return [tap for tap in self.taps if self.layers is None or tap.layer in self.layers]

    def _name(self, tap: Tap) -> str:
        return f"layer{tap.layer}.{tap.stage}.{self._steps}"

    def _chosen(self) -> Tensor | None:
        """Return which rows of the pass to keep; None for all."""
        if self.keep is None or self._positions is None:
            return None
        return self.keep(self._positions)

    def _hook(self, tap: Tap) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ANN401
            if torch.compiler.is_compiling():
                raise CaptureError(
                    f"module {tap.module!r} is being compiled: a hook would see its trace and not "
                    "its runs; capture from the eager model"
                )
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    f"module {tap.module!r} runs under CUDA graph capture: replays do not call "
                    "hooks; capture without CUDA graphs"
                )
            if self._positions is None:
                return  # a pass outside of step(), such as a warm-up
            self._store(self._name(tap), self._rows(tap.select(args, kwargs, output)))

        return hook

    def _rows(self, found: Tensor) -> Tensor:
        rows = found.detach().flatten(0, 1)
        chosen = self._chosen()
        if chosen is not None and len(rows) == len(chosen):
            rows = rows[chosen.to(rows.device)]
        return rows

    def _store(self, name: str, tensor: Tensor) -> None:
        if name in self._tensors:
            raise CaptureError(
                f"{name}: captured twice in one pass; tap a module that is called once"
            )
        size = tensor.numel() * tensor.element_size()
        if self._used + size > self.budget_bytes:
            raise CaptureError(
                f"{name}: {size} bytes more than the {self.budget_bytes - self._used} left of the "
                "budget; choose fewer layers or tokens, or a larger budget_bytes"
            )
        self._used += size
        # A clone at once: engines write the next pass into the same buffers.
        self._tensors[name] = tensor.to("cpu", copy=True).contiguous()
