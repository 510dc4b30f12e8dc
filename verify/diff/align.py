"""Which token each row of a dump is: ragged, chunked and padded batches back into requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from needlepoint.verify.diff.files import DumpError, DumpFiles
from needlepoint.verify.diff.mapping import Mapping


@dataclass(frozen=True)
class Step:
    """The rows of one forward pass.

    Attributes
    ----------
    rows
        int64, rows of the pass that are tokens of a request: no padding, none past its end.
    slots
        int64, where these tokens stand when requests lie one after another.
    total
        Rows of the pass.
    """

    rows: Tensor
    slots: Tensor
    total: int


@dataclass(frozen=True)
class Alignment:
    """Where every row of a dump belongs.

    Attributes
    ----------
    lengths
        Tokens of each request.
    steps
        The passes, in order.
    dropped
        Rows that belong to no token: padding, and positions past a request's end.
    """

    lengths: tuple[int, ...]
    steps: tuple[Step, ...]
    dropped: int

    def tokens(self, parts: Sequence[Tensor], what: str) -> Tensor:
        """Return one row a token, requests one after another, from the rows of each pass.

        Raises
        ------
        DumpError
            Where a pass has another number of rows than its tokens.
        """
        self._require(parts, [step.total for step in self.steps], what)
        if self._plain:
            return parts[0]
        out = parts[0].new_empty((sum(self.lengths), *parts[0].shape[1:]))
        for step, part in zip(self.steps, parts, strict=True):
            out[step.slots] = part[step.rows]
        return out

    def entries(self, parts: Sequence[Tensor], ratio: int, what: str) -> Tensor:
        """Return one row an entry, from the rows that each pass completed, in the pass's order.

        A pass may also hold a row for every token, of which those that complete no window are
        left out.

        Raises
        ------
        DumpError
            Where a pass has another number of rows than the windows it completes or its tokens.
        """
        places = [self._completed(step, ratio) for step in self.steps]
        counts = [len(slots) for _, slots in places]
        out = None
        for step, (rows, slots), part, count in zip(self.steps, places, parts, counts, strict=True):
            if len(part) == step.total and step.total != count:
                part = part[rows]
            self._require([part], [count], what)
            if self._plain:
                return part
            if out is None:
                out = part.new_empty((sum(n // ratio for n in self.lengths), *part.shape[1:]))
            out[slots] = part
        if out is None:
            raise DumpError(f"{what}: no rows")
        return out

    @property
    def _plain(self) -> bool:
        """Whether the one pass holds every token in its place already."""
        if len(self.steps) != 1:
            return False
        step = self.steps[0]
        whole = torch.arange(sum(self.lengths))
        return torch.equal(step.rows, whole) and torch.equal(step.slots, whole)

    def _completed(self, step: Step, ratio: int) -> tuple[Tensor, Tensor]:
        """Return the rows of a pass that complete a window, and the entries' places."""
        lengths = torch.tensor(self.lengths)
        ends = lengths.cumsum(0)
        request = torch.searchsorted(ends, step.slots, right=True)
        position = step.slots - (ends - lengths)[request]
        done = (position + 1) % ratio == 0
        counts = lengths // ratio
        first = counts.cumsum(0) - counts
        return step.rows[done], (first[request] + (position + 1) // ratio - 1)[done]

    @staticmethod
    def _require(parts: Sequence[Tensor], counts: Sequence[int], what: str) -> None:
        for part, count in zip(parts, counts, strict=True):
            if part.dim() == 0 or len(part) != count:
                raise DumpError(
                    f"{what}: shape {list(part.shape)}, expected {count} rows, those of the tokens "
                    "of the same forward pass"
                )


def whole_requests(lengths: tuple[int, ...]) -> Alignment:
    """Return the alignment of tensors that hold whole requests one after another."""
    every = torch.arange(sum(lengths))
    return Alignment(lengths, (Step(every, every, len(every)),), 0)


def align(
    lengths: tuple[int, ...], passes: Sequence[tuple[Tensor, Tensor]], where: str
) -> Alignment:
    """Place the rows of every pass.

    Parameters
    ----------
    lengths
        Tokens of each request.
    passes
        Positions and requests of each pass's rows, integers; a negative position or request is
        padding.
    where
        What to call the dump in errors.

    Raises
    ------
    DumpError
        Where a request does not exist, a token comes twice, or one is missing: what is not there
        cannot be judged.
    """
    starts = torch.tensor((0, *lengths)).cumsum(0)[:-1]
    ends = torch.tensor(lengths)
    seen = torch.full((sum(lengths),), -1, dtype=torch.int64)
    steps: list[Step] = []
    dropped = 0
    for number, (position, request) in enumerate(passes):
        real = (position >= 0) & (request >= 0)
        if bool((request[real] >= len(lengths)).any()):
            raise DumpError(
                f"{where}, pass {number}: request {int(request[real].max())}, expected 0 to "
                f"{len(lengths) - 1}"
            )
        kept = real.clone()
        kept[real] = position[real] < ends[request[real]]
        rows = kept.nonzero().squeeze(1)
        slots = starts[request[rows]] + position[rows]
        earlier = seen[slots]
        twice = (earlier >= 0).nonzero().squeeze(1)
        unique, count = torch.unique(slots, return_counts=True)
        if len(twice) or bool((count > 1).any()):
            slot = int(slots[twice[0]]) if len(twice) else int(unique[count > 1][0])
            raise DumpError(
                f"{where}, pass {number}: {_token(slot, lengths)} comes twice; leave the pass that "
                "was run again out of `steps`"
            )
        seen[slots] = number
        dropped += len(position) - len(rows)
        steps.append(Step(rows, slots, len(position)))
    missing = (seen < 0).nonzero().squeeze(1)
    if len(missing):
        raise DumpError(
            f"{where}: {len(missing)} of {len(seen)} tokens are in no pass, the first is "
            f"{_token(int(missing[0]), lengths)}; dump every pass or give shorter `requests`"
        )
    return Alignment(lengths, tuple(steps), dropped)


def read_alignment(files: DumpFiles, mapping: Mapping) -> Alignment:
    """Return where the rows of a dump belong, from the tensors that its mapping names.

    Raises
    ------
    DumpError
        As :func:`align`, or where these tensors are not integers or do not fit one another.
    """
    if mapping.tokens is None:
        return whole_requests(mapping.requests)
    passes = []
    for step in mapping.steps:
        position = _integers(files, mapping.tokens.positions, step)
        where = f"dump {files.directory}, step {step}"
        if mapping.tokens.requests is not None:
            request = _integers(files, mapping.tokens.requests, step)
        else:
            counts = _integers(files, str(mapping.tokens.lengths), step)
            if bool((counts < 0).any()) or int(counts.sum()) > len(position):
                raise DumpError(f"{where}: lengths {counts.tolist()} for {len(position)} rows")
            request = torch.arange(len(counts)).repeat_interleave(counts)
            request = pad(request, (0, len(position) - len(request)), value=-1)
        if len(request) != len(position):
            raise DumpError(
                f"{where}: {len(position)} positions and {len(request)} requests; expected one "
                "each for every row"
            )
        passes.append((position, request))
    return align(mapping.requests, passes, f"dump {files.directory}")


def _integers(files: DumpFiles, template: str, step: int) -> Tensor:
    found = files.tensor(template.replace("{step}", str(step)))
    if found.dtype.is_floating_point or found.dim() != 1:
        raise DumpError(
            f"{template}: {found.dtype} {list(found.shape)}, expected a list of integers"
        )
    return found.to(torch.int64)


def _token(slot: int, lengths: tuple[int, ...]) -> str:
    request = 0
    while slot >= lengths[request]:
        slot -= lengths[request]
        request += 1
    return f"request {request}, position {slot}"
