"""The commands of ``fixtures``: what is pinned, and how it may change."""

from __future__ import annotations

import typer

from needlepoint.verify.cli.options import (
    AcceptOptions,
    CheckOptions,
    ListOptions,
    ProposeOptions,
)
from needlepoint.verify.cli.outputs import reader_may_leave
from needlepoint.verify.goldens import accept as goldens_accept
from needlepoint.verify.goldens import check as goldens_check
from needlepoint.verify.goldens import manifest as goldens
from needlepoint.verify.goldens import propose as goldens_propose
from needlepoint.verify.goldens import recorded as goldens_recorded


def list_fixtures(options: ListOptions) -> int:
    """List every fixture: kind, tensors, and why it is what it is."""
    folder = goldens.find_root(options.root) / goldens.FIXTURES
    manifest = goldens.load_manifest(folder)
    with reader_may_leave():
        for name, golden in sorted(manifest.goldens.items()):
            tensors = sum(len(pin.tensors or ()) for pin in golden.files.values())
            last = next((e for e in reversed(manifest.history) if e.name == name), None)
            typer.echo(f"{name}: {golden.kind}, {tensors} tensors, {_origin(golden)}")
            if last is not None:
                typer.echo(f"  accepted {last.date}: {last.reason}")
    return 0


def check(options: CheckOptions) -> int:
    """Check every byte under fixtures/; 1 on any fault."""
    report = goldens_check.check(goldens.find_root(options.root))
    with reader_may_leave():
        for fault in report.faults:
            typer.echo(f"fault: {fault}")
        for note in report.notes:
            typer.echo(f"note: {note}")
        typer.echo(
            f"{report.fixtures} fixtures, {report.tensors} tensors: {len(report.faults)} faults"
        )
    return 1 if report.faults else 0


def propose(options: ProposeOptions) -> int:
    """Write a new golden beside the old one and print what changes."""
    place, name, source = goldens.find_root(options.root), options.name, options.source
    chosen = options.keep
    stages = None if chosen is None else tuple(sorted(".".join(key) for key in chosen))
    if options.cases is not None or goldens_recorded.is_drawn(place, name):
        others = ("input", "result", "generator", "emulation", "keep")
        if any(options.asked(other) for other in others):
            raise ValueError(
                "--input, --result, --generator, --emulation and --keep are not for kernel cases "
                f"({name} or --cases); leave them out"
            )
        proposal = goldens_recorded.propose_card(place, name, options.cases, source)
    elif source is None:
        if options.result or options.generator is not None or options.emulation is not None:
            raise ValueError("--result, --generator and --emulation go with --from DIR; add it")
        choice = None
        if options.input is not None:
            choice = goldens_propose.InputChoice(
                source=options.input,
                model=options.model,
                layers=options.layers,
                tokens=options.tokens,
                seed=options.seed,
                contract=options.contract,
            )
        proposal = goldens_propose.propose_reference(place, name, choice, stages)
    elif options.result is not None:
        proposal = goldens_recorded.propose_recorded(
            place, name, source, options.result, stages, options.emulation
        )
    else:
        proposal = goldens_propose.propose_given(place, name, source, options.generator)
    with reader_may_leave():
        for line in proposal.review:
            typer.echo(line)
        typer.echo(f"proposed in {proposal.folder.relative_to(place)}; read the lines above, then")
        typer.echo(f"needlepoint fixtures accept {name} --reason '..'")
    return 0


def accept(options: AcceptOptions) -> int:
    """Put proposals in place; refused in CI, without a reason, and beside other changes."""
    act = goldens_accept.remove if options.remove else goldens_accept.accept
    for entry in act(goldens.find_root(options.root), list(options.names), options.reason):
        done = "removed" if options.remove else "accepted"
        typer.echo(f"{done} {entry.name}: {entry.review}")
    return 0


def _origin(golden: goldens.Golden) -> str:
    """Return what a fixture comes from, in words."""
    definition = golden.definition
    if definition is None:
        return f"made by {golden.generator}"
    if isinstance(definition, goldens.CardDefinition):
        return f"kernel cases {definition.cases} on {golden.device}"
    who = f"{definition.candidate} on {golden.device}" if definition.candidate else "reference"
    return f"{who} over {definition.input}, {sum(definition.requests)} tokens"
