"""``needlepoint fixtures propose``: write a new golden beside the old one and review the change."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from needlepoint.verify.goldens.compute import (
    Computed,
    compute,
    golden_sources,
    require_own_sources,
)
from needlepoint.verify.goldens.manifest import (
    FIXTURES,
    PROPOSED,
    TENSORS_FILE,
    Definition,
    Golden,
    GoldenError,
    Kind,
    check_name,
    load_golden,
    load_manifest,
    pin_folder,
)
from needlepoint.verify.goldens.review import load_side, review
from needlepoint.verify.inputs.load import MINI, SYNTHETIC, load_inputs
from needlepoint.verify.recording.file import tensor_source, write_tensors
from needlepoint.verify.schema.environment import collect_environment
from needlepoint.verify.schema.result import Contract

RECORD: Final = "needlepoint record"
PROPOSE: Final = "needlepoint fixtures propose"
PROPOSAL_FILE: Final = "proposal.json"
DEFAULT_KEEP: Final = ("index.stored", "main.stored", "query.query", "query.weights")


@dataclass(frozen=True)
class InputChoice:
    """What a reference golden is computed from, as in ``load_inputs``."""

    source: str
    model: str | None
    layers: tuple[int, ...] | None
    tokens: int | None
    seed: int | None
    contract: Contract


@dataclass(frozen=True)
class Proposal:
    """What was written, and its review."""

    golden: Golden
    """What would be pinned."""
    folder: Path
    """Where it stands."""
    review: tuple[str, ...]
    """Lines to read before accepting."""


def propose_reference(
    root: Path, name: str, choice: InputChoice | None, stages: tuple[str, ...] | None
) -> Proposal:
    """Run the reference and propose what it gives.

    Parameters
    ----------
    root
        Root of the checkout.
    name
        The fixture.
    choice
        Its input and contract; None for those it has.
    stages
        Stages to keep; None for those it has, or :data:`DEFAULT_KEEP`.

    Raises
    ------
    ValueError
        If the fixture is of another kind, has no definition yet and none is given, or the input
        cannot be used.
    """
    require_own_sources(root)
    old = accepted_golden(root, name, "reference")
    before = old.definition if old is not None and isinstance(old.definition, Definition) else None
    if choice is None and before is None:
        raise GoldenError(
            f"golden {name}: is new; name the input it is computed from, for example --input "
            "synthetic:small --tokens 600 --layers 0"
        )
    kept = stages or (before.keep if before else DEFAULT_KEEP)
    definition = before if choice is None else _definition(choice, kept)
    if definition is None:
        raise GoldenError(f"golden {name}: has no definition")
    definition = definition.model_copy(update={"keep": kept})
    return write_proposal(root, name, _reference(root, definition), compute(definition))


def propose_given(root: Path, name: str, source: Path, generator: str | None) -> Proposal:
    """Propose files that a script made.

    Raises
    ------
    ValueError
        If the fixture is of another kind, the folder is not usable, or no script is named.
    """
    old = accepted_golden(root, name, "given")
    script = generator or (None if old is None else old.generator)
    if script is None or not (root / script).is_file() or Path(script).is_absolute():
        raise GoldenError(
            f"golden {name}: --generator {script}: expected the script that made it, from the root "
            "of the checkout, for example fixtures/make_mini.py"
        )
    if not source.is_dir() or not any(source.glob("*.safetensors")):
        raise GoldenError(f"--from {source}: expected a folder with safetensors files")
    names = list(pin_folder(source))
    target = fresh(root, name)
    for file in names:
        shutil.copyfile(source / file, target / file)
    golden = Golden(
        kind="given",
        generator=script,
        sources_sha256=golden_sources(root, script),
        versions=tool_versions(),
        device="cpu",
        files={},
    )
    return finish(root, name, target, golden)


def _definition(choice: InputChoice, stages: tuple[str, ...]) -> Definition:
    if choice.source != MINI and choice.source.partition(":")[0] != SYNTHETIC:
        raise GoldenError(f"--input {choice.source}: expected {MINI} or {SYNTHETIC}:KIND")
    inputs = load_inputs(
        choice.source,
        model=choice.model,
        layers=choice.layers,
        tokens=choice.tokens,
        seed=choice.seed,
    )
    return Definition(
        input=inputs.name,
        model=choice.model,
        requests=inputs.requests,
        layers=inputs.layers,
        seed=inputs.seed,
        input_sha256=inputs.sha256,
        keep=stages,
        contract=choice.contract,
    )


def _reference(root: Path, definition: Definition) -> Golden:
    return Golden(
        kind="reference",
        generator=RECORD,
        sources_sha256=golden_sources(root, "reference"),
        versions=tool_versions(),
        device="cpu",
        files={},
        definition=definition,
    )


def accepted_golden(root: Path, name: str, kind: Kind) -> Golden | None:
    """Return the fixture as it is now, its bytes checked; None for a new one."""
    check_name(name)
    folder = root / FIXTURES
    golden = load_manifest(folder).goldens.get(name)
    if golden is None:
        return None
    if golden.kind != kind:
        hint = {
            "given": "give --from a folder that its script made",
            "reference": "leave --from and --result away",
            "recorded": "give --from a recording and --result its result, both made on a card, or "
            "--cases",
        }[golden.kind]
        raise GoldenError(f"golden {name}: is {golden.kind}, not {kind}; {hint}")
    return load_golden(name, folder).golden


def write_proposal(root: Path, name: str, golden: Golden, found: Computed) -> Proposal:
    """Write computed tensors as a proposal, pin them and review the change."""
    target = fresh(root, name)
    write_tensors(
        target / TENSORS_FILE, {key: tensor_source(t) for key, t in found.tensors.items()}
    )
    return finish(root, name, target, golden.model_copy(update={"layers": dict(found.layers)}))


def fresh(root: Path, name: str) -> Path:
    """Return an empty folder for a proposal; an earlier one is replaced."""
    target = root / FIXTURES / f"{name}{PROPOSED}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    return target


def finish(root: Path, name: str, target: Path, golden: Golden) -> Proposal:
    """Write the pins of a proposal beside its files and review it."""
    golden = golden.model_copy(update={"files": pin_folder(target)})
    (target / PROPOSAL_FILE).write_bytes(
        golden.model_dump_json(by_alias=True, indent=1).encode() + b"\n"
    )
    folder = root / FIXTURES
    old = load_manifest(folder).goldens.get(name)
    before = None if old is None else load_side(folder / name, old)
    return Proposal(golden, target, tuple(review(before, load_side(target, golden))))


def tool_versions() -> dict[str, str]:
    """Return the versions that a golden keeps."""
    here = collect_environment()
    return {
        "needlepoint": here.needlepoint,
        "python": here.python,
        "torch": here.torch,
        "numpy": here.numpy,
    }
