"""Around the run of a command: files that are checked before and written after, and progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TextIO

from numpy.typing import ArrayLike
from pydantic import BaseModel
from rich.console import Console

from needlepoint.verify.base.atomic import check_writable, write_files
from needlepoint.verify.base.progress import NoProgress, Progress, TerminalProgress
from needlepoint.verify.cli.app import RunFailed, say
from needlepoint.verify.cli.options import Written
from needlepoint.verify.judge.results.gates import Gate, apply_gates, parse_gate
from needlepoint.verify.recording.results import result_files, rows_path
from needlepoint.verify.report.junit import junit_xml
from needlepoint.verify.report.markdown import markdown_summary
from needlepoint.verify.report.terminal import print_report
from needlepoint.verify.schema.result import Result, Verdict

EXIT_CODES: Final[Mapping[Verdict, int]] = {"match": 0, "differ": 1, "cannot-judge": 2}


@dataclass(frozen=True)
class Outputs:
    """Where a result goes, checked before the run that makes it."""

    options: Written
    gates: tuple[Gate, ...]

    @classmethod
    def create(cls, options: Written, *further: Path | None) -> Self:
        """Parse gates and check that every file of the run can be written.

        ``further`` files are written by the caller and only checked here.

        Raises
        ------
        ValueError
            Where a gate is wrong, a file cannot be written, or two outputs share one path.
        """
        gates = tuple(parse_gate(text) for text in options.gates())
        named = (options.json_, options.junitxml, options.html, options.markdown, *further)
        paths = [path for path in named if path is not None]
        for path in paths:
            check_writable(path, force=options.force)
        if options.json_ is not None:
            paths.append(rows_path(options.json_))
            check_writable(paths[-1], force=options.force)
        resolved = [path.resolve() for path in paths]
        for path in resolved:
            if resolved.count(path) > 1:
                raise ValueError(f"output {path}: named for two outputs; give each its own file")
        return cls(options, gates)

    def write(
        self,
        result: Result,
        rows: Mapping[str, ArrayLike],
        extra: Mapping[Path, bytes] | None = None,
    ) -> Result:
        """Apply gates, write all files at once, and return the result with its gates.

        ``extra`` are further files of the run.
        """
        options, result = self.options, apply_gates(result, self.gates)
        files: dict[Path, bytes] = dict(extra or {})
        if options.junitxml is not None:
            files[options.junitxml] = junit_xml(result)
        if options.html is not None:
            # Loaded where it is used: `rejudge` of 43 layers has two seconds, and this needs torch.
            from needlepoint.verify.report.html import html_report

            files[options.html] = html_report(result, rows)
        if options.markdown is not None:
            files[options.markdown] = markdown_summary(result)
        if options.json_ is not None:
            files |= result_files(result, rows, options.json_)
        write_files(files, force=options.force)
        return result

    def finish(
        self,
        result: Result,
        rows: Mapping[str, ArrayLike],
        *,
        limits: bool = False,
        extra: Mapping[Path, bytes] | None = None,
    ) -> int:
        """Write all files, print the report, and return the exit code.

        With ``limits`` the report lists the smallest limit that each stage passes. Files come
        before the report: a closed pipe behind standard output must not cost them.
        """
        result, quiet = self.write(result, rows, extra), self.options.quiet
        with reader_may_leave():
            print_report(
                result,
                plain_console(sys.stdout),
                brief=quiet,
                limits=limits,
                timelines=_timelines(result),
            )
        for note in result.notes if quiet else ():  # a full report holds them
            say(f"note: {note}")
        return EXIT_CODES[result.verdict]


def _timelines(result: Result) -> Iterable[tuple[str, list[str]]]:
    if result.scenario is None:
        return ()
    from needlepoint.verify.scenario.timeline import timelines  # it needs torch

    return timelines(result.scenario)


def write_record(record: BaseModel, path: Path | None, *, force: bool) -> None:
    """Write a record as JSON; nothing without a path."""
    if path is not None:
        text = record.model_dump_json(by_alias=True, indent=1) + "\n"
        write_files({path: text.encode()}, force=force)


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
def watched(quiet: bool) -> Iterator[Progress]:
    """Yield the progress of a run.

    Raises
    ------
    RunFailed
        For errors of the run that typer would take for its own.
    """
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


class _PlainConsole(Console):
    """Console that leaves a closed pipe to its caller; rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Pass the error on; called while it is handled."""
        raise


def plain_console(file: TextIO) -> Console:
    """Return a console that prints text as it is: names are data, not markup."""
    return _PlainConsole(file=file, markup=False, highlight=False, emoji=False)
