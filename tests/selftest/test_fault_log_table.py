"""The table of docs/fault_log.md: every row has a case that plants it, or a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from needlepoint.verify.selftest.faults.catalogue import CATALOGUE
from needlepoint.verify.selftest.faults.scenario import FAULTS as SERVING

TABLE = Path(__file__).parents[2] / "docs" / "fault_log.md"
ROWS = 143
_ROW = re.compile(r"^\| ([A-Q]\d\d) \| \[[^]]+\]\(https://[^)]+\) \| (.+) \| (.+) \|$")


@pytest.fixture(scope="module")
def table() -> dict[str, str]:
    """Return row to its last column."""
    found: dict[str, str] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and line[2] in "ABCDEFGHIJKLMNOPQ" and line[3].isdigit():
            match = _ROW.match(line)
            assert match, line
            assert match[1] not in found
            found[match[1]] = match[3]
    return found


def covered() -> dict[str, set[str]]:
    """Return row to the cases that plant it."""
    found: dict[str, set[str]] = {}
    for case in CATALOGUE.values():
        for row in case.log:
            found.setdefault(row, set()).add(case.id)
    for fault in SERVING:
        for row in fault.log:
            found.setdefault(row, set()).add(f"server-{fault.id}")
    return found


def test_every_row_has_a_case_or_a_reason(table: dict[str, str]) -> None:
    assert len(table) == ROWS
    for row, last in table.items():
        if row in covered():
            assert set(re.findall(r"`([^`]+)`", last)) == covered()[row], row
        else:
            assert re.fullmatch(r"no case: .{12,}", last), row


def test_every_case_names_rows_that_exist(table: dict[str, str]) -> None:
    assert covered().keys() <= table.keys()


def test_most_rows_have_a_case(table: dict[str, str]) -> None:
    """A reason is an exception: nothing slides into it unnoticed."""
    assert sum(last.startswith("no case") for last in table.values()) <= 17
