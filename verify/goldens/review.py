"""What a proposal changes: values moved, by how many codes or ULPs, and which picks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.emulation.pages import LAYOUTS, planes
from needlepoint.optimized.protocol.interface import PagedRows
from needlepoint.reference.formats import unpack_e2m1
from needlepoint.verify.base.rows import Rows
from needlepoint.verify.goldens.manifest import CardDefinition, Golden, LayerForm
from needlepoint.verify.goldens.scores import COUNTS
from needlepoint.verify.goldens.stores import layout_of
from needlepoint.verify.layout.pages import open_pool
from needlepoint.verify.recording.file import read_tensor

_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
_SIGN_BITS = {"index-fp8": 0x80, "main-584": 0x80, "index-fp4": 0x8}
PICKS_SHOWN = 5


@dataclass(frozen=True)
class Side:
    """Tensors of a golden, old or new, how its rows are laid out, and its requests."""

    tensors: Mapping[str, Tensor]
    layers: Mapping[str, LayerForm]
    requests: tuple[int, ...] = ()
    rows: Mapping[str, str] = field(default_factory=dict)
    """Layout of tensors that hold stored rows one after another, values then scales."""


def review(old: Side | None, new: Side) -> list[str]:
    """Return the review of a proposal, one line a tensor that moved and one for the rest.

    Parameters
    ----------
    old
        What is accepted now; None for a new fixture.
    new
        What would replace it.
    """
    if old is None:
        values = sum(tensor.numel() for tensor in new.tensors.values())
        return [f"new: {len(new.tensors)} tensors, {values:,} values"]
    lines = [f"- {name}: removed" for name in sorted(set(old.tensors) - set(new.tensors))]
    same = 0
    for name, tensor in sorted(new.tensors.items()):
        if name not in old.tensors:
            lines.append(f"+ {name}: {tensor.numel():,} values")
            continue
        found = list(_tensor_review(name, old, new))
        same += not found
        lines += found
    return [*lines, f"{same} of {len(new.tensors)} tensors unchanged"]


def load_side(folder: Path, golden: Golden) -> Side:
    """Return the tensors of a golden that stands in a folder."""
    prefix = golden.kind == "given"
    tensors = {
        f"{file}:{tensor}" if prefix else tensor: read_tensor(folder / file, tensor).clone()
        for file, pin in golden.files.items()
        for tensor in pin.tensors or ()
    }
    definition = golden.definition
    if isinstance(definition, CardDefinition):
        rows = {name: layout_of(name) for name in tensors if definition.cases == "stores"}
        known = {name: layout for name, layout in rows.items() if layout is not None}
        return Side(tensors, golden.layers, COUNTS, known)
    return Side(tensors, golden.layers, definition.requests if definition else ())


def summary(lines: list[str]) -> str:
    """Return a review in one line, for the history."""
    return "; ".join(line.strip() for line in lines)[:1000]


def _tensor_review(name: str, old: Side, new: Side) -> Iterator[str]:
    a, b = old.tensors[name], new.tensors[name]
    if a.dtype != b.dtype or a.shape != b.shape:
        yield f"{name}: {a.dtype} {list(a.shape)} becomes {b.dtype} {list(b.shape)}"
        return
    if name.endswith((".topk", ".picks")):
        yield from _picks_review(name, a, b, Rows(new.requests))
        return
    if torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
        return
    parts = _parts(name, old), _parts(name, new)
    moved = 0
    for part in parts[0]:
        if part not in parts[1] or parts[0][part].values.shape != parts[1][part].values.shape:
            yield f"{name}: {part} has another shape"
            continue
        before, after = parts[0][part], parts[1][part]
        apart = (before.values.astype(np.float64) - after.values.astype(np.float64)).__abs__()
        count = int((apart > 0).sum())
        moved += count
        if count:
            yield (
                f"{name}: {count:,} of {apart.size:,} {part} moved, by at most "
                f"{int(apart.max())} {before.unit}"
            )
    if not moved:
        yield f"{name}: bytes that no row owns, or signs of zero, changed"


@dataclass(frozen=True)
class _Ordered:
    """Numbers as integers in order of value, so that their difference counts steps."""

    values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    unit: str


def _parts(name: str, side: Side) -> dict[str, _Ordered]:
    """Return a tensor as ordered integers, stored pages by codes and scales."""
    tensor = side.tensors[name]
    if name in side.rows:
        return _pages(_one_page(side.rows[name], tensor))
    layer, _, rest = name.partition(".")
    path, _, stage = rest.partition(".")
    form = side.layers.get(layer.removeprefix("layer"))
    if stage == "stored.pages" and form is not None and path in form.pools:
        return _stored(name.removesuffix(".pages"), form, path, side)
    if tensor.dtype in _INTEGERS:
        return {"values": _Ordered(_float_order(tensor), "ulp")}
    coded = form.query.format if form is not None and form.query is not None else None
    if stage == "query.codes" and coded is not None:
        return _codes(tensor, coded)
    drawn = re.fullmatch(r"query_[a-z0-9]+_([a-z0-9]+)\.codes", name)
    if drawn is not None:
        return _codes(tensor, drawn[1])
    return {"values": _Ordered(tensor.numpy().astype(np.int64), "steps")}


def _codes(tensor: Tensor, format: str) -> dict[str, _Ordered]:
    """Return the bytes of stored queries in order of value."""
    if format == "bf16":
        return {"values": _Ordered(_float_order(tensor.view(torch.bfloat16)), "ulp")}
    packed = format == "fp4"
    codes = unpack_e2m1(tensor) if packed else tensor
    return {"codes": _Ordered(_code_order(codes.numpy(), 0x8 if packed else 0x80), "codes")}


def _stored(prefix: str, form: LayerForm, path: str, side: Side) -> dict[str, _Ordered]:
    record = form.pools["index" if path == "index" else "main"]
    tables = tuple(side.tensors[f"{prefix}.page_table.{r}"] for r in range(len(record.entries)))
    return _pages(
        PagedRows(
            record.layout, side.tensors[f"{prefix}.pages"], record.page_size, tables, record.entries
        )
    )


def _one_page(layout: str, rows: Tensor) -> PagedRows:
    """Return rows as the only page of a pool."""
    size, form = len(rows), LAYOUTS[layout]
    page = torch.zeros(1, form.page_bytes(size), dtype=torch.uint8)
    paged = PagedRows(layout, page, size, (torch.zeros(1, dtype=torch.int32),), (size,))
    for plane, part in zip(
        planes(paged), (rows[:, : form.value_bytes], rows[:, form.value_bytes :]), strict=True
    ):
        plane[0] = part.numpy()
    return paged


def _pages(paged: PagedRows) -> dict[str, _Ordered]:
    pool = open_pool(paged.pool, paged.layout, paged.page_size)
    rows = pool.read_requests(paged.page_table, paged.entries)
    codes = np.concatenate([row.codes for row in rows])
    sign = _SIGN_BITS.get(paged.layout)
    if sign is None:
        return {"values": _Ordered(_bits_order(codes), "ulp")}
    parts = {"codes": _Ordered(_code_order(codes, sign), "codes")}
    scales = [row.scales for row in rows if row.scales is not None]
    joined = torch.from_numpy(np.concatenate(scales))
    floating = joined.dtype in _INTEGERS
    parts["scales"] = _Ordered(
        _float_order(joined) if floating else joined.numpy().astype(np.int64),
        "ulp" if floating else "exponents",
    )
    ropes = [row.rope_codes for row in rows if row.rope_codes is not None]
    if ropes:
        parts["rope values"] = _Ordered(_bits_order(np.concatenate(ropes)), "ulp")
    return parts


def _float_order(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    bits = tensor.contiguous().view(_INTEGERS[tensor.dtype]).to(torch.int64)
    lowest = torch.iinfo(_INTEGERS[tensor.dtype]).min
    return torch.where(bits < 0, lowest - bits, bits).numpy()


def _bits_order(
    bits: np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    kind = torch.bfloat16 if bits.dtype == np.uint16 else torch.float64
    signed = torch.from_numpy(bits.view(np.int16 if kind is torch.bfloat16 else np.int64))
    return _float_order(signed.view(kind))


def _code_order(
    codes: np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]], sign: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    magnitude = (codes & (sign - 1)).astype(np.int64)
    return np.where(codes & sign, -magnitude, magnitude)


def _picks_review(name: str, a: Tensor, b: Tensor, rows: Rows) -> Iterator[str]:
    changed = []
    for row, (before, after) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        if set(before) != set(after):
            changed.append(
                (row, sorted(set(before) - set(after)), sorted(set(after) - set(before)))
            )
    if changed:
        yield f"{name}: picks of {len(changed):,} of {len(a):,} queries changed"
    elif not torch.equal(a, b):
        yield f"{name}: the same picks in another order"
    for row, gone, come in changed[:PICKS_SHOWN]:
        token = rows.token(row)
        where = f"request {token.request} position {token.position}"
        yield f"  {where}: loses {_some(gone)}, gains {_some(come)}"


def _some(picks: list[int]) -> str:
    more = f" and {len(picks) - 8} more" if len(picks) > 8 else ""
    return f"{', '.join(map(str, picks[:8])) or 'nothing'}{more}"
