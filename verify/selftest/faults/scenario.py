"""Faults between calls: each planted in a server, each with a scenario that shows it.

A fault leaves whole prompts right, so that only a history can find it. The self-test runs the
scenario of every fault on a server that has it and on the sound one; ``caught`` says what was seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.optimized.emulation.scoring import fused_scores
from needlepoint.optimized.protocol.serving import CacheSpec, LayerParameters
from needlepoint.optimized.serving.cache import new_cache
from needlepoint.optimized.serving.emulated import EmulatedServer
from needlepoint.verify.scenario.events import (
    Accept,
    Copy,
    Decode,
    Draft,
    Event,
    Evict,
    Fork,
    Free,
    Offload,
    Pad,
    Prefill,
    Request,
    Restore,
    Scenario,
    Split,
)
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.scenario.run import Failure
from needlepoint.verify.scenario.trial import try_candidate
from needlepoint.verify.selftest.faults import servers


@dataclass(frozen=True)
class FaultyCandidate(EmulatedCandidate):
    """An emulated candidate whose server has a fault; whole prompts are right."""

    server: type[EmulatedServer] = EmulatedServer  # The faulty server.

    def serve(self, parameters: LayerParameters, spec: CacheSpec) -> EmulatedServer:
        """Open the faulty server."""
        cache = new_cache(parameters, spec, self.key_format)
        return self.server(parameters, cache, self.key_format, fused_scores)


@dataclass(frozen=True)
class ScenarioFault:
    """One fault."""

    id: str  # Name that stays the same.
    letter: str  # Class of the fault log, ``I`` to ``N``.
    text: str  # What is planted, one sentence.
    server: type[EmulatedServer]  # The faulty server.
    events: tuple[Event, ...]  # Events that show it, over requests ``a`` to ``d``.
    log: tuple[str, ...] = ()  # Rows of the fault log whose mechanism this is.

    @property
    def scenario(self) -> Scenario:
        """The scenario of the fault."""
        return scenario_of(self.id, self.events)

    def candidate(self, key_format: str = "fp8") -> FaultyCandidate:
        """Return a candidate with the fault."""
        return FaultyCandidate(key_format, Order.FUSED, self.server)

    def caught(self, key_format: str = "fp8") -> Failure | None:
        """Run the scenario on the faulty candidate and return what was seen."""
        return seen(self.scenario, self.candidate(key_format))


def scenario_of(name: str, events: tuple[Event, ...]) -> Scenario:
    """Return a scenario over requests ``a`` to ``d``, each with a text of its own."""
    words = {word for event in events for word in event.describe().replace(",", "").split()}
    requests = tuple(Request(n, i) for i, n in enumerate("abcd") if n in words)
    return Scenario(name, requests, events, pages=8)


def seen(scenario: Scenario, candidate: EmulatedCandidate) -> Failure | None:
    """Return the first failure of a candidate in a scenario, or None."""
    failures = try_candidate(scenario, check(scenario), candidate).failures
    return failures[0].failure if failures else None


def fault(
    id: str, letter: str, server: type[EmulatedServer], *events: Event, log: str = ""
) -> ScenarioFault:
    """Return a fault; what is planted is said by its server."""
    text = (server.__doc__ or "").splitlines()[0]
    return ScenarioFault(id, letter, text, server, events, tuple(log.split()))


def _both(a: int, b: int) -> Prefill:
    return Prefill(("a", "b"), (a, b))


FAULTS: Final[tuple[ScenarioFault, ...]] = (
    fault("overlap-lost", "I", servers.Overlap, Prefill(("a",), (6,)), Prefill(("a",), (6,)),
          log="I01 I03"),
    fault("bias-from-call", "I", servers.SlotBias, Prefill(("a",), (6,)), Prefill(("a",), (6,)),
          log="I06 I04"),
    fault("tail-dropped", "I", servers.Tail, Prefill(("a",), (7,)), Decode(("a",)), log="I04"),
    fault("padding-counted", "I", servers.Padding, Pad(3, "front"), Prefill(("a",), (8,)),
          log="I05"),
    fault("padding-stored", "I", servers.PaddingStored, Pad(2, "back"), _both(8, 9), log="C05"),
    fault("rope-from-call", "I", servers.EntryPosition, Prefill(("a",), (8,)),
          Prefill(("a",), (8,)), log="I04"),
    fault("drafts-kept", "J", servers.DraftsKept, Prefill(("a",), (5,)), Draft(("a",), (2,)),
          Accept(("a",), (0,)), Prefill(("a",), (3,)), log="J05 K04"),
    fault("rejected-visible", "J", servers.RejectedVisible, Prefill(("a",), (6,)),
          Draft(("a",), (3,)), Accept(("a",), (0,)), Prefill(("a",), (3,)), log="J03"),
    fault("drafts-blind", "J", servers.DraftsBlind, Prefill(("a",), (6,)), Draft(("a",), (4,)),
          Accept(("a",), (4,)), log="J09 J03"),
    fault("ring-too-short", "J", servers.ShortRing, Prefill(("a",), (7,)), Draft(("a",), (8,)),
          Accept(("a",), (0,)), Prefill(("a",), (5,)), log="J05 K11"),
    fault("prefix-stale", "K", servers.StalePrefix, Prefill(("a",), (30,)), Fork("b", "a", 6),
          Prefill(("b",), (4,)), log="K01 K06"),
    fault("prefix-without-state", "K", servers.NoPrefixState, Prefill(("a",), (6,)),
          Fork("b", "a", 6), Prefill(("b",), (4,)), log="K01 K08"),
    fault("prefix-page-left", "K", servers.PartialPage, Prefill(("a",), (12,)),
          Fork("b", "a", 10), log="K02"),
    fault("offload-without-index", "K", servers.IndexLost, _both(9, 5), Offload("a"),
          Prefill(("c",), (5,)), Restore("a"), log="K09"),
    fault("offload-without-state", "K", servers.StateLost, _both(9, 6), Offload("a"), Free("b"),
          Restore("a"), Prefill(("a",), (4,)), log="K02 K05"),
    fault("restore-to-old-slot", "K", servers.WrongSlot, _both(9, 6), Offload("a"),
          Prefill(("c",), (6,)), Restore("a"), log="K10 K11"),
    fault("copy-by-one-table", "K", servers.OneTable, _both(9, 40), Copy("a", 1), log="K12"),
    fault("copy-without-last-page", "K", servers.LastPageLeft, _both(9, 5), Copy("a", 1),
          log="K12"),
    fault("former-owner", "K", servers.FormerOwner, Prefill(("a",), (16,)), Free("a"),
          Prefill(("b",), (5,)), log="K01"),
    fault("evicted-owner", "K", servers.FormerOwner, Prefill(("a",), (16,)), Evict("a"),
          Prefill(("b",), (5,)), log="K01"),
    fault("strided-as-run", "L", servers.StridedAsRun, Split(2, "strided"),
          Prefill(("a",), (13,)), log="L05"),
    fault("local-length", "L", servers.LocalLength, Split(2, "contiguous"),
          Prefill(("a",), (13,)), log="L04"),
    fault("unfinished-visible", "L", servers.Unfinished, Prefill(("a",), (12,)), log="I05"),
    fault("newest-hidden", "L", servers.NewestHidden, Prefill(("a",), (7,)), Decode(("a",)),
          log="L04 J09"),
    fault("one-page-table", "L", servers.FirstPages, _both(8, 9), log="L01 B07"),
    fault("one-slot", "N", servers.FirstSlot, _both(5, 6), Decode(("b",)), Decode(("b",)),
          log="B07"),
    fault("stale-metadata", "M", servers.StaleMetadata, Prefill(("a",), (6,)), Decode(("a",)),
          Decode(("a",)), log="M04 M02"),
    fault("first-decode-stale", "M", servers.FirstDecodeStale, Prefill(("a",), (7,)),
          Decode(("a",)), log="M04 J08"),
    fault("state-in-bf16", "I", servers.Bf16State, Prefill(("a",), (6,)), Decode(("a",)),
          Decode(("a",)), log="I03"),
)  # fmt: skip
"""Every fault; their ids stay the same."""


def wrong_residues(
    server: type[EmulatedServer], decodes: int, lengths: range = range(5, 13)
) -> tuple[int, ...]:
    """Return the prompt lengths modulo 4 at which a fault shows: prompt, then some decodes.

    Raises
    ------
    ValueError
        If some lengths of one residue fail and others do not.
    """
    wrong: dict[int, set[bool]] = {}
    candidate = FaultyCandidate("fp8", Order.FUSED, server)
    for length in lengths:
        events: tuple[Event, ...] = (Prefill(("a",), (length,)), *(Decode(("a",)),) * decodes)
        failed = seen(scenario_of("prompt", events), candidate) is not None
        wrong.setdefault(length % 4, set()).add(failed)
    if any(len(found) > 1 for found in wrong.values()):
        raise ValueError(f"{server.__name__}: lengths of one residue disagree: {wrong}")
    return tuple(sorted(residue for residue, found in wrong.items() if found == {True}))
