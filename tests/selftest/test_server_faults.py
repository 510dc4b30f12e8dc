"""Faults between calls: other formats, whole prompts and the words of what was seen.

That each is caught by its scenario, and the sound server by none, is in ``test_selftest.py``.
"""

from __future__ import annotations

from collections import Counter

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.verify.scenario.bank import bank
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.scenario.trial import try_candidate
from needlepoint.verify.selftest.faults.scenario import FAULTS, wrong_residues
from needlepoint.verify.selftest.faults.servers import FirstDecodeStale, NewestHidden, Tail


def test_faults_are_caught_in_another_format() -> None:
    missed = [fault.id for fault in FAULTS if fault.caught("fp4") is None]

    assert missed == []


def test_the_catalogue_names_every_class_between_calls() -> None:
    letters = Counter(fault.letter for fault in FAULTS)

    assert set(letters) == set("IJKLMN")
    assert max(Counter(fault.id for fault in FAULTS).values()) == 1
    assert all(fault.text.endswith(".") and len(fault.text) > 20 for fault in FAULTS)


def test_whole_prompts_of_a_faulty_candidate_are_right() -> None:
    """What makes these faults invisible to a comparison of single prompts."""
    for fault in FAULTS[:2]:
        sound = EmulatedCandidate("fp8", Order.FUSED).run(bank(128, 0).inputs)
        assert (
            fault.candidate()
            .run(bank(128, 0).inputs)
            .stored["main"]
            .pool.equal(sound.stored["main"].pool)
        )


def test_a_byte_that_nobody_owns_is_named() -> None:
    (fault,) = [fault for fault in FAULTS if fault.id == "restore-to-old-slot"]
    (found,) = try_candidate(fault.scenario, check(fault.scenario), fault.candidate()).failures

    assert found.failure.request == ""
    assert "state of slot 0 changed" in found.failure.problem.detail


def test_which_faults_show_at_prompts_of_3_modulo_4_alone() -> None:
    """One decode after the prompt: whatever the first decode completes. Eight: what stays lost."""
    once = range(5, 9)
    assert wrong_residues(Tail, 1, once) == wrong_residues(NewestHidden, 1, once) == (3,)
    assert wrong_residues(Tail, 8, once) == (1, 2, 3)
    assert wrong_residues(FirstDecodeStale, 1, once) == (3,)
    assert wrong_residues(FirstDecodeStale, 8, once) == (3,)
