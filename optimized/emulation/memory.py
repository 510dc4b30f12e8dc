"""Transient memory: what a computation holds beyond its inputs and results, counted exactly.

The unfused score path materialises one fp32 number per query, head and key. Its transients are
measured at four sizes that fit, a law is fitted to them, and the figure for a prompt that does not
fit is predicted from the law, never allocated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from needlepoint.optimized.protocol.optional import TransientLaw, TransientSample

_ONE_AT_A_TIME = threading.RLock()  # torch keeps the state of modes in module globals

LAW_SIZES = ((64, 8, 96), (256, 8, 64), (64, 32, 128), (128, 16, 512))
"""(queries, heads, keys) of the four measurements; at most 4 MiB each."""


class TransientMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every tensor storage created while it is active.

    Storages are counted once, however many views they have, until they are freed. What exists
    before the meter starts is not counted, so a caller that allocates its result first measures
    transients alone. Workspace inside one operator is not seen. Only operators of the thread that
    entered the meter are seen; a second thread waits until the first has left.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler (over a second) only to leave it out

    def __enter__(self) -> TransientMeter:
        _ONE_AT_A_TIME.acquire()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _ONE_AT_A_TIME.release()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operator and count the storages that it created."""
        keywords = dict(kwargs or {})
        given = {_storage_key(x) for x in _tensors((args, tuple(keywords.values())))}
        result = func(*args, **keywords)
        for tensor in _tensors((result,)):
            if _storage_key(tensor) not in given:
                self.hold(tensor)
        return result

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor that no operator created, for example one over a NumPy array."""
        alive = {}
        for key, (reference, size) in self._live.items():
            if not reference.expired():  # type: ignore[no-untyped-call]
                alive[key] = (reference, size)
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        alive[_storage_key(tensor)] = (reference, storage.nbytes())
        self._live = alive
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))


def fit_law(samples: Sequence[TransientSample]) -> TransientLaw:
    """Fit the one factor of the law by least squares.

    Raises
    ------
    ValueError
        If there are fewer than two samples: one always fits.
    """
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} samples: expected at least 2, one size always fits")
    products = np.array([float(s.queries * s.heads * s.keys) for s in samples])
    measured = np.array([float(s.bytes) for s in samples])
    factor = float(products @ measured / (products @ products))
    return TransientLaw(factor, tuple(samples))


def measure_law(
    score: Callable[[Tensor, Tensor, Tensor, Tensor], None],
    sizes: Sequence[tuple[int, int, int]] = LAW_SIZES,
) -> TransientLaw:
    """Measure the transients of a score function at several sizes and fit the law.

    Parameters
    ----------
    score
        ``score(queries [S, H, 128], weights [S, H], keys [T, 128], out [S, T])``.
    sizes
        (S, H, T) of each measurement.
    """
    samples = []
    for queries, heads, keys in sizes:
        q, w = torch.ones(queries, heads, 128), torch.ones(queries, heads)
        k, out = torch.ones(keys, 128), torch.empty(queries, keys)
        with TransientMeter() as meter:
            score(q, w, k, out)
        samples.append(TransientSample(queries, heads, keys, meter.peak_bytes))
    return fit_law(samples)


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
