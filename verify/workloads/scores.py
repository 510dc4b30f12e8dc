"""Stored queries and keys drawn on a device, their scores in float64 and the bound of each score.

Nothing here goes through a kernel of ours: bytes are drawn in their stored format and decoded with
torch, so that an error of a store and one of a score kernel cannot meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needlepoint.optimized.build.score_variants import MMA
from needlepoint.optimized.cuda.score_plan import ScorePlan, plan_scores
from needlepoint.optimized.cuda.scores import KeyPages, KeyRows
from needlepoint.optimized.emulation.pages import LAYOUTS
from needlepoint.optimized.protocol.interface import QueryRows
from needlepoint.reference.profile import Accumulator
from needlepoint.verify.numerics.error_model import ACCUMULATORS

KINDS = ("normal", "integers", "one sign", "cancelling")
"""Kinds of data: random; numbers whose sums are exact in fp32; numbers that all add up; pairs of
dims that cancel almost everything."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ROWS_AT_A_TIME = 64


@dataclass(frozen=True)
class ScoreCase:
    """One batch.

    Attributes
    ----------
    row
        Row format of queries and keys.
    heads, counts, entries
        Heads; query rows and keys of each request.
    query, context_lens
        Stored queries, and int32 ``[rows]`` on the device.
    keys, key_scales
        Decoded keys fp32 ``[sum(entries), 128]`` (fp4 with its scales) and fp8 scales or None.
    stored
        The keys as rows, request after request.
    """

    row: str
    heads: int
    counts: tuple[int, ...]
    entries: tuple[int, ...]
    query: QueryRows
    context_lens: Tensor
    keys: Tensor
    key_scales: Tensor | None
    stored: KeyRows

    @property
    def columns(self) -> int:
        """Keys of the longest request."""
        return max(self.entries)

    def plan(self, unit: str = MMA) -> ScorePlan:
        """Return the plan of the batch, on the device."""
        return plan_scores(self.counts, self.heads, unit).to(self.context_lens.device)

    def paged(self, page_size: int, seed: int = 0, *, spare: int = 3) -> KeyPages:
        """Return the keys in shuffled pages; bytes of no key are 0xFF."""
        device = self.context_lens.device
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-n // page_size) for n in self.entries]
        order = torch.randperm(sum(counts) + spare, generator=generator).to(torch.int32)
        page_bytes = LAYOUTS[f"index-{self.row}"].page_bytes(page_size)
        shape = (sum(counts) + spare, page_bytes)
        pages = torch.full(shape, 255, dtype=torch.uint8, device=device)
        table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        values = self.stored.values.view(torch.uint8)
        split = page_size * values.shape[1]
        first = used = 0
        for request, (n, count) in enumerate(zip(self.entries, counts, strict=True)):
            own = order[used : used + count]
            table[request, :count] = own
            entry = torch.arange(n)
            page, slot = own[entry // page_size].long().to(device), (entry % page_size).to(device)
            part = pages[:, :split].view(-1, page_size, values.shape[1])
            part[page, slot] = values[first : first + n]
            if self.stored.scales is not None:
                scales = self.stored.scales[first : first + n].reshape(n, -1).view(torch.uint8)
                pages[:, split:].view(-1, page_size, 4)[page, slot] = scales
            first, used = first + n, used + count
        return KeyPages(self.row, pages, page_size, table.to(device))

    def true_rows(self, accumulator: str = "fp32") -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows, their scores in float64 (-inf past the context) and the bound of each.

        The bound is the table's constant of fp32 sums times ``sum_h |w_h| sum_d |q_hd k_d|`` (times
        the key scale). ``"sm90-fp8"`` adds what the short sums of Hopper can lose: each of four
        instructions cuts 32 products and the sum so far at 2^-13 of the largest of them, which is
        at most the magnitudes of all products so far.
        """
        device, columns = self.context_lens.device, self.columns
        starts = [0]
        for n in self.entries:
            starts.append(starts[-1] + n)
        lost = torch.full((128,), ACCUMULATORS[Accumulator.FP32].value, device=device).double()
        if accumulator == Accumulator.SM90_FP8.value:
            instructions_left = 4 - torch.arange(128, device=device) // 32
            lost += 33 * 2.0**-13 * instructions_left
        row = 0
        for request, count in enumerate(self.counts):
            span = slice(starts[request], starts[request + 1])
            keys = self.keys[span].double()
            scale = None if self.key_scales is None else self.key_scales[span].double()
            for first in range(row, row + count, _ROWS_AT_A_TIME):
                rows = slice(first, min(first + _ROWS_AT_A_TIME, row + count))
                queries = decoded(self.query, rows).double()
                weights = self.query.weights[rows].double().unsqueeze(-1)
                found = ((queries @ keys.T).relu() * weights).sum(1)
                bound = ((queries.abs() * weights.abs()).sum(1) * lost) @ keys.abs().T
                if scale is not None:
                    found, bound = found * scale, bound * scale
                out = found.new_full((found.shape[0], columns), -torch.inf)
                out[:, : found.shape[1]] = found
                seen = torch.arange(columns, device=device) < self.context_lens[rows, None]
                out.masked_fill_(~seen, -torch.inf)
                yield rows, out, torch.nn.functional.pad(bound, (0, columns - bound.shape[1]))
            row += count

    def of(self, requests: Sequence[int]) -> ScoreCase:
        """Return the batch of some of the requests, in the given order."""
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        rows = torch.cat([torch.arange(ends[r] - self.counts[r], ends[r]) for r in requests]).to(
            self.context_lens.device
        )
        query = self.query
        return replace(
            self,
            counts=tuple(self.counts[r] for r in requests),
            query=QueryRows(
                query.format,
                query.codes[rows],
                None if query.scales is None else query.scales[rows],
                query.weights[rows],
                query.scale_folded,
            ),
            context_lens=self.context_lens[rows],
        )


def decoded(query: QueryRows, rows: slice) -> Tensor:
    """Return stored queries as fp32 ``[n, heads, 128]``, decoded by torch."""
    codes = query.codes[rows]
    if query.format == "bf16":
        return codes.float()
    if query.format == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if query.scales is None:
        raise ValueError("fp4 queries without scales")
    return decoded_fp4(codes, query.scales[rows])


def decoded_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Return packed E2M1 ``[.., 64]`` with UE8M0 scales ``[.., 4]`` as fp32 ``[.., 128]``."""
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    steps = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    return table[pairs.long()] * steps.repeat_interleave(32, dim=-1)


