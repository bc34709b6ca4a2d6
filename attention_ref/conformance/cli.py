"""The `attention-ref` command."""
import argparse
import json
import os
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from .. import __version__, variants
from . import cases, conventions, doctor, export, programs, report, reports
from .diagnosis import Diagnosis, diagnose_all, mistakes
from .isolation import TIMEOUT, Worker
from .numbers import UNIT
from .verify import TIERS, Result

CALL = "backend", "device", "layout", "state_layout", "rename", "grad", "vjp", "strides", "repeat"
EXAMPLES = """examples:
  attention-ref list
  attention-ref show sdpa
  attention-ref verify                                  every form of every variant against the golden outputs
  attention-ref verify sdpa --impl mymodule:attention   your function, called as attention(q=..., k=..., v=..., ...)
  attention-ref verify gqa --impl mymodule:gqa --dtype float16 --case causal
  attention-ref verify sdpa --impl mymodule:attention --backend torch --layout BTHD --grad --strides
  attention-ref verify sdpa --impl mymodule:attention --html report.html --junit report.xml
  attention-ref adapter sdpa                            adapter.py: a file to fill, for what no option covers
  attention-ref export sdpa cases --format txt          cases as files, for a program in any language
  attention-ref compare sdpa cases --command './sdpa {in} {out}'
  attention-ref probe --impl mymodule:attention         what your function computes, found by calling it
  attention-ref golden gqa --out mygolden               make golden data anew

exit codes: 0 right, 1 wrong, 2 the command could not be run as asked, 130 interrupted
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
    verify_options(commands.add_parser("verify", help="verify the package itself, or your function", epilog=EXAMPLES,
                                       formatter_class=argparse.RawDescriptionHelpFormatter))
    add = commands.add_parser("adapter", help="write adapter.py: a function of a variant's arguments, to be filled")
    add.add_argument("variant")
    program_commands(commands)
    add = commands.add_parser("conventions", help="where a variant can be read in another way, and who does")
    add.add_argument("variant", nargs="?", help="all of them if left out")
    commands.add_parser("doctor", help="whether this installation is whole")
    add = commands.add_parser("probe", help="find out what a function of q, k, v computes, by calling it")
    add.add_argument("--impl", metavar="MODULE:FUNCTION", required=True, help="a function of at least q, k, v")
    add.add_argument("--backend", choices=("numpy", "torch", "jax", "cupy"), default="numpy",
                     help="the library of its arrays (numpy)")
    isolation(add)
    add.add_argument("--json", action="store_true", help="as JSON")
    add = commands.add_parser("golden", help="make golden data anew (needs python-flint)")
    add.add_argument("variant", nargs="*", help="all of them if left out")
    add.add_argument("--out", type=Path, default=cases.GOLDEN, help="folder to write to (the package's own)")
    return top


def program_commands(commands):
    """The commands for a program in any language."""
    add = commands.add_parser("export", help="golden cases as files for a program in any language")
    add.add_argument("variant")
    add.add_argument("folder", metavar="DIR", type=Path, help="an empty or a new folder")
    add.add_argument("--format", choices=list(export.WRITERS), default="safetensors", help="(safetensors)")
    add.add_argument("--dtype", choices=list(UNIT), default="float32", help="the type of the arrays (float32)")
    add.add_argument("--case", help="only the cases whose name contains this")
    add = commands.add_parser("compare", help="judge what a program wrote, or run it on every case")
    add.add_argument("variant")
    add.add_argument("folder", metavar="DIR", type=Path, help="what `export` wrote; the results are in DIR/results")
    add.add_argument("--command", dest="program", metavar="'PROGRAM {in} {out}'",
                     help="run this for every case, with the paths of its input and result; exports if DIR is empty")
    add.add_argument("--timeout", type=float, default=TIMEOUT, help=f"seconds for one case ({TIMEOUT:g})")
    add.add_argument("--accumulate", choices=list(UNIT), help="the type of its sums, if wider")
    add.add_argument("--case", help="only the cases whose name contains this")
    declarations(add)
    reports.add_options(add)


def verify_options(add):
    """The options of verify; those of CALL are fields of `call.Call`."""
    add.add_argument("variant", nargs="?", help="all of them if left out")
    add.add_argument("--impl", metavar="MODULE:FUNCTION", help="your function; arguments come by the names in INPUTS")
    add.add_argument("--dtype", choices=list(UNIT), help="the type of the arrays it gets (float64)")
    add.add_argument("--accumulate", choices=list(UNIT), help="the type of its sums, if wider than --dtype")
    add.add_argument("--case", help="only the cases whose name contains this")
    add.add_argument("--backend", choices=("numpy", "torch", "jax", "cupy"), help="the library of its arrays (numpy)")
    add.add_argument("--device", help="where the arrays are, as the library names it: cuda:1")
    add.add_argument("--layout", choices=("BHTD", "BTHD", "packed"),
                     help="of arrays of batch, heads, tokens, channels (BHTD); packed is (B, T, H*d)")
    add.add_argument("--state-layout", choices=("BHKV", "BHVK"), help="of states (BHKV); BHVK is (B, H, dv, dk)")
    add.add_argument("--rename", type=pairs, metavar="OURS=YOURS,...", help="names of arguments: q=query,k=key")
    add.add_argument("--grad", action="store_true", help="gradients too, by the autograd of torch or jax")
    add.add_argument("--vjp", metavar="MODULE:FUNCTION", help="gradients too, by your backward")
    add.add_argument("--strides", action="store_true", help="transposed, sliced and reversed views of the arrays too")
    add.add_argument("--repeat", type=int, metavar="N", help="N runs, which must agree bit by bit")
    isolation(add)
    declarations(add)
    reports.add_options(add)


def isolation(add):
    add.add_argument("--timeout", type=float, metavar="SECONDS",
                     help=f"for one call of the function ({TIMEOUT:g}); a process of its own is stopped then")
    add.add_argument("--in-process", action="store_true",
                     help="call it in this process, for a debugger: a hang or a crash is that of the command")


def declarations(add):
    add.add_argument("--convention", metavar="NAME=READING,...", help="other readings: see `attention-ref conventions`")
    add.add_argument("--tier", choices=list(TIERS), help="accept 1, 4 or 32 times the budget (strict)")


def pairs(text):
    """q=query,k=key as a dict."""
    found = [pair.split("=") for pair in text.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in found):
        raise argparse.ArgumentTypeError(f"expected ours=yours,ours=yours, got {text!r}")
    return dict(found)


def main(arguments=None):
    """Run the command; returns the exit code: 0 right, 1 wrong, 2 not runnable as asked, 130 interrupted."""
    options = parser().parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
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
    except KeyboardInterrupt:
        print("attention-ref: interrupted", file=sys.stderr)
        return 130


def list_(options):
    if options.mistakes:
        return print(report.catalogue(variants()))
    found = [dict(variant=name, family=module.__name__.split(".")[-2], title=cases.title(module),
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
    for name in ("case", "dtype", "accumulate", "convention", "tier", "timeout", "in_process", *CALL, *reports.KINDS):
        if getattr(options, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} goes with --impl")
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
    say(report.summaries(rows))
    for row in rows:
        if not row.worst.passed:
            say("\n" + report.explain(row.worst))
    return 0 if all(row.passed for row in rows) else 1


def verify_implementation(options):
    from .implementations import diagnosis_of, joining, results_of
    if not options.variant:
        raise ValueError("--impl needs the VARIANT it implements: attention-ref verify VARIANT --impl module:function")
    golden, dtype = cases.load_cases(options.variant, options.case), options.dtype or "float64"
    golden = conventions.declared(golden, options.convention, options.tier)
    with called(options) as call:
        code, results = conclude(results_of(call, golden, dtype, options.accumulate), golden, dtype, options,
                                 lambda results: diagnosis_of(call, results, options.accumulate))
        if code == 1 and not any(r.comparisons for r in results) and (text := joining(call, golden[0])):
            say(text, stream_of(options))
    return code


@contextmanager
def called(options):
    """The function as what is judged: in a process of its own, which ends with the block, or in this one."""
    from .implementations import Answers, Isolated, loaded
    given = {name: getattr(options, name) for name in CALL if getattr(options, name) is not None}
    if in_this_process(options):
        yield loaded(options.impl, **given)
        return
    with Worker(Answers, options.impl, given.pop("vjp", None), given, timeout=seconds(options)) as worker:
        yield Isolated(worker, given.get("rename", {}), given.get("repeat", 1))


def in_this_process(options):
    if options.in_process and options.timeout is not None:
        raise ValueError("timeout: a call in this process cannot be stopped: --timeout or --in-process")
    return options.in_process


def seconds(options):
    return TIMEOUT if options.timeout is None else options.timeout


def conclude(results, golden, dtype, options, diagnose):
    """The exit code and the Results: shown as they come, then diagnosed and reported; Ctrl-C keeps what is there."""
    found, interrupted = shown(results, golden, dtype, stream_of(options))
    try:
        diagnosis = diagnose_all(found, options.accumulate) if interrupted else diagnose(found)
    except KeyboardInterrupt:
        diagnosis, interrupted = Diagnosis(), True
    absent = "not asked: --grad or --vjp" if options.command == "verify" else "not written"
    say("\n" + report.verdict(found, diagnosis, dtype, absent), stream_of(options))
    reports.write(reports.asked_for(options), found, diagnosis, options.arguments)
    failed = any(r.failed for r in found) or not any(r.passed for r in found)
    return 130 if interrupted else int(failed), found


def shown(results, golden, dtype, stream):
    """(Results, whether Ctrl-C came): a row for each as it is there, the case that is asked below the last."""
    line, found = Line(), []
    try:
        line(report.progress(0, golden))
        for result in results:
            found.append(result)
            line("")
            say((report.heads(golden) + "\n") * (len(found) == 1) + report.row(result, golden), stream)
            line(report.progress(len(found), golden))
    except KeyboardInterrupt:
        pass
    finally:
        line("")
    missing = [Result(case, dtype, not_asked="interrupted") for case in golden[len(found):]]
    return found + missing, bool(missing)


def stream_of(options):
    """Where a person reads: standard output, unless a report goes there."""
    return sys.stderr if "-" in reports.asked_for(options).values() else sys.stdout


def adapter(options):
    from .template import template
    golden, path = cases.load_cases(options.variant), Path("adapter.py")
    if path.exists():
        raise ValueError(f"{path} is there and is not overwritten: rename it first")
    path.write_text(template(max(golden, key=lambda case: len(case.gradients))))
    print(f"{path} written: attention-ref verify {options.variant} --impl adapter:run")


def export_(options):
    count = export.write(options.variant, options.folder, options.format, options.dtype, options.case)
    print(f"{options.variant}: {count} cases in {options.folder}; results go to {options.folder / 'results'}")


def compare(options):
    if options.program and not (options.folder.exists() and any(options.folder.iterdir())):
        export.write(options.variant, options.folder)
    index, golden = programs.opened(options.variant, options.folder, options.case)
    golden = conventions.declared(golden, options.convention, options.tier)
    if options.program:
        results = programs.judge_program(options.program, options.folder, index, golden, options.accumulate,
                                         options.timeout)
    else:
        results = programs.judge_results(options.folder, golden, index["dtype"], options.accumulate)
    return conclude(results, golden, index["dtype"], options,
                    lambda results: diagnose_all(results, options.accumulate))[0]


def conventions_(options):
    if options.variant:
        cases.load_cases(options.variant)
    print(report.readings([options.variant] if options.variant else list(variants())))


def doctor_(options):
    findings = doctor.examine()
    print(report.table([(f.part, f.found, "ok" if f.healthy else "FAILED") for f in findings], ("", "found", "")))
    return 0 if all(f.healthy for f in findings) else 1


def probe(options):
    from . import probe
    line = Line()
    with probed(options) as callee:
        found = probe.probe(callee, options.backend, line)
    line("")
    print(json.dumps(probe.record(found), indent=1) if options.json else probe.text(found))


@contextmanager
def probed(options):
    """The function as a `Callee`, in a process of its own or in this one."""
    from .blackbox import IsolatedCallee
    from .implementations import callee
    if in_this_process(options):
        yield callee(options.impl, options.backend)
        return
    with Worker(callee, options.impl, options.backend, timeout=seconds(options)) as worker:
        yield IsolatedCallee(worker, options.backend)


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


def say(text, stream=None):
    stream = stream or sys.stdout
    print(report.paint(text) if stream.isatty() and not os.environ.get("NO_COLOR") else text, file=stream, flush=True)


class Line:
    """One line of progress on a terminal, rewritten in place; elsewhere only what is worth a line of a log."""

    def __call__(self, text, log=False):
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
        elif log:
            print(text, file=sys.stderr, flush=True)


COMMANDS = dict(list=list_, show=show, verify=verify, adapter=adapter, export=export_, compare=compare, probe=probe,
                golden=golden, conventions=conventions_, doctor=doctor_)
