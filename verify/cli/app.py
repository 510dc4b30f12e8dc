"""The command line: options in, one message for each error, an exit code out.

Exit codes: 0 match and no gate exceeded, 1 differ or a gate exceeded, 2 cannot judge (wrong usage,
bad input, a shortfall in what was compared, a crash), 130 interrupted. Results go to standard
output, progress and errors to standard error. What a command runs is loaded when it runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from traceback import format_exception
from typing import Annotated, Final

import typer
from pydantic.fields import FieldInfo

from needlepoint.verify.cli.defaults import Defaults, load_defaults
from needlepoint.verify.cli.options import (
    AcceptOptions,
    BenchOptions,
    CheckOptions,
    DiffOptions,
    DoctorOptions,
    ListOptions,
    Options,
    ProposeOptions,
    RecallOptions,
    RecordOptions,
    RejudgeOptions,
    SelftestOptions,
    VerifyOptions,
)
from needlepoint.verify.schema.version import own_version

EXIT_CANNOT_JUDGE: Final = 2
EXIT_INTERRUPTED: Final = 130
COMMANDS: Final[Mapping[str, tuple[type[Options], str]]] = {
    "verify": (VerifyOptions, "commands:verify"),
    "record": (RecordOptions, "commands:record"),
    "diff": (DiffOptions, "commands:diff"),
    "rejudge": (RejudgeOptions, "rejudge:rejudge"),
    "doctor": (DoctorOptions, "doctor:doctor"),
    "selftest": (SelftestOptions, "selftest:selftest"),
    "bench": (BenchOptions, "bench:bench"),
    "recall": (RecallOptions, "recall:recall"),
}
"""Options of each command, and the function of this package that takes them."""
FIXTURES: Final[Mapping[str, tuple[type[Options], str]]] = {
    "list": (ListOptions, "fixtures:list_fixtures"),
    "check": (CheckOptions, "fixtures:check"),
    "propose": (ProposeOptions, "fixtures:propose"),
    "accept": (AcceptOptions, "fixtures:accept"),
}


class RunFailed(Exception):
    """A run failed with the cause of this exception."""


def _new_app(told: str, commands: Mapping[str, tuple[type[Options], str]]) -> typer.Typer:
    """Return a command line of these commands."""
    made = typer.Typer(
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help=told,
    )
    for name, (options, run) in commands.items():
        made.command(name)(_command(options, run))
    return made


def _command(options: type[Options], run: str) -> Callable[..., int]:
    """Return the function that typer calls: it reads options and runs what ``run`` names."""
    fields = options.options()
    names = {_parameter(name): name for name in fields}

    def command(ctx: typer.Context, **values: object) -> int:
        defaults: Defaults = ctx.obj
        given = {names[key]: value for key, value in values.items() if _is_named(ctx, key)}
        read = options.read(given, "command line", _spelled, defaults.values)
        used = ", ".join(sorted(options.taken(defaults.values)))
        if used and not getattr(read, "quiet", False):
            say(f"defaults from {defaults.source}: {used}")
        module, _, function = run.partition(":")
        code: int = getattr(import_module(f"needlepoint.verify.cli.{module}"), function)(read)
        return code

    typed = [_typed(name, field) for name, field in fields.items()]
    context = inspect.Parameter(
        "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    command.__signature__ = inspect.Signature([context, *typed])  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in (context, *typed)}
    command.__doc__ = options.__doc__
    return command


_KIND = inspect.Parameter.KEYWORD_ONLY


def _parameter(option: str) -> str:
    """Return a name that a parameter may have: ``from`` is a word of Python."""
    return option.replace("-", "_") + "_"


def _typed(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return an option as typer reads it; every value is a text, which the options read."""
    extra = field.json_schema_extra
    metavar = str(extra["metavar"]) if isinstance(extra, dict) else ""
    told = field.description
    kind: object = str
    if field.annotation is bool:
        kind = bool
    elif field.annotation == tuple[str, ...]:
        kind = list[str]
    info: object
    if isinstance(extra, dict) and extra.get("argument"):
        info = typer.Argument(metavar=metavar, help=told)
        return inspect.Parameter(_parameter(name), _KIND, annotation=Annotated[kind, info])
    info = typer.Option(f"--{name}", metavar=metavar or None, help=told)
    if field.is_required():
        return inspect.Parameter(_parameter(name), _KIND, annotation=Annotated[kind, info])
    default = field.default
    if default in (None, (), ""):
        default = None
        kind = kind | None  # type: ignore[operator]
    elif kind is str:
        default = str(default)
    return inspect.Parameter(
        _parameter(name), _KIND, default=default, annotation=Annotated[kind, info]
    )


def _is_named(ctx: typer.Context, parameter: str) -> bool:
    """Return whether an option stands on the command line."""
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _spelled(name: str, value: object) -> str:
    """Return an option and its value as the command line has them."""
    return f"--{name} {', '.join(map(str, value)) if isinstance(value, tuple) else repr(value)}"


app = _new_app("Verify DeepSeek-V4 compressor and indexer kernels against a reference.", COMMANDS)
app.add_typer(
    _new_app("Golden fixtures of a checkout: what is pinned, and how it may change.", FIXTURES),
    name="fixtures",
)


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


def run_app(app: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing is raised.

    Parameters
    ----------
    app
        The commands.
    arguments
        Arguments after the program name; those of this process by default.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A name that the terminal cannot spell must not turn a verdict into a crash.
            stream.reconfigure(errors="backslashreplace")
    debug = "--debug" in arguments
    try:
        _check_text(arguments)
        defaults = load_defaults(Path.cwd()) if _takes_defaults(arguments) else Defaults()
        debug = debug or defaults.values.get("debug") is True
        code = app(arguments, prog_name="needlepoint", standalone_mode=False, obj=defaults)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except BaseException as error:  # an exit or a cancellation inside the run is no verdict
        return _fail(error, debug)
    if code == EXIT_INTERRUPTED:
        say("interrupted; nothing half-written is left behind")
    return code if isinstance(code, int) else 0


def _takes_defaults(arguments: Sequence[str]) -> bool:
    """Return whether a faulty table stops the command: not what helps to correct it."""
    return arguments[:1] not in (["doctor"], ["--version"]) and not {"-h", "--help"} & {*arguments}


def _check_text(arguments: Sequence[str]) -> None:
    """Refuse arguments that no result could hold, before the run that would make one."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"argument {argument!r}: is not UTF-8; rename the file or folder"
            ) from error


def _fail(error: BaseException, debug: bool) -> int:
    """Print one message for an error and return the exit code."""
    error = error.__cause__ or error if isinstance(error, RunFailed) else error
    if debug:
        sys.stderr.write("".join(format_exception(error)))
    usage = getattr(error, "format_message", None)
    if callable(usage):
        message = f"{str(usage()).rstrip('.')} (--help lists the options)"
    elif isinstance(error, ValueError):
        message = str(error)
    elif isinstance(error, MemoryError):
        message = "out of memory; choose fewer --tokens or --layers"
    else:
        hint = "" if debug else "; run again with --debug for the traceback"
        message = f"unexpected {type(error).__name__}: {error}{hint}"
    say(f"error: {message}")
    return EXIT_CANNOT_JUDGE


def say(message: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(f"needlepoint: {message}\n")
