"""The command ``rejudge``. Nothing here needs torch: a saved result is judged in two seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from needlepoint.verify.cli.run import Outputs, watched
from needlepoint.verify.cli.shared_options import (
    Debug,
    Force,
    Gates,
    HtmlFile,
    JsonFile,
    JunitFile,
    LimitsFile,
    MarkdownFile,
    Quiet,
    new_app,
)
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recording.results import load_result, load_rows
from needlepoint.verify.triage.rejudge import rejudge as judge_again

app = new_app()


@app.callback()
def alone() -> None:
    """Keep the name of the one command."""


@app.command()
def rejudge(
    ctx: typer.Context,
    result: Annotated[
        Path, typer.Argument(metavar="RESULT", help="File of --json, row errors beside it.")
    ],
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
    """Judge a saved result by other limits; nothing is rerun."""
    outputs = Outputs.create(
        json, junitxml, gate or [], force=force, quiet=quiet, html=html, markdown=markdown
    )
    with watched(ctx.obj, quiet=True):
        saved, rows = load_result(result), load_rows(result)
        table = Limits.default() if limits is None else Limits.load(limits)
        judged = judge_again(saved, rows, table)
    return outputs.finish(judged, rows, limits=True)
