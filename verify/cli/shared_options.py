"""Options that several commands share, as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new_app(help_text: str | None = None) -> typer.Typer:
    """Return a command line without commands, set up as all of ours are."""
    return typer.Typer(
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help=help_text,
    )


Source = Annotated[
    str, typer.Option("--input", metavar="mini|synthetic[:KIND]|PATH", help="What to run over.")
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="mini|v4-flash|v4-pro|v3.2|glm-5.2|CONFIG.json",
        help="Model shapes; default: the input's.",
    ),
]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="DIR", help="Weights; default: drawn from the seed."),
]
Contract = Annotated[
    str, typer.Option(metavar="exact|bf16|official", help="What cost is counted against.")
]
Candidates = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Repeatable; default: the four emulated candidates."),
]
Layers = Annotated[
    str | None,
    typer.Option(metavar="2,4-8", help="Default: those recorded; else the first of each ratio."),
]
Tokens = Annotated[
    str | None,
    typer.Option(metavar="N", help="Default: all of a recording, 2,304 of a synthetic input."),
]
Seed = Annotated[
    str | None,
    typer.Option(metavar="N", help="Seed of weights and synthetic input."),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="cpu|cuda",
        help="Where verify runs the reference, and which built-in candidates run unless named.",
    ),
]
LimitsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TOML: scale = X, or [stage] with value = Y.")
]
Gates = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH<=VALUE", help="Repeatable; a figure of each candidate's result."),
]
JsonFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the result, row errors beside it.")
]
JunitFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")]
HtmlFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a report to open in a browser.")
]
MarkdownFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a summary for a pull request.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite output files.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the verdict line only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print a traceback with an error.")]
