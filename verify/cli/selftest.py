"""The command ``selftest``."""

from __future__ import annotations

import sys

from needlepoint.verify.base.atomic import check_writable
from needlepoint.verify.cli.options import SelftestOptions
from needlepoint.verify.cli.outputs import (
    EXIT_CODES,
    plain_console,
    reader_may_leave,
    watched,
    write_record,
)
from needlepoint.verify.inputs.load import load_inputs
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.report.selftest_report import print_selftest
from needlepoint.verify.selftest.command import selftest as run_selftest
from needlepoint.verify.selftest.faults.catalogue import CATALOGUE
from needlepoint.verify.selftest.input import (
    TOKENS,
    SelftestInput,
    own_input,
    recorded_input,
)


def selftest(options: SelftestOptions) -> int:
    """Run the command and return its exit code."""
    if options.json_ is not None:
        check_writable(options.json_, force=options.force)
    table = Limits.load(options.limits)
    source = _source(options)
    with watched(options.quiet) as progress:
        result = run_selftest(source, tuple(CATALOGUE.values()), table, progress)
    write_record(result, options.json_, force=options.force)
    with reader_may_leave():
        print_selftest(result, plain_console(sys.stdout), brief=options.quiet)
    return EXIT_CODES[result.verdict]


def _source(options: SelftestOptions) -> SelftestInput:
    """Return what to plant on."""
    model, tokens, seed = options.model, options.tokens, options.seed
    if options.input is None:
        if model is not None or tokens is not None:
            raise ValueError("--model and --tokens belong to --input; name an input as well")
        return own_input(seed)
    inputs = load_inputs(options.input, model=model, tokens=tokens, seed=seed)
    if tokens is None and inputs.tokens > TOKENS:
        inputs = load_inputs(options.input, model=model, tokens=TOKENS, seed=seed)
    return recorded_input(inputs)
