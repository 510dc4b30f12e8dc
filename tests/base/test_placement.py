"""Judging on a card: nothing mixes with CPU memory, and the verdict is the one of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.base.placement import on, placed
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge import layer_run
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.run import pipeline
from needlepoint.verify.run.pipeline import verify

Dispatched: TypeAlias = Any
"""What torch hands to a dispatcher: an operator, its arguments, its result."""
Item = TypeVar("Item")
Result = TypeVar("Result")
CARD = "meta"
"""Plays the card: torch keeps no data there, so :class:`OnCard` brings its own."""
_CPU_INDICES = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"}


class OnCard(Tensor):
    """A tensor of the pretended card, around one in CPU memory; it does not mix with others."""

    held: Tensor

    @staticmethod
    def __new__(cls: type[OnCard], inner: Tensor) -> OnCard:
        made: OnCard = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(CARD),
        )
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Dispatched,
        types: object,
        args: tuple[Dispatched, ...] = (),
        kwargs: dict[str, Dispatched] | None = None,
    ) -> Dispatched:
        return run(function, args, kwargs or {})


class Pretend(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes what factories put on the card."""

    def __torch_dispatch__(
        self,
        function: Dispatched,
        types: object,
        args: tuple[Dispatched, ...] = (),
        kwargs: dict[str, Dispatched] | None = None,
    ) -> Dispatched:
        return run(function, args, kwargs or {})


def inner(value: Dispatched) -> Dispatched:
    return value.held if isinstance(value, OnCard) else value


def wrapped(value: object) -> object:
    if isinstance(value, OnCard) or not isinstance(value, Tensor):
        return value
    return OnCard(value)


def run(function: Dispatched, args: Dispatched, kwargs: dict[str, Dispatched]) -> Dispatched:
    name, device = function.name(), kwargs.get("device")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    own = {id(inner(x)): x for x in tensors if isinstance(x, OnCard)}
    asked = device is not None and torch.device(device).type == CARD
    if not own and not asked:
        return function(*args, **kwargs)
    plain = kwargs if device is None else kwargs | {"device": torch.device("cpu")}
    if any(x.is_meta and not isinstance(x, OnCard) for x in tensors):
        raise RuntimeError(f"{name}: a tensor without data, from a list given as an index")
    found = function(*tree_map(inner, args), **tree_map(inner, plain))
    if name == "aten::_to_copy":
        return OnCard(found) if asked or device is None else found
    if name == "aten::copy_":
        return args[0]
    strangers = own and [x for x in tensors if not isinstance(x, OnCard) and x.dim()]
    if strangers and not (name in _CPU_INDICES and isinstance(args[0], OnCard)):
        raise RuntimeError(f"{name}: tensors of the card and of the CPU")
    return tree_map(lambda x: own.get(id(x), wrapped(x)), found)


class Here:
    """Workers that work in this thread: the pretended card is known to no other."""

    def map(self, task: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        return [task(item) for item in items]

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        for task in tasks:
            task()


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PipelineOutput]:
    """Return a judge whose reference runs on the pretended card."""
    with on(CARD):
        torch.empty(0)  # torch lists its factories at the first use, which must be the real ones
    tensor = torch.tensor

    def literal(data: Dispatched, **options: Dispatched) -> Tensor:
        made = tensor(data, **options)
        return OnCard(tensor(data, **options | {"device": "cpu"})) if made.is_meta else made

    @contextmanager
    def here(device: str) -> Iterator[Here]:
        yield Here()

    monkeypatch.setattr(torch, "tensor", literal)
    monkeypatch.setattr(layer_run, "workers", here)
    monkeypatch.setattr(pipeline, "require_device", lambda device: None)

    def judge(inputs: Inputs, *candidates: Candidate, swap: bool = False) -> PipelineOutput:
        with Pretend():  # type: ignore[no-untyped-call]
            return verify(
                inputs,
                candidates,
                contract=BF16_CONTRACT,
                limits=Limits.default(),
                stages=None,
                progress=NoProgress(),
                swap=swap,
                device=CARD,
            )

    return judge


@pytest.mark.parametrize(
    "names",
    [
        ("emulated:fused-fp8", "emulated:fused-fp4"),
        ("emulated:fused-bf16", "emulated:unfused-bf16"),
    ],
)
def test_a_card_judges_as_the_cpu_does(
    names: tuple[str, ...],
    small_inputs: Callable[..., Inputs],
    judge: Callable[..., PipelineOutput],
    on_card: Callable[..., PipelineOutput],
) -> None:
    inputs = small_inputs(tokens=260, layers=(0, 1, 2))
    candidates = [create(name) for name in names]

    found, meant = on_card(inputs, *candidates), judge(inputs, *candidates)

    assert found.result.verdict == "match"
    assert found.result.counts == meant.result.counts
    assert found.rows.keys() == meant.rows.keys()
    for name, rows in meant.rows.items():  # sums of larger blocks may go in another order
        torch.testing.assert_close(found.rows[name], rows, rtol=1e-4, atol=1e-6)


def test_swaps_are_counted_on_a_card(
    small_inputs: Callable[..., Inputs], on_card: Callable[..., PipelineOutput]
) -> None:
    result = on_card(small_inputs(layers=(0,)), create("emulated:fused-fp8"), swap=True).result
    assert result.candidates[0].layers[0].swap is not None


def test_without_a_card_it_says_so(small_inputs: Callable[..., Inputs]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match="--device cuda: torch finds no CUDA device"):
        verify(
            small_inputs(),
            [create("emulated:fused-fp8")],
            contract=BF16_CONTRACT,
            limits=Limits.default(),
            stages=None,
            progress=NoProgress(),
            device="cuda",
        )


def test_placed_keeps_what_lies_there() -> None:
    value = {"a": [torch.ones(2), 3], "b": (torch.zeros(1), "x")}
    assert placed(value, "cpu") is value
    (first, number), (second, text) = placed(value, CARD).values()
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert first.is_meta
    assert second.is_meta
    assert (number, text) == (3, "x")


def test_a_device_holds_for_its_block() -> None:
    with on(CARD):
        assert torch.empty(1).is_meta
        with on("cpu"):
            assert not torch.empty(1).is_meta
    assert not torch.empty(1).is_meta
