"""The commands around the main job: ``doctor`` and ``fixtures``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from needlepoint.verify.base.atomic import check_writable, write_files
from needlepoint.verify.cli.doctor import diagnose
from needlepoint.verify.cli.doctor_report import print_diagnosis
from needlepoint.verify.cli.options import parse_contract, parse_layers, parse_number, parse_stages
from needlepoint.verify.cli.run import plain_console, reader_may_leave
from needlepoint.verify.goldens import accept as goldens_accept
from needlepoint.verify.goldens import card as goldens_card
from needlepoint.verify.goldens import check as goldens_check
from needlepoint.verify.goldens import manifest as goldens
from needlepoint.verify.goldens import propose as goldens_propose
from needlepoint.verify.goldens import recorded as goldens_recorded

fixtures_app = typer.Typer(
    help="Golden fixtures of a checkout: what is pinned, and how it may change.",
    rich_markup_mode=None,
)

Root = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Root of the checkout; default: the one around this folder."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Folder under fixtures/.")]
Names = Annotated[list[str], typer.Argument(metavar="NAME..", help="Folders under fixtures/.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print a traceback with an error.")]


def doctor(
    caches: Annotated[bool, typer.Option("--caches", help="List every built kernel.")] = False,
    purge_stale: Annotated[
        bool, typer.Option("--purge-stale", help="Remove built kernels that are stale.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write needlepoint.doctor/1.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite output files.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
    debug: Debug = False,
) -> int:
    """Say what this machine can run, and why not the rest; 0 if it could be told."""
    if json is not None:
        check_writable(json, force=force)
    found = diagnose(caches=caches, purge=purge_stale)
    if json is not None:
        text = found.model_dump_json(by_alias=True, indent=1) + "\n"
        write_files({json: text.encode()}, force=force)
    if not quiet:
        with reader_may_leave():
            print_diagnosis(found, plain_console(sys.stdout))
    return 0


@fixtures_app.command("list")
def list_fixtures(root: Root = None, debug: Debug = False) -> int:
    """List every fixture: kind, tensors, and why it is what it is."""
    folder = goldens.find_root(root) / goldens.FIXTURES
    manifest = goldens.load_manifest(folder)
    with reader_may_leave():
        for name, golden in sorted(manifest.goldens.items()):
            tensors = sum(len(pin.tensors or ()) for pin in golden.files.values())
            last = next((e for e in reversed(manifest.history) if e.name == name), None)
            typer.echo(f"{name}: {golden.kind}, {tensors} tensors, {_origin(golden)}")
            if last is not None:
                typer.echo(f"  accepted {last.date}: {last.reason}")
    return 0


@fixtures_app.command()
def check(root: Root = None, debug: Debug = False) -> int:
    """Check every byte under fixtures/; 1 on any fault."""
    report = goldens_check.check(goldens.find_root(root))
    with reader_may_leave():
        for fault in report.faults:
            typer.echo(f"fault: {fault}")
        for note in report.notes:
            typer.echo(f"note: {note}")
        typer.echo(
            f"{report.fixtures} fixtures, {report.tensors} tensors: {len(report.faults)} faults"
        )
    return 1 if report.faults else 0


@fixtures_app.command()
def propose(
    name: Name,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Recording, or a folder that a script made."),
    ] = None,
    result: Annotated[
        Path | None, typer.Option(metavar="RESULT", help="Result that vouches for a recording.")
    ] = None,
    generator: Annotated[
        str | None, typer.Option(metavar="SCRIPT", help="What made the folder of --from.")
    ] = None,
    input: Annotated[
        str | None, typer.Option(metavar="mini|synthetic[:KIND]", help="Input of a reference.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model shapes.")] = None,
    layers: Annotated[str | None, typer.Option(metavar="2,4-8", help="Layers.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="Tokens.")] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Seed.")] = None,
    contract: Annotated[
        str, typer.Option(metavar="exact|bf16|official", help="Arithmetic of the reference.")
    ] = "bf16",
    keep: Annotated[
        str | None, typer.Option(metavar="index.stored,..", help="Stages to keep.")
    ] = None,
    emulation: Annotated[
        str | None, typer.Option(metavar="NAME", help="What a recording is compared with.")
    ] = None,
    cases: Annotated[
        str | None,
        typer.Option(metavar="stores|scores", help="Record every kernel of this card over cases."),
    ] = None,
    root: Root = None,
    debug: Debug = False,
) -> int:
    """Write a new golden beside the old one and print what changes."""
    place = goldens.find_root(root)
    chosen = parse_stages(keep)
    stages = None if chosen is None else tuple(sorted(".".join(key) for key in chosen))
    if cases is not None or goldens_recorded.is_drawn(place, name):
        others = (input, result, generator, emulation, keep)
        if any(option is not None for option in others):
            raise ValueError(
                "--input, --result, --generator, --emulation and --keep are not for kernel cases "
                f"({name} or --cases); leave them out"
            )
        proposal = goldens_recorded.propose_card(place, name, parse_cases(cases), source)
    elif source is None:
        if result is not None or generator is not None or emulation is not None:
            raise ValueError("--result, --generator and --emulation go with --from DIR; add it")
        choice = None
        if input is not None:
            choice = goldens_propose.InputChoice(
                source=input,
                model=model,
                layers=parse_layers(layers),
                tokens=None if tokens is None else parse_number("--tokens", tokens, 1),
                seed=None if seed is None else parse_number("--seed", seed, 0),
                contract=parse_contract(contract),
            )
        proposal = goldens_propose.propose_reference(place, name, choice, stages)
    elif result is not None:
        proposal = goldens_recorded.propose_recorded(place, name, source, result, stages, emulation)
    else:
        proposal = goldens_propose.propose_given(place, name, source, generator)
    with reader_may_leave():
        for line in proposal.review:
            typer.echo(line)
        typer.echo(f"proposed in {proposal.folder.relative_to(place)}; read the lines above, then")
        typer.echo(f"needlepoint fixtures accept {name} --reason '..'")
    return 0


@fixtures_app.command()
def accept(
    names: Names,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; kept in the history.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the fixtures.")] = False,
    root: Root = None,
    debug: Debug = False,
) -> int:
    """Put proposals in place; refused in CI, without a reason, and beside other changes."""
    act = goldens_accept.remove if remove else goldens_accept.accept
    for entry in act(goldens.find_root(root), names, reason):
        typer.echo(f"{'removed' if remove else 'accepted'} {entry.name}: {entry.review}")
    return 0


def parse_cases(text: str | None) -> goldens.Cases | None:
    """Return the kernel cases of ``--cases``.

    Raises
    ------
    ValueError
        For any other word.
    """
    for cases in goldens_card.CASES:
        if text == cases:
            return cases
    if text is None:
        return None
    raise ValueError(f"--cases {text!r}: expected {' or '.join(goldens_card.CASES)}")


def _origin(golden: goldens.Golden) -> str:
    """Return what a fixture comes from, in words."""
    definition = golden.definition
    if definition is None:
        return f"made by {golden.generator}"
    if isinstance(definition, goldens.CardDefinition):
        return f"kernel cases {definition.cases} on {golden.device}"
    who = f"{definition.candidate} on {golden.device}" if definition.candidate else "reference"
    return f"{who} over {definition.input}, {sum(definition.requests)} tokens"
