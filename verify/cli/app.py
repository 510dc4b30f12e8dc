"""The commands: parse, call, write, exit code. Nothing is computed or formatted here.

Exit codes: 0 match and no gate exceeded, 1 differ or a gate exceeded, 2 cannot judge (wrong usage,
bad input, a shortfall in what was compared, a crash), 130 interrupted. Results go to standard
output, progress and errors to standard error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from needlepoint.verify.cli import bench as cli_bench
from needlepoint.verify.cli import commands
from needlepoint.verify.cli import recall as cli_recall
from needlepoint.verify.cli import rejudge as cli_rejudge
from needlepoint.verify.cli import scenario as scenario_command
from needlepoint.verify.cli import selftest as cli_selftest
from needlepoint.verify.cli import tools as cli_tools
from needlepoint.verify.cli.main import main as main
from needlepoint.verify.cli.options import (
    REPEAT_GATE,
    check_device,
    parse_candidates,
    parse_contract,
    parse_layers,
    parse_number,
    parse_recorded,
    parse_stages,
)
from needlepoint.verify.cli.run import Outputs, reader_may_leave, watched
from needlepoint.verify.cli.shared_options import (
    Candidates,
    CheckpointFolder,
    Contract,
    Debug,
    Device,
    Force,
    Gates,
    HtmlFile,
    JsonFile,
    JunitFile,
    Layers,
    LimitsFile,
    MarkdownFile,
    Model,
    Quiet,
    Seed,
    Source,
    Tokens,
    new_app,
)
from needlepoint.verify.schema.environment import own_version

app = new_app("Verify DeepSeek-V4 compressor and indexer kernels against a reference.")


Stages = Annotated[
    str | None,
    typer.Option(metavar="pooled,index.stored", help="Stages to compare; default: all declared."),
]
ScenarioFile = Annotated[
    str | None,
    typer.Option(metavar="FILE|all", help="Drive candidates through request histories instead."),
]
Seconds = Annotated[
    str | None, typer.Option(metavar="N", help="Time of --scenario all; default 60.")
]
Repeat = Annotated[
    str, typer.Option(metavar="N", help="Run every candidate N times; each run must be the same.")
]
Swap = Annotated[
    bool,
    typer.Option("--swap", help="Replace one stage at a time by the reference, and the reverse."),
]
ShrinkFolder = Annotated[
    Path | None,
    typer.Option("--shrink", metavar="DIR", help="Write the smallest input that still differs."),
]
FailuresFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Record every candidate that differs.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"needlepoint {own_version()}")
        raise typer.Exit(0)


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]


@app.callback()
def common(version: Version = False) -> None:
    """Verify DeepSeek-V4 compressor and indexer kernels against a reference.

    Defaults can stand in [tool.needlepoint] of the nearest pyproject.toml.
    """


@app.command()
def verify(
    ctx: typer.Context,
    input: Source = "mini",
    model: Model = None,
    checkpoint: CheckpointFolder = None,
    contract: Contract = "bf16",
    candidate: Candidates = None,
    layers: Layers = None,
    tokens: Tokens = None,
    seed: Seed = None,
    device: Device = "cpu",
    stages: Stages = None,
    scenario: ScenarioFile = None,
    seconds: Seconds = None,
    repeat: Repeat = "1",
    swap: Swap = False,
    shrink: ShrinkFolder = None,
    save_failures: FailuresFolder = None,
    limits: LimitsFile = None,
    gate: Gates = None,
    json: JsonFile = None,
    junitxml: JunitFile = None,
    html: HtmlFile = None,
    markdown: MarkdownFile = None,
    force: Force = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Run reference and candidates over an input and judge every stage of every layer."""
    runs = parse_number("--repeat", repeat, 1)
    gates = [*(gate or []), *([REPEAT_GATE] if runs > 1 else [])]
    outputs = Outputs.create(
        json, junitxml, gates, force=force, quiet=quiet, html=html, markdown=markdown
    )
    asked = scenario_command.parse_scenario_options(
        scenario,
        seconds,
        seed=None if seed is None else parse_number("--seed", seed, 0),
        candidates=parse_candidates(candidate or [], device),
        contract=parse_contract(contract),
        named=[option for option in ctx.params if _named(ctx, option)],
    )
    if asked is not None:
        check_device(device)
        scenario_command.check_failures(save_failures, force=force)
        with watched(ctx.obj, quiet=quiet) as progress:
            driven = scenario_command.run_scenarios(asked, progress)
        scenario_command.save_failures(driven.result, save_failures, force=force)
        return outputs.finish(driven.result, driven.rows)
    request = commands.VerifyRequest(
        input=_input(input, model, checkpoint, layers, tokens, seed, device),
        candidates=parse_candidates(candidate or [], device),
        contract=parse_contract(contract),
        limits=limits,
        stages=parse_stages(stages),
        repeat=runs,
        swap=swap,
        shrink=shrink,
        save_failures=save_failures,
        force=force,
        device=device,
    )
    with watched(ctx.obj, quiet=quiet) as progress:
        output = commands.run_verify(request, progress)
    if not output.reports:
        return 0  # under torchrun one rank writes for all
    return outputs.finish(output.result, output.rows)


