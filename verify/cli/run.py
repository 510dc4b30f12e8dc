"""Around the commands: defaults, one message per error, output files, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from traceback import format_exception
from typing import Final, Self, TextIO

import typer
from numpy.typing import ArrayLike
from rich.console import Console

from needlepoint.verify.base.atomic import check_writable, write_files
from needlepoint.verify.base.progress import NoProgress, Progress, TerminalProgress
from needlepoint.verify.cli.defaults import Defaults, load_defaults
from needlepoint.verify.judge.results.gates import Gate, apply_gates, parse_gate
from needlepoint.verify.recording.results import result_files, rows_path
from needlepoint.verify.report.junit import junit_xml
from needlepoint.verify.report.markdown import markdown_summary
from needlepoint.verify.report.terminal import print_report
from needlepoint.verify.schema.result import Result, Verdict

EXIT_CODES: Final[Mapping[Verdict, int]] = {"match": 0, "differ": 1, "cannot-judge": 2}
EXIT_CANNOT_JUDGE: Final = 2
EXIT_INTERRUPTED: Final = 130

# Options of `verify` that mean something else, or nothing, to another command.
_NOT_FOR_RECORD = frozenset({"candidate"})
_FOR_SELFTEST = frozenset({"seed", "limits", "force", "quiet", "debug"})
_NOT_FOR_RECALL = frozenset({"input", "layers", "model", "checkpoint"})


@dataclass(frozen=True)
class Outputs:
    """Where a result goes, checked before the run that makes it."""

    json: Path | None
    junitxml: Path | None
    gates: tuple[Gate, ...]
    force: bool
    quiet: bool
    html: Path | None = None
    markdown: Path | None = None

    @classmethod
    def create(
        cls,
        json: Path | None,
        junitxml: Path | None,
        gates: Sequence[str],
        *,
        force: bool,
        quiet: bool,
        html: Path | None = None,
        markdown: Path | None = None,
        svg: Path | None = None,
    ) -> Self:
        """Parse gates and check that every file of the run can be written.

        ``svg`` is written by its caller and only checked here.

        Raises
        ------
        ValueError
            Where a gate is wrong, a file cannot be written, or two outputs share one path.
        """
        parsed = tuple(parse_gate(text) for text in gates)
        outputs = cls(json, junitxml, parsed, force, quiet, html, markdown)
        paths = [path for path in (json, junitxml, html, markdown, svg) if path is not None]
        for path in paths:
            check_writable(path, force=force)
        if json is not None:
            paths.append(rows_path(json))
            check_writable(paths[-1], force=force)
        resolved = [path.resolve() for path in paths]
        for path in resolved:
            if resolved.count(path) > 1:
                raise ValueError(f"output {path}: named for two outputs; give each its own file")
        return outputs

    def finish(
        self,
        result: Result,
        rows: Mapping[str, ArrayLike],
        *,
        limits: bool = False,
        extra: Mapping[Path, bytes] | None = None,
    ) -> int:
        """Apply gates, write all files, print the report, and return the exit code.

        With ``limits`` the report lists the smallest limit that each stage passes. ``extra`` are
        further files of the run.

        Files come before the report: a closed pipe behind standard output must not cost them.
        """
        result = apply_gates(result, self.gates)
        files: dict[Path, bytes] = dict(extra or {})
        if self.junitxml is not None:
            files[self.junitxml] = junit_xml(result)
        if self.html is not None:
            # Loaded where it is used: `rejudge` of 43 layers has two seconds, and this needs torch.
            from needlepoint.verify.report.html import html_report

            files[self.html] = html_report(result, rows)
        if self.markdown is not None:
            files[self.markdown] = markdown_summary(result)
        if self.json is not None:
            files |= result_files(result, rows, self.json)
        write_files(files, force=self.force)
        with reader_may_leave():
            print_report(
                result,
                plain_console(sys.stdout),
                brief=self.quiet,
                limits=limits,
                timelines=_timelines(result),
            )
        for note in result.notes if self.quiet else ():  # a full report holds them
            _say(f"note: {note}")
        return EXIT_CODES[result.verdict]


def _timelines(result: Result) -> Iterable[tuple[str, list[str]]]:
    if result.scenario is None:
        return ()
    from needlepoint.verify.scenario.timeline import timelines  # it needs torch

    return timelines(result.scenario)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Print to standard output; a closed pipe behind it changes neither files nor exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again at exit and must find an open file behind standard output.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextmanager
def watched(defaults: Defaults, *, quiet: bool) -> Iterator[Progress]:
    """Yield the progress of a run; say first which defaults come from a file.

    Raises
    ------
    RunFailed
        For errors of the run that typer would take for its own.
    """
    if defaults.source is not None and defaults.values and not quiet:
        names = ", ".join(sorted(defaults.values))
        _say(f"defaults from {defaults.source}: {names}")
    try:
        if quiet:
            yield NoProgress()
        else:
            with TerminalProgress(plain_console(sys.stderr)) as progress:
                yield progress
    except (EOFError, OSError) as error:
        raise RunFailed from error
    except SystemExit as error:
        # Foreign code ends the process this way, and its exit code is not a verdict.
        raise RunFailed from RuntimeError(f"a candidate ended the process (exit {error.code})")


class RunFailed(Exception):
    """A run failed with the cause of this exception."""


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
        values = defaults.parameters
        debug = debug or values.get("debug") is True
        code = app(
            arguments,
            prog_name="needlepoint",
            standalone_mode=False,
            obj=defaults,
            default_map={
                "verify": values,
                "diff": values,
                "record": {k: v for k, v in values.items() if k not in _NOT_FOR_RECORD},
                "selftest": {k: v for k, v in values.items() if k in _FOR_SELFTEST},
                "recall": {k: v for k, v in values.items() if k not in _NOT_FOR_RECALL},
            },
        )
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except BaseException as error:  # an exit or a cancellation inside the run is no verdict
        return _fail(error, debug)
    if code == EXIT_INTERRUPTED:
        _say("interrupted; nothing half-written is left behind")
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
    _say(f"error: {message}")
    return EXIT_CANNOT_JUDGE


def _say(message: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(f"needlepoint: {message}\n")


class _PlainConsole(Console):
    """Console that leaves a closed pipe to its caller; rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Pass the error on; called while it is handled."""
        raise


def plain_console(file: TextIO) -> Console:
    """Return a console that prints text as it is: names are data, not markup."""
    return _PlainConsole(file=file, markup=False, highlight=False, emoji=False)
