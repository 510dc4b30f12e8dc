"""``needlepoint fixtures accept``: put a proposal in place of a golden, for a stated reason.

Nothing else writes the manifest. A continuous-integration job cannot accept, and nobody can with
other changes in the tree: what a golden was computed from must be what is committed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from needlepoint.verify.base.atomic import write_files
from needlepoint.verify.goldens.compute import golden_sources
from needlepoint.verify.goldens.manifest import (
    FIXTURES,
    MANIFEST_FILE,
    PROPOSED,
    Accepted,
    Golden,
    GoldenError,
    Goldens,
    check_name,
    load_golden,
    load_manifest,
    manifest_bytes,
    pin_folder,
    pins_digest,
)
from needlepoint.verify.goldens.propose import PROPOSAL_FILE
from needlepoint.verify.goldens.review import load_side, review, summary
from needlepoint.verify.recording.manifest import first_fault

CI_VARIABLES: Final = (
    "CI",
    "BUILDKITE",
    "CIRCLECI",
    "GITHUB_ACTIONS",
    "GITLAB_CI",
    "JENKINS_URL",
    "TEAMCITY_VERSION",
    "TF_BUILD",
    "TRAVIS",
)
LEAST_REASON: Final = 10
"""Characters of a reason: enough for three words."""


def accept(root: Path, names: Sequence[str], reason: str) -> list[Accepted]:
    """Put proposals in place and write the reason to the history.

    Parameters
    ----------
    root
        Root of the checkout.
    names
        Fixtures with a proposal each.
    reason
        Why the values may change.

    Raises
    ------
    GoldenError
        In continuous integration, on a tree with other changes, without a reason, or if a proposal
        is missing, was edited, or was computed by other sources than today's.
    """
    reason = _ready(root, names, reason)
    folder = root / FIXTURES
    goldens = load_manifest(folder)
    proposals = {name: _proposal(root, name) for name in names}
    entries = [
        _entry(name, reason, _review(folder, name, golden, goldens), pins_digest(golden))
        for name, golden in proposals.items()
    ]
    for name in names:
        _replace(folder / f"{name}{PROPOSED}", folder / name)
    _save(folder, goldens, {**goldens.goldens, **proposals}, entries)
    return entries


def remove(root: Path, names: Sequence[str], reason: str) -> list[Accepted]:
    """Remove fixtures and write the reason to the history.

    Raises
    ------
    GoldenError
        As :func:`accept`, or if there is no such fixture.
    """
    reason = _ready(root, names, reason)
    folder = root / FIXTURES
    goldens = load_manifest(folder)
    for name in names:
        if name not in goldens.goldens:
            raise GoldenError(f"golden {name!r}: not in {folder / MANIFEST_FILE}")
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
    entries = [_entry(name, reason, "removed", None) for name in names]
    rest = {name: golden for name, golden in goldens.goldens.items() if name not in names}
    _save(folder, goldens, rest, entries)
    return entries


def _ready(root: Path, names: Sequence[str], reason: str) -> str:
    """Return the reason, cleaned, after every refusal."""
    if not names or len(set(names)) != len(names):
        raise GoldenError("accept: name each fixture once")
    for name in names:
        check_name(name)
    reason = " ".join(reason.split())
    if len(reason) < LEAST_REASON:
        raise GoldenError(
            f"--reason {reason!r}: say in a few words why the values may change; it is kept in the "
            "fixtures' history"
        )
    require_no_ci(os.environ)
    require_clean_tree(root, names)
    return reason


def require_no_ci(environment: Mapping[str, str]) -> None:
    """Raise ``GoldenError`` in a continuous-integration job."""
    for variable in CI_VARIABLES:
        if environment.get(variable, "").lower() not in ("", "0", "false"):
            raise GoldenError(
                f"accept: {variable} is set, so this is continuous integration, where nobody reads "
                "the review; accept on your own machine and commit the result"
            )


def require_clean_tree(root: Path, names: Sequence[str]) -> None:
    """Raise ``GoldenError`` unless git sees no change but the proposals."""
    command = ["git", "-C", str(root), "status", "--porcelain", "-z", "--untracked-files=all"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise GoldenError(
            f"accept: git cannot tell whether {root} has other changes ({error}); accept in a git "
            "checkout"
        ) from error
    own = tuple(f"{FIXTURES}/{name}{PROPOSED}/" for name in names)
    others = [line[3:] for line in done.stdout.split("\0") if line and not line[3:].startswith(own)]
    if others:
        shown = ", ".join(others[:5]) + (" .." if len(others) > 5 else "")
        raise GoldenError(
            f"accept: the tree has other changes ({shown}); commit or undo them first, so that the "
            "golden belongs to what is committed"
        )


def _proposal(root: Path, name: str) -> Golden:
    """Return a proposal after checking that it is what was proposed, by today's sources."""
    folder = root / FIXTURES / f"{name}{PROPOSED}"
    path = folder / PROPOSAL_FILE
    if not path.is_file():
        raise GoldenError(f"golden {name}: no proposal in {folder}; run `fixtures propose` first")
    try:
        golden = Golden.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise GoldenError(f"{path}: {first_fault(error)}; propose again") from error
    pins = pin_folder(folder)
    del pins[PROPOSAL_FILE]
    if pins != golden.files:
        raise GoldenError(f"{folder}: was changed after it was proposed; propose again")
    if golden_sources(root, golden.made_by) != golden.sources_sha256:
        raise GoldenError(f"{folder}: sources changed after it was proposed; propose again")
    return golden


def _review(folder: Path, name: str, golden: Golden, goldens: Goldens) -> str:
    """Return what changes, in one line, from the bytes and not from what a file says."""
    after = load_side(folder / f"{name}{PROPOSED}", golden)
    before = None
    if name in goldens.goldens:
        load_golden(name, folder)
        before = load_side(folder / name, goldens.goldens[name])
    return summary(review(before, after))


def _entry(name: str, reason: str, reviewed: str, digest: str | None) -> Accepted:
    today = datetime.now(UTC).date().isoformat()
    return Accepted(date=today, name=name, reason=reason, review=reviewed, sha256=digest)


def _replace(proposed: Path, target: Path) -> None:
    (proposed / PROPOSAL_FILE).unlink()
    shutil.rmtree(target, ignore_errors=True)
    proposed.rename(target)


def _save(
    folder: Path,
    goldens: Goldens,
    kept: Mapping[str, Golden],
    entries: Sequence[Accepted],
) -> None:
    updated = goldens.model_copy(
        update={"goldens": dict(kept), "history": (*goldens.history, *entries)}
    )
    write_files({folder / MANIFEST_FILE: manifest_bytes(updated)}, force=True)
