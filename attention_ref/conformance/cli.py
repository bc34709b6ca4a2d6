"""The `attention-ref` command."""
import argparse
import json
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from .. import __version__, variants
from . import cases, report
from .diagnosis import mistakes
from .numbers import UNIT

EXAMPLES = """examples:
  attention-ref list
  attention-ref show sdpa
  attention-ref verify                                  every form of every variant against the golden outputs
  attention-ref verify sdpa --impl mymodule:attention   your function, called as attention(q=..., k=..., v=..., ...)
  attention-ref verify gqa --impl mymodule:gqa --dtype float16 --case causal
  attention-ref golden gqa --out /tmp/golden            make golden data anew

exit codes: 0 right, 1 wrong, 2 the command could not be run as asked
"""


def parser():
    """The argument parser of the command."""
    top = argparse.ArgumentParser("attention-ref", description="What attention, in every form, is supposed to compute.",
                                  epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--version", action="version", version=f"attention_ref {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("list", help="the variants")
    add.add_argument("--json", action="store_true", help="as JSON")
    add.add_argument("--mistakes", action="store_true", help="every mistake with the cases that catch it, as Markdown")
    add = commands.add_parser("show", help="formula, shapes, conventions, cases and mistakes of a variant")
    add.add_argument("variant")
    add = commands.add_parser("verify", help="verify the package itself, or your function", epilog=EXAMPLES,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
    add.add_argument("variant", nargs="?", help="all of them if left out")
    add.add_argument("--impl", metavar="MODULE:FUNCTION", help="your function; arguments come by the names in INPUTS")
    add.add_argument("--dtype", choices=list(UNIT), help="the type of the arrays it gets (float64)")
    add.add_argument("--accumulate", choices=list(UNIT), help="the type of its sums, if wider than --dtype")
    add.add_argument("--case", help="only the cases whose name contains this")
    add = commands.add_parser("golden", help="make golden data anew (needs python-flint)")
    add.add_argument("variant", nargs="*", help="all of them if left out")
    add.add_argument("--out", type=Path, default=cases.GOLDEN, help="folder to write to (the package's own)")
    return top


def main(arguments=None):
    """Run the command; returns the exit code: 0 right, 1 wrong, 2 not runnable as asked."""
    options = parser().parse_args(arguments)
    try:
        code = COMMANDS[options.command](options) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:                              # nobody reads on; Python would complain at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"attention-ref: {error}", file=sys.stderr)
        return 2


def list_(options):
    if options.mistakes:
        return print(report.catalogue(variants(), cases.load_cases))
    def first_line(module):
        return re.split(r"[.:,](?: |$)", module.__doc__.splitlines()[0])[0]
    found = [dict(variant=name, family=module.__name__.split(".")[-2], title=first_line(module),
                  forms=len(module.FORMS), cases=len(module.CASES), mistakes=len(mistakes(module)))
             for name, module in variants().items()]
    print(json.dumps(found, indent=1) if options.json else report.table([f.values() for f in found], list(found[0])))


def show(options):
    golden = cases.load_cases(options.variant)
    print(report.page(variants()[options.variant], golden))


def verify(options):
    if options.impl:
        return verify_implementation(options)
    from .suite import summary
    for name in ("case", "dtype", "accumulate"):
        if getattr(options, name):
            raise ValueError(f"--{name} goes with --impl")
    names = [options.variant] if options.variant else list(variants())
    for name in names:
        cases.load_cases(name)
    line, rows = Line(), []
    line(f"verifying {', '.join(names)}", log=True)
    with ProcessPoolExecutor(min(len(names), os.cpu_count() or 1), get_context("spawn")) as pool:
        for row in pool.map(summary, names):
            rows.append(row)
            line(f"{row.variant} verified, {len(rows)} of {len(names)} variants", log=True)
    line("")
    print(report.summaries(rows))
    for row in rows:
        if not row.worst.passed:
            print("\n" + report.explain(row.worst))
    return 0 if all(row.passed for row in rows) else 1


def verify_implementation(options):
    from .implementations import judge, load
    if not options.variant:
        raise ValueError("--impl needs the VARIANT it implements: attention-ref verify VARIANT --impl module:function")
    golden, dtype = cases.load_cases(options.variant, options.case), options.dtype or "float64"
    line = Line()
    results, diagnosis = judge(load(options.impl), golden, dtype, options.accumulate, line)
    line("")
    print(report.verdict(results, diagnosis, dtype))
    failed = any(not r.passed and not r.unsupported for r in results)
    return 1 if failed or not any(r.passed for r in results) else 0


def golden(options):
    try:
        import flint  # noqa: F401
    except ImportError:
        raise ValueError("golden data is certified with python-flint: pip install 'attention_ref[golden]'") from None
    from .golden import remake
    for name in options.variant:
        if name not in variants():
            raise ValueError(f"variant: expected one of {', '.join(variants())}, got {name!r}")
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.time()

    def progress(text):
        print(f"{time.time() - start:5.0f} s  {text}", flush=True)
    remake(options.variant or list(variants()), options.out, progress)


class Line:
    """One line of progress on a terminal, rewritten in place; elsewhere only what is worth a line of a log."""

    def __call__(self, text, log=False):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
        elif log:
            print(text, file=sys.stderr, flush=True)


COMMANDS = dict(list=list_, show=show, verify=verify, golden=golden)