def make_case(
    row: str,
    heads: int,
    counts: Sequence[int],
    entries: Sequence[int],
    *,
    kind: str = "normal",
    seed: int = 0,
    device: str = "cuda",
    context_lens: Sequence[int] | None = None,
) -> ScoreCase:
    """Draw a batch.

    Parameters
    ----------
    row, heads, counts, entries
        As in :class:`ScoreCase`.
    kind
        One of :data:`KINDS`.
    seed
        Seed of the data.
    device
        Where it is drawn.
    context_lens
        Keys that each row sees; default what the last tokens of each request see at ratio 4.

    Raises
    ------
    ValueError
        For an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: expected one of {list(KINDS)}")
    generator = torch.Generator(device=device).manual_seed(seed)
    rows, keys = sum(counts), sum(entries)
    codes, q_scales = _draw(row, (rows, heads), kind, generator)
    values, k_scales = _draw(row, (keys,), kind, generator)
    weights = torch.randn(rows, heads, generator=generator, device=device)
    if kind == "integers":
        weights = (2 * weights).round().clamp(-4, 4)
    elif kind == "one sign":
        weights = weights.abs() + 0.1
    key_scales = None
    if row == "fp8":
        key_scales = torch.rand(keys, generator=generator, device=device) + 0.1
        if kind == "integers":
            key_scales = torch.ldexp(torch.ones_like(key_scales), (8 * key_scales).int() - 4)
    if context_lens is None:
        seen = []
        for count, n in zip(counts, entries, strict=True):
            seen += [max(0, n - (count - 1 - i) // 4) for i in range(count)]
    else:
        seen = list(context_lens)
    decoded_keys = {
        "bf16": lambda: values.float(),
        "fp8": lambda: values.view(torch.float8_e4m3fn).float(),
        "fp4": lambda: decoded_fp4(values, k_scales if k_scales is not None else values),
    }[row]()
    starts = torch.tensor([0, *entries[:-1]]).cumsum(0)
    scales = key_scales if row == "fp8" else k_scales
    return ScoreCase(
        row=row,
        heads=heads,
        counts=tuple(counts),
        entries=tuple(entries),
        query=QueryRows(row, codes, q_scales, weights, row == "fp8"),
        context_lens=torch.tensor(seen, dtype=torch.int32, device=device),
        keys=decoded_keys,
        key_scales=key_scales,
        stored=KeyRows(row, values, scales, starts.to(device)),
    )


def _draw(
    row: str, shape: tuple[int, ...], kind: str, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Return codes and, for fp4, block scales of rows of 128 dims."""
    device = generator.device
    x = torch.randn(*shape, 128, generator=generator, device=device)
    if kind == "integers":
        x = x.round().clamp(-3, 3)
    elif kind == "one sign":
        x = x.abs() + 0.5
    elif kind == "cancelling":
        x = 300 * x.sign() * torch.ones(128, device=device).cumprod(0)
        x[..., 1::2] = -x[..., 0::2]
        x += torch.randn(x.shape, generator=generator, device=device)
    if row == "bf16":
        return x.bfloat16(), None
    if row == "fp8":
        return x.to(torch.float8_e4m3fn).view(torch.uint8), None
    if kind == "integers":
        scales = torch.full((*shape, 4), 127, dtype=torch.uint8, device=device)
    else:
        scales = torch.randint(
            119, 131, (*shape, 4), generator=generator, device=device, dtype=torch.uint8
        )
    table = torch.tensor(_E2M1, device=device)
    middle = (table[1:] + table[:-1]) / 2
    code = torch.bucketize(x.abs().contiguous(), middle) | (x < 0).int() * 8
    packed = code[..., 0::2] | code[..., 1::2] << 4
    return packed.to(torch.uint8), scales
