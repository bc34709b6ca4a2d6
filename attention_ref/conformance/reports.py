"""The files that `verify` and `compare` write beside the verdict: their options, and how they come about."""
import argparse
import shlex
from pathlib import Path

from .tensors import write_whole

KINDS = dict(json="JSON", junit="JUnit XML", html="a page with pictures")


def add_options(parser):
    """Give a parser the options --json, --junit and --html."""
    for kind, what in KINDS.items():
        parser.add_argument(f"--{kind}", metavar="FILE", type=_new_file,
                            help=f"write the verdict as {what} too; - is standard output")


def _new_file(text):
    path = Path(text)
    if text != "-" and (path.is_dir() or not path.parent.is_dir()):
        raise argparse.ArgumentTypeError(f"expected - or a file in a folder that exists, got {text!r}")
    return text


def asked_for(options):
    """Kind -> file, or - for standard output, of the reports that parsed options ask for."""
    return {kind: getattr(options, kind) for kind in KINDS if getattr(options, kind)}


def write(files, results, diagnosis, arguments):
    """Write the reports, each whole or not at all; arguments are those of the command, for the way to run it again."""
    for kind, file in files.items():
        text = _text(kind, results, diagnosis, arguments)
        if file == "-":
            print(text, end="")
        else:
            write_whole(Path(file), text.encode())


def _text(kind, results, diagnosis, arguments):
    from . import formats, html
    if kind == "html":
        return html.page(results, diagnosis, without_reports(arguments))
    return dict(json=formats.as_json, junit=formats.as_junit)[kind](results, diagnosis)


def without_reports(arguments):
    """The command as a line for a shell, without its reports and its choice of cases."""
    left_out = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(left_out)
    left_out.add_argument("--case")
    return shlex.join(["attention-ref", *left_out.parse_known_args(arguments)[1]])