@app.command()
def record(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must not exist.")],
    input: Source = "mini",
    model: Model = None,
    checkpoint: CheckpointFolder = None,
    contract: Contract = "bf16",
    candidate: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Default: the reference.")
    ] = None,
    layers: Layers = None,
    tokens: Tokens = None,
    seed: Seed = None,
    device: Device = "cpu",
    force: Force = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Write the stages of the reference or of one candidate to a folder."""
    request = commands.RecordRequest(
        input=_input(input, model, checkpoint, layers, tokens, seed, device),
        candidate=parse_recorded(
            candidate or [], contract_asked=_named(ctx, "contract"), device=device
        ),
        contract=parse_contract(contract),
        out=out,
        force=force,
    )
    with watched(ctx.obj, quiet=quiet) as progress:
        commands.run_record(request, progress)
    if not quiet:
        with reader_may_leave():
            typer.echo(f"recorded {request.candidate or 'reference'} to {out}")
    return 0


@app.command()
def diff(
    ctx: typer.Context,
    a: Annotated[Path, typer.Argument(metavar="A", help="Recording to judge against.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Recording to judge.")],
    contract: Contract = "bf16",
    layers: Annotated[
        str | None, typer.Option(metavar="2,4-8", help="Default: all layers of both.")
    ] = None,
    stages: Stages = None,
    limits: LimitsFile = None,
    gate: Gates = None,
    json: JsonFile = None,
    junitxml: JunitFile = None,
    html: HtmlFile = None,
    markdown: MarkdownFile = None,
    force: Force = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Judge recording B against recording A."""
    outputs = Outputs.create(
        json, junitxml, gate or [], force=force, quiet=quiet, html=html, markdown=markdown
    )
    request = commands.DiffRequest(
        a=a,
        b=b,
        contract=parse_contract(contract),
        layers=parse_layers(layers),
        limits=limits,
        stages=parse_stages(stages),
    )
    with watched(ctx.obj, quiet=quiet) as progress:
        output = commands.run_diff(request, progress)
    return outputs.finish(output.result, output.rows)


def _named(ctx: typer.Context, option: str) -> bool:
    """Return whether an option stands on the command line, not in the defaults."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _input(
    source: str,
    model: str | None,
    checkpoint: Path | None,
    layers: str | None,
    tokens: str | None,
    seed: str | None,
    device: str,
) -> commands.InputRequest:
    """Parse the options that say what to run over."""
    check_device(device)
    return commands.InputRequest(
        source=source,
        model=model,
        layers=parse_layers(layers),
        tokens=None if tokens is None else parse_number("--tokens", tokens, 1),
        seed=None if seed is None else parse_number("--seed", seed, 0),
        checkpoint=checkpoint,
    )


app.command()(cli_rejudge.rejudge)
app.command()(cli_tools.doctor)
app.command()(cli_selftest.selftest)
app.command()(cli_bench.bench)
app.command()(cli_recall.recall)
app.add_typer(cli_tools.fixtures_app, name="fixtures")
